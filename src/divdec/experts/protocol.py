"""The interface of experts, and operations on the layers of their caches."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

OwnCache = TypeVar("OwnCache", bound=Cache)
_ROW_METHODS = ("crop", "reorder_cache", "batch_repeat_interleave", "batch_select_indices")


@runtime_checkable
class Experts(Protocol):
    """A retain and a forget model that compute ℓ_q − ℓ_p over the target's vocabulary."""

    vocab_size: int
    """Width of the divergence: the vocabulary that both models share."""

    def new_cache(self) -> Cache:
        """Return an empty cache for `divergence`; it can be cropped, reordered and selected from by row."""
        ...

    def divergence(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch past_and_tokens"] | None = None,
        position_ids: Int[Tensor, "batch_or_one tokens"] | None = None,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
    ) -> Float[Tensor, "batch kept vocab"]:
        """Return ℓ_q − ℓ_p after each of the last `logits_to_keep` tokens (after every token if 0), in float32.

        Args:
            input_ids: the tokens that `cache` does not hold yet.
            attention_mask: 1 for tokens, 0 for padding, cached tokens included.
            position_ids: position of each token in its sequence, padding not counted.
            cache: from `new_cache`; it is extended by `input_ids`. None computes without a cache.
            logits_to_keep: number of positions to return, counted from the end.
        """
        ...


@runtime_checkable
class TokenPredictor(Protocol):
    """A retain model that can draft tokens without a forward pass, such as n-grams."""

    def likeliest(self, tokens: np.ndarray) -> int:
        """Return the most frequent continuation of a text, int64 [tokens]; −1 if none is known."""
        ...


def own_cache(cache: Cache | None, kind: type[OwnCache]) -> OwnCache | None:
    """Return the cache if it is of the type that the experts' `new_cache` returns.

    Raises:
        TypeError: it is of another type.
    """
    if cache is not None and not isinstance(cache, kind):
        raise TypeError(f"the experts' cache is a {type(cache).__name__}; it must come from new_cache()")
    return cache


def length_of(cache: Cache) -> int:
    """Return the number of tokens that a cache holds."""
    # Layers that share another layer's keys and values stay empty.
    layers: list[Any] = [layer for layer in cache.layers if hasattr(layer, "get_seq_length")]
    return max((layer.get_seq_length() for layer in layers), default=0)


def lengths_of(cache: Cache) -> list[int]:
    """Return the number of tokens that each model's cache holds; they must all be equal."""
    lengths = getattr(cache, "lengths", None)
    return [length_of(cache)] if lengths is None else lengths


def holds_tokens(layer: Any) -> bool:
    """Whether a layer stores each token separately, so that tokens can be removed and rows selected.

    A recurrent state does not. A layer class that belongs to one architecture (DeepSeek-V4) may inherit methods that
    change only its keys and values, so it counts only if it defines all of these methods itself.
    """
    kind = type(layer)
    known = kind in (DynamicLayer, DynamicSlidingWindowLayer) or kind.__module__.startswith("divdec.")
    return known or all(name in vars(kind) for name in _ROW_METHODS)


def can_roll_back(layer: Any) -> bool:
    """Whether the last tokens can be removed from a layer now."""
    recorded = getattr(layer, "record_past", False)
    if not holds_tokens(layer):
        # A convolution's inputs are available while the past is recorded.
        return recorded and hasattr(layer, "recurrent_states") and getattr(layer, "is_croppable", False)
    window = getattr(layer, "sliding_window", None)
    if window is not None:
        return recorded or layer.get_seq_length() < window
    return getattr(layer, "is_croppable", True)


def can_shift(layer: Any) -> bool:
    """Whether a different number of tokens can be removed from each row of a layer."""
    # A sliding window does not start at the sequence's first column; a recurrent state has no columns.
    return type(layer) is DynamicLayer or hasattr(layer, "take_columns")


def take_columns(layer: Any, columns: Int[Tensor, "batch columns"]) -> None:
    """Replace the tokens of each row by those in the given columns."""
    if hasattr(layer, "take_columns"):
        layer.take_columns(columns)
    elif layer.keys is not None and layer.values is not None:
        layer.keys, layer.values = columns_of(layer.keys, columns), columns_of(layer.values, columns)


def columns_of(
    states: Float[Tensor, "batch heads tokens width"], columns: Int[Tensor, "batch columns"]
) -> Float[Tensor, "batch heads columns width"]:
    """Return keys or values of the given columns of each row."""
    index = columns.to(states.device)[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    return states.gather(2, index)
