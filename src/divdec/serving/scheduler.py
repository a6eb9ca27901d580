"""Continuous-batching scheduler: decide which requests share a pass, and run failed ones again alone."""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from collections.abc import Iterable, Sequence

import numpy as np

from divdec.decoding.cache import holds_tokens
from divdec.decoding.speculative import Speculation
from divdec.errors import FailedClosed, UsageError
from divdec.model.modeling import DivergenceForCausalLM, Logits
from divdec.passes import rotary_types_by_length, stateful_types
from divdec.serving.batches import Batch, Group, Prefill, SpeculativeRequest, StepOutput
from divdec.serving.request import Request

PREFILL_CHUNK = 512  # prompt tokens per prefill chunk, between two decoding steps
PREFILL_LOGITS = 1 << 24  # logits of prompts that are held at a time where all of them are needed
_log = logging.getLogger(__name__)


class Closing(Exception):
    """The engine is shutting down."""


class Scheduler:
    """Waiting, prefilling and decoding requests.

    Attributes:
        waiting: requests that are not started; other threads append to it.
        prompt_tokens: prompt tokens read so far.
        generated_tokens: tokens generated so far.
        steps: forward passes so far.
        positions: last positions of prefill passes and those before generated tokens so far.
        changed_positions: those of them where steering changed the likeliest token.
    """

    def __init__(
        self,
        model: DivergenceForCausalLM,
        max_num_seqs: int,
        speculation: Speculation | None,
        measure_suppression: bool = False,
    ) -> None:
        self.waiting: collections.deque[Request] = collections.deque()  # append and popleft are atomic
        self.prompt_tokens = self.generated_tokens = self.steps = 0
        self.positions = self.changed_positions = 0
        model.on_steered = self._compare
        self._model, self._max_num_seqs, self._speculation = model, max_num_seqs, speculation
        self._measure_suppression = measure_suppression
        # Whether answers would depend on other requests and chunks. Recurrent states also read padding and keep rows.
        types = [*stateful_types(model.target, model.experts), *rotary_types_by_length(model)]
        self._separate = bool(types) or not all(map(holds_tokens, model.new_cache().layers))
        self._prefills: list[Prefill] = []
        self._groups: list[Group] = []
        self._outputs: StepOutput = []

    @property
    def running(self) -> int:
        """Number of requests that are prefilling or decoding."""
        return sum(len(group.requests) for group in [*self._groups, *self._prefills])

    def _compare(self, target_logits: Logits, steered: Logits) -> None:
        self._changed = target_logits.argmax(-1) != steered.argmax(-1)
        if self._measure_suppression:
            removed_probability = target_logits.float().softmax(-1) - steered.float().softmax(-1)
            self._shares = removed_probability.clamp(min=0).sum(-1)

    def _count_changes(self, positions: slice, replies: Iterable[tuple[int, Request]]) -> None:
        """Count positions of the last pass, and measure those of replies, which are given with their rows."""
        changed = self._changed[:, positions]
        self.positions += changed.numel()
        self.changed_positions += int(changed.sum())
        if self._measure_suppression:
            shares = self._shares[:, positions].amax(-1).cpu().numpy()
            for row, request in replies:
                request.suppressed = float(np.maximum(shares[row], request.suppressed))  # NaN stays NaN and is refused

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self._prefills or self._groups)

    def step(self) -> StepOutput:
        """Read a chunk of each prefill, and advance every decoding request."""
        try:
            self._drop_aborted()
            self._admit()
            self._prefill()
            self._decode()
        except Exception as error:  # an error in the scheduler itself: send it to every client
            _log.exception("the scheduler failed")
            return self.abort_all(error)
        outputs, self._outputs = self._outputs, []
        return outputs

    def abort_all(self, error: Exception) -> StepOutput:
        """End every request with an error, after its pending outputs."""
        requests = [self.waiting.popleft() for _ in range(len(self.waiting))]
        requests += [request for group in (*self._prefills, *self._groups) for request in group.requests]
        self._groups, self._prefills = [], []
        self._fail(requests, error)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _drop_aborted(self) -> None:
        for request in [request for request in list(self.waiting) if request.aborted]:
            self.waiting.remove(request)
        self._prefills = [
            prefill for prefill in self._prefills if not all(request.aborted for request in prefill.requests)
        ]
        for group in self._groups:
            self._drop(group, [request for request in group.requests if request.aborted])
        self._groups = [group for group in self._groups if group.requests]

    def _drop(self, group: Group, finished: Sequence[Request]) -> None:
        remaining = [request for request in group.requests if request not in finished]
        try:
            group.drop(finished)
        except Exception as error:
            group.requests = []
            self._retry(remaining, error)

    def _admit(self) -> None:
        """Start the oldest request and all others that fit into the batch; short ones do not wait for a long one."""
        free = self._max_num_seqs - self.running
        waiting = list(self.waiting)
        if self._prefills:
            waiting = [request for request in waiting if len(request.tokens) <= self._chunk(request)]
        if free <= 0 or not waiting:
            return
        first = waiting[0]
        admitted, texts = [first], {tuple(first.tokens)}
        for request in waiting[1:free]:
            together = {*texts, tuple(request.tokens)}  # prefill a prompt with several answers once
            fits = len(together) == 1 or len(together) * max(map(len, together)) <= self._chunk(request, first)
            if not fits or request.failed_in_batch or first.failed_in_batch or self._separate:
                break
            admitted.append(request)
            texts = together
        for request in admitted:
            self.waiting.remove(request)
            if request.timing is not None and request.timing.prefill is None:
                request.timing.prefill = time.time_ns()
        self.prompt_tokens += sum(len(request.prompt) for request in admitted if not request.answer)
        try:
            self._prefills.append(Prefill(self._model, admitted, self._chunk(*admitted)))
        except Exception as error:
            self._retry(admitted, error)

    def _chunk(self, *requests: Request) -> int:
        """Return the chunk size of the prefill in tokens."""
        if self._separate:
            return max(len(request.tokens) for request in requests)
        if any(request.missing_prompt_logprobs is not None for request in requests):
            return max(1, min(PREFILL_CHUNK, PREFILL_LOGITS // self._model.vocab_size))
        return PREFILL_CHUNK

    def _prefill(self) -> None:
        for prefill in list(self._prefills):
            self.steps += 1
            try:
                result = prefill.step()
            except Exception as error:
                self._prefills.remove(prefill)
                self._retry(prefill.requests, error)
                continue
            replies = zip(prefill.rows, prefill.requests, strict=True)
            self._count_changes(slice(-1, None), () if result is None else replies)
            if result is not None:
                self._prefills.remove(prefill)
                self._start_decoding(*result)

    def _start_decoding(self, outputs: StepOutput, batch: Batch) -> None:
        """Add requests with their first token to an open batch, or as a new one, and stop drafting."""
        self._groups = [group.to_batch() if isinstance(group, SpeculativeRequest) else group for group in self._groups]
        self._groups.append(batch)
        self._record(batch, outputs)
        for group in self._groups[:-1] if not self._separate else ():
            if isinstance(group, Batch) and group.is_open and batch.is_open and group.requests and batch.requests:
                self._groups.remove(batch)
                requests = [*group.requests, *batch.requests]
                try:
                    group.join(batch)
                except Exception as error:
                    group.requests = []
                    self._retry(requests, error)
                return

    def _decode(self) -> None:
        """Advance every decoding request: with drafts if it is alone, because in a batch they take what they save."""
        if self._speculation is not None and len(self._groups) == 1:
            (group,) = self._groups
            if isinstance(group, Batch) and group.can_speculate:
                self._groups = [SpeculativeRequest(self._model, group, self._speculation)]
        for group in [group for group in self._groups if group.requests]:
            self.steps += 1
            requests = list(group.requests)
            try:
                outputs = group.step()
            except Exception as error:
                # The cache is in an unknown state: prefill the unaffected requests again, one by one.
                group.requests = []
                self._retry(requests, error)
                continue
            self._count_changes(slice(len(outputs) // len(requests)), enumerate(requests))  # without rejected drafts
            self._record(group, outputs)
        self._groups = [group for group in self._groups if group.requests]

    def _record(self, group: Group, outputs: StepOutput) -> None:
        """Collect outputs, and drop requests that are finished or failed."""
        finished = []
        for request, output in outputs:
            if isinstance(output, Exception):
                self._fail([request], output)
                finished.append(request)
                continue
            request.failed_in_batch = False
            self.generated_tokens += len(output.tokens)
            if output.finish_reason is not None:
                finished.append(request)
                if self._measure_suppression:
                    output = dataclasses.replace(output, suppressed=request.suppressed if request.answer else 0.0)
            self._outputs.append((request, output))
        if finished:
            self._drop(group, finished)

    def _retry(self, requests: Sequence[Request], error: Exception) -> None:
        """Run each request alone, and fail those that raise an error alone."""
        if len(requests) == 1:
            self._fail(requests, error)
            return
        for request in reversed(requests):
            request.failed_in_batch = True
            self.waiting.appendleft(request)

    def _fail(self, requests: Sequence[Request], error: Exception) -> None:
        if not isinstance(error, UsageError | FailedClosed | Closing) and requests:
            _log.error("a request failed: %s", type(error).__name__, exc_info=error)
            error = FailedClosed("the model failed; nothing is answered unsteered")
        self._outputs += [(request, error) for request in requests]
