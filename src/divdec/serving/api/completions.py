"""POST /v1/completions and /v1/chat/completions: whole replies and streams in the OpenAI format."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Iterable
from typing import Any, TypeVar

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from divdec.serving.api.errors import ApiError, invalid
from divdec.serving.api.generation import Generation, ServedModel, Server
from divdec.serving.api.middleware import RequestRecord
from divdec.serving.api.schemas import ChatCompletionRequest, CompletionRequest
from divdec.serving.engine.request import RequestOutput, TokenLogprob

Result = TypeVar("Result")
Event = dict[str, Any]
AppStatus.disable_automatic_graceful_drain()  # on shutdown the engines end their streams


@dataclasses.dataclass
class Reply:
    """Outputs of one reply, added up."""

    text: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    offsets: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: str | None = None

    def add(self, output: RequestOutput) -> None:
        """Append an output."""
        self.text += output.text
        self.tokens += output.tokens
        self.offsets += output.offsets
        self.logprobs += output.logprobs
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.finish_reason = output.finish_reason

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the tokens, which orders the replies for `best_of`."""
        return sum(token.logprob for token in self.logprobs) / max(len(self.logprobs), 1)


@dataclasses.dataclass
class Prompt:
    """A prompt of a completion request."""

    ids: list[int]
    text: str
    offsets: list[int]
    """Where each token begins in the text; empty if no log-probabilities of the prompt are needed."""


class CompletionCall:
    """State of one completion request: its replies and their format."""

    object_name = event_name = "text_completion"

    def __init__(
        self, body: CompletionRequest | ChatCompletionRequest, server: Server, model: ServedModel, record: RequestRecord
    ) -> None:
        self.body, self.server, self.model, self.record = body, server, model, record
        self.generations: list[Generation] = []
        self.prompt_tokens = 0
        self.created = int(time.time())
        record.model, record.stream = model.engine.name, body.stream

    def set_prompt_tokens(self, number: int) -> None:
        """Set the number of prompt tokens."""
        self.prompt_tokens = self.record.prompt_tokens = number

    def envelope(self, name: str, choices: list[Event], **fields: Any) -> Event:
        """Return a response body or an event."""
        return {
            "id": self.record.id, "object": name, "created": self.created, "model": self.model.engine.name,
            "choices": choices, **fields,
        }  # fmt: skip

    def usage(self) -> Event:
        """Return the token counts; call it when all replies are complete."""
        generated = self.record.generated_tokens
        return {
            "prompt_tokens": self.prompt_tokens, "completion_tokens": generated,
            "total_tokens": self.prompt_tokens + generated,
        }  # fmt: skip

    async def respond(self, request: Request) -> Response:
        """Answer the request; an error before the first event of a stream is an ordinary error reply."""
        if not self.body.stream:
            return JSONResponse(await unless_disconnected(request.receive, self._whole()))
        events = self._events()
        try:
            first = await unless_disconnected(request.receive, anext(events))
        except BaseException:
            await events.aclose()
            raise
        return EventSourceResponse(self._stream(first, events), sep="\n", headers={"Cache-Control": "no-cache"})

    async def _whole(self) -> Event:
        replies = [Reply() for _ in self.generations]
        async for index, output in self.server.run(self.model, self.generations, self.record):
            replies[index].add(output)
        return self.envelope(self.object_name, self.choices(replies), usage=self.usage())

    async def _events(self) -> AsyncGenerator[Event, None]:
        started: set[int] = set()
        outputs = self.server.run(self.model, self.generations, self.record)
        try:
            async for index, output in outputs:
                for choice in self.deltas(index, output, index not in started):
                    yield self.envelope(self.event_name, [choice])
                started.add(index)
        finally:
            await outputs.aclose()
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            yield self.envelope(self.event_name, [], usage=self.usage())

    async def _stream(self, first: Event, events: AsyncGenerator[Event, None]) -> AsyncGenerator[ServerSentEvent, None]:
        """Server-sent events that end with `data: [DONE]`, or with an error in its place."""
        try:
            yield _encode(first)
            async for event in events:
                yield _encode(event)
            yield ServerSentEvent("[DONE]", sep="\n")
        except Exception as error:
            yield _encode(self.record.set_error(error).body())
        finally:
            await events.aclose()

    def choices(self, replies: list[Reply]) -> list[Event]:
        """Return the choices of a whole response."""
        raise NotImplementedError

    def deltas(self, index: int, output: RequestOutput, first: bool) -> Iterable[Event]:
        """Return the choices of the events for an output of one reply."""
        raise NotImplementedError


class TextCompletion(CompletionCall):
    """A request of POST /v1/completions."""

    body: CompletionRequest

    async def prepare(self) -> None:
        """Tokenize the prompts and check the request."""
        body, model = self.body, self.model
        self.record.prompt = body.prompt
        prompts: list[Any] = (
            [body.prompt] if isinstance(body.prompt, str) or isinstance(body.prompt[0], int) else [*body.prompt]
        )
        self.replies_per_prompt = max(body.n, body.best_of or 1)
        if len(prompts) * self.replies_per_prompt > self.server.limits.max_sequences:
            raise invalid(
                f"{len(prompts)} prompts with {self.replies_per_prompt} answers each: this server makes at most "
                f"{self.server.limits.max_sequences} answers for a request",
                "prompt" if len(prompts) > 1 else "n",
            )
        self.prompts = [await self._encode(prompt) for prompt in prompts]
        self.set_prompt_tokens(sum(len(prompt.ids) for prompt in self.prompts))
        selects = self.replies_per_prompt > body.n  # by log-probability
        for prompt in self.prompts:
            self.generations += self.server.generations(
                body, model, prompt.ids, self.replies_per_prompt,
                max_tokens=body.max_tokens if "max_tokens" in body.model_fields_set else None,
                default=body.max_tokens,
                logprobs=0 if selects and body.logprobs is None else body.logprobs,
                prompt_logprobs=body.logprobs if body.echo else None,
            )  # fmt: skip

    async def _encode(self, prompt: str | list[int]) -> Prompt:
        if isinstance(prompt, str):
            ids = await self.model.encode_text(prompt)
            scored = self.body.echo and self.body.logprobs is not None
            return Prompt(ids, prompt, await self.model.text_offsets(prompt, len(ids)) if scored else [])
        self.model.check_ids(prompt, "prompt")
        return Prompt(prompt, *await self.model.decode(prompt))

    def choices(self, replies: list[Reply]) -> list[Event]:
        """See `CompletionCall.choices`."""
        choices: list[Event] = []
        for number in range(len(self.prompts)):
            best = replies[number * self.replies_per_prompt : (number + 1) * self.replies_per_prompt]
            if len(best) > self.body.n:
                best = sorted(best, key=lambda reply: -reply.mean_logprob)[: self.body.n]
            choices += [self._choice(len(choices) + i, number, reply, True) for i, reply in enumerate(best)]
        return choices

    def deltas(self, index: int, output: RequestOutput, first: bool) -> Iterable[Event]:
        """See `CompletionCall.deltas`."""
        choice = self._choice(index, index // self.replies_per_prompt, output, first)
        if choice["text"] or choice["finish_reason"] or (choice["logprobs"] and choice["logprobs"]["tokens"]):
            yield choice

    def _choice(self, index: int, number: int, reply: Reply | RequestOutput, first: bool) -> Event:
        prompt = self.prompts[number]
        text = (prompt.text if self.body.echo and first else "") + reply.text
        logprobs = None if self.body.logprobs is None else self._logprobs(prompt, reply)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reply.finish_reason}

    def _logprobs(self, prompt: Prompt, reply: Reply | RequestOutput) -> Event:
        names: Event = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

        def add(token: int, offset: int, logprob: TokenLogprob | None) -> None:
            names["tokens"].append(self._name(token))
            names["text_offset"].append(offset)
            names["token_logprobs"].append(None if logprob is None else logprob.logprob)
            top: dict[str, float] = {}
            for other, value in () if logprob is None else (*logprob.top, (token, logprob.logprob)):
                top.setdefault(self._name(other), value)
            names["top_logprobs"].append(None if logprob is None else top)

        if reply.prompt_logprobs is not None:
            for token, offset, logprob in zip(prompt.ids, prompt.offsets, reply.prompt_logprobs, strict=True):
                add(token, offset, logprob)
        start = len(prompt.text) if self.body.echo else 0
        for offset, logprob in zip(reply.offsets, reply.logprobs, strict=True):
            add(logprob.token, start + offset, logprob)
        return names

    def _name(self, token: int) -> str:
        return self.model.token_name(token, by_id=self.body.return_tokens_as_token_ids)


class ChatCompletion(CompletionCall):
    """A request of POST /v1/chat/completions."""

    object_name, event_name = "chat.completion", "chat.completion.chunk"
    body: ChatCompletionRequest

    async def prepare(self) -> None:
        """Tokenize the messages and check the request."""
        body, most = self.body, self.server.limits.max_sequences
        self.record.prompt = [message.model_dump() for message in body.messages]
        if body.n > most:
            raise invalid(f"n is {body.n}: this server makes at most {most} answers", "n")
        prompt = await self.model.encode_chat(body.messages)
        self.set_prompt_tokens(len(prompt))
        self.generations = self.server.generations(
            body, self.model, prompt, body.n,
            max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )  # fmt: skip

    def choices(self, replies: list[Reply]) -> list[Event]:
        """See `CompletionCall.choices`."""
        return [
            {
                "index": index, "message": {"role": "assistant", "content": reply.text, "refusal": None},
                "logprobs": self._logprobs(reply.logprobs), "finish_reason": reply.finish_reason,
            }
            for index, reply in enumerate(replies)
        ]  # fmt: skip

    def deltas(self, index: int, output: RequestOutput, first: bool) -> Iterable[Event]:
        """See `CompletionCall.deltas`."""
        empty = {"index": index, "delta": {}, "logprobs": None, "finish_reason": None}
        if first:
            yield empty | {"delta": {"role": "assistant", "content": ""}}
        if output.text or output.logprobs:
            yield empty | {"delta": {"content": output.text}, "logprobs": self._logprobs(output.logprobs)}
        if output.finish_reason:
            yield empty | {"finish_reason": output.finish_reason}

    def _logprobs(self, tokens: Iterable[TokenLogprob]) -> Event | None:
        if not self.body.logprobs:
            return None
        most = self.body.top_logprobs or 0
        return {
            "content": [
                self._token(token.token, token.logprob)
                | {"top_logprobs": [self._token(*other) for other in token.top[:most]]}
                for token in tokens
            ],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float) -> Event:
        name = self.model.token_name(token, by_id=self.body.return_tokens_as_token_ids)
        return {"token": name, "logprob": logprob, "bytes": list(self.model.token_bytes(token)) or None}


async def unless_disconnected(receive: Receive, work: Awaitable[Result]) -> Result:
    """Await work, and cancel it if the client disconnects.

    Raises:
        ApiError: the client disconnected; no one receives it.
    """

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    watcher, worker = asyncio.ensure_future(wait_for_disconnect()), asyncio.ensure_future(work)
    try:
        await asyncio.wait({watcher, worker}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        raise ApiError(499, "the client disconnected", code="disconnected")
    finally:
        for task in (watcher, worker):
            task.cancel()
        await asyncio.gather(watcher, worker, return_exceptions=True)


def _encode(event: Event) -> ServerSentEvent:
    # ASCII, and lines that end as in the OpenAI API: some clients end a line at U+2028 or split at an empty line.
    return ServerSentEvent(json.dumps(event, allow_nan=False), sep="\n")
