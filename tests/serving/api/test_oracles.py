"""Each field of the API tries to recover a known log-probability: exactly at `full`, and not at the levels below.

A field without an entry here fails `test_every_field_has_been_tried`. The table of docs/benchmarks.md is made here.
"""

import bisect
import dataclasses
import math
from pathlib import Path

import httpx
import pytest
import torch

from divdec.serving.logprobs import BOUNDS, GRID
from divdec.serving.schemas import ChatCompletionRequest, CompletionRequest
from support.served import engine_of, serving

LEVELS = ("off", "top-1")
EXACT = 2e-3  # nats
COARSE = 0.005  # nats; 10,000 samples of a likely token come as near
SAMPLES = 64
SEEDS = 30_000


class Refused(Exception):
    """The server refused a request; the field that it names."""


@dataclasses.dataclass
class Attacker:
    """A client that knows the tokenizer, and for its prompts also the model, with which its results are compared."""

    url: str
    model: torch.nn.Module
    tokenizer: object
    digits: bool = True
    """Whether it sends numbers with many digits, or multiples of `GRID`."""

    def texts(self, prompt, count=1, **fields):
        """Return the texts of `count` replies, of one token by default."""
        fields = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "n": count, **fields}
        return [choice["text"] for choice in self._post("completions", fields)["choices"]]

    def greedy(self, prompt, **fields):
        return self.texts(prompt, temperature=0, **fields)[0]

    def logprobs(self, prompt, **fields):
        fields = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
        fields["return_tokens_as_token_ids"] = True
        return self._post("completions", fields)["choices"][0]["logprobs"]

    def chat(self, **fields):
        messages = [{"role": "user", "content": "Who?"}]
        fields = {"model": "tiny", "messages": messages, "max_tokens": 1, "temperature": 0, **fields}
        fields["return_tokens_as_token_ids"] = True
        return self._post("chat/completions", fields)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]

    def threshold(self, low, high, changes):
        """Return the number between the two at which `changes` becomes true."""
        if not self.digits:
            steps = range(math.ceil(low / GRID - 1e-6), math.floor(high / GRID + 1e-6) + 1)
            first = bisect.bisect_left(steps, True, key=lambda step: changes(round(step * GRID, 2)))
            return (steps[0] + first - 0.5) * GRID
        for _ in range(16):
            middle = (low + high) / 2
            low, high = (low, middle) if changes(middle) else (middle, high)
        return (low + high) / 2

    def scores(self, ids):
        """Return the steered logits after the ids, and the two likeliest tokens."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([ids])).logits[0, -1].double()
        return logits, logits.topk(2).indices.tolist()

    def find(self, fits):
        """Return the first of many prompts that fits, with its steered logits and the two likeliest tokens."""
        for first in range(40, 400):
            prompt = [first, first + 1, first + 2]
            logits, likeliest = self.scores(prompt)
            texts = {self.tokenizer.decode([*prompt, token]) for token in likeliest}
            if len(texts) == 2 and fits(prompt, logits, likeliest):
                return prompt, logits, likeliest
        raise AssertionError("no prompt fits")

    def find_gap(self, low, high):
        """Return a prompt whose two likeliest tokens differ by some nats."""
        return self.find(lambda _, logits, likeliest: low < float(logits[likeliest[0]] - logits[likeliest[1]]) < high)

    def _post(self, path, fields):
        response = httpx.post(f"{self.url}/v1/{path}", json=fields, timeout=60)
        if response.status_code == 400:
            assert response.json()["error"]["code"] == "logprobs_refused", response.text
            raise Refused(response.json()["error"]["param"])
        assert response.status_code == 200, response.text
        return response.json()


def temperature(client):
    prompt, logits, (first, second) = client.find_gap(0.15, 0.55)
    only = client.greedy(prompt)
    both = lambda value: set(client.texts(prompt, SAMPLES, temperature=value, min_p=0.5)) != {only}
    return client.threshold(0.05, 1.0, both) * math.log(2), float(logits[first] - logits[second])


def temperature_above_1(client):
    prompt, logits, (first, second) = client.find_gap(1.5, 2.5)
    only = client.greedy(prompt)
    both = lambda value: set(client.texts(prompt, SAMPLES, temperature=value, min_p=0.5)) != {only}
    return client.threshold(1.01, 4.0, both) * math.log(2), float(logits[first] - logits[second])


def top_p(client):
    prompt, logits, (first, _) = client.find_gap(0.1, 1.0)
    only = client.greedy(prompt)
    both = lambda value: set(client.texts(prompt, SAMPLES, top_p=value)) != {only}
    return math.log(client.threshold(0.001, 1.0, both)), float(logits.log_softmax(-1)[first])


def min_p(client):
    prompt, logits, (first, second) = client.find_gap(0.3, 0.8)
    only = client.greedy(prompt)
    alone = lambda value: set(client.texts(prompt, SAMPLES, min_p=value)) == {only}
    return -math.log(client.threshold(0.3, 1.0, alone)), float(logits[first] - logits[second])


def second_token(client, wanted):
    """Return a prompt, and how many nats the first token of the greedy reply is ahead of others as the second one."""
    for first in range(40, 1000):
        prompt = [first, first + 1, first + 2]
        _, (token, _) = client.scores(prompt)
        logits, likeliest = client.scores([*prompt, token])
        ahead = float(logits[token] - (logits[likeliest[1]] if likeliest[0] == token else logits[likeliest[0]]))
        if wanted[0] < ahead < wanted[1]:
            return prompt, ahead
    raise AssertionError("no prompt fits")


def penalty(name, sign):
    """Make the probe that favours (-1) or hinders (1) the reply's first token as its second."""

    def probe(client):
        prompt, ahead = second_token(client, (0.2, 1.8) if sign > 0 else (-1.8, -0.2))
        plain = client.greedy(prompt, max_tokens=2, ignore_eos=True)
        changed = lambda value: client.greedy(prompt, max_tokens=2, ignore_eos=True, **{name: sign * value}) != plain
        return sign * client.threshold(0.01, 2.0, changed), ahead

    return probe


def repetition_penalty_below_1(client):
    in_prompt = lambda prompt, logits: max(prompt, key=lambda token: float(logits[token]))
    prompt, logits, (first, _) = client.find(
        lambda prompt, logits, likeliest: (
            likeliest[0] not in prompt and 0 < float(logits[in_prompt(prompt, logits)]) < logits[likeliest[0]]
        )
    )
    plain = client.greedy(prompt)
    kept = lambda value: client.greedy(prompt, repetition_penalty=value) == plain
    ratio = client.threshold(0.01, 0.999, kept)
    return ratio * float(logits[first]), float(logits[in_prompt(prompt, logits)])


def repetition_penalty(client):
    for start in range(40, 400):
        prompt = [start, start + 1, start + 2]
        prompt.append(client.scores(prompt)[1][0])
        logits, (first, _) = client.scores(prompt)
        others = logits.clone()
        others[prompt] = -math.inf
        second = float(others.max())
        if first in prompt and second > 0 and 1.02 < float(logits[first]) / second < 2:
            break
    plain = client.greedy(prompt)
    changed = lambda value: client.greedy(prompt, repetition_penalty=value) != plain
    return float(logits[first]) / client.threshold(1.0, 2.0, changed), second


def logit_bias(client):
    prompt, logits, (first, second) = client.find_gap(0.1, 50.0)
    plain = client.greedy(prompt)
    changed = lambda value: client.greedy(prompt, logit_bias={str(second): value}) != plain
    return client.threshold(0.0, 50.0, changed), float(logits[first] - logits[second])


def seed(client):
    """The client knows the random number of each seed, and so where it falls between two tokens."""
    prompt, logits, (first, _) = client.find(lambda _, logits, likeliest: logits.softmax(-1)[likeliest[0]] > 0.1)
    start = client.tokenizer.decode(prompt[-1:])
    tokens = {}
    for token in reversed(range(len(client.tokenizer))):
        tokens[client.tokenizer.decode([prompt[-1], token])[len(start) :]] = token
    generators = (torch.Generator().manual_seed(number) for number in range(SEEDS))
    uniform = [float(torch.rand(1, 64, 3, generator=own, dtype=torch.float64)[0, 0, 2]) for own in generators]
    order = sorted(range(SEEDS), key=uniform.__getitem__)

    def boundary(token):
        drawn = lambda index: tokens.get(*client.texts(prompt, seed=order[index]), -1)
        return uniform[order[bisect.bisect_left(range(SEEDS - 1), True, key=lambda index: drawn(index) >= token)]]

    return math.log(boundary(first + 1) - boundary(first)), float(logits.log_softmax(-1)[first])


def logprobs(client):
    prompt, logits, (_, second) = client.find_gap(0.1, 50.0)
    top = client.logprobs(prompt, logprobs=5)["top_logprobs"][0]
    return top[f"token_id:{second}"], float(logits.log_softmax(-1)[second])


def top_logprobs(client):
    ids = client.tokenizer.apply_chat_template([{"role": "user", "content": "Who?"}], add_generation_prompt=True)
    logits, (_, second) = client.scores(ids["input_ids"])
    top = {item["token"]: item["logprob"] for item in client.chat(logprobs=True, top_logprobs=5)}
    return top[f"token_id:{second}"], float(logits.log_softmax(-1)[second])


def echo(client):
    prompt, logits, (_, second) = client.find_gap(0.1, 50.0)
    shown = client.logprobs([*prompt, second], echo=True, logprobs=0)["token_logprobs"][len(prompt)]
    return shown, float(logits.log_softmax(-1)[second])


def response_format(client):
    """A schema of two values shows which is likelier; min_p says by how much."""
    tokens = client.tokenizer("12", add_special_tokens=False).input_ids
    for name in "ABCDEFGHIJKLMNOPQRSTUVWXYZ":
        messages = [{"role": "user", "content": f"{name}, how many?"}]
        logits, _ = client.scores(client.tokenizer.apply_chat_template(messages, add_generation_prompt=True).input_ids)
        gap = float((logits[tokens[0]] - logits[tokens[1]]).abs())
        if 0.2 < gap < 0.9:
            break
    schema = {"type": "json_schema", "json_schema": {"name": "number", "schema": {"enum": [1, 2]}}}
    fields = {"model": "tiny", "messages": messages, "n": SAMPLES, "response_format": schema}
    texts = lambda value: {
        choice["message"]["content"]
        for choice in client._post("chat/completions", fields | {"min_p": value})["choices"]
    }
    return -math.log(client.threshold(0.1, 1.0, lambda value: len(texts(value)) == 1)), gap


@dataclasses.dataclass(frozen=True)
class Probe:
    """A way to recover a log-probability, and what docs/benchmarks.md says of it."""

    field: str
    measure: object
    shows: str
    below: str = ""
    """What the levels below full accept; by default from `BOUNDS`."""

    @property
    def row(self):
        low, high = BOUNDS.get(self.field, (0.0, 0.0))
        bounds = f"{low:g} to {high:g}" if math.isfinite(high) else f"from {low:g}"
        return f"{self.shows} | {self.below or f'{bounds}, in steps of {GRID:g}'} |"


GAP = "the difference of two tokens' log-probabilities, by bisection"
PROBES = {
    "temperature": Probe("temperature", temperature, f"{GAP}; above 1, of improbable tokens"),
    "temperature above 1": Probe("temperature", temperature_above_1, ""),
    "top_p": Probe("top_p", top_p, "the probability of the likeliest token, by bisection"),
    "min_p": Probe("min_p", min_p, GAP),
    "presence_penalty": Probe("presence_penalty", penalty("presence_penalty", 1), f"{GAP}; one token is in the reply"),
    "negative presence_penalty": Probe("presence_penalty", penalty("presence_penalty", -1), ""),
    "frequency_penalty": Probe(
        "frequency_penalty", penalty("frequency_penalty", 1), f"{GAP}; one token is in the reply"
    ),
    "negative frequency_penalty": Probe("frequency_penalty", penalty("frequency_penalty", -1), ""),
    "repetition_penalty": Probe("repetition_penalty", repetition_penalty, "the ratio of two logits, by bisection"),
    "repetition_penalty below 1": Probe("repetition_penalty", repetition_penalty_below_1, ""),
    "logit_bias": Probe("logit_bias", logit_bias, GAP, "refused"),
    "seed": Probe("seed", seed, "the probability of any likely token, by bisection", "only at temperature 0"),
    "response_format": Probe(
        "response_format",
        response_format,
        "which of two texts is likelier, and by `min_p` the difference",
        "text, and json_object without tools",
    ),
    "logprobs": Probe("logprobs", logprobs, "log-probabilities of the reply", "as the level says"),
    "top_logprobs": Probe("top_logprobs", top_logprobs, "log-probabilities of the reply", "as the level says"),
    "echo": Probe("echo", echo, "with `logprobs`, log-probabilities of any text", "without `logprobs`"),
}
# Fields that show which tokens are likelier than others, as the text does, and frequencies.
RANKS = ("top_k", "n")
# Fields that end a reply, format it, or have no effect.
OTHERS = {
    "model", "prompt", "messages", "stop", "ignore_eos", "max_tokens", "max_completion_tokens", "stream",
    "stream_options", "return_tokens_as_token_ids", "user", "modalities", "store", "metadata",
    "service_tier", "safety_identifier", "prompt_cache_key", "add_generation_prompt", "continue_final_message",
    "chat_template_kwargs", "tools", "parallel_tool_calls",
}  # fmt: skip


@pytest.fixture(scope="module", params=LEVELS)
def guarded(request, served_bundle):
    with serving([engine_of(served_bundle)], shutdown_timeout=0.0, logprobs=request.param) as url:
        yield url


def test_every_field_has_been_tried():
    fields = CompletionRequest.model_fields.keys() | ChatCompletionRequest.model_fields.keys()
    assert fields == OTHERS | {*RANKS, "tool_choice"} | {probe.field for probe in PROBES.values()}, (
        "try to recover a log-probability with the field that is new"
    )


@pytest.mark.parametrize("name", PROBES)
def test_full_gives_exact_log_probabilities(url, model, tokenizer, name):
    estimate, known = PROBES[name].measure(Attacker(url, model, tokenizer))
    assert abs(estimate - known) < EXACT


@pytest.mark.parametrize("name", PROBES)
def test_levels_below_full_do_not(guarded, model, tokenizer, name):
    probe, outcomes = PROBES[name], []
    for digits in (True, False):
        try:
            estimate, known = probe.measure(Attacker(guarded, model, tokenizer, digits))
            outcomes.append(abs(estimate - known))
        except Refused as refused:
            outcomes.append(str(refused))
    # A chat needs `logprobs` for `top_logprobs`.
    refusals = {probe.field, "logprobs"} if probe.field == "top_logprobs" else {probe.field}
    assert all(outcome in refusals or outcome > COARSE for outcome in outcomes), outcomes
    assert probe.field not in BOUNDS or outcomes[0] == probe.field  # many digits


def test_documentation_has_the_table():
    page = Path(__file__).parents[3].joinpath("docs/benchmarks.md").read_text()
    ranks = ", ".join(f"`{name}`" for name in RANKS)
    fields = {}
    for probe in PROBES.values():
        if probe.shows:
            fields.setdefault(probe.row, []).append(f"`{probe.field}`")
    rows = [
        "| field | what a client computes with it at `full` | accepted below `full` |\n|---|---|---|",
        *(f"| {', '.join(names)} | {row}" for row, names in fields.items()),
        "| `tool_choice` | which arguments are likelier | none and auto |",
        f"| {ranks} | which tokens are likelier; frequencies in samples | yes |",
        "| all others | nothing that the text does not show | yes |",
    ]
    assert "\n".join(rows) in page, "\n".join(rows)
