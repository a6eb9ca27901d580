"""The cache of experts that another process holds: here its length, and what is done to it, told with the next pass.

It knows nothing of how orders travel.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import weakref
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

Orders = collections.deque[list[Any]]
_NUMBERS = itertools.count()


@dataclasses.dataclass(frozen=True)
class Abilities:
    """What can be done to the caches that a process makes."""

    window: int | None = None
    """The shortest sliding window among the layers."""
    croppable: bool = True
    """False where a layer sums up the past."""
    shiftable: bool = True
    """Whether rows can be moved apart."""


class RemoteLayer(CacheLayerMixin):
    """Stands for all layers of a cache elsewhere; what is done to it is done there before anything is read again."""

    is_sliding = False

    def __init__(self, orders: Orders, abilities: Abilities) -> None:
        super().__init__()
        self.number = next(_NUMBERS)
        self.length = 0
        self.sliding_window = abilities.window
        self.is_croppable = abilities.croppable
        self.can_shift = abilities.shiftable
        self._abilities, self._orders, self._recording = abilities, orders, False
        self._order("new")
        # A deque's append is atomic, whatever thread drops the layer.
        weakref.finalize(self, orders.append, ["drop", self.number])

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteLayer:
        other = RemoteLayer(self._orders, self._abilities)
        other.length, other.is_initialized, other._recording = self.length, self.is_initialized, self._recording
        other._order("copy", self.number)
        memo[id(self)] = other
        return other

    def _order(self, what: str, *given: Any) -> None:
        self._orders.append([what, self.number, *given])

    @property
    def record_past(self) -> bool:
        """Whether windows keep what they would drop, so that they can be rolled back."""
        return self._recording

    @record_past.setter
    def record_past(self, value: bool) -> None:
        if value != self._recording:
            self._recording = value
            self._order("record", value)

    def activate_past_recording(self) -> None:
        """Let windows keep what they would drop."""
        self.record_past = True

    def get_seq_length(self) -> int:
        """How many tokens the other process has told that it holds."""
        return self.length

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of a mask over all tokens."""
        return self.length + query_length, 0

    def reset(self) -> None:
        """Forget all tokens."""
        self.length, self.is_initialized = 0, False
        self._order("reset")

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens; windows also hear that there are none to remove, and drop what they recorded."""
        number = min(abs(tokens_to_remove), self.length)
        if number or self.sliding_window is not None:
            self.length -= number
            self._order("crop", number)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take other rows, for beam search."""
        self._order("reorder", beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self._order("repeat", repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        indices = torch.as_tensor(indices)
        rows = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
        self._order("select", rows.tolist())

    def take_columns(self, columns: Int[Tensor, "batch columns"]) -> None:
        """Let each row's tokens be those of these columns."""
        self.length = columns.shape[1]
        self._order("columns", columns.tolist())

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Refused: keys and values are elsewhere."""
        raise NotImplementedError("keys and values are with another process")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refused: keys and values are elsewhere."""
        raise NotImplementedError("keys and values are with another process")

    def offload(self) -> None:
        """Nothing."""

    prefetch = offload


class RemoteCache(Cache):
    """A cache with a single layer, which stands for all those elsewhere."""

    def __init__(self, orders: Orders, abilities: Abilities) -> None:
        self.layer = RemoteLayer(orders, abilities)
        super().__init__(layers=[self.layer])
