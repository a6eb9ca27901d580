"""The cache of a pair with another tokenizer: the target's tokens, and a memo of what the auxiliaries computed.

Only the tokens say where a sequence stands. The memo is corrected at each call to what the auxiliaries must then
have read, so that nothing done to the tokens can make it wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from divdec.bridge.context import Context
from divdec.errors import FailedClosed
from divdec.experts.neural import logits_of, new_cache
from divdec.experts.protocol import columns_of, length_of
from divdec.experts.token_cache import TokenLayer

Logits = tuple[Float[Tensor, "rows kept width"], Float[Tensor, "rows kept width"]]


class PairMemo:
    """Keys and values of two models for rows of different lengths, some of whose slots hold nothing.

    `ids[row]` are the tokens held, in the order of the row's valid slots.
    """

    def __init__(self, models: tuple[PreTrainedModel, PreTrainedModel], rows: int, keeps: bool = True) -> None:
        self.models = models
        self.keeps = keeps
        self.ids: list[list[int]]
        self._valid: Bool[Tensor, "rows slots"]
        self._caches: list[Cache]
        self._clear(rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> PairMemo:
        return self.select(range(len(self.ids)))

    def select(self, rows: Sequence[int]) -> PairMemo:
        """A memo of its own for these rows; one may be named twice."""
        return self.fork(rows, [len(self.ids[row]) for row in rows])

    def fork(self, rows: Sequence[int], lengths: Sequence[int]) -> PairMemo:
        """A memo of its own that holds the first tokens of each of these rows, this many."""
        other = PairMemo(self.models, len(rows), self.keeps)
        if not self.keeps or not any(lengths):
            return other
        index = torch.tensor(rows)
        valid = self._valid[index] & (self._valid[index].cumsum(1) <= torch.tensor(lengths)[:, None])
        slots = int(valid.any(0).nonzero().max()) + 1
        for cache, own in zip(other._caches, self._caches, strict=True):
            layers: list[tuple[Any, Any]] = list(zip(cache.layers, own.layers, strict=True))
            for layer, own_layer in layers:
                if own_layer.keys is not None:  # layers that share another's keys and values stay empty
                    there = index.to(own_layer.keys.device)
                    layer.update(own_layer.keys[there, :, :slots], own_layer.values[there, :, :slots])
        other._valid = valid[:, :slots]
        other.ids = [self.ids[row][:length] for row, length in zip(rows, lengths, strict=True)]
        return other

    def joined(self, other: PairMemo) -> PairMemo:
        """A memo of the rows of both."""
        found = PairMemo(self.models, len(self.ids) + len(other.ids), self.keeps)
        slots = max(self._valid.shape[1], other._valid.shape[1])
        if not self.keeps or not slots:
            return found
        found._valid = torch.cat([_widened(memo._valid, slots) for memo in (self, other)])
        found.ids = self.ids + other.ids
        for place, cache in enumerate(found._caches):
            layers: list[tuple[Any, ...]] = list(
                zip(cache.layers, self._caches[place].layers, other._caches[place].layers, strict=True)
            )
            for layer, *held in layers:
                # A memo that lost all it had (a pass that failed) has no keys, and nothing of it is valid.
                made = next((own for own in held if own.keys is not None), None)
                if made is not None:
                    states = [
                        _states_of(own, made, len(memo.ids), slots)
                        for own, memo in zip(held, (self, other), strict=True)
                    ]
                    layer.update(*(torch.cat(both) for both in zip(*states, strict=True)))
        return found

    def feed(self, kept: Sequence[int], added: Sequence[list[int]], logits_to_keep: int) -> Logits:
        """Keep the first tokens of each row, add others, and return both models' logits for the last columns.

        Args:
            kept: how many tokens of each row stay.
            added: what comes after them; the rows end together, in the last column.
            logits_to_keep: how many columns are returned.
        """
        try:
            return self._feed(kept, added, logits_to_keep)
        except BaseException:
            # One model may hold what the other does not; what is held by neither is computed again.
            self._clear(len(self.ids))
            raise

    def _clear(self, rows: int) -> None:
        self.ids = [[] for _ in range(rows)]
        self._valid = torch.zeros(rows, 0, dtype=torch.bool)
        self._caches = [new_cache(model) for model in self.models] if self.keeps else []

    def _feed(self, kept: Sequence[int], added: Sequence[list[int]], logits_to_keep: int) -> Logits:
        self._drop(torch.tensor(kept))
        width = max(map(len, added))
        padding = torch.tensor([[width - len(ids)] for ids in added])
        columns = torch.arange(width)[None]
        input_ids = torch.tensor([[0] * (width - len(ids)) + ids for ids in added])
        positions = (torch.tensor(kept)[:, None] + columns - padding).clamp(min=0)
        valid = torch.cat([self._valid, columns >= padding], dim=1)
        found = []
        for place, model in enumerate(self.models):
            cache = self._caches[place] if self.keeps else None
            found.append(logits_of(model, input_ids, valid.long(), positions, cache, logits_to_keep))
            if cache is not None and length_of(cache) != valid.shape[1]:
                raise FailedClosed("an auxiliary did not keep the tokens in its cache")
        if self.keeps:
            self._valid = valid
            self.ids = [ids[:length] + new for ids, length, new in zip(self.ids, kept, added, strict=True)]
        return found[0], found[1]

    def _drop(self, kept: Int[Tensor, " rows"]) -> None:
        slots = self._valid.shape[1]
        if not slots:
            return
        self._valid &= self._valid.cumsum(1) <= kept[:, None]
        used = self._valid.any(0).nonzero()
        end = int(used.max()) + 1 if len(used) else 0
        self._valid = self._valid[:, :end]
        longest = int(self._valid.sum(1).max()) if end else 0
        if 2 * longest < end:
            # Valid slots first, in their order; what follows them holds nothing and is masked.
            order = (~self._valid).long().argsort(dim=1, stable=True)[:, :longest]
            self._valid = self._valid.gather(1, order)
            self._each_layer(lambda states: columns_of(states, order))
        elif end < slots:
            self._each_layer(lambda states: states[:, :, :end])

    def _each_layer(self, change: Callable[[Tensor], Tensor]) -> None:
        layers: list[Any] = [layer for cache in self._caches for layer in cache.layers]
        for layer in layers:
            if layer.keys is not None:
                layer.keys, layer.values = change(layer.keys), change(layer.values)


class BridgeLayer(TokenLayer):
    """The target's tokens, with the context and the memo of each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.contexts: list[Context] = []
        self.memo: PairMemo | None = None

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self.contexts, self.memo = [], None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take other rows, for beam search."""
        super().reorder_cache(beam_idx)
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        super().batch_repeat_interleave(repeats)
        self._select([row for row in range(len(self.contexts)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        super().batch_select_indices(indices)
        chosen = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
        self._select(chosen.tolist())

    def join(self, other: TokenLayer) -> None:
        """Add another layer's rows, with what was computed for them."""
        assert isinstance(other, BridgeLayer)
        super().join(other)
        self.contexts = self.contexts + other.contexts
        self.memo = self.memo.joined(other.memo) if self.memo is not None and other.memo is not None else None

    def _select(self, rows: list[int]) -> None:
        if self.contexts and rows != list(range(len(self.contexts))):
            self.contexts = [self.contexts[row].copy() for row in rows]
            self.memo = self.memo.select(rows) if self.memo is not None else None


class BridgeCache(Cache):
    """A cache with a single layer, as long as the target's."""

    def __init__(self) -> None:
        self.layer = BridgeLayer()
        super().__init__(layers=[self.layer])


def keeps_memo(model: PreTrainedModel, accepts_positions: bool) -> bool:
    """Whether a model can go on from keys and values with holes: plain attention, told each token's place."""
    return accepts_positions and all(type(layer) is DynamicLayer for layer in new_cache(model).layers)


def _widened(valid: Bool[Tensor, "rows slots"], slots: int) -> Bool[Tensor, "rows slots_of_both"]:
    return nn.functional.pad(valid, (0, slots - valid.shape[1]))


def _states_of(layer: Any, made: Any, rows: int, slots: int) -> list[Tensor]:
    """Keys and values with so many slots; empty ones, of another layer's shape, where there are none."""
    if layer.keys is None:
        return [s.new_zeros(rows, s.shape[1], slots, s.shape[3]) for s in (made.keys, made.values)]
    return [nn.functional.pad(s, (0, 0, 0, slots - s.shape[2])) for s in (layer.keys, layer.values)]
