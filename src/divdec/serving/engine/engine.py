"""A steered model that answers many clients: a thread that batches what they ask for, step by step.

Nobody can change rule or strength through it. What fails gives an error, never the target's own answer.
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
from divdec.serving.engine.batch import Told
from divdec.serving.engine.requests import Piece, Sampling
from divdec.serving.engine.scheduler import Closing, Scheduler
from divdec.serving.engine.sequence import Running

__all__ = ["Busy", "Closing", "Engine"]
LAST_STEP = 10.0  # seconds that a pass may still take when the engine is closed
LONGEST = 1 << 15  # tokens of prompt and answer where a model names no limit


class Busy(Exception):
    """As many requests wait as may."""


class Engine:
    """Answers requests with one model, at most `rows` at once; the rest waits in order."""

    def __init__(
        self,
        model: DivergenceForCausalLM,
        tokenizer: Any,
        name: str,
        *,
        rows: int = 32,
        queue: int = 128,
        speculation: Speculation | None = None,
    ) -> None:
        """Prepare; `start` begins to answer.

        Args:
            model: the steered model; from now on nobody else may change it.
            tokenizer: its tokenizer.
            name: what clients call it.
            rows: sequences that decode together at most.
            queue: sequences that wait at most.
            speculation: how a request that is alone is decoded; None decodes it like any other.

        Raises:
            UsageError: the tokenizer cannot show an answer while it grows, or there is nothing to speculate with.
        """
        if not getattr(tokenizer, "is_fast", False):
            raise UsageError(f"{name}: the server needs a tokenizer of the tokenizers library (tokenizer.json)")
        if speculation is not None:
            make_drafter(speculation.drafter, model.experts, model.steering, model.takedowns)
            check_cache(model.new_cache(), model)
        self.name, self.tokenizer, self.created = name, tokenizer, int(time.time())
        self.vocab_size = model.vocab_size
        self.max_model_len: int = model.config.max_position_embeddings or LONGEST
        self.steering = model.rule
        self._takedowns = model.takedowns
        self._queue = queue
        ends: Any = model.generation_config.eos_token_id
        self._ends = frozenset([ends] if isinstance(ends, int) else ends or ())
        self._scheduler = Scheduler(model, rows, speculation)
        self._changed = threading.Condition()
        self._closing = self._ended = False
        self._thread = threading.Thread(target=self._work, name=f"engine {name}", daemon=True)

    @property
    def running(self) -> int:
        """How many sequences are being read or answered."""
        return self._scheduler.running

    @property
    def waiting(self) -> int:
        """How many sequences nobody has begun with, those not counted whose clients have gone."""
        return sum(not sequence.cancelled for sequence in list(self._scheduler.waiting))

    @property
    def prompt_tokens_total(self) -> int:
        """Tokens of prompts that were read."""
        return self._scheduler.counts.prompt_tokens

    @property
    def generated_tokens_total(self) -> int:
        """Tokens that were answered."""
        return self._scheduler.counts.generated_tokens

    @property
    def steps_total(self) -> int:
        """Forward passes."""
        return self._scheduler.counts.steps

    @property
    def is_open(self) -> bool:
        """Whether it takes requests."""
        return self._thread.is_alive() and not self._closing

    @property
    def registry_requests(self) -> int | None:
        """Takedown requests in force; None without a registry."""
        return None if self._takedowns is None else len(self._takedowns.snapshot().state.entries)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def begin_closing(self) -> None:
        """Take no more requests; what was accepted goes on."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    async def close(self, seconds: float) -> None:
        """Take no more requests, let those accepted go on so long, end the rest with `Closing`, and stop."""
        self.begin_closing()
        deadline = time.monotonic() + seconds
        while self._thread.is_alive() and self._scheduler.has_work and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        with self._changed:
            self._ended = True
            self._changed.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, LAST_STEP)

    async def generate(self, prompt: Sequence[int], sampling: Sampling) -> AsyncGenerator[Piece, None]:
        """Answer a prompt piece by piece; to close the generator is to cancel the request.

        Args:
            prompt: token ids, at least one.
            sampling: how.

        Raises:
            Busy: too many wait.
            Closing: the engine is shutting down.
            UsageError: the prompt is empty, or leaves no room for an answer.
            FailedClosed: the model could not be steered.
        """
        if not prompt or not all(0 <= token < self.vocab_size for token in prompt):
            raise UsageError(f"a prompt needs at least one token, and ids from 0 to {self.vocab_size - 1}")
        if len(prompt) + min(sampling.max_tokens, 1) > self.max_model_len:
            raise UsageError(f"the prompt has {len(prompt)} tokens; the model has {self.max_model_len} positions")
        loop = asyncio.get_running_loop()
        running = Running(prompt, sampling, self.tokenizer, self._ends, self.max_model_len, loop)
        with self._changed:
            if self._closing:
                raise Closing(self.name)
            if self.waiting >= self._queue:
                raise Busy(self.name)
            self._scheduler.waiting.append(running)
            self._changed.notify()
        try:
            while True:
                piece = await running.pieces.get()
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            running.cancelled = True

    def _work(self) -> None:
        wait_for_checks()  # what one request does to the numbers must not cost the device to all
        try:
            with torch.inference_mode():
                while self._wait_for_work():
                    _deliver(self._scheduler.step())
        finally:
            # Also where something ended the thread that nobody foresaw: who waits must hear of it.
            self.begin_closing()
            _deliver(self._scheduler.end(Closing(self.name)))

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not (self._ended or self._scheduler.has_work):
                self._changed.wait()
            return not self._ended


def _deliver(told: Told) -> None:
    """Hand over what a step gave, with one call a loop."""
    by_loop: dict[asyncio.AbstractEventLoop, Told] = {}
    for running, piece in told:
        by_loop.setdefault(running.loop, []).append((running, piece))
    for loop, pieces in by_loop.items():
        with contextlib.suppress(RuntimeError):  # its loop is closed: nobody listens
            loop.call_soon_threadsafe(_put, pieces)


def _put(told: Told) -> None:
    for running, piece in told:
        running.pieces.put_nowait(piece)
