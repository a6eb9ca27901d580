"""POST /v1/chat/completions."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from divdec.serving.api import body, generation, sending
from divdec.serving.api.errors import invalid
from divdec.serving.api.generation import Job, Served, Server
from divdec.serving.api.record import RequestRecord, record_of
from divdec.serving.api.responses import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChatToken,
    ChunkChoice,
    TopLogprob,
    Usage,
)
from divdec.serving.api.schemas import ChatRequest
from divdec.serving.engine.requests import TokenLogprob


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A request that has been understood."""

    request: ChatRequest
    served: Served
    prompt_tokens: int
    jobs: list[Job]
    id: str
    created: int

    def named(self) -> dict[str, Any]:
        return {"id": self.id, "created": self.created, "model": self.served.engine.name}

    def logprobs(self, tokens: Iterable[TokenLogprob]) -> ChatLogprobs | None:
        if not self.request.logprobs:
            return None
        most = self.request.top_logprobs or 0
        return ChatLogprobs(
            content=[
                ChatToken(
                    **self._token(given.token, given.logprob),
                    top_logprobs=[TopLogprob(**self._token(*other)) for other in given.top[:most]],
                )
                for given in tokens
            ]
        )

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        vocabulary = self.served.vocabulary
        name = vocabulary.name(token, by_id=self.request.return_tokens_as_token_ids)
        return {"token": name, "logprob": logprob, "bytes": list(vocabulary.bytes(token)) or None}


async def converse(request: Request, server: Server) -> Response:
    """Answer a conversation's last turn."""
    record = record_of(request)
    asked = await _understand(request, server, record)
    if asked.request.stream:
        events = _events(server, asked, record)
        return await sending.stream(request, record, events, server.limits.slowest_reader)
    return await sending.answer(request, _whole(server, asked, record))


async def _understand(request: Request, server: Server, record: RequestRecord) -> _Asked:
    wanted = await body.read(request, ChatRequest, server.limits.max_body_bytes)
    served = server.find(wanted.model)
    record.model, record.stream = served.engine.name, wanted.stream
    record.prompt = [turn.model_dump() for turn in wanted.messages]
    if wanted.n > server.limits.max_sequences:
        raise invalid(f"n is {wanted.n}: this server makes at most {server.limits.max_sequences} answers", "n")
    prompt = await served.vocabulary.of_turns(wanted.messages)
    record.prompt_tokens = len(prompt)
    told = wanted.max_completion_tokens if wanted.max_completion_tokens is not None else wanted.max_tokens
    sampling = generation.sampling_of(
        wanted,
        served,
        max_tokens=generation.room(served, prompt, told, None, server.limits),
        logprobs=(wanted.top_logprobs or 0) if wanted.logprobs else None,
    )
    jobs = generation.jobs_of([prompt], sampling, wanted.n)
    return _Asked(wanted, served, len(prompt), jobs, record.id, generation.now())


async def _whole(server: Server, asked: _Asked, record: RequestRecord) -> ChatCompletion:
    answers = await generation.collect(generation.run(server, asked.served, asked.jobs, record), len(asked.jobs))
    choices = [
        ChatChoice(
            index=index,
            message=ChatMessage(content=answer.text),
            logprobs=asked.logprobs(answer.logprobs),
            finish_reason=answer.finish_reason,
        )
        for index, answer in enumerate(answers)
    ]
    generated = sum(len(answer.tokens) for answer in answers)
    return ChatCompletion(**asked.named(), choices=choices, usage=Usage.of(asked.prompt_tokens, generated))


async def _events(server: Server, asked: _Asked, record: RequestRecord) -> AsyncGenerator[dict[str, Any], None]:
    include_usage = asked.request.stream_options is not None and asked.request.stream_options.include_usage
    left_out = None if include_usage else {"usage"}

    def event(choice: ChunkChoice) -> dict[str, Any]:
        return ChatChunk(**asked.named(), choices=[choice]).model_dump(exclude=left_out)

    begun: set[int] = set()
    generated = 0
    pieces = generation.run(server, asked.served, asked.jobs, record)
    try:
        async for number, piece in pieces:
            generated += len(piece.tokens)
            if number not in begun:
                begun.add(number)
                yield event(ChunkChoice(index=number, delta={"role": "assistant", "content": ""}))
            logprobs = asked.logprobs(piece.logprobs)
            if piece.text or (logprobs is not None and logprobs.content):
                yield event(ChunkChoice(index=number, delta={"content": piece.text}, logprobs=logprobs))
            if piece.finish_reason:
                yield event(ChunkChoice(index=number, delta={}, finish_reason=piece.finish_reason))
    finally:
        await pieces.aclose()
    if include_usage:
        usage = Usage.of(asked.prompt_tokens, generated)
        yield ChatChunk(**asked.named(), choices=[], usage=usage).model_dump()
