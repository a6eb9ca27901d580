"""Continuous-batching scheduler: requests join and leave the batch between steps."""

from __future__ import annotations

import collections
import logging
from collections.abc import Sequence

from divdec.decoding.speculative import Speculation
from divdec.errors import FailedClosed, UsageError
from divdec.experts.neural import stateful_types
from divdec.experts.protocol import holds_tokens
from divdec.model.modeling import DivergenceForCausalLM
from divdec.serving.engine.batch import Batch, Prefill, SpeculativeRequest, StepOutput
from divdec.serving.engine.request import Request

PREFILL_CHUNK = 512  # prompt tokens that are read between two decoding steps
PREFILL_LOGITS = 1 << 24  # logits of prompts that are held at a time where all of them are needed
Group = Batch | SpeculativeRequest  # requests that share a cache
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
    """

    def __init__(self, model: DivergenceForCausalLM, max_num_seqs: int, speculation: Speculation | None) -> None:
        self.waiting: collections.deque[Request] = collections.deque()  # append and popleft are atomic
        self.prompt_tokens = self.generated_tokens = self.steps = 0
        self._model, self._max_num_seqs, self._speculation = model, max_num_seqs, speculation
        self._separate = _needs_separate_passes(model)
        self._prefills: list[Prefill] = []
        self._groups: list[Group] = []
        self._outputs: StepOutput = []

    @property
    def running(self) -> int:
        """Number of requests that are prefilling or decoding."""
        return sum(len(group.requests) for group in [*self._groups, *self._prefills])

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self._prefills or self._groups)

    def add_request(self, request: Request) -> None:
        """Queue a request. Other threads may call it."""
        self.waiting.append(request)

    def step(self) -> StepOutput:
        """Read a chunk of each prefill and advance every decoding request."""
        try:
            self._drop_aborted()
            self._admit()
            self._prefill()
            self._decode()
        except Exception as error:  # a fault of the scheduler itself; every client must receive it
            _log.exception("the scheduler failed")
            self._fail(self._remove_all(), error)
        return self._take_outputs()

    def abort_all(self, error: Exception) -> StepOutput:
        """End every request with an error."""
        self._fail(self._remove_all(), error)
        return self._take_outputs()

    def _take_outputs(self) -> StepOutput:
        outputs, self._outputs = self._outputs, []
        return outputs

    def _remove_all(self) -> list[Request]:
        requests = [self.waiting.popleft() for _ in range(len(self.waiting))]
        requests += [request for group in (*self._prefills, *self._groups) for request in group.requests]
        self._groups, self._prefills = [], []
        return requests

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
        """Start the oldest request, with others that fit beside it; short ones do not wait for a long one."""
        free = self._max_num_seqs - self.running
        waiting = list(self.waiting)
        if self._prefills:
            waiting = [request for request in waiting if len(request.tokens) <= self._chunk(request)]
        if free <= 0 or not waiting:
            return
        first = waiting[0]
        speculates = not self._groups and len(self.waiting) == 1 and SpeculativeRequest.supports(first)
        admitted, texts = [first], {tuple(first.tokens)}
        for request in waiting[1:free]:
            together = {*texts, tuple(request.tokens)}  # a prompt with several answers is read once
            fits = len(together) == 1 or len(together) * max(map(len, together)) <= self._chunk(request, first)
            if not fits or request.failed_in_batch or first.failed_in_batch or self._separate:
                break
            admitted.append(request)
            texts = together
        for request in admitted:
            self.waiting.remove(request)
        self.prompt_tokens += sum(len(request.prompt) for request in admitted if not request.answer)
        try:
            if speculates and self._speculation is not None:
                self._groups.append(SpeculativeRequest(self._model, first, self._speculation, self._chunk(first)))
            else:
                self._prefills.append(Prefill(self._model, admitted, self._chunk(*admitted)))
        except Exception as error:
            self._retry(admitted, error)

    def _chunk(self, *requests: Request) -> int:
        """Return how many tokens of a prompt are read at a time."""
        if self._separate:
            return max(len(request.tokens) for request in requests)
        if any(request.needs_prompt_logprobs for request in requests):
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
            if result is not None:
                self._prefills.remove(prefill)
                self._start_decoding(*result)

    def _start_decoding(self, outputs: StepOutput, batch: Batch) -> None:
        """Add requests with their first token to an open batch, or as a new one."""
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
        for group in [group for group in self._groups if group.requests]:
            self.steps += 1
            requests = list(group.requests)
            try:
                outputs = group.step()
            except Exception as error:
                # The state of the cache is unknown: requests that are not at fault are read anew, one by one.
                group.requests = []
                self._retry(requests, error)
                continue
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
            self._outputs.append((request, output))
            if output.finish_reason is not None:
                finished.append(request)
        if finished:
            self._drop(group, finished)

    def _retry(self, requests: Sequence[Request], error: Exception) -> None:
        """Run each of several requests alone; a request that fails alone is at fault."""
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


def _needs_separate_passes(model: DivergenceForCausalLM) -> bool:
    """Whether an answer would depend on the requests beside it, or on reading its prompt in chunks.

    Some rotary embeddings choose their factors by the largest position of a pass. Recurrent states also read padding,
    and their rows cannot leave a batch.
    """
    if stateful_types(model.target, model.experts) or not all(map(holds_tokens, model.new_cache().layers)):
        return True
    kinds = (str(getattr(module, "rope_type", "")) for module in model.modules())
    return any("longrope" in kind or "dynamic" in kind for kind in kinds)
