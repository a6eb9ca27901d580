"""What a loaded server must answer (`soak.py`): what the library answers to the same prompts, each made alone.

And how a request may end otherwise.
"""

import dataclasses
import random

import torch

LONGEST = 48  # tokens of a reference
CLEAREST = 1e-3  # logits: where the best two are nearer, rounding decides, and the batch a row is in
TOLERANCE = 2e-3  # log-probabilities


class Wrong(Exception):
    """An answer that must not be."""


class Ended(Exception):
    """The server ended a request as it says that it does: an error object, or an error event."""


class GaveUp(Exception):
    """The queue was full, and nobody asks any longer."""


class Lost(Exception):
    """The connection was refused, or closed without an answer."""

    def __init__(self, error, began):
        super().__init__(f"{type(error).__name__}: {error}")
        self.began = began


class Full(Exception):
    """The queue is full; when to come back."""

    def __init__(self, seconds):
        super().__init__(seconds)
        self.seconds = seconds


@dataclasses.dataclass
class Reference:
    """What the library answers to a prompt alone."""

    prompt: str
    messages: list | None
    prompt_ids: list
    ids: list
    texts: list
    """Of the first 0, 1, ... tokens of the answer."""
    logprobs: list
    """Steered, of each token of prompt and answer but the first, from one pass over both."""
    end: int

    def answer(self, most, stop=None):
        """Tokens, text and finish reason with so many tokens at most."""
        ids = self.ids[:most]
        if stop is not None:
            found = next((count for count in range(len(ids) + 1) if stop in self.texts[count]), None)
            if found is not None:
                return ids[:found], self.texts[found][: self.texts[found].find(stop)], "stop"
        return ids, self.texts[len(ids)], "stop" if ids[-1] == self.end else "length"


def steered(model, ids):
    """The log-probability of each token but the first."""
    with torch.inference_mode():
        found = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
    return found[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def reference(model, tokenizer, prompt, messages=None):
    """One; None where two tokens are too near to each other to tell which is right."""
    if messages is None:
        ids = tokenizer(prompt).input_ids
    else:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    given = torch.tensor([ids])
    with torch.inference_mode():
        found = model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=LONGEST, do_sample=False,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    best = torch.stack(found.logits, dim=1).topk(2).values
    if (best[..., 0] - best[..., 1]).min() < CLEAREST:
        return None
    answer = found.sequences[0, len(ids) :].tolist()
    texts = [tokenizer.decode(answer[:count], skip_special_tokens=True) for count in range(len(answer) + 1)]
    return Reference(prompt, messages, ids, answer, texts, steered(model, ids + answer), tokenizer.eos_token_id)


def references(model, tokenizer, texts, number=40, seed=0):
    """So many, a third of them conversations; no two have one answer, so that a mixed-up one is seen."""
    chance, found = random.Random(seed), {}
    for text in texts:
        prompt = text[: chance.choice([8, 20, 60, 200, 600])]
        asked = [{"role": "user", "content": prompt}] if len(found) % 3 == 0 else None
        if (made := reference(model, tokenizer, prompt, asked)) is not None and len(made.ids) > 4:
            found.setdefault(tuple(made.ids[:16]), made)
        if len(found) == number:
            return list(found.values())
    raise AssertionError(f"only {len(found)} prompts have answers that differ clearly")


@dataclasses.dataclass
class Choice:
    """One of the answers to a request, put together from its events."""

    text: str = ""
    ids: list = dataclasses.field(default_factory=list)
    logprobs: list = dataclasses.field(default_factory=list)
    reason: str | None = None

    def add(self, choice):
        if self.reason is not None:
            raise Wrong("an answer goes on after its end")
        message = choice.get("delta") or choice.get("message") or {}
        self.text += choice["text"] if "text" in choice else message.get("content") or ""
        self.reason = choice["finish_reason"]
        told = choice.get("logprobs") or {}
        names = [item["token"] for item in told.get("content") or []] or told.get("tokens") or []
        self.ids += [int(name.removeprefix("token_id:")) for name in names]
        self.logprobs += [item["logprob"] for item in told.get("content") or []] or told.get("token_logprobs") or []


def check_sampled(model, tally):
    """Samples tell steered log-probabilities, too."""
    for prompt, ids, told in tally.sampled:
        expected = steered(model, prompt + ids)[len(prompt) - 1 :]
        if any(abs(a - b) > TOLERANCE for a, b in zip(told, expected, strict=True)):
            tally.problem(f"sampled: log-probabilities {told} instead of {expected}")


def must_be_clean(response, body):
    """An error must be an object of the OpenAI API; of 5xx only those that the documentation names in their place."""
    status = response.status_code
    if status == 200:
        return
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"}:
        raise Wrong(f"{status} without an error object: {body}")
    if status >= 500 and (status, error["code"]) not in ((503, "closing"), (504, "timeout")):
        raise Wrong(f"{status} {error}")
    if status == 429 and "retry-after" not in response.headers:
        raise Wrong("429 without Retry-After")
