"""Models that answer on the page: a bundle with the effect of steering on each token, its target alone, a server.

Only `UnsteeredTarget` answers from the target's own logits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from divdec.data.formatting import Format, check_template_kwargs, encode, encode_prompt, plain_prompt
from divdec.data.records import Message, Record, checked_text
from divdec.decoding.text import AnswerText
from divdec.endpoint import Endpoint, Refused
from divdec.errors import UsageError
from divdec.evaluation.scoring import sweep
from divdec.experts.combined import NoExperts, check_rule
from divdec.fail_closed import wait_for_checks
from divdec.passes import device_of
from divdec.playground.rendering import Token, TokenShift
from divdec.sampling import pick
from divdec.serving import is_local
from divdec.serving.logprobs import REFUSED
from divdec.steering import MAX_ALPHA, Steering

if TYPE_CHECKING:
    from divdec.model.modeling import DivergenceForCausalLM

Logits = Float[Tensor, "tokens vocab"]

MIN_SLIDER_ALPHA = 0.1  # weaker steering hardly differs from the target
MAX_SLIDER_ALPHA = 4.0
MAX_K = 200
MAX_ALTERNATIVES = 4  # tokens named at a position
MIN_LOSS = 0.005  # of probability: a token that loses less is not named
MARKED_LOSS = 0.1  # of probability: the position is marked
NO_QUESTION = "there is nothing to answer: type a question"
TOP_LOGPROBS = 5  # requested from a server
TIMEOUT = 300.0  # seconds; a server's queue may be long


@dataclasses.dataclass(frozen=True)
class ChatOptions:
    """How answers are generated."""

    system_prompt: str | None = None
    """System prompt of every conversation."""
    single_turn: bool = False
    """Read only the last question, for models that were trained on single questions."""
    max_new_tokens: int = 256
    """Longest answer, in tokens."""
    seed: int = 0
    """Seed of sampled answers."""
    chat_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Variables of the chat template."""

    def form(self, **fields: Any) -> Format:
        """Return the layout of conversations."""
        return Format(self.system_prompt, chat_template_kwargs=self.chat_template_kwargs, **fields)


def is_number(value: Any) -> bool:
    """Return whether a value from a client is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True)
class SteeringControls:
    """Rules and strengths that the page offers; each of them steers."""

    default: Steering
    """The bundle's rule; every choice keeps its eligible vocabulary and fill."""
    eligible_size: int
    """Size of the eligible vocabulary."""
    rank: bool = True
    """Whether the rank rule is offered; it needs experts, not only takedown requests."""

    def __post_init__(self) -> None:
        """Refuse a bundle whose rule steers nothing."""
        if self.default.rule == "linear" and not self.default.alpha > 0:
            raise UsageError(
                f"steering is {self.default}: the playground shows steered answers only; accepted: a strength above 0 "
                "(--steering linear:1)"
            )

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of the rules."""
        return ("linear", "rank") if self.rank else ("linear",)

    @property
    def alpha_range(self) -> tuple[float, float]:
        """Smallest and largest α."""
        if self.default.rule != "linear":
            return MIN_SLIDER_ALPHA, MAX_SLIDER_ALPHA
        alpha = self.default.alpha
        return min(MIN_SLIDER_ALPHA, alpha), min(max(MAX_SLIDER_ALPHA, 2 * alpha), MAX_ALPHA)

    @property
    def k_range(self) -> tuple[int, int]:
        """Smallest and largest k."""
        largest = max(MAX_K, 2 * self.default.k if self.default.rule == "rank" else 1)
        return 1, min(largest, self.eligible_size - 1)

    def steering(self, rule: Any, alpha: Any, k: Any) -> Steering:
        """Return the rule for values that a client sent; refuse those that the controls do not offer."""
        if rule not in self.rules:
            raise UsageError(f"rule is {rule!r}; accepted here: {', '.join(self.rules)}")
        if rule == "linear":
            low, high = self.alpha_range
            if not is_number(alpha) or not low <= alpha <= high:
                raise UsageError(f"strength is {alpha!r}; accepted: {low:g} to {high:g} (0 would steer nothing)")
            return dataclasses.replace(self.default, rule="linear", alpha=float(alpha))
        smallest, largest = self.k_range
        if not is_number(k) or not smallest <= k <= largest or k != int(k):
            raise UsageError(f"k is {k!r}; accepted: a whole number from {smallest} to {largest}")
        return dataclasses.replace(self.default, rule="rank", k=int(k))


class SteeredModel:
    """A steered model that explains its answers. Each call names a rule.

    Its methods raise a `UsageError` for a rule that steers nothing, `FailedClosed` where the model cannot be steered.
    """

    def __init__(
        self, model: DivergenceForCausalLM, tokenizer: Any, options: ChatOptions, *, reveal: bool = False
    ) -> None:
        """Wrap a loaded bundle; `reveal` adds probabilities under the steered model and the target."""
        if not getattr(tokenizer, "is_fast", False):
            raise UsageError("the playground needs a tokenizer of the tokenizers library (tokenizer.json)")
        check_template_kwargs(tokenizer, options.chat_template_kwargs)
        rule = model.steering
        eligible_size = model.vocab_size if rule.vocabulary is None else len(rule.vocabulary)
        self.controls = SteeringControls(rule, eligible_size, rank=not isinstance(model.experts, NoExperts))
        self.model, self.tokenizer, self.options, self.reveal = model, tokenizer, options, reveal
        eos: Any = model.generation_config.eos_token_id
        self.eos_token_ids = frozenset([eos] if isinstance(eos, int) else eos or ())
        self.max_length: int = model.config.max_position_embeddings or 1 << 15
        self._generator = torch.Generator().manual_seed(options.seed)

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Encode a conversation up to the beginning of the next answer; refuse an empty question."""
        if not messages or not messages[-1].content.strip():
            raise UsageError(NO_QUESTION)
        for message in messages:
            checked_text(message.content, "the text")
        turns = tuple(messages[-1:] if self.options.single_turn else messages)
        return self.check_prompt(encode_prompt(Record("", messages=turns), self.tokenizer, self.options.form()))

    def check_prompt(self, prompt: list[int]) -> list[int]:
        """Return the prompt; refuse one that is empty or leaves no room for an answer."""
        if not prompt:
            raise UsageError("the prompt has no tokens: type more")
        if len(prompt) >= self.max_length:
            raise UsageError(
                f"{len(prompt)} tokens are too many for {self.max_length} positions of the models: begin a new "
                "conversation, or shorten the question"
            )
        return prompt

    def answer(self, prompt: list[int], steering: Steering, temperature: float = 0.0) -> Iterator[Token]:
        """Generate an answer, greedily or with a temperature, and yield its tokens.

        The last token of a character has the character's text, the others have none.
        """
        self.check_steering(steering)
        wait_for_checks()
        text = AnswerText(self.tokenizer, (), prompt)
        cache, eligible = self.model.new_cache(), steering.eligible(self.model.vocab_size)
        new_ids, pending = prompt, None
        for _ in range(self.most_new_tokens(prompt)):
            token_id, token = self._generate_token(new_ids, cache, steering, eligible, temperature)
            if token_id in self.eos_token_ids:
                break
            if pending is not None:
                yield pending
            pending, new_ids = dataclasses.replace(token, text=text.add(token_id)), [token_id]
        if pending is not None:
            yield dataclasses.replace(pending, text=pending.text + text.end())

    def most_new_tokens(self, prompt: list[int]) -> int:
        """Return the length of the longest answer to a prompt."""
        return min(self.options.max_new_tokens, self.max_length - len(prompt))

    @torch.inference_mode()
    def recolor(self, prompt: list[int], tokens: Sequence[Token], steering: Steering) -> tuple[Token, ...]:
        """Compute the effect of another rule on the tokens of an existing answer. The text does not change."""
        self.check_steering(steering)
        ids = [token.id for token in tokens if token.id is not None]
        if not ids or len(ids) != len(tokens):
            return tuple(tokens)
        target_logits, corrected, divergence = self._compute_logits([*prompt, *ids[:-1]], len(ids))
        steered = steering.apply(corrected, divergence)
        shifts = compute_shifts(target_logits, steered, torch.tensor(ids), self._decode, reveal=self.reveal)
        return tuple(dataclasses.replace(new, text=old.text) for new, old in zip(shifts, tokens, strict=True))

    @torch.inference_mode()
    def likelihoods(self, question: str, continuation: str, steerings: Sequence[Steering]) -> list[float]:
        """Compute a continuation's probability per token (geometric mean) under each rule, in one forward pass."""
        for steering in steerings:
            self.check_steering(steering)
        if not continuation.strip():
            raise UsageError("there is no continuation: type the words whose probability to compute")
        messages = (Message("user", question),)
        prompt = self.encode_prompt(messages)
        record = Record(checked_text(continuation.strip(), "the continuation"), messages=messages)
        example = encode(record, self.tokenizer, self.options.form(max_length=self.max_length))
        ids = list(example.input_ids)
        while ids and ids[-1] in self.tokenizer.all_special_ids:  # the end of the answer is not part of the words
            ids.pop()
        labels = torch.tensor(ids[example.prompt_length :])
        if len(ids) >= self.max_length or not len(labels):
            raise UsageError(f"{len(prompt)} tokens and the continuation do not fit {self.max_length} positions")
        _, corrected, divergence = self._compute_logits(ids[:-1], len(labels))
        probabilities = []
        for logits in sweep(steerings, corrected, divergence):
            logprobs = logits.log_softmax(dim=-1).gather(-1, labels[:, None].to(logits.device))
            probabilities.append(float(logprobs.mean().exp()))
        return probabilities

    def check_steering(self, steering: Steering) -> None:
        """Refuse a rule that would answer as the target does."""
        if steering.rule == "linear" and not steering.alpha > 0:
            raise UsageError(f"{steering} steers nothing: the playground answers steered only")
        check_rule(steering, self.model.experts)
        steering.check_vocabulary(self.model.vocab_size)

    @torch.inference_mode()
    def _generate_token(
        self, new_ids: list[int], cache: Any, steering: Steering, eligible: Tensor | None, temperature: float
    ) -> tuple[int, Token]:
        target_logits, corrected, divergence = self._compute_logits(new_ids, 1, cache)
        steered = steering.apply(corrected, divergence, eligible)
        if temperature > 0:
            uniform = torch.rand(1, generator=self._generator).to(steered.device)
            chosen = pick((steered / temperature).softmax(dim=-1), uniform)
        else:
            chosen = steered.argmax(dim=-1)
        return int(chosen), compute_shifts(target_logits, steered, chosen, self._decode, reveal=self.reveal)[0]

    def _compute_logits(self, ids: list[int], keep: int, cache: Any = None) -> tuple[Logits, Logits, Logits]:
        """Return the last positions' target logits before and after the takedown correction, and the divergences."""
        wait_for_checks()
        input_ids = torch.tensor([ids], device=self.model.device)
        target_logits, corrected, divergence = self.model.unsteered_components(input_ids, cache, logits_to_keep=keep)
        return target_logits[0], corrected[0], divergence[0]

    def _decode(self, token_id: int) -> str:
        return str(self.tokenizer.decode([token_id], skip_special_tokens=False))


def compute_shifts(
    target_logits: Logits,
    steered_logits: Logits,
    chosen: Int[Tensor, " tokens"],
    decode: Callable[[int], str],
    *,
    reveal: bool,
) -> list[Token]:
    """Compute the effect of steering at each position of an answer; with `reveal`, tokens hold probabilities."""
    before, after = target_logits.float().log_softmax(dim=-1), steered_logits.float().log_softmax(dim=-1)
    loss = before.exp() - after.exp()
    largest = loss.topk(min(MAX_ALTERNATIVES + 1, loss.shape[-1]), dim=-1)  # the chosen token may be among them
    tokens = []
    for position, chosen_id in enumerate(chosen.tolist()):

        def shift(token_id: int, position: int = position) -> TokenShift:
            old, new = float(before[position, token_id]), float(after[position, token_id])
            change = 0.0 if old == new else new - old  # equal if both are minus infinity
            probabilities = (math.exp(old), math.exp(new)) if reveal else (None, None)
            return TokenShift(decode(token_id), change, *probabilities)

        candidates = zip(largest.indices[position].tolist(), largest.values[position].tolist(), strict=True)
        losses = {token_id: lost for token_id, lost in candidates if lost >= MIN_LOSS and token_id != chosen_id}
        named = list(losses)[:MAX_ALTERNATIVES]
        tokens.append(
            Token(
                **vars(shift(chosen_id)),
                id=chosen_id,
                alternatives=tuple(map(shift, named)),
                marked=any(losses[token_id] >= MARKED_LOSS for token_id in named),
            )
        )
    return tokens


class UnsteeredTarget:
    """The target alone, UNSTEERED: for `--show-target` on this machine, on a page that marks it as unsteered."""

    def __init__(self, model: SteeredModel, host: str) -> None:
        """Take the target of a bundle; refuse a host whose page other machines can reach."""
        if not is_local(host):
            raise UsageError(f"--show-target shows unsteered answers; it is refused for host {host}: only 127.0.0.1")
        self._model = model

    def answer(self, prompt: list[int]) -> Iterator[str]:
        """Yield the target's own greedy answer, UNSTEERED, as it grows."""
        model = self._model
        text, answer, new_ids, cache = AnswerText(model.tokenizer, (), prompt), "", prompt, None
        for _ in range(model.most_new_tokens(prompt)):
            token_id, cache = self._generate_token(new_ids, cache)
            if token_id in model.eos_token_ids:
                break
            answer, new_ids = answer + text.add(token_id), [token_id]
            yield answer
        yield answer + text.end()

    @torch.inference_mode()
    def _generate_token(self, new_ids: list[int], cache: Any) -> tuple[int, Any]:
        target: Any = self._model.model.target
        input_ids = torch.tensor([new_ids], device=device_of(target))
        output = target(input_ids, past_key_values=cache, use_cache=True)
        return int(output.logits[0, -1].argmax()), output.past_key_values


class RemoteServer:
    """A model at an OpenAI-compatible server, which sets rule and strength."""

    def __init__(
        self, url: str, options: ChatOptions, *, model: str | None = None, api_key_env: str | None = None
    ) -> None:
        """Connect to a server, such as http://127.0.0.1:8000, with or without /v1; it must serve the model.

        Without `model`, its first model answers. `api_key_env` is the environment variable that holds the API key.
        """
        self.url, self.options = f"{url.rstrip('/').removesuffix('/v1')}/v1", options
        endpoint = Endpoint(self.url, model or "", api_key_env, timeout=TIMEOUT, retries=0)
        with endpoint:
            try:
                models = endpoint.list_models()
            except Refused as error:
                if error.status != 401:
                    raise
                raise UsageError(
                    f"{self.url} requires an API key; set the environment variable DIVDEC_API_KEY to it"
                ) from None
        self.name = model or models[0]
        if self.name not in models:
            raise UsageError(f"{self.url} serves no model {self.name!r}; it serves: {', '.join(models)}")
        self._endpoint = dataclasses.replace(endpoint, model=self.name)
        self._chat = self._logprobs = self._seeds = True  # until the server refuses

    def close(self) -> None:
        """Close the connections."""
        self._endpoint.close()

    def answer(self, messages: Sequence[Message], temperature: float = 0.0) -> Iterator[Token]:
        """Stream an answer; a model without a chat template receives a plain prompt. Errors are those of `Endpoint`."""
        if not messages or not messages[-1].content.strip():
            raise UsageError(NO_QUESTION)
        turns = list(messages[-1:] if self.options.single_turn else messages)
        if self.options.system_prompt:
            turns.insert(0, Message("system", self.options.system_prompt))
        fields = {"max_tokens": self.options.max_new_tokens, "temperature": temperature}
        while True:
            seed = {"seed": self.options.seed} if self._seeds or temperature == 0 else {}
            try:
                yield from (self._stream_chat if self._chat else self._stream_text)(turns, fields | seed)
                return
            except Refused as error:
                if error.status != 400:
                    raise
                if self._chat and "chat template" in str(error):
                    self._chat = False
                elif self._seeds and REFUSED in str(error) and "'seed'" in str(error):
                    self._seeds = False
                elif self._logprobs and REFUSED in str(error):
                    self._logprobs = False
                else:
                    raise

    def _stream_chat(self, turns: Sequence[Message], fields: Mapping[str, Any]) -> Iterator[Token]:
        chat = [{"role": turn.role, "content": turn.content} for turn in turns]
        asked: dict[str, Any] = {"logprobs": True, "top_logprobs": TOP_LOGPROBS} if self._logprobs else {}
        if self.options.chat_template_kwargs:
            asked["chat_template_kwargs"] = self.options.chat_template_kwargs
        for choice in self._endpoint.stream(messages=chat, **asked, **fields):
            entries = (choice.get("logprobs") or {}).get("content") or [{}]
            top = {other["token"]: other["logprob"] for other in entries[-1].get("top_logprobs") or ()}
            text = (choice.get("delta") or {}).get("content")
            yield from _read_token(text, entries[-1].get("token"), entries[-1].get("logprob"), top)

    def _stream_text(self, turns: Sequence[Message], fields: Mapping[str, Any]) -> Iterator[Token]:
        prompt = plain_prompt((turn.role, turn.content) for turn in turns)
        asked: dict[str, Any] = {"logprobs": TOP_LOGPROBS} if self._logprobs else {}
        for choice in self._endpoint.stream(prompt=prompt, **asked, **fields):
            logprobs = choice.get("logprobs") or {}
            name, logprob, top = (
                (logprobs.get(field) or [None])[-1] for field in ("tokens", "token_logprobs", "top_logprobs")
            )
            yield from _read_token(choice.get("text"), name, logprob, top or {})


def _read_token(
    text: str | None, name: str | None, logprob: float | None, top_logprobs: Mapping[str, float]
) -> Iterator[Token]:
    """Yield the token of a chunk, if it has one; without a name it has no probabilities."""
    if name is None:
        if text:
            yield Token(text)
        return
    others = {str(other): math.exp(min(value, 0.0)) for other, value in top_logprobs.items() if other != name}
    alternatives = tuple(TokenShift(other, steered_probability=value) for other, value in others.items())
    yield Token(text or "", steered_probability=math.exp(min(logprob or 0.0, 0.0)), alternatives=alternatives)
