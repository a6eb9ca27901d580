"""POST /v1/completions."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from divdec.serving.api import body, generation, sending
from divdec.serving.api.errors import invalid
from divdec.serving.api.generation import Answer, Job, Served, Server
from divdec.serving.api.record import RequestRecord, record_of
from divdec.serving.api.responses import Completion, CompletionChoice, CompletionLogprobs, Usage
from divdec.serving.api.schemas import CompletionRequest
from divdec.serving.api.vocabulary import Vocabulary
from divdec.serving.engine.requests import Piece, Sampling, TokenLogprob


@dataclasses.dataclass(frozen=True)
class _Prompt:
    """A prompt as tokens, and as it is echoed."""

    ids: list[int]
    text: str
    starts: list[int]
    """Where each token begins in the text; empty where that is not told."""


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A request that has been understood."""

    request: CompletionRequest
    served: Served
    prompts: list[_Prompt]
    jobs: list[Job]
    times: int
    """Answers that are made to each prompt; `request.n` of them are given."""
    id: str
    created: int

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.prompts)

    def event(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        return Completion(id=self.id, created=self.created, model=self.served.engine.name, choices=choices, usage=usage)


async def complete(request: Request, server: Server) -> Response:
    """Answer one or several prompts."""
    record = record_of(request)
    asked = await _understand(request, server, record)
    if asked.request.stream:
        events = _events(server, asked, record)
        return await sending.stream(request, record, events, server.limits.slowest_reader)
    return await sending.answer(request, _whole(server, asked, record))


async def _understand(request: Request, server: Server, record: RequestRecord) -> _Asked:
    wanted = await body.read(request, CompletionRequest, server.limits.max_body_bytes)
    served = server.find(wanted.model)
    record.model, record.stream, record.prompt = served.engine.name, wanted.stream, wanted.prompt
    times = max(wanted.n, wanted.best_of or 1)
    given = _given(wanted.prompt)
    if len(given) * times > server.limits.max_sequences:
        raise invalid(
            f"{len(given)} prompts with {times} answers each: this server makes at most "
            f"{server.limits.max_sequences} answers for a request",
            "prompt" if len(given) > 1 else "n",
        )
    scored = wanted.echo and wanted.logprobs is not None
    prompts = [await _encoded(prompt, served.vocabulary, scored) for prompt in given]
    record.prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
    limits = server.limits
    told = wanted.max_tokens if "max_tokens" in wanted.model_fields_set else None
    default = CompletionRequest.model_fields["max_tokens"].default
    logprobs = wanted.logprobs
    if times > wanted.n and logprobs is None:
        logprobs = 0  # by which the best are chosen
    jobs = []
    for prompt in prompts:
        sampling: Sampling = generation.sampling_of(
            wanted,
            served,
            max_tokens=generation.room(served, prompt.ids, told, default, limits),
            logprobs=logprobs,
            prompt_logprobs=wanted.logprobs if wanted.echo else None,
        )
        jobs += generation.jobs_of([prompt.ids], sampling, times)
    return _Asked(wanted, served, prompts, jobs, times, record.id, generation.now())


def _given(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """The prompts one by one; a list of numbers is one prompt."""
    if isinstance(prompt, str):
        return [prompt]
    return [[part for part in prompt if isinstance(part, int)]] if isinstance(prompt[0], int) else [*prompt]  # pyright: ignore[reportReturnType]


async def _encoded(prompt: str | list[int], vocabulary: Vocabulary, scored: bool) -> _Prompt:
    if isinstance(prompt, str):
        ids = await vocabulary.of_text(prompt)
        return _Prompt(ids, prompt, await vocabulary.starts(prompt, len(ids)) if scored else [])
    vocabulary.check(prompt, "prompt")
    return _Prompt(prompt, *await vocabulary.written(prompt))


async def _whole(server: Server, asked: _Asked, record: RequestRecord) -> Completion:
    pieces = generation.run(server, asked.served, asked.jobs, record)
    answers = await generation.collect(pieces, len(asked.jobs))
    choices = []
    for number, prompt in enumerate(asked.prompts):
        own = answers[number * asked.times : (number + 1) * asked.times]
        if asked.times > asked.request.n:
            own = sorted(own, key=lambda answer: -answer.mean_logprob)[: asked.request.n]
        choices += [_choice(asked, len(choices) + place, prompt, answer) for place, answer in enumerate(own)]
    generated = sum(len(answer.tokens) for answer in answers)
    return asked.event(choices, Usage.of(asked.prompt_tokens, generated))


def _choice(asked: _Asked, index: int, prompt: _Prompt, answer: Answer) -> CompletionChoice:
    text = (prompt.text if asked.request.echo else "") + answer.text
    return CompletionChoice(
        index=index,
        text=text,
        logprobs=_logprobs(asked, prompt, answer),
        finish_reason=answer.finish_reason,
    )


def _logprobs(asked: _Asked, prompt: _Prompt, answer: Answer | Piece) -> CompletionLogprobs | None:
    """Log-probabilities of an answer or a piece of it, with those of its prompt where it is echoed."""
    if asked.request.logprobs is None:
        return None
    found = CompletionLogprobs()
    if answer.prompt_logprobs is not None:
        for token, start, given in zip(prompt.ids, prompt.starts, answer.prompt_logprobs, strict=True):
            _add(found, asked, token, start, given)
    begin = len(prompt.text) if asked.request.echo else 0
    for start, given in zip(answer.starts, answer.logprobs, strict=True):
        _add(found, asked, given.token, begin + start, given)
    return found


def _add(found: CompletionLogprobs, asked: _Asked, token: int, start: int, given: TokenLogprob | None) -> None:
    vocabulary, by_id = asked.served.vocabulary, asked.request.return_tokens_as_token_ids
    found.tokens.append(vocabulary.name(token, by_id=by_id))
    found.text_offset.append(start)
    found.token_logprobs.append(given.logprob if given is not None else None)
    if given is None:
        found.top_logprobs.append(None)
        return
    top: dict[str, float] = {}
    for other, logprob in (*given.top, (given.token, given.logprob)):
        top.setdefault(vocabulary.name(other, by_id=by_id), logprob)
    found.top_logprobs.append(top)


async def _events(server: Server, asked: _Asked, record: RequestRecord) -> AsyncGenerator[dict[str, Any], None]:
    include_usage = asked.request.stream_options is not None and asked.request.stream_options.include_usage
    left_out = None if include_usage else {"usage"}
    begun: set[int] = set()
    generated = 0
    pieces = generation.run(server, asked.served, asked.jobs, record)
    try:
        async for number, piece in pieces:
            generated += len(piece.tokens)
            text = piece.text
            if number not in begun:
                begun.add(number)
                text = (asked.prompts[number // asked.times].text if asked.request.echo else "") + text
            logprobs = _logprobs(asked, asked.prompts[number // asked.times], piece)
            if not text and not piece.finish_reason and (logprobs is None or not logprobs.tokens):
                continue
            choice = CompletionChoice(index=number, text=text, logprobs=logprobs, finish_reason=piece.finish_reason)
            yield asked.event([choice]).model_dump(exclude=left_out)
    finally:
        await pieces.aclose()
    if include_usage:
        yield asked.event([], Usage.of(asked.prompt_tokens, generated)).model_dump()
