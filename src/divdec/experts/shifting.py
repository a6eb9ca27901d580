"""What can be done to a cache's layers: taking tokens back, selecting rows, moving rows apart.

It knows nothing of why.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from divdec.experts.columns import columns_of
from divdec.experts.fixed_cache import FixedLayer
from divdec.experts.read_ahead import ReadAhead
from divdec.experts.token_cache import TokenLayer

_CHANGES = ("crop", "reorder_cache", "batch_repeat_interleave", "batch_select_indices")


def holds_tokens(layer: Any) -> bool:
    """Whether a layer holds each of its tokens by itself, so that tokens can be taken back and rows selected.

    A recurrent state sums them up. Layers of an architecture's own (DeepSeek-V4) may inherit methods that reach their
    keys and values alone: they count only if they bring all of these methods themselves.
    """
    kind = type(layer)
    known = kind in (DynamicLayer, DynamicSlidingWindowLayer) or kind.__module__.startswith("divdec.")
    return known or all(name in vars(kind) for name in _CHANGES)


def can_roll_back(layer: Any) -> bool:
    """Whether the last tokens can be removed now."""
    recorded = getattr(layer, "record_past", False)
    if not holds_tokens(layer):
        # The inputs of a convolution are there while the past is recorded.
        return recorded and hasattr(layer, "recurrent_states") and getattr(layer, "is_croppable", False)
    window = getattr(layer, "sliding_window", None)
    if window is not None:
        return recorded or layer.get_seq_length() < window
    return getattr(layer, "is_croppable", True)


def can_shift(layer: Any) -> bool:
    """Whether a layer's rows can be moved apart."""
    # A window's first column is not the sequence's; states that sum up the past have no columns.
    return type(layer) is DynamicLayer or isinstance(layer, FixedLayer | TokenLayer | ReadAhead)


def take_columns(layer: Any, columns: Int[Tensor, "batch columns"]) -> None:
    """Let each row's tokens be those of these columns."""
    if isinstance(layer, TokenLayer):
        if layer.tokens is not None:
            layer.tokens = layer.tokens.gather(1, columns.to(layer.tokens.device))
    elif isinstance(layer, FixedLayer):
        layer.take_columns(columns)
    elif isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
        layer.keys, layer.values = columns_of(layer.keys, columns), columns_of(layer.values, columns)
