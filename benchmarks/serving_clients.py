"""Concurrent clients for serving.py, which record the arrival time of each piece of an answer.

While an answer streams, a client only records times, because clients share the processor with the server.
"""

import asyncio
import dataclasses
import itertools
import json
import math
import statistics
import time

import httpx
import torch

from decoding_costs import Clock

PATIENCE = 600  # seconds


class WrongAnswerError(Exception):
    """A server returned an error or an unexpected reply."""


@dataclasses.dataclass
class Measured:
    """Measurements of the clients; times in seconds."""

    seconds: float = 0.0
    tokens: int = 0
    first: list[float] = dataclasses.field(default_factory=list)
    """From a request to the first piece of its answer."""
    gaps: list[float] = dataclasses.field(default_factory=list)
    """Between a piece and the next."""
    per_token: list[float] = dataclasses.field(default_factory=list)
    """Of each answer, after its first piece."""
    texts: list[str] = dataclasses.field(default_factory=list)

    def add(self, begun, times, tokens, text):
        self.tokens += tokens
        self.first.append(times[0] - begun)
        self.gaps += [after - before for before, after in itertools.pairwise(times)]
        self.per_token.append((times[-1] - times[0]) / (tokens - 1))
        self.texts.append(text)


def asked(server, clients, prompts, tokens, tokenizer):
    """N clients share the prompts; each sends the next prompt when its answer is complete."""
    command = server.command
    bodies = [_body(command, ids, tokens, tokenizer) for ids in prompts]
    try:
        answers = asyncio.run(_all(f"{server.url}/v1/completions", bodies, clients))
    except* (WrongAnswerError, httpx.HTTPError) as group:
        raise WrongAnswerError(str(group.exceptions[0]) or type(group.exceptions[0]).__name__) from None
    found = Measured(seconds=max(times[-1] for _, times, _ in answers) - min(begun for begun, _, _ in answers))
    for ids, (begun, times, lines) in zip(prompts, answers):
        expected = {"completion_tokens": tokens} | ({} if command.peer else {"prompt_tokens": len(ids)})
        came, text = _read(times, lines, expected)
        found.add(begun, came, tokens, text)
    return found


def _body(command, ids, tokens, tokenizer):
    if command.peer:
        # It takes texts alone, and knows ignore_eos as an end that never comes.
        settings = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
        text = tokenizer.decode(ids, skip_special_tokens=True)
        return {"model": command.model, "prompt": text, "stream": True, "generation_config": json.dumps(settings)}
    return {"model": command.model, "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip


async def _all(url, bodies, clients):
    waiting, answers = list(enumerate(bodies)), [None] * len(bodies)
    waiting.reverse()

    async def one(client):
        while waiting:
            place, body = waiting.pop()
            answers[place] = await _ask(client, url, body)

    limits = httpx.Limits(max_connections=clients)
    connections = httpx.AsyncClient(timeout=PATIENCE, limits=limits, trust_env=False)
    async with connections as client, asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(one(client))
    return answers


async def _ask(client, url, body):
    begun, times, lines = time.perf_counter(), [], []
    async with client.stream("POST", url, json=body) as response:
        if response.status_code != 200:
            raise WrongAnswerError(f"status {response.status_code}: {(await response.aread())[:300]!r}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
                lines.append(line)
    if not times:
        raise WrongAnswerError("a stream was empty")
    return begun, times, lines


def _read(times, lines, expected):
    """Arrival times of the pieces of an answer, and its text; a piece is one token or several."""
    came, texts, usage, reason = [], [], {}, None
    for when, line in zip(times, lines):
        event = json.loads(line.removeprefix("data: "))
        if "choices" not in event:
            raise WrongAnswerError(f"a stream ended with {line[:300]}")
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            reason = choice.get("finish_reason") or reason
            if choice["text"] or not event.get("usage"):
                came.append(when)
                texts.append(choice["text"])
    found = {name: usage.get(name) for name in expected}
    if found != expected or reason != "length":
        raise WrongAnswerError(f"asked for {expected}, got {found}, ended by {reason!r}")
    return came, "".join(texts)


class InProcess:
    """The target's own `generate`, without a server."""

    def __init__(self, model, tokenizer):
        self.model, self.tokenizer = model, tokenizer
        model.generation_config.eos_token_id = None  # every answer has all its tokens

    def asked(self, prompts, tokens):
        """One prompt after another."""
        found, started = Measured(), time.perf_counter()
        for ids in prompts:
            given, clock, begun = torch.tensor([ids], device=self.model.device), Clock(1), time.perf_counter()
            answer = self.model.generate(
                given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=tokens,
                pad_token_id=self.tokenizer.pad_token_id, streamer=clock,
            )[0, len(ids) :]  # fmt: skip
            if len(answer) != tokens or len(clock.times) != tokens:
                raise WrongAnswerError(f"asked generate for {tokens} tokens, got {len(answer)}")
            found.add(begun, clock.times, tokens, self.tokenizer.decode(answer, skip_special_tokens=True))
        found.seconds = time.perf_counter() - started
        return found


def percentile(values, share):
    """The given quantile of the values."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def summary(rounds, alone):
    """One table row over several rounds, with a comparison to the answers for a single client."""
    rates = [found.tokens / found.seconds for found in rounds]
    every = {name: [1e3 * value for found in rounds for value in getattr(found, name)]
             for name in ("first", "gaps", "per_token")}  # fmt: skip
    tokens = sum(found.tokens for found in rounds)
    answers = [(text, known) for found in rounds for text, known in zip(found.texts, alone)]
    return {
        "tokens_per_s": statistics.median(rates), "least": min(rates), "most": max(rates), "rates": rates,
        "first_ms": statistics.median(every["first"]), "first_p99_ms": percentile(every["first"], 0.99),
        "gap_ms": percentile(every["gaps"], 0.5), "gap_p99_ms": percentile(every["gaps"], 0.99),
        "ms_per_token": statistics.median(every["per_token"]), "tokens": tokens,
        "tokens_per_piece": tokens / (len(every["gaps"]) + len(every["first"])),
        "as_alone": sum(text == known for text, known in answers), "compared": len(answers),
    }  # fmt: skip
