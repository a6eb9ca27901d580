"""Caches put together and made narrower, so that sequences can join and leave a batch while it decodes.

Rows end together, in the last column; what stands at the left of a shorter one is padding, which the mask must say.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from divdec.errors import FailedClosed
from divdec.experts.read_ahead import ReadAhead
from divdec.experts.token_cache import TokenLayer
from divdec.model.cache import DivergenceCache


def can_join(cache: DivergenceCache) -> bool:
    """Whether rows can be added to a cache: states that sum up the past have no columns that could be padding."""
    return all(
        type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) or isinstance(layer, TokenLayer | ReadAhead)
        for layer in cache.layers
    )


def join(cache: DivergenceCache, other: DivergenceCache) -> tuple[int, int]:
    """Add another cache's rows behind those of `cache`; the other is no longer to be used.

    Returns:
        How many columns of padding each of the two got at its left.

    Raises:
        FailedClosed: they belong to different models, or to one that keeps states that cannot be put together.
    """
    if cache.owner != other.owner or not (can_join(cache) and can_join(other)):
        raise FailedClosed("caches of different models, or of one with recurrent states, cannot be joined")
    length, other_length = cache.check_length(), other.check_length()
    longest = max(length, other_length)
    pairs: list[tuple[Any, Any]] = list(zip(cache.layers, other.layers, strict=True))
    for layer, other_layer in pairs:
        if isinstance(layer, ReadAhead):
            layer.batch_repeat_interleave(1)  # refused while something is read ahead
            other_layer.batch_repeat_interleave(1)
        elif isinstance(layer, TokenLayer):
            layer.join(other_layer)
        elif layer.is_initialized:
            _join_states(layer, other_layer, longest)
    cache.check_length()
    return longest - length, longest - other_length


def drop_columns(cache: DivergenceCache, number: int) -> None:
    """Drop columns at the left, which are padding in every row."""
    for layer in cache.layers:
        if isinstance(layer, TokenLayer):
            layer.drop_columns(number)
        elif isinstance(layer, DynamicLayer) and layer.is_initialized:
            _keep_last(layer, layer.get_seq_length() - number)
    cache.check_length()


def _join_states(layer: Any, other: Any, longest: int) -> None:
    columns = _held(layer, longest)
    layer.keys, layer.values = (
        torch.cat([_widened(own, columns), _widened(added.to(own.device), columns)])
        for own, added in ((layer.keys, other.keys), (layer.values, other.values))
    )


def _widened(states: Float[Tensor, "rows heads tokens width"], columns: int) -> Float[Tensor, "rows heads all width"]:
    return nn.functional.pad(states, (0, 0, columns - states.shape[-2], 0))


def _keep_last(layer: Any, length: int) -> None:
    columns = _held(layer, length)
    layer.keys, layer.values = layer.keys[:, :, -columns:], layer.values[:, :, -columns:]


def _held(layer: Any, length: int) -> int:
    """How many columns a layer keeps of so many, which it is told."""
    if not hasattr(layer, "sliding_window"):
        return length
    layer.cumulative_length = length
    return min(length, layer.sliding_window - 1)
