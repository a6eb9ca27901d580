"""Engine: a thread that steps a steered model's scheduler and delivers outputs to asyncio clients.

No request can change the rule or its strength. A failure is an error, never an unsteered answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import torch

from divdec.decoding.drafters import make_drafter
from divdec.decoding.speculative import Speculation, check_cache
from divdec.errors import UsageError
from divdec.fail_closed import wait_for_checks
from divdec.model.modeling import DivergenceForCausalLM
from divdec.serving.engine.batch import StepOutput
from divdec.serving.engine.request import Request, RequestOutput, SamplingParams
from divdec.serving.engine.scheduler import Closing, Scheduler

__all__ = ["Busy", "Closing", "Engine"]
LAST_STEP = 10.0  # seconds that a running pass has to finish when the engine is closed
MAX_MODEL_LEN = 1 << 15  # tokens of prompt and answer for models without a limit


class Busy(Exception):
    """The queue is full."""


class Engine:
    """Answers requests with one model; `max_num_seqs` run at once, the others wait in order."""

    def __init__(
        self,
        model: DivergenceForCausalLM,
        tokenizer: Any,
        name: str,
        *,
        max_num_seqs: int = 32,
        max_queue: int = 128,
        speculation: Speculation | None = None,
    ) -> None:
        """Prepare; `start` starts the thread.

        Args:
            model: the steered model; nothing else may change it from now on.
            tokenizer: its tokenizer.
            name: model name for clients.
            max_num_seqs: most sequences that decode together.
            max_queue: most sequences that wait.
            speculation: how a request decodes that runs alone; None decodes it without drafts.

        Raises:
            UsageError: the tokenizer cannot stream text, or the model cannot speculate.
        """
        if not getattr(tokenizer, "is_fast", False):
            raise UsageError(f"{name}: the server needs a tokenizer of the tokenizers library (tokenizer.json)")
        if speculation is not None:
            make_drafter(speculation.drafter, model.experts)
            check_cache(model.new_cache(), model)
        self.name, self.tokenizer, self.created = name, tokenizer, int(time.time())
        self.vocab_size = model.vocab_size
        self.max_model_len: int = model.config.max_position_embeddings or MAX_MODEL_LEN
        self.steering = model.rule
        self._takedowns = model.takedowns
        self._max_queue = max_queue
        eos: Any = model.generation_config.eos_token_id
        self._eos_token_ids = frozenset([eos] if isinstance(eos, int) else eos or ())
        self._scheduler = Scheduler(model, max_num_seqs, speculation)
        self._changed = threading.Condition()
        self._closing = self._stopped = False
        self._thread = threading.Thread(target=self._run, name=f"engine {name}", daemon=True)

    @property
    def running(self) -> int:
        """Number of sequences that are prefilling or decoding."""
        return self._scheduler.running

    @property
    def waiting(self) -> int:
        """Number of queued sequences, without those whose clients have gone."""
        return sum(not request.aborted for request in list(self._scheduler.waiting))

    @property
    def prompt_tokens_total(self) -> int:
        """Prompt tokens read so far."""
        return self._scheduler.prompt_tokens

    @property
    def generated_tokens_total(self) -> int:
        """Tokens generated so far."""
        return self._scheduler.generated_tokens

    @property
    def steps_total(self) -> int:
        """Forward passes so far."""
        return self._scheduler.steps

    @property
    def is_open(self) -> bool:
        """Whether requests are accepted."""
        return self._thread.is_alive() and not self._closing

    @property
    def registry_requests(self) -> int | None:
        """Takedown requests in force; None without a registry."""
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
        while self._thread.is_alive() and self._scheduler.has_work and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, LAST_STEP)

    def add_request(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        """Queue a request from an event loop, on which its outputs arrive.

        Raises:
            Busy: the queue is full.
            Closing: the engine is shutting down.
            UsageError: the prompt is empty or too long, or holds a token id outside the vocabulary.
        """
        if not prompt or not all(0 <= token < self.vocab_size for token in prompt):
            raise UsageError(f"a prompt needs at least one token, and ids from 0 to {self.vocab_size - 1}")
        if len(prompt) + min(params.max_tokens, 1) > self.max_model_len:
            raise UsageError(f"the prompt has {len(prompt)} tokens; the model has {self.max_model_len} positions")
        loop = asyncio.get_running_loop()
        request = Request(prompt, params, self.tokenizer, self._eos_token_ids, self.max_model_len, loop)
        with self._changed:
            if self._closing:
                raise Closing(self.name)
            if self.waiting >= self._max_queue:
                raise Busy(self.name)
            self._scheduler.add_request(request)
            self._changed.notify()
        return request

    def abort(self, request: Request) -> None:
        """Drop a request before the next step."""
        request.aborted = True

    async def generate(self, prompt: Sequence[int], params: SamplingParams) -> AsyncGenerator[RequestOutput, None]:
        """Answer a prompt and yield its outputs; closing the generator aborts the request.

        Args:
            prompt: token ids.
            params: sampling parameters.

        Raises:
            Busy, Closing, UsageError: see `add_request`.
            FailedClosed: the model could not be steered.
        """
        request = self.add_request(prompt, params)
        try:
            while True:
                output = await request.outputs.get()
                if isinstance(output, BaseException):
                    raise output
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self.abort(request)

    def _run(self) -> None:
        wait_for_checks()  # an assertion on the device would end it for all requests
        try:
            with torch.inference_mode():
                while self._wait_for_work():
                    _deliver(self._scheduler.step())
        finally:
            # Also after an unforeseen error: waiting clients must receive it.
            self.begin_closing()
            _deliver(self._scheduler.abort_all(Closing(self.name)))

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not (self._stopped or self._scheduler.has_work):
                self._changed.wait()
            return not self._stopped


def _deliver(outputs: StepOutput) -> None:
    """Put outputs into their requests' queues, with one call per event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, StepOutput] = {}
    for request, output in outputs:
        by_loop.setdefault(request.loop, []).append((request, output))
    for loop, own in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(_put, own)


def _put(outputs: StepOutput) -> None:
    for request, output in outputs:
        request.outputs.put_nowait(output)
