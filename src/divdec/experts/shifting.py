"""Moving each row of a cache by columns of its own: what speculation in batches does to rows that kept fewer tokens.

It knows nothing of why rows move.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from divdec.experts.columns import columns_of
from divdec.experts.fixed_cache import FixedLayer
from divdec.experts.placed_cache import RemoteLayer
from divdec.experts.read_ahead import ReadAhead
from divdec.experts.token_cache import TokenLayer


def can_shift(layer: Any) -> bool:
    """Whether a layer's rows can be moved apart."""
    if isinstance(layer, RemoteLayer):
        return layer.can_shift
    # A window's first column is not the sequence's; states that sum up the past have no columns.
    return type(layer) is DynamicLayer or isinstance(layer, FixedLayer | TokenLayer | ReadAhead)


def take_columns(layer: Any, columns: Int[Tensor, "batch columns"]) -> None:
    """Let each row's tokens be those of these columns."""
    if isinstance(layer, TokenLayer):
        if layer.tokens is not None:
            layer.tokens = layer.tokens.gather(1, columns.to(layer.tokens.device))
    elif isinstance(layer, FixedLayer | RemoteLayer):
        layer.take_columns(columns)
    elif isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
        layer.keys, layer.values = columns_of(layer.keys, columns), columns_of(layer.values, columns)
