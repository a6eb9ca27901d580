"""A pair of auxiliaries with a tokenizer other than the target's (paper, section 3.1).

At each of the target's tokens the auxiliaries have read exactly the text up to that token, tokenized with their own
tokenizer, so scores of a whole text equal those of decoding it token by token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from divdec.bridge.alignment import AlignedSequence, AuxiliaryInput, DivergenceMapper, Retokenizer
from divdec.data.formatting import common_prefix_length, padded
from divdec.errors import FailedClosed, UsageError
from divdec.experts.neural import check_pair
from divdec.experts.protocol import Experts, Inputs
from divdec.experts.token_cache import PADDING, TokenLayer
from divdec.passes import device_of, length_of, logit_width, logits_of, new_cache, uses_gradient_checkpointing

# Inputs that branch off from a row are computed in batches of at most this many rows and tokens: their keys and values
# are copied.
_MAX_ROWS, _MAX_TOKENS = 64, 1 << 15

PairLogits = tuple[Float[Tensor, "rows kept width"], Float[Tensor, "rows kept width"]]


class BridgedPair(Experts, nn.Module):
    """Retain auxiliary q and forget auxiliary p with a tokenizer other than the target's.

    Args:
        retain: retain auxiliary, q.
        forget: forget auxiliary, p.
        target_tokenizer: the target's tokenizer.
        auxiliary_tokenizer: the tokenizer of both auxiliaries.
        target_width: number of the target's logits.

    Attributes:
        source: for each of the target's tokens the auxiliary one that its difference is read from, within a text.

    Raises:
        UsageError: the auxiliaries are the same model, or a tokenizer does not fit or does not say which bytes its
            tokens stand for.
    """

    def __init__(
        self,
        retain: PreTrainedModel,
        forget: PreTrainedModel,
        *,
        target_tokenizer: Any,
        auxiliary_tokenizer: Any,
        target_width: int,
    ) -> None:
        super().__init__()
        check_pair(retain, forget)
        self.cache_class = BridgeCache
        self.retain = retain
        self.forget = forget
        self.auxiliary_tokenizer = auxiliary_tokenizer
        self.vocab_size = target_width
        self.retokenizer = Retokenizer(target_tokenizer, auxiliary_tokenizer)
        width = min(logit_width(retain), logit_width(forget))
        # Special tokens may lie beyond the logits: text never holds them.
        tokens = max(
            (index for index, text in enumerate(self.retokenizer.auxiliary.bytes) if text is not None), default=-1
        )
        if tokens >= width:
            raise UsageError(
                f"the auxiliaries' tokenizer has {tokens + 1} tokens, but they have logits for {width}: give the "
                "tokenizer that they were trained with"
            )
        self._mapper = DivergenceMapper(self.retokenizer.bytes, self.retokenizer.auxiliary, target_width)
        self.source = self._mapper.source()
        configs = [model.config.get_text_config(decoder=True) for model in (retain, forget)]
        limits = [getattr(config, "max_position_embeddings", None) for config in configs]
        self._limit = min((limit for limit in limits if limit), default=None)
        self._supports_cache = _supports_ragged_cache(retain) and _supports_ragged_cache(forget)

    def new_cache(self) -> BridgeCache:
        """Return an empty cache, as long as the target's."""
        return BridgeCache()

    def compute(self, inputs: Inputs, cache: BridgeCache | None, logits_to_keep: int) -> Tensor:
        """Compute ℓ_q − ℓ_p over the target's vocabulary.

        Raises:
            UsageError: the auxiliaries' tokens of a text exceed their positions.
        """
        input_ids, attention_mask, _ = inputs
        layer = BridgeLayer() if cache is None else cache.layer
        tokens = layer.extend(input_ids, attention_mask)
        if layer.pair_cache is None:
            layer.sequences = [AlignedSequence(self.retokenizer) for _ in tokens]
            use_cache = self._supports_cache and not uses_gradient_checkpointing(self)
            layer.pair_cache = RaggedPairCache((self.retain, self.forget), len(tokens), use_cache)
        last = min(logits_to_keep or input_ids.shape[1], input_ids.shape[1])
        positions: list[tuple[int, int]] = []  # row and column of each input
        texts: list[AuxiliaryInput] = []
        for row, sequence in enumerate(layer.sequences):
            is_token = tokens[row] != PADDING
            counts = is_token.cumsum(0)[-last:].tolist()
            columns = [column for column in range(last) if is_token[-last:][column]]
            texts += sequence.auxiliary_inputs(tokens[row][is_token].tolist(), [counts[column] for column in columns])
            positions += [(row, column) for column in columns]
        longest = max((len(text.ids) for text in texts), default=0)
        if self._limit is not None and longest > self._limit:
            raise UsageError(
                f"the text has {longest} tokens in the auxiliaries' tokenizer, which have {self._limit} positions; "
                "shorten it, or use auxiliaries with more"
            )
        result = torch.zeros(len(tokens), last, self.vocab_size, device=device_of(self.retain))
        ids = [text.ids for text in texts]
        for indices, retain, forget in self._logits(layer.pair_cache, [row for row, _ in positions], ids):
            batch = [texts[index] for index in indices]
            values = self._mapper.divergence(retain, forget, batch)
            target = torch.tensor([positions[index] for index in indices], device=result.device)
            result[target[:, 0], target[:, 1]] = values.to(result.device)
        return result

    def _logits(
        self, cache: RaggedPairCache, rows: Sequence[int], inputs: Sequence[list[int]]
    ) -> Iterator[tuple[list[int], Float[Tensor, "inputs width"], Float[Tensor, "inputs width"]]]:
        """Compute both models' logits after each input.

        One pass over each row's last input also gives the logits of its prefixes. Other inputs branch off: they end in
        tokens that later text has changed.

        Args:
            cache: keys and values of the rows.
            rows: row of each input, in ascending order.
            inputs: ids of each input.

        Yields:
            Indices of some inputs, and the logits of the retain and the forget auxiliary for them.
        """
        if not inputs:
            return
        final = dict(zip(rows, inputs, strict=True))  # the last input of each row
        lengths = [len(ids) for ids in cache.ids]
        for row, ids in final.items():
            lengths[row] = _reusable_length(cache.ids[row], ids)
        prefixes, branches = [], []
        for index, (row, ids) in enumerate(zip(rows, inputs, strict=True)):
            if common_prefix_length(ids, final[row]) == len(ids):
                prefixes.append(index)
                lengths[row] = min(lengths[row], max(len(ids) - 1, 0))
            else:
                branches.append(index)
        added = [final[row][length:] if row in final else [] for row, length in enumerate(lengths)]
        columns = max(len(final[rows[index]]) - len(inputs[index]) for index in prefixes) + 1
        retain, forget = cache.logits(lengths, added, min(columns, max(map(len, added))))
        columns = retain.shape[1]
        for start in range(0, len(prefixes), _MAX_ROWS):
            indices = prefixes[start : start + _MAX_ROWS]
            ends = [columns - 1 - len(final[rows[index]]) + len(inputs[index]) for index in indices]
            own_rows = [rows[index] for index in indices]
            yield indices, retain[own_rows, ends], forget[own_rows, ends]
        del retain, forget
        for indices in _batches(branches, inputs):
            lengths = [_reusable_length(cache.ids[rows[index]], inputs[index]) for index in indices]
            branch = cache.select([rows[index] for index in indices], lengths)
            added = [inputs[index][length:] for index, length in zip(indices, lengths, strict=True)]
            retain, forget = branch.logits(lengths, added, 1)
            yield indices, retain[:, -1], forget[:, -1]


class RaggedPairCache:
    """Keys and values of both auxiliaries for rows of different lengths; some slots of a row are unused.

    Args:
        models: retain and forget auxiliary.
        rows: number of rows.
        use_cache: store keys and values; otherwise each pass reads the whole rows.

    Attributes:
        ids: tokens of each row, in the order of its used slots.
    """

    def __init__(self, models: tuple[PreTrainedModel, PreTrainedModel], rows: int, use_cache: bool) -> None:
        self._models = models
        self._use_cache = use_cache
        self.ids: list[list[int]]
        self._used: Bool[Tensor, "rows slots"]
        self._caches: list[Cache]
        self._clear(rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedPairCache:
        return self.select(range(len(self.ids)))

    def select(self, rows: Sequence[int], lengths: Sequence[int] | None = None) -> RaggedPairCache:
        """Copy rows, which may repeat, each up to a length; the whole rows by default."""
        lengths = [len(self.ids[row]) for row in rows] if lengths is None else lengths
        result = RaggedPairCache(self._models, len(rows), self._use_cache)
        if not self._use_cache or not any(lengths):
            return result
        index = torch.tensor(rows)
        used = self._used[index] & (self._used[index].cumsum(1) <= torch.tensor(lengths)[:, None])
        slots = int(used.any(0).nonzero().max()) + 1
        for layer, source in zip(result.layers, self.layers, strict=True):
            if source.keys is not None:  # layers that share another layer's keys and values stay empty
                device_index = index.to(source.keys.device)
                layer.update(source.keys[device_index, :, :slots], source.values[device_index, :, :slots])
        result._used = used[:, :slots]
        result.ids = [self.ids[row][:length] for row, length in zip(rows, lengths, strict=True)]
        return result

    def concatenate(self, other: RaggedPairCache) -> RaggedPairCache:
        """Return a cache with the rows of both."""
        result = RaggedPairCache(self._models, len(self.ids) + len(other.ids), self._use_cache)
        slots = max(self._used.shape[1], other._used.shape[1])
        if not self._use_cache or not slots:
            return result
        both = (self, other)
        result._used = torch.cat([nn.functional.pad(cache._used, (0, slots - cache._used.shape[1])) for cache in both])
        result.ids = self.ids + other.ids
        for layer, *sources in zip(result.layers, self.layers, other.layers, strict=True):
            # A cache that was cleared after an error has no keys, and none of its slots are used.
            filled = next((source for source in sources if source.keys is not None), None)
            if filled is None:
                continue
            states = []
            for name in ("keys", "values"):
                _, heads, _, width = getattr(filled, name).shape
                stacked = getattr(filled, name).new_zeros(len(result.ids), heads, slots, width)
                for source, rows in zip(sources, (slice(len(self.ids)), slice(len(self.ids), None)), strict=True):
                    if source.keys is not None:
                        stacked[rows, :, : source.keys.shape[2]] = getattr(source, name)
                states.append(stacked)
            layer.update(*states)
        return result

    def logits(self, lengths: Sequence[int], added: Sequence[list[int]], logits_to_keep: int) -> PairLogits:
        """Truncate each row to its length, append ids, and return both models' logits for the last columns.

        Rows are aligned at the last column.
        """
        try:
            return self._extend(lengths, added, logits_to_keep)
        except BaseException:
            # One model may have read tokens that the other has not.
            self._clear(len(self.ids))
            raise

    @property
    def layers(self) -> list[Any]:
        """The layers of both models' caches."""
        return [layer for cache in self._caches for layer in cache.layers]

    def _clear(self, rows: int) -> None:
        self.ids = [[] for _ in range(rows)]
        self._used = torch.zeros(rows, 0, dtype=torch.bool)
        self._caches = [new_cache(model) for model in self._models] if self._use_cache else []

    def _extend(self, lengths: Sequence[int], added: Sequence[list[int]], logits_to_keep: int) -> PairLogits:
        self._truncate(torch.tensor(lengths))
        width = max(map(len, added))
        padding = torch.tensor([[width - len(ids)] for ids in added])
        columns = torch.arange(width)[None]
        input_ids = padded(added, 0, left=True)
        positions = (torch.tensor(lengths)[:, None] + columns - padding).clamp(min=0)
        used = torch.cat([self._used, columns >= padding], dim=1)
        caches = self._caches or [None, None]
        logits = [
            logits_of(model, input_ids, used.long(), positions, cache, logits_to_keep)
            for model, cache in zip(self._models, caches, strict=True)
        ]
        if self._use_cache:
            if any(length_of(cache) != used.shape[1] for cache in self._caches):
                raise FailedClosed("an auxiliary did not keep the tokens in its cache")
            self._used = used
            self.ids = [ids[:length] + new for ids, length, new in zip(self.ids, lengths, added, strict=True)]
        return logits[0], logits[1]

    def _truncate(self, lengths: Int[Tensor, " rows"]) -> None:
        slots = self._used.shape[1]
        if not slots:
            return
        self._used = self._used & (self._used.cumsum(1) <= lengths[:, None])  # may be an inference tensor
        used_columns = self._used.any(0).nonzero()
        end = int(used_columns.max()) + 1 if len(used_columns) else 0
        self._used = self._used[:, :end]
        longest = int(self._used.sum(1).max()) if end else 0
        if 2 * longest < end:
            # Compact: move the used slots to the front, in their order.
            order = (~self._used).long().argsort(dim=1, stable=True)[:, :longest]
            self._used = self._used.gather(1, order)
            index = order[:, None, :, None]
            self._change_layers(
                lambda states: states.gather(
                    2, index.to(states.device).expand(-1, states.shape[1], -1, states.shape[3])
                )
            )
        elif end < slots:
            self._change_layers(lambda states: states[:, :, :end])

    def _change_layers(self, change: Callable[[Tensor], Tensor]) -> None:
        for layer in self.layers:
            if layer.keys is not None:
                layer.keys, layer.values = change(layer.keys), change(layer.values)


class BridgeLayer(TokenLayer):
    """The target's tokens, and what was computed from them: aligned sequences and the auxiliaries' keys and values.

    Only the tokens define the position of a sequence. The keys and values are corrected at each call to the tokens that
    the auxiliaries must have read by then, so no operation on the tokens can make them wrong.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sequences: list[AlignedSequence] = []
        self.pair_cache: RaggedPairCache | None = None

    def reset(self) -> None:
        """Remove all tokens."""
        super().reset()
        self.sequences, self.pair_cache = [], None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the rows by those with these indices, for beam search."""
        super().reorder_cache(beam_idx)
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        super().batch_repeat_interleave(repeats)
        self._select([row for row in range(len(self.sequences)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows with these indices, or where a mask is true."""
        super().batch_select_indices(indices)
        rows = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
        self._select(rows.tolist())

    def join(self, other: TokenLayer) -> None:
        """Append the rows of another layer."""
        assert isinstance(other, BridgeLayer)
        super().join(other)
        self.sequences = self.sequences + other.sequences
        if self.pair_cache is not None and other.pair_cache is not None:
            self.pair_cache = self.pair_cache.concatenate(other.pair_cache)
        else:
            self.pair_cache = None

    def _select(self, rows: list[int]) -> None:
        if self.sequences and rows != list(range(len(self.sequences))):
            self.sequences = [self.sequences[row].copy() for row in rows]
            self.pair_cache = self.pair_cache.select(rows) if self.pair_cache is not None else None


class BridgeCache(Cache):
    """A cache with a single layer, as long as the target's."""

    def __init__(self) -> None:
        self.layer = BridgeLayer()
        super().__init__(layers=[self.layer])


def _reusable_length(cached: list[int], ids: list[int]) -> int:
    """Return how many cached tokens a row may reuse, so that a pass returns logits for its last token."""
    return min(common_prefix_length(cached, ids), max(len(ids) - 1, 0))


def _batches(indices: list[int], inputs: Sequence[list[int]]) -> Iterator[list[int]]:
    """Group inputs of similar length."""
    batch: list[int] = []
    for index in sorted(indices, key=lambda index: len(inputs[index])):
        if batch and (len(batch) == _MAX_ROWS or (len(batch) + 1) * len(inputs[index]) > _MAX_TOKENS):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _supports_ragged_cache(model: PreTrainedModel) -> bool:
    """Whether a model accepts keys and values with unused slots: plain attention, with explicit positions."""
    accepts_positions = "position_ids" in inspect.signature(type(model).forward).parameters
    return accepts_positions and all(type(layer) is DynamicLayer for layer in new_cache(model).layers)
