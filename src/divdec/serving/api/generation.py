"""Served models: text to tokens and back, limits, and the replies that one API request asks for."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from jinja2.exceptions import TemplateError

from divdec.bridge.token_bytes import special_tokens, token_bytes
from divdec.data.formatting import encode_prompt
from divdec.data.records import Message, Record
from divdec.decoding.text import AnswerText
from divdec.errors import UsageError, first_line
from divdec.serving.api.errors import ApiError, invalid
from divdec.serving.api.middleware import Metrics, RequestRecord
from divdec.serving.api.schemas import ChatMessageParam, GenerationRequest
from divdec.serving.engine.engine import Engine
from divdec.serving.engine.request import RequestOutput, SamplingParams

MAX_LOGPROB_VALUES = 1_000_000  # log-probabilities in the replies to one request
LOWEST_TEMPERATURE = 1e-5  # below, division by the temperature overflows; decoding is greedy there
Result = TypeVar("Result")
Generation = tuple[list[int], SamplingParams]  # prompt and parameters of one reply


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of one API request."""

    max_tokens: int = 4096
    """Longest reply."""
    max_seconds: float = 300.0
    """Longest time to a complete reply, the time in the queue included."""
    max_body_bytes: int = 2 * 1024 * 1024
    """Largest request body."""
    max_sequences: int = 160
    """Most replies: prompts times n (or best_of)."""


class ServedModel:
    """An engine with its tokenizer. Tokenization runs in a thread, so that streams continue meanwhile."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.tokenizer = engine, engine.tokenizer
        tokenizer = self.tokenizer
        try:
            self._bytes, self._special = token_bytes(tokenizer), special_tokens(tokenizer)
        except UsageError:  # an unknown kind of vocabulary: each token as it decodes alone
            self._bytes = [str(tokenizer.decode([token])).encode() for token in range(len(tokenizer))]
            self._special = {token: str(tokenizer.convert_ids_to_tokens(token)) for token in tokenizer.all_special_ids}
        self._lock = threading.Lock()

    async def encode_text(self, text: str, special_tokens: bool | None = None) -> list[int]:
        """Tokenize a prompt, by default as `divdec generate` does.

        Args:
            text: the prompt.
            special_tokens: whether the tokenizer adds special tokens; the token ids may then be empty.

        Raises:
            ApiError: there is no token.
        """
        if special_tokens is not None:
            return await self._in_thread(lambda: self.tokenizer(text, add_special_tokens=special_tokens)["input_ids"])
        ids = await self._in_thread(lambda: encode_prompt(Record("", prompt=text), self.tokenizer))
        if not ids:
            raise invalid("prompt holds no token: there is nothing to continue", "prompt")
        return ids

    async def encode_chat(self, messages: Sequence[ChatMessageParam], *, generation_prompt: bool = True) -> list[int]:
        """Tokenize a conversation with the tokenizer's chat template.

        Raises:
            ApiError: there is no chat template, the template refuses the messages, or there is no token.
        """
        if not self.tokenizer.chat_template:
            raise invalid("this model's tokenizer has no chat template: use /v1/completions", "messages")
        # Templates know OpenAI's role developer as system.
        turns = [("system" if turn.role == "developer" else turn.role, turn.content) for turn in messages]

        def encode() -> list[int]:
            if generation_prompt:
                record = Record("", messages=tuple(Message(*turn) for turn in turns))
                return encode_prompt(record, self.tokenizer)
            dicts = [{"role": role, "content": content} for role, content in turns]
            text = self.tokenizer.apply_chat_template(dicts, tokenize=False, add_generation_prompt=False)
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]

        try:
            ids = await self._in_thread(encode)
        except TemplateError as error:
            raise invalid(f"the chat template refuses these messages: {first_line(error)}", "messages") from None
        if not ids:
            raise invalid("messages hold no token: there is nothing to answer", "messages")
        return ids

    def check_ids(self, ids: Iterable[int], param: str) -> None:
        """Refuse token ids outside the vocabulary."""
        size = self.engine.vocab_size
        for token in ids:
            if token >= size:
                raise invalid(f"{param}: token id {token} is outside the vocabulary of {size} tokens", param)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token stands for; of a special token, its name."""
        if (special := self._special.get(token)) is not None:
            return special.encode()
        return (self._bytes[token] or b"") if token < len(self._bytes) else b""

    def token_name(self, token: int, *, by_id: bool = False) -> str:
        """Return a token as text; a part of a character is spelt as bytes, as OpenAI does."""
        if by_id or not (content := self.token_bytes(token)):
            return f"token_id:{token}"
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    async def text_offsets(self, text: str, count: int) -> list[int]:
        """Return where each of the first tokens of a prompt begins in its text, in characters."""
        encoding = await self._in_thread(lambda: self.tokenizer(text, return_offsets_mapping=True))
        offsets, end = [], 0
        for start, stop in encoding["offset_mapping"][:count]:
            # Special tokens have no width; a space before a token belongs to it.
            offsets.append(end if start == stop or text[end:start].isspace() else start)
            end = max(end, stop)
        return offsets

    async def decode(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """Return the text of tokens, special ones included, and where each begins in it."""

        def decode() -> tuple[str, list[int]]:
            text = AnswerText(self.tokenizer, skip_special=False)
            pieces, offsets = [], []
            for token in ids:
                pieces.append(text.add(token))
                offsets.append(text.start)
            return "".join([*pieces, text.end()]), offsets

        return await self._in_thread(decode)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        def locked() -> Result:
            with self._lock:
                return work()

        return await asyncio.to_thread(locked)


@dataclasses.dataclass
class Server:
    """Served models by name, limits and metrics."""

    models: Mapping[str, ServedModel]
    limits: Limits
    metrics: Metrics

    def find_model(self, name: str | None) -> ServedModel:
        """Return the model of a name; without a name, the only one.

        Raises:
            ApiError: there is no such model.
        """
        if name is None and len(self.models) == 1:
            return next(iter(self.models.values()))
        if name is None:
            raise invalid("field 'model' is required: several models are served", "model", "missing_required_parameter")
        if name not in self.models:
            message = f"there is no model {name[:200]!r} here; there are: {', '.join(self.models)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return self.models[name]

    def generations(
        self,
        body: GenerationRequest,
        model: ServedModel,
        prompt: list[int],
        count: int,
        *,
        max_tokens: int | None,
        default: int | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> list[Generation]:
        """Prepare `count` replies to a prompt; the i-th has the i-th seed.

        Args:
            body: the request.
            model: the model.
            prompt: token ids.
            count: number of replies.
            max_tokens: longest reply; None if the client sets none.
            default: longest reply in that case; None for the rest of the context.
            logprobs: number of likeliest tokens per token of the reply; None for no log-probabilities.
            prompt_logprobs: the same for the prompt.

        Raises:
            ApiError: the context is too short, or a limit is exceeded.
        """
        model.check_ids(body.logit_bias, "logit_bias")
        context, most = model.engine.max_model_len, self.limits.max_tokens
        if max_tokens is not None and max_tokens > most:
            raise invalid(f"max_tokens is {max_tokens}: this server answers with at most {most}", "max_tokens")
        if len(prompt) + (1 if max_tokens is None else max_tokens) > context:
            reply = "" if max_tokens is None else f" and {max_tokens} of the answer"
            raise invalid(
                f"the context has {context} tokens; the prompt has {len(prompt)}{reply}: shorten them",
                "max_tokens" if max_tokens is not None and len(prompt) < context else "prompt",
                "context_length_exceeded",
            )
        if max_tokens is None:
            max_tokens = min(context - len(prompt), most, *([] if default is None else [default]))
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=body.temperature if body.temperature >= LOWEST_TEMPERATURE else 0.0,
            top_p=body.top_p,
            top_k=max(body.top_k, 0),
            min_p=body.min_p,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            repetition_penalty=body.repetition_penalty,
            logit_bias=dict(body.logit_bias),
            stop=tuple(body.stop),
            ignore_eos=body.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        seeds = [None if body.seed is None else (body.seed + number) % 2**63 for number in range(count)]
        return [(prompt, dataclasses.replace(params, seed=seed)) for seed in seeds]

    async def run(
        self, model: ServedModel, generations: Sequence[Generation], record: RequestRecord
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield the outputs of all replies as they are made, each with the number of its reply.

        Raises:
            Busy, Closing, FailedClosed, UsageError: the engine's error of the first reply that fails.
            TimeoutError: the replies take longer than the server allows.
        """
        _check_logprob_values(generations)
        outputs: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue()

        async def generate(index: int, prompt: list[int], params: SamplingParams) -> None:
            stream = model.engine.generate(prompt, params)
            try:
                async for output in stream:
                    outputs.put_nowait((index, output))
            except Exception as error:
                outputs.put_nowait((index, error))
            finally:
                await stream.aclose()

        deadline = asyncio.get_running_loop().time() + self.limits.max_seconds
        observe = self.metrics.token_timer(model.engine.name, len(generations))
        tasks = [asyncio.create_task(generate(index, *generation)) for index, generation in enumerate(generations)]
        unfinished = len(tasks)
        try:
            while unfinished:
                async with asyncio.timeout_at(deadline):
                    index, output = await outputs.get()
                if isinstance(output, Exception):
                    raise output
                observe(index, len(output.tokens))
                record.generated_tokens += len(output.tokens)
                if output.finish_reason:
                    unfinished -= 1
                    record.finish_reasons.add(output.finish_reason)
                yield index, output
        finally:
            # Cancelling closes the engine's generators, which aborts their requests.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _check_logprob_values(generations: Sequence[Generation]) -> None:
    values = 0
    for prompt, params in generations:
        for number, tokens in ((params.prompt_logprobs, len(prompt)), (params.logprobs, params.max_tokens)):
            values += 0 if number is None else (1 + number) * tokens
    if values > MAX_LOGPROB_VALUES:
        raise invalid(
            f"this asks for up to {values} log-probabilities, of which one request may have {MAX_LOGPROB_VALUES}: ask "
            "for fewer answers, tokens or likeliest tokens",
            "logprobs",
        )
