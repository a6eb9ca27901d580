"""Requests that share forward passes: prompts in prefill, a decoding batch, and a request that decodes with drafts.

Each of them has a `step` that runs one pass, and does not know of the others; `divdec.serving.scheduler` decides which
requests share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from divdec.decoding.cache import DivergenceCache
from divdec.decoding.speculative import Speculation, SpeculativeSequence, decode
from divdec.errors import FailedClosed
from divdec.experts.neural import ReadAhead
from divdec.experts.token_cache import TokenLayer
from divdec.model.modeling import DivergenceForCausalLM
from divdec.serving.request import Request, RequestOutput, TokenLogprob, token_logprob

StepOutput = list[tuple[Request, RequestOutput | Exception]]


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
        self.cache = cache
        self._model, self._mask = model, mask

    @property
    def is_open(self) -> bool:
        """Whether other requests can join."""
        return can_join(self.cache)

    @property
    def can_speculate(self) -> bool:
        """Whether it has one request, without a grammar, log-probabilities and seeded samples, and no padding."""
        if len(self.requests) != 1 or not self._mask.all():
            return False
        params = self.requests[0].params
        plain = params.logprobs is None and params.grammar is None
        return plain and (params.temperature == 0 or params.seed is None)

    def step(self) -> StepOutput:
        """Add a token to every answer."""
        last = torch.tensor([[request.answer[-1]] for request in self.requests])
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(last), 1)], dim=1)
        return _sample(self.requests, _forward(self._model, last, self._mask, self.cache)[:, -1])

    def join(self, other: Batch) -> None:
        """Move the requests of another batch into this one. The other batch must not be used afterwards."""
        padding, other_padding = join(self.cache, other.cache)
        masks = ((self._mask, padding), (other._mask, other_padding))
        self._mask = torch.cat([nn.functional.pad(mask, (columns, 0)) for mask, columns in masks])
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
        self.cache.batch_select_indices(index)
        self._mask = self._mask[index]
        padding = int((self._mask.cumsum(1) == 0).sum(1).min())
        if padding and self.is_open:
            drop_columns(self.cache, padding)
            self._mask = self._mask[:, padding:]


class Prefill:
    """Prompts in prefill. Long prompts are split into chunks, so that running requests do not wait for them."""

    def __init__(self, model: DivergenceForCausalLM, requests: list[Request], chunk: int) -> None:
        """Prepare passes of at most `chunk` tokens of each prompt.

        Several requests need a longest prompt that fits one chunk: no row may consist of padding alone.
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
    """A request that decodes alone, with drafts: several tokens per forward pass of the target."""

    def __init__(self, model: DivergenceForCausalLM, batch: Batch, speculation: Speculation) -> None:
        """Continue the only request of a batch, which must not be used afterwards; see `Batch.can_speculate`."""
        (request,) = self.requests = batch.requests
        self._model, self._cache = model, batch.cache
        ids = torch.tensor([request.tokens], device=model.device)
        config = GenerationConfig(
            do_sample=request.params.temperature > 0,
            max_length=ids.shape[1] + request.max_tokens - len(request.answer),
        )
        sequence = SpeculativeSequence(
            model, ids, request.processors, StoppingCriteriaList(), config, {"past_key_values": self._cache}
        )
        self._steps = decode(sequence, speculation, request.seed())

    def step(self) -> StepOutput:
        """Draft, verify, and add the accepted tokens."""
        self._model.follow_registry(self._cache)
        (request,) = self.requests
        outputs: StepOutput = []
        for token in next(self._steps):
            output = request.append_token(token, None)
            outputs.append((request, output))
            if output.finish_reason:
                break
        return outputs

    def drop(self, requests: Sequence[Request]) -> None:
        """Remove the request if it is in `requests`."""
        self.requests = [request for request in self.requests if request not in requests]

    def to_batch(self) -> Batch:
        """Continue without drafts in a batch. This object must not be used afterwards."""
        self._cache.deactivate_past_recording()
        mask = torch.ones(1, self._cache.check_length(), dtype=torch.long)
        return Batch(self._model, self.requests, self._cache, mask)


Group = Batch | SpeculativeRequest  # requests that share a cache


def can_join(cache: DivergenceCache) -> bool:
    """Whether rows can be added to a cache; a recurrent state has no columns to pad."""
    return all(
        type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) or isinstance(layer, TokenLayer | ReadAhead)
        for layer in cache.layers
    )


def join(cache: DivergenceCache, other: DivergenceCache) -> tuple[int, int]:
    """Append the rows of another cache, which must not be used afterwards; rows end in the same column.

    Returns:
        Number of padding columns added on the left of each of the two.

    Raises:
        FailedClosed: the caches belong to different models, or to one with a recurrent state.
    """
    if cache.owner != other.owner or not (can_join(cache) and can_join(other)):
        raise FailedClosed("caches of different models, or of one with recurrent states, cannot be joined")
    length, other_length = cache.check_length(), other.check_length()
    longest = max(length, other_length)
    pairs: list[tuple[Any, Any]] = list(zip(cache.layers, other.layers, strict=True))
    for layer, other_layer in pairs:
        if isinstance(layer, ReadAhead):
            layer.batch_repeat_interleave(1)  # raises an error while tokens are read ahead
            other_layer.batch_repeat_interleave(1)
        elif isinstance(layer, TokenLayer):
            layer.join(other_layer)
        elif layer.is_initialized:
            columns = _set_length(layer, longest)
            layer.keys, layer.values = (
                torch.cat([_pad_left(states, columns), _pad_left(added.to(states.device), columns)])
                for states, added in ((layer.keys, other_layer.keys), (layer.values, other_layer.values))
            )
    cache.check_length()
    return longest - length, longest - other_length


def drop_columns(cache: DivergenceCache, number: int) -> None:
    """Drop columns on the left, which must be padding in every row."""
    layers: list[Any] = list(cache.layers)
    for layer in layers:
        if isinstance(layer, TokenLayer):
            layer.drop_columns(number)
        elif isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
            columns = _set_length(layer, layer.get_seq_length() - number)
            layer.keys, layer.values = layer.keys[:, :, -columns:], layer.values[:, :, -columns:]
    cache.check_length()


def _pad_left(states: Float[Tensor, "rows heads tokens width"], columns: int) -> Float[Tensor, "rows heads all width"]:
    return nn.functional.pad(states, (0, 0, columns - states.shape[-2], 0))


def _set_length(layer: Any, length: int) -> int:
    """Set the number of tokens of a sliding window, and return how many columns a layer stores."""
    if not hasattr(layer, "sliding_window"):
        return length
    layer.cumulative_length = length
    return min(length, layer.sliding_window - 1)


def _forward(
    model: DivergenceForCausalLM,
    input_ids: Int[Tensor, "rows tokens"],
    mask: Int[Tensor, "rows past_and_tokens"],
    cache: DivergenceCache,
    keep: int = 1,
) -> Float[Tensor, "rows kept vocab"]:
    """Return steered logits from the model's own forward pass."""
    model.follow_registry(cache)
    device = model.device
    output: Any = model(
        input_ids=input_ids.to(device), attention_mask=mask.to(device), past_key_values=cache, logits_to_keep=keep
    )
    return output.logits


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
