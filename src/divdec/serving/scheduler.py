"""Continuous-batching scheduler: requests join and leave the batch between steps."""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList

from divdec.decoding.batch import SpeculativeBatch
from divdec.decoding.cache import DivergenceCache, can_join, drop_columns, holds_tokens, join
from divdec.decoding.speculative import Speculation, decode
from divdec.errors import FailedClosed, UsageError
from divdec.model.modeling import DivergenceForCausalLM
from divdec.model.suppression import SuppressionPass
from divdec.passes import stateful_types
from divdec.serving.request import Request, RequestOutput, TokenLogprob, token_logprob

PREFILL_CHUNK = 512  # prompt tokens per prefill chunk, between two decoding steps
PREFILL_LOGITS = 1 << 24  # logits of prompts that are held at a time where all of them are needed
StepOutput = list[tuple[Request, RequestOutput | Exception]]
_log = logging.getLogger(__name__)


class Closing(Exception):
    """The engine is shutting down."""


class Batch:
    """A decoding batch: one cache, and one forward pass per step. Requests join and leave between steps."""

    def __init__(
        self,
        model: DivergenceForCausalLM,
        requests: list[Request],
        cache: DivergenceCache,
        mask: Int[Tensor, "rows past"],
    ) -> None:
        self.requests = requests
        self._model, self._cache, self._mask = model, cache, mask

    @property
    def is_open(self) -> bool:
        """Whether other requests can join."""
        return can_join(self._cache)

    def step(self) -> StepOutput:
        """Add a token to every answer."""
        last = torch.tensor([[request.answer[-1]] for request in self.requests])
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(last), 1)], dim=1)
        return _sample(self.requests, _forward(self._model, last, self._mask, self._cache)[:, -1])

    def join(self, other: Batch) -> None:
        """Move the requests of another batch into this one. The other batch must not be used afterwards."""
        padding, other_padding = join(self._cache, other._cache)
        masks = ((self._mask, padding), (other._mask, other_padding))
        self._mask = torch.cat([torch.nn.functional.pad(mask, (columns, 0)) for mask, columns in masks])
        self.requests = self.requests + other.requests

    def drop(self, requests: Sequence[Request]) -> None:
        """Remove requests."""
        rows = [row for row, request in enumerate(self.requests) if request not in requests]
        if len(rows) == len(self.requests):
            return
        self.requests = [self.requests[row] for row in rows]
        if not rows:
            return
        index = torch.tensor(rows)
        self._cache.batch_select_indices(index)
        self._mask = self._mask[index]
        padding = int((self._mask.cumsum(1) == 0).sum(1).min())
        if padding and self.is_open:
            drop_columns(self._cache, padding)
            self._mask = self._mask[:, padding:]


class Prefill:
    """Prompts in prefill. Long prompts are split into chunks, so that running requests do not wait for them."""

    def __init__(self, model: DivergenceForCausalLM, requests: list[Request], chunk: int) -> None:
        """Prepare.

        Args:
            model: the steered model.
            requests: several only if their longest prompt fits one chunk: no row may consist of padding alone.
            chunk: tokens of each prompt in one pass.
        """
        self.requests = requests
        self._model, self._chunk = model, chunk
        texts = [tuple(request.tokens) for request in requests]
        distinct = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        self.rows = [distinct[text] for text in texts]
        self._width = max(map(len, distinct))
        assert len(distinct) == 1 or self._width <= chunk
        self._ids = torch.tensor([[0] * (self._width - len(text)) + list(text) for text in distinct])
        self._mask = torch.tensor([[0] * (self._width - len(text)) + [1] * len(text) for text in distinct])
        self._cache = model.new_cache()
        self._read = 0
        # By row and number of likeliest tokens: several answers to one prompt share its log-probabilities.
        self._logprobs: dict[tuple[int, int], list[TokenLogprob | None]] = {
            (row, number): [None]
            for row, request in zip(self.rows, requests, strict=True)
            if (number := request.missing_prompt_logprobs) is not None
        }

    def step(self) -> tuple[StepOutput, Batch] | None:
        """Prefill the next chunk. After the last chunk, return the first tokens of the answers and their batch."""
        start, end = self._read, min(self._read + self._chunk, self._width)
        keep = 0 if self._logprobs else 1
        logits = _forward(self._model, self._ids[:, start:end], self._mask[:, :end], self._cache, keep)
        self._read = end
        self._score(logits, start, end)
        if end < self._width:
            return None
        for row, request in zip(self.rows, self.requests, strict=True):
            if (number := request.missing_prompt_logprobs) is not None:
                request.prompt_logprobs = tuple(self._logprobs[row, number])
        if self.rows != list(range(len(self._ids))):  # several answers to one prompt
            index = torch.tensor(self.rows)
            self._cache.batch_select_indices(index)
            self._mask = self._mask[index]
        batch = Batch(self._model, self.requests, self._cache, self._mask)
        return _sample(self.requests, logits[torch.tensor(self.rows, device=logits.device), -1]), batch

    def _score(self, logits: Float[Tensor, "rows chunk vocab"], start: int, end: int) -> None:
        """Compute the log-probabilities of the tokens that follow those of this chunk."""
        for (row, number), logprobs in self._logprobs.items():
            first = int((self._mask[row] == 0).sum())
            for column in range(max(start, first), min(end, self._width - 1)):
                distribution = logits[row, column - start].float().log_softmax(dim=-1)
                logprobs.append(token_logprob(distribution, int(self._ids[row, column + 1]), number))


class SpeculativeRequest:
    """A speculative request, which runs alone: several tokens per forward pass of the target."""

    is_open = False

    def __init__(self, model: DivergenceForCausalLM, request: Request, speculation: Speculation, chunk: int) -> None:
        """Prepare; `chunk` tokens of the prompt are read in a pass."""
        self.requests = [request]
        self._model = model
        self._cache = model.new_cache()
        ids = torch.tensor([request.tokens], device=model.device)
        self._length = ids.shape[1]
        config = GenerationConfig(
            do_sample=request.params.temperature > 0,
            max_length=self._length + request.max_tokens - len(request.answer),
        )
        config.prefill_chunk_size = chunk
        config._pad_token_tensor = None  # pyright: ignore[reportAttributeAccessIssue]
        arguments = {"past_key_values": self._cache}
        self._batch = SpeculativeBatch(model, ids, request.processors, StoppingCriteriaList(), config, arguments)
        self._steps = decode(self._batch, speculation, request.seed())

    @staticmethod
    def supports(request: Request) -> bool:
        """Whether a request can speculate: it has no grammar and asks for no log-probabilities or seeded samples."""
        params = request.params
        plain = params.logprobs is None and params.prompt_logprobs is None and params.grammar is None
        return plain and (params.temperature == 0 or params.seed is None) and request.max_tokens > 1

    def step(self) -> StepOutput:
        """Draft, verify, and add the accepted tokens."""
        _follow_registry(self._model, self._cache)
        next(self._steps)
        request = self.requests[0]
        outputs: StepOutput = []
        rows = self._batch.sequences
        for token in rows.ids[0, self._length : rows.lengths[0]].tolist():
            output = request.append_token(token, None)
            outputs.append((request, output))
            if output.finish_reason:
                break
        self._length = rows.lengths[0]
        return outputs

    def drop(self, requests: Sequence[Request]) -> None:
        """Remove the request if it is in `requests`."""
        self.requests = [request for request in self.requests if request not in requests]


Group = Batch | SpeculativeRequest  # requests that share a cache


class Scheduler:
    """Waiting, prefilling and decoding requests.

    Attributes:
        waiting: requests that are not started; other threads append to it.
        prompt_tokens: prompt tokens read so far.
        generated_tokens: tokens generated so far.
        steps: forward passes so far.
        positions: by sequence and pass, the number of last positions so far.
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
        model.on_steered = self._count_changes
        self._model, self._max_num_seqs, self._speculation = model, max_num_seqs, speculation
        self._measure_suppression = measure_suppression
        self._separate = _needs_separate_passes(model)
        self._prefills: list[Prefill] = []
        self._groups: list[Group] = []
        # Finished requests with their last outputs, to which the share is added.
        self._measurements: list[tuple[Request, RequestOutput, SuppressionPass]] = []
        self._outputs: StepOutput = []

    @property
    def running(self) -> int:
        """Number of requests that are prefilling, decoding or being measured."""
        return sum(len(group.requests) for group in [*self._groups, *self._prefills]) + len(self._measurements)

    def _count_changes(
        self, target_logits: Float[Tensor, "rows kept vocab"], steered: Float[Tensor, "rows kept vocab"]
    ) -> None:
        changed = target_logits[:, -1].argmax(-1) != steered[:, -1].argmax(-1)
        self.positions += len(changed)
        self.changed_positions += int(changed.sum())
        self._changed_rows = changed

    def _count_traced(self, requests: Sequence[Request], rows: Sequence[int]) -> None:
        """Count the last pass for requests that are traced; `rows` are their rows in it."""
        for request, row in zip(requests, rows, strict=True):
            if (timing := request.timing) is not None:
                timing.positions += 1
                timing.changed_positions += int(self._changed_rows[row])

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self._prefills or self._groups or self._measurements)

    def step(self) -> StepOutput:
        """Read a chunk of each prefill, advance every decoding request, and measure a chunk of finished ones."""
        try:
            self._drop_aborted()
            self._admit()
            self._prefill()
            self._decode()
            self._measure()
        except Exception as error:  # an error in the scheduler itself: send it to every client
            _log.exception("the scheduler failed")
            return self.abort_all(error)
        outputs, self._outputs = self._outputs, []
        return outputs

    def abort_all(self, error: Exception) -> StepOutput:
        """End every request with an error, after its pending outputs."""
        requests = [self.waiting.popleft() for _ in range(len(self.waiting))]
        requests += [request for group in (*self._prefills, *self._groups) for request in group.requests]
        requests += [request for request, *_ in self._measurements]
        self._groups, self._prefills, self._measurements = [], [], []
        self._fail(requests, error)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _drop_aborted(self) -> None:
        for request in [request for request in list(self.waiting) if request.aborted]:
            self.waiting.remove(request)
        self._prefills = [
            prefill for prefill in self._prefills if not all(request.aborted for request in prefill.requests)
        ]
        self._measurements = [item for item in self._measurements if not item[0].aborted]
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
        speculates = not self._groups and len(self.waiting) == 1 and SpeculativeRequest.supports(first)
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
            if speculates and self._speculation is not None:
                self._groups.append(SpeculativeRequest(self._model, first, self._speculation, self._chunk(first)))
            else:
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
            if result is not None:
                self._prefills.remove(prefill)
                self._count_traced(prefill.requests, prefill.rows)
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
                # The cache is in an unknown state: prefill the unaffected requests again, one by one.
                group.requests = []
                self._retry(requests, error)
                continue
            self._count_traced(requests, range(len(requests)))
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
            if self._measure_suppression and output.finish_reason is not None:
                self._start_measurement(request, output)
            else:
                self._outputs.append((request, output))
            if output.finish_reason is not None:
                finished.append(request)
        if finished:
            self._drop(group, finished)

    def _start_measurement(self, request: Request, output: RequestOutput) -> None:
        """Begin one more pass over prompt and reply, whose result is added to the last output of a request."""
        chunk = min(self._chunk(request), max(1, PREFILL_LOGITS // self._model.vocab_size))
        try:
            measurement = SuppressionPass(
                self._model, request.tokens, len(request.prompt), len(request.tokens) if self._separate else chunk
            )
        except Exception as error:
            self._fail([request], error)
        else:
            self._measurements.append((request, output, measurement))

    def _measure(self) -> None:
        """Measure as many tokens as a chunk of a prefill has, of the replies that finished first."""
        left = PREFILL_CHUNK
        while self._measurements and left > 0:
            request, output, measurement = self._measurements[0]
            self.steps += 1
            left -= min(measurement.chunk, len(request.tokens))
            try:
                share = measurement.step()
            except Exception as error:
                self._measurements.pop(0)
                self._fail([request], error)
                continue
            if share is not None:
                self._measurements.pop(0)
                self._outputs.append((request, dataclasses.replace(output, suppressed=share)))

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


def _needs_separate_passes(model: DivergenceForCausalLM) -> bool:
    """Whether an answer depends on the other requests in the batch or on chunked prefill.

    Some rotary embeddings choose their factors by the largest position of a pass. Recurrent states also read padding,
    and their rows cannot leave a batch.
    """
    if stateful_types(model.target, model.experts) or not all(map(holds_tokens, model.new_cache().layers)):
        return True
    kinds = (str(getattr(module, "rope_type", "")) for module in model.modules())
    return any("longrope" in kind or "dynamic" in kind for kind in kinds)


def _forward(
    model: DivergenceForCausalLM,
    input_ids: Int[Tensor, "rows tokens"],
    mask: Int[Tensor, "rows past_and_tokens"],
    cache: DivergenceCache,
    keep: int = 1,
) -> Float[Tensor, "rows kept vocab"]:
    """Return steered logits from the model's own forward pass."""
    _follow_registry(model, cache)
    device = model.device
    output: Any = model(
        input_ids=input_ids.to(device), attention_mask=mask.to(device), past_key_values=cache, logits_to_keep=keep
    )
    return output.logits


def _follow_registry(model: DivergenceForCausalLM, cache: DivergenceCache) -> None:
    """Apply the current takedown requests to the next forward pass."""
    if model.takedowns is not None:
        assert cache.takedowns is not None
        model.takedowns.begin(cache.takedowns)


def _sample(requests: Sequence[Request], logits: Float[Tensor, "rows vocab"]) -> StepOutput:
    greedy = logits.argmax(dim=-1).tolist()  # for all rows at once: most requests are greedy and need nothing else
    outputs: StepOutput = []
    for row, request in enumerate(requests):
        try:
            if request.max_tokens <= 0:
                output: RequestOutput | Exception = request.finish_empty()
            else:
                plain = request.params.temperature == 0 and not request.processors
                output = request.append_token(greedy[row] if plain else request.sample(logits[row]), logits[row])
        except Exception as error:  # fails this request alone; the others have their tokens
            output = error
        outputs.append((request, output))
    return outputs
