"""Engine: a thread that steps a steered model's scheduler and delivers outputs to asyncio clients.

No request can change the rule or its strength. A failure is an error, never an unsteered answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from divdec.bridge.token_bytes import special_tokens, token_bytes
from divdec.data.formatting import Format, check_template_kwargs, encode_conversation, encode_prompt
from divdec.data.records import Record
from divdec.decoding.speculative import Speculation, drafting_pair
from divdec.decoding.text import AnswerText
from divdec.errors import UsageError
from divdec.evaluation.generation import end_tokens
from divdec.fail_closed import check_vocabulary, wait_for_checks
from divdec.model.loading import bundle_identity
from divdec.model.modeling import DivergenceForCausalLM
from divdec.runs import settings_hash
from divdec.serving.batches import StepOutput
from divdec.serving.grammar import GrammarCompiler, GrammarMatcher
from divdec.serving.request import Request, RequestOutput, RequestTiming, SamplingParams
from divdec.serving.scheduler import Closing, Scheduler

LAST_STEP = 10.0  # seconds that a running pass has to finish when the engine is closed
Result = TypeVar("Result")
MAX_MODEL_LEN = 1 << 15  # tokens of prompt and answer for models without a limit


class Busy(Exception):
    """The queue is full."""


class InvalidRequest(UsageError):
    """A request cannot be answered; `param` names its field."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class Engine:
    """Answers requests with one model; `max_num_seqs` run at once, the others wait in order.

    Attributes:
        scheduler: the requests, and counts of tokens and forward passes.
        steering: the rule, for people.
        fingerprint: changes with the bundle's parts and the rule, not with takedown requests.
    """

    def __init__(
        self,
        model: DivergenceForCausalLM,
        tokenizer: Any,
        name: str,
        *,
        max_num_seqs: int = 32,
        max_queue: int = 128,
        speculation: Speculation | None = None,
        measure_suppression: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare; `start` starts the thread.

        Args:
            model: the steered model; nothing else may change it from now on.
            tokenizer: its tokenizer.
            name: model name for clients.
            max_num_seqs: most sequences that decode together.
            max_queue: most sequences that wait.
            speculation: how a sequence decodes while it is alone; None decodes without drafts.
            measure_suppression: measure what steering took from each reply.
            chat_template_kwargs: variables of the chat template, which requests can replace.

        Raises:
            UsageError: the tokenizer cannot stream text, the model cannot speculate, or the chat template does not
                have such variables.
        """
        if not getattr(tokenizer, "is_fast", False):
            raise UsageError(f"{name}: the server needs a tokenizer of the tokenizers library (tokenizer.json)")
        self._template_kwargs = dict(chat_template_kwargs or {})
        check_template_kwargs(tokenizer, self._template_kwargs)
        if speculation is not None:
            drafting_pair(model, model.new_cache())
        self.name, self.tokenizer, self.created = name, tokenizer, int(time.time())
        self.vocab_size = model.vocab_size
        self.max_model_len: int = model.config.max_position_embeddings or MAX_MODEL_LEN
        self.steering = model.rule
        self.fingerprint = f"fp_{settings_hash([bundle_identity(model.config), model.steering.to_dict()])}"
        self._takedowns = model.takedowns
        self._max_queue = max_queue
        self._eos_token_ids = end_tokens(model)
        self.scheduler = Scheduler(model, max_num_seqs, speculation, measure_suppression)
        try:
            self._bytes, self._special = token_bytes(tokenizer), special_tokens(tokenizer)
        except UsageError:  # an unknown kind of vocabulary: each token as it decodes alone
            self._bytes = [str(tokenizer.decode([token])).encode() for token in range(len(tokenizer))]
            self._special = {token: str(tokenizer.convert_ids_to_tokens(token)) for token in tokenizer.all_special_ids}
        self._tokenizer_lock = threading.Lock()
        self._grammars: GrammarCompiler | None = None
        self._changed = threading.Condition()
        self._closing = self._stopped = False
        self._thread = threading.Thread(target=self._run, name=f"engine {name}", daemon=True)

    @property
    def waiting(self) -> int:
        """Number of queued sequences, without those whose clients have gone."""
        return sum(not request.aborted for request in list(self.scheduler.waiting))

    @property
    def is_open(self) -> bool:
        """Whether requests are accepted."""
        return self._thread.is_alive() and not self._closing

    def count_takedowns(self) -> int | None:
        """Return the number of takedown requests in force; None without a registry."""
        return None if self._takedowns is None else len(self._takedowns.snapshot().state.entries)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def begin_closing(self) -> None:
        """Accept no more requests; accepted ones continue."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    async def close(self, timeout: float) -> None:
        """Accept no more requests, let accepted ones finish within `timeout` seconds, end the rest with `Closing`."""
        self.begin_closing()
        deadline = time.monotonic() + timeout
        while self._thread.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, LAST_STEP)

    def add_request(
        self, prompt: Sequence[int], params: SamplingParams, timing: RequestTiming | None = None
    ) -> Request:
        """Queue a request from an event loop, on which its outputs arrive.

        Raises:
            Busy: the queue is full.
            Closing: the engine is shutting down.
            UsageError: the prompt is empty or too long, or holds a token id outside the vocabulary.
        """
        if not prompt:
            raise UsageError("the prompt has no token: there is nothing to continue")
        check_vocabulary(prompt, self.vocab_size, "the prompt")
        if len(prompt) + min(params.max_tokens, 1) > self.max_model_len:
            raise UsageError(f"the prompt has {len(prompt)} tokens; the model has {self.max_model_len} positions")
        loop = asyncio.get_running_loop()
        request = Request(prompt, params, self.tokenizer, self._eos_token_ids, self.max_model_len, loop, timing)
        with self._changed:
            if self._closing:
                raise Closing(self.name)
            if self.waiting >= self._max_queue:
                raise Busy(self.name)
            self.scheduler.waiting.append(request)
            self._changed.notify()
        return request

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, timing: RequestTiming | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a prompt and yield its outputs; closing the generator aborts the request.

        Raises:
            Busy, Closing, UsageError: see `add_request`.
            FailedClosed: the model could not be steered.
        """
        request = self.add_request(prompt, params, timing)
        try:
            while True:
                output = await request.outputs.get()
                if isinstance(output, BaseException):
                    raise output
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            request.aborted = True  # dropped before the next step

    async def encode_text(self, text: str) -> list[int]:
        """Tokenize a prompt as `divdec generate` does."""
        ids = await self._in_thread(lambda: encode_prompt(Record("", prompt=text), self.tokenizer))
        if not ids:
            raise InvalidRequest("prompt holds no token: there is nothing to continue", "prompt")
        return ids

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Tokenize a conversation with the tokenizer's chat template.

        Args:
            messages: the turns, as chat templates read them.
            tools: functions that the model may call.
            continue_final_message: end with the text of the last message, which the reply continues.
            template_kwargs: variables of the template, beside the engine's.

        Raises:
            InvalidRequest: there is no chat template, the template rejects the messages, does not read tools or does
                not have a variable, or the prompt has no tokens.
        """
        if not self.tokenizer.chat_template:
            raise InvalidRequest("this model's tokenizer has no chat template: use /v1/completions", "messages")
        form = Format(chat_template_kwargs={**self._template_kwargs, **(template_kwargs or {})})
        options = {
            "add_generation_prompt": not continue_final_message,
            "continue_final_message": continue_final_message,
        }
        try:
            check_template_kwargs(self.tokenizer, form.chat_template_kwargs)
        except UsageError as error:
            raise InvalidRequest(str(error), "chat_template_kwargs") from None

        def encode(tools: Sequence[Mapping[str, Any]]) -> list[int]:
            return encode_conversation(messages, self.tokenizer, form, tools=tools, **options)

        try:
            ids = await self._in_thread(lambda: encode(tools))
            ignores_tools = bool(tools) and ids == await self._in_thread(lambda: encode(()))
        except UsageError as error:
            raise InvalidRequest(str(error), "messages") from None
        if ignores_tools:
            raise InvalidRequest("this model's chat template does not read tools; leave them out", "tools")
        if not ids:
            raise InvalidRequest("messages hold no token: there is nothing to answer", "messages")
        return ids

    async def compile_grammar(self, lark: str) -> GrammarMatcher:
        """Compile a grammar; see `divdec.serving.grammar`.

        Raises:
            UsageError: the grammar, or this model's tokenizer, cannot be used.
        """

        def compile() -> GrammarMatcher:
            if self._grammars is None:
                self._grammars = GrammarCompiler(self.tokenizer, self.vocab_size, self._eos_token_ids)
            return self._grammars.compile(lark)

        return await self._in_thread(compile)

    def check_ids(self, ids: Iterable[int], param: str) -> None:
        """Refuse token ids outside the vocabulary."""
        size = self.vocab_size
        for token in ids:
            if token >= size:
                raise InvalidRequest(f"{param}: token id {token} is outside the vocabulary of {size} tokens", param)

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
        """Return the character offset of each of the first tokens of a prompt."""
        encoding = await self._in_thread(lambda: self.tokenizer(text, return_offsets_mapping=True))
        offsets, end = [], 0
        for start, stop in encoding["offset_mapping"][:count]:
            # Special tokens have no width; a space before a token belongs to it.
            offsets.append(end if start == stop or text[end:start].isspace() else start)
            end = max(end, stop)
        return offsets

    async def decode(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """Return the text of the tokens, including special tokens, and the offset of each token."""

        def decode() -> tuple[str, list[int]]:
            text = AnswerText(self.tokenizer, skip_special=False)
            pieces, offsets = [], []
            for token in ids:
                pieces.append(text.add(token))
                offsets.append(text.start)
            return "".join([*pieces, text.end()]), offsets

        return await self._in_thread(decode)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        """Run the tokenizer in a thread, so that it does not block streaming."""

        def locked() -> Result:
            with self._tokenizer_lock:
                return work()

        return await asyncio.to_thread(locked)

    def _run(self) -> None:
        wait_for_checks()  # an assertion on the device would end it for all requests
        try:
            with torch.inference_mode():
                while self._wait_for_work():
                    _deliver(self.scheduler.step())
        finally:
            # Also after an unforeseen error: waiting clients must receive it.
            self.begin_closing()
            _deliver(self.scheduler.abort_all(Closing(self.name)))

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not (self._stopped or self._closing or self.scheduler.has_work):
                self._changed.wait()
            return not self._stopped and self.scheduler.has_work


def _deliver(outputs: StepOutput) -> None:
    """Put outputs into their requests' queues, with one call for requests of one event loop."""
    for loop, loop_outputs in itertools.groupby(outputs, key=lambda item: item[0].loop):
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(_put, list(loop_outputs))


def _put(outputs: StepOutput) -> None:
    for request, output in outputs:
        request.outputs.put_nowait(output)
