"""POST /v1/completions and /v1/chat/completions: tokenization, generation, replies and streams in the OpenAI format."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from divdec.errors import UsageError
from divdec.serving import ServeSettings
from divdec.serving.engine import Engine
from divdec.serving.grammar import HERMES, TAGS, GrammarMatcher, ToolCallParser, make_grammar
from divdec.serving.logprobs import LogprobPolicy
from divdec.serving.middleware import Metrics, RequestRecord
from divdec.serving.request import RequestOutput, RequestTiming, SamplingParams, TokenLogprob
from divdec.serving.schemas import (
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    NamedToolChoice,
    invalid,
)

MAX_LOGPROB_VALUES = 1_000_000  # log-probabilities in the replies to one request
MIN_TEMPERATURE = 1e-5  # smaller temperatures overflow on division; decode greedily instead
SAME_FIELDS = (
    "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "ignore_eos",
)  # fmt: skip
"""Request fields that are passed on unchanged as sampling parameters."""
FILTERED = "content_filter"  # finish reason of a refused reply, as in the OpenAI API
Result = TypeVar("Result")
Event = dict[str, Any]
AppStatus.disable_automatic_graceful_drain()  # on shutdown the engines end their streams


@dataclasses.dataclass
class Server:
    """Engines by model name, options, log-probabilities that replies may contain, and metrics."""

    models: Mapping[str, Engine]
    options: ServeSettings
    policy: LogprobPolicy
    metrics: Metrics

    def find_model(self, name: str) -> Engine:
        """Return the engine of a model."""
        if name not in self.models:
            message = f"there is no model {name[:200]!r} here; there are: {', '.join(self.models)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return self.models[name]


@dataclasses.dataclass
class Prompt:
    """A prompt of a completion request."""

    ids: list[int]
    text: str
    offsets: list[int]
    """Character offset of each token; empty if no log-probabilities of the prompt are needed."""


class CompletionCall:
    """State of one completion request: its replies and their format."""

    object_name, event_name, prompt_field = "text_completion", "text_completion", "prompt"

    def __init__(self, body: CompletionRequest | ChatCompletionRequest, server: Server, request: Request) -> None:
        self.body, self.server, self.request = body, server, request
        self.engine, self.policy = server.find_model(body.model), server.policy
        self.record: RequestRecord = request.state.record
        self.record.engine, self.record.stream = self.engine, body.stream
        self.replies: list[tuple[list[int], SamplingParams]] = []
        """Prompt and parameters of each reply."""
        self._created = int(time.time())
        self._deadline = asyncio.get_running_loop().time() + server.options.max_seconds

    async def respond(self) -> Response:
        """Answer the request; an error before the first event of a stream is an ordinary error reply."""
        if (field := self.policy.find_refused(vars(self.body))) is not None:
            raise invalid(self.policy.refusal(field), field, "logprobs_refused")
        async with asyncio.timeout_at(self._deadline):
            await unless_disconnected(self.request.receive, self.prepare())
        self._check_logprob_values()
        if not self.body.stream:
            return JSONResponse(await unless_disconnected(self.request.receive, self._whole()))
        events = self._events()
        try:
            first = await unless_disconnected(self.request.receive, anext(events))
        except BaseException:
            await events.aclose()
            raise
        return EventSourceResponse(self._stream(first, events), sep="\n", headers={"Cache-Control": "no-cache"})

    async def prepare(self) -> None:
        """Tokenize, check the request and fill `replies`."""
        raise NotImplementedError

    def choices(self, replies: list[RequestOutput]) -> list[Event]:
        """Return the choices of a whole response."""
        raise NotImplementedError

    def deltas(self, index: int, output: RequestOutput, first: bool) -> Iterable[Event]:
        """Return the choices of the events for an output of one reply."""
        raise NotImplementedError

    def note(self, reply: RequestOutput) -> Event:
        """Return the field of a choice that says whether steering took much, if the operator wants it."""
        options, share = self.server.options, reply.suppressed
        if options.on_suppressed != "note" or reply.finish_reason is None:
            return {}
        marked = options.took_much(share)
        if self.policy.level != "full":  # the share is a probability of the unsteered target
            return {"suppressed": {"marked": marked}}
        return {"suppressed": {"share": None if share is None else round(share, 4), "marked": marked}}

    def add_replies(
        self,
        prompt: list[int],
        count: int,
        max_tokens: int | None,
        *,
        default: int | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        **fields: Any,
    ) -> None:
        """Add `count` replies to a prompt; reply i uses seed + i. See `SamplingParams` for the other arguments.

        If the client sets no `max_tokens`, a reply has at most `default` tokens, or the rest of the context.

        Raises:
            ApiError: the context is too short, or a limit is exceeded.
        """
        body = self.body
        self.engine.check_ids(map(int, body.logit_bias), "logit_bias")
        context, most = self.engine.max_model_len, self.server.options.max_tokens
        length = "max_tokens" if getattr(body, "max_completion_tokens", None) is None else "max_completion_tokens"
        if max_tokens is not None and max_tokens > most:
            raise invalid(f"{length} is {max_tokens}: this server answers with at most {most}", length)
        if len(prompt) + (1 if max_tokens is None else max_tokens) > context:
            reply = "" if max_tokens is None else f" and {max_tokens} of the answer"
            raise invalid(
                f"the context has {context} tokens; the prompt has {len(prompt)}{reply}: shorten them",
                length if max_tokens is not None and len(prompt) < context else self.prompt_field,
                "context_length_exceeded",
            )
        if max_tokens is None:
            max_tokens = min(context - len(prompt), most, *([] if default is None else [default]))
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=body.temperature if body.temperature >= MIN_TEMPERATURE else 0.0,
            top_k=max(body.top_k, 0),
            stop=tuple(body.stop),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            **{name: getattr(body, name) for name in SAME_FIELDS},
            **fields,
        )
        seeds = [None if body.seed is None else (body.seed + number) % 2**63 for number in range(count)]
        self.replies += [(prompt, dataclasses.replace(params, seed=seed)) for seed in seeds]
        self.record.prompt_tokens += len(prompt)

    def _check_logprob_values(self) -> None:
        values = 0
        for prompt, params in self.replies:
            for number, tokens in ((params.prompt_logprobs, len(prompt)), (params.logprobs, params.max_tokens)):
                values += 0 if number is None else (1 + number) * tokens
        if values > MAX_LOGPROB_VALUES:
            raise invalid(
                f"this asks for up to {values} log-probabilities, of which one request may have {MAX_LOGPROB_VALUES}: "
                "ask for fewer answers, tokens or likeliest tokens",
                "logprobs",
            )

    async def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield what may be sent of all replies as they arrive, each with the index of its reply.

        Raises:
            Busy, Closing, FailedClosed, UsageError: the engine's error of the first reply that fails.
            TimeoutError: the replies take longer than the server allows.
        """
        options = self.server.options
        waiting: list[list[RequestOutput]] = [[] for _ in self.replies]
        observe = self.server.metrics.token_timer(self.engine.name)
        async with contextlib.aclosing(self._merged_replies()) as outputs:
            async for index, output in outputs:
                observe(index, output)
                self.record.generated_tokens += len(output.tokens)
                waiting[index].append(output)
                if output.finish_reason:
                    if options.on_suppressed == "refuse" and options.took_much(output.suppressed):
                        prompt = waiting[index][0].prompt_logprobs
                        waiting[index] = [
                            RequestOutput(options.refusal, prompt_logprobs=prompt, finish_reason=FILTERED)
                        ]
                    self.record.finish_reasons.add(waiting[index][-1].finish_reason or "")
                elif options.on_suppressed == "refuse":
                    continue  # a streamed part could not be taken back
                for part in waiting[index]:
                    yield index, part
                waiting[index].clear()

    async def _merged_replies(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Generate all replies at once, and yield their outputs as they arrive; see `_outputs` for errors."""
        outputs: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue()

        async def generate(index: int, prompt: list[int], params: SamplingParams) -> None:
            try:
                async with contextlib.aclosing(self._reply(prompt, params)) as reply:
                    async for output in reply:
                        outputs.put_nowait((index, output))
            except Exception as error:
                outputs.put_nowait((index, error))

        tasks = [asyncio.create_task(generate(index, *reply)) for index, reply in enumerate(self.replies)]
        unfinished = len(tasks)
        try:
            while unfinished:
                async with asyncio.timeout_at(self._deadline):
                    index, output = await outputs.get()
                if isinstance(output, Exception):
                    raise output
                unfinished -= bool(output.finish_reason)
                yield index, output
        finally:
            # Cancelling closes the engine's generators, which aborts their requests.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _reply(self, prompt: list[int], params: SamplingParams) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of one reply, and time it where requests are traced."""
        timing = None
        if self.record.timings is not None:
            timing = RequestTiming(len(prompt))
            self.record.timings.append(timing)
        try:
            async with contextlib.aclosing(self.engine.generate(prompt, params, timing)) as stream:
                async for output in stream:
                    if timing is not None:
                        timing.generated_tokens += len(output.tokens)
                        timing.suppressed = output.suppressed
                    yield output
        finally:
            if timing is not None:
                timing.end = time.time_ns()

    async def _whole(self) -> Event:
        outputs: list[list[RequestOutput]] = [[] for _ in self.replies]
        async for index, output in self._outputs():
            outputs[index].append(output)
        return self._envelope(
            self.object_name, self.choices([_joined(reply_outputs) for reply_outputs in outputs]), usage=self._usage()
        )

    async def _events(self) -> AsyncGenerator[Event, None]:
        started: set[int] = set()
        async with contextlib.aclosing(self._outputs()) as outputs:
            async for index, output in outputs:
                for choice in self.deltas(index, output, index not in started):
                    yield self._envelope(self.event_name, [choice])
                started.add(index)
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            yield self._envelope(self.event_name, [], usage=self._usage())

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

    def _envelope(self, name: str, choices: list[Event], **fields: Any) -> Event:
        """Return a response body or an event."""
        return {
            "id": self.record.id, "object": name, "created": self._created, "model": self.engine.name,
            "system_fingerprint": self.engine.fingerprint, "choices": choices, **fields,
        }  # fmt: skip

    def _usage(self) -> Event:
        prompt, generated = self.record.prompt_tokens, self.record.generated_tokens
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


class TextCompletion(CompletionCall):
    """A request of POST /v1/completions."""

    body: CompletionRequest

    async def prepare(self) -> None:
        """See `CompletionCall.prepare`."""
        body = self.body
        self.record.prompt = body.prompt
        prompts: list[Any] = (
            [body.prompt] if isinstance(body.prompt, str) or isinstance(body.prompt[0], int) else [*body.prompt]
        )
        if len(prompts) * body.n > self.server.options.max_queue:
            raise invalid(
                f"{len(prompts)} prompts with {body.n} answers each: this server makes at most "
                f"{self.server.options.max_queue} answers for a request",
                "prompt" if len(prompts) > 1 else "n",
            )
        self.prompts = [await self._encode(prompt) for prompt in prompts]
        for prompt in self.prompts:
            self.add_replies(
                prompt.ids, body.n, body.max_tokens if "max_tokens" in body.model_fields_set else None,
                default=body.max_tokens, logprobs=body.logprobs,
                prompt_logprobs=body.logprobs if body.echo else None,
            )  # fmt: skip

    async def _encode(self, prompt: str | list[int]) -> Prompt:
        if isinstance(prompt, str):
            ids = await self.engine.encode_text(prompt)
            scored = self.body.echo and self.body.logprobs is not None
            return Prompt(ids, prompt, await self.engine.text_offsets(prompt, len(ids)) if scored else [])
        self.engine.check_ids(prompt, "prompt")
        if not self.body.echo or len(prompt) > self.engine.max_model_len:  # nobody reads its text; or it is refused
            return Prompt(prompt, "", [])
        return Prompt(prompt, *await self.engine.decode(prompt))

    def choices(self, replies: list[RequestOutput]) -> list[Event]:
        """See `CompletionCall.choices`."""
        return [self._choice(index, reply, True) for index, reply in enumerate(replies)]

    def deltas(self, index: int, output: RequestOutput, first: bool) -> Iterable[Event]:
        """See `CompletionCall.deltas`."""
        choice = self._choice(index, output, first)
        if choice["text"] or choice["finish_reason"] or (choice["logprobs"] and choice["logprobs"]["tokens"]):
            yield choice

    def _choice(self, index: int, reply: RequestOutput, first: bool) -> Event:
        prompt = self.prompts[index // self.body.n]
        text = (prompt.text if self.body.echo and first else "") + reply.text
        logprobs = None if self.body.logprobs is None else self._logprobs(prompt, reply)
        return {
            "index": index, "text": text, "logprobs": logprobs, "finish_reason": reply.finish_reason,
            **self.note(reply),
        }  # fmt: skip

    def _logprobs(self, prompt: Prompt, reply: RequestOutput) -> Event:
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
        return self.engine.token_name(token, by_id=self.body.return_tokens_as_token_ids)


class ChatCompletion(CompletionCall):
    """A request of POST /v1/chat/completions."""

    object_name, event_name, prompt_field = "chat.completion", "chat.completion.chunk", "messages"
    body: ChatCompletionRequest
    _parsers: Sequence[ToolCallParser] = ()  # by reply, if it may call tools

    async def prepare(self) -> None:
        """See `CompletionCall.prepare`."""
        body, most = self.body, self.server.options.max_queue
        self.record.prompt = [message.model_dump() for message in body.messages]
        if body.n > most:
            raise invalid(f"n is {body.n}: this server makes at most {most} answers", "n")
        tools = [tool.model_dump(exclude_unset=True) for tool in body.tools or ()] if body.callable_tools else []
        prompt = await self.engine.encode_chat(
            [turn.for_template() for turn in body.messages],
            tools=tools,
            continue_final_message=body.continue_final_message,
            template_kwargs=body.chat_template_kwargs,
        )
        grammar = await self._grammar()
        # Where a grammar writes calls, it writes the Hermes form.
        response_template = None if grammar is not None else getattr(self.engine.tokenizer, "response_template", None)
        self.add_replies(
            prompt, body.n, body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None, grammar=grammar,
            skip_special_tokens=not (tools and response_template), shown_tokens=TAGS if tools else (),
        )  # fmt: skip
        if tools:
            text = str(self.engine.tokenizer.decode(prompt)) if response_template else ""
            parallel = body.parallel_tool_calls and not isinstance(body.tool_choice, NamedToolChoice)
            self._parsers = [
                ToolCallParser(response_template or HERMES, text, tools, parallel=parallel) for _ in self.replies
            ]

    async def _grammar(self) -> GrammarMatcher | None:
        """Return the grammar that the reply must follow, if any."""
        body = self.body
        schema = None if body.response_format is None else body.response_format.schema_of_reply
        if schema is None and not body.forces_call:
            return None
        named = isinstance(body.tool_choice, NamedToolChoice)
        tools = {tool.name: tool.parameters for tool in body.callable_tools}
        added = self.engine.tokenizer.get_added_vocab()
        lark = make_grammar(schema, tools, added, parallel=body.parallel_tool_calls and not named)
        try:
            return await self.engine.compile_grammar(lark)
        except UsageError as error:
            raise invalid(str(error), "tools" if schema is None else "response_format") from None

    def choices(self, replies: list[RequestOutput]) -> list[Event]:
        """See `CompletionCall.choices`."""
        choices: list[Event] = []
        for index, reply in enumerate(replies):
            text, calls, reason = self._parse(index, reply)
            message: Event = {"role": "assistant", "content": text, "refusal": None}
            if calls:
                message |= {"content": text or None, "tool_calls": calls}
            choices.append(
                {
                    "index": index, "message": message, "logprobs": self._logprobs(reply.logprobs),
                    "finish_reason": reason, **self.note(reply),
                }
            )  # fmt: skip
        return choices

    def _parse(self, index: int, output: RequestOutput) -> tuple[str, list[Event], str | None]:
        """Return content, tool calls and finish reason of an output of one reply."""
        if not self._parsers or output.finish_reason == FILTERED:
            return output.text, [], output.finish_reason
        parser = self._parsers[index]
        text, calls = parser.feed(output.text, last=output.finish_reason is not None)
        return text, calls, "tool_calls" if parser.calls and output.finish_reason == "stop" else output.finish_reason

    def deltas(self, index: int, output: RequestOutput, first: bool) -> Iterable[Event]:
        """See `CompletionCall.deltas`."""
        empty = {"index": index, "delta": {}, "logprobs": None, "finish_reason": None}
        if first:
            yield empty | {"delta": {"role": "assistant", "content": ""}}
        text, calls, reason = self._parse(index, output)
        if text or output.logprobs:
            yield empty | {"delta": {"content": text}, "logprobs": self._logprobs(output.logprobs)}
        if calls:
            number = len(self._parsers[index].calls) - len(calls)
            yield empty | {"delta": {"tool_calls": [{"index": number + i, **call} for i, call in enumerate(calls)]}}
        if reason:
            yield empty | {"finish_reason": reason} | self.note(output)

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
        name = self.engine.token_name(token, by_id=self.body.return_tokens_as_token_ids)
        return {
            "token": name, "logprob": logprob,
            "bytes": list(self.engine.token_bytes(token)) or None,
        }  # fmt: skip


async def unless_disconnected(receive: Receive, work: Awaitable[Result]) -> Result:
    """Await a task, and cancel it if the client disconnects.

    Raises:
        ApiError: the client disconnected. Nobody receives this error.
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


def _joined(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Merge all outputs of a reply into one."""
    fields = {
        name: tuple(itertools.chain.from_iterable(getattr(output, name) for output in outputs))
        for name in ("tokens", "offsets", "logprobs")
    }
    first, last = outputs[0], outputs[-1]
    text = "".join(output.text for output in outputs)
    return RequestOutput(
        text, **fields, prompt_logprobs=first.prompt_logprobs, finish_reason=last.finish_reason,
        suppressed=last.suppressed,
    )  # fmt: skip


def _encode(event: Event) -> ServerSentEvent:
    # ASCII, and lines that end as in the OpenAI API: some clients end a line at U+2028 or split at an empty line.
    return ServerSentEvent(json.dumps(event, allow_nan=False), sep="\n")
