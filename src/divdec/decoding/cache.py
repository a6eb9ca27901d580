"""One cache for target, experts and takedowns: every operation applies to all of them or to none."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from divdec.errors import FailedClosed, UsageError
from divdec.passes import length_of, lengths_of

_ROW_METHODS = ("crop", "reorder_cache", "batch_repeat_interleave", "batch_select_indices")


class DivergenceCache(Cache):
    """Caches of target, experts and takedowns, always of equal length.

    Its layers are those of its parts, so reordering, repeating, selecting, resetting and cropping reach all of them.

    Attributes:
        owner: identifies the steered model; keys and values of another model, or of a copy, are refused.
    """

    def __init__(self, target: Cache, experts: Cache, owner: str, takedowns: Cache | None = None) -> None:
        super().__init__(layers=[*target.layers, *experts.layers, *(takedowns.layers if takedowns else ())])
        self.owner = owner
        self.target = target
        self.experts = experts
        self.takedowns = takedowns
        self.is_interrupted = False  # a pass has ended in some of the layers

    def reset(self) -> None:
        """Remove all tokens."""
        super().reset()
        self.is_interrupted = False

    def check_length(self) -> int:
        """Return the number of tokens held.

        Raises:
            FailedClosed: the parts hold different numbers of tokens, so that the divergence would belong to another
                context than the target's logits; or a pass was interrupted.
        """
        if self.is_interrupted:
            raise FailedClosed("an error or Ctrl-C stopped a pass that was filling this cache; begin with a new one")
        lengths = [length_of(self.target), *lengths_of(self.experts)]
        if self.takedowns is not None:
            lengths.append(length_of(self.takedowns))
        if len(set(lengths)) > 1:
            raise FailedClosed(
                f"the caches of target and experts hold different numbers of tokens {lengths}: "
                "change them only through DivergenceCache"
            )
        return lengths[0]

    def check_rows(self, rows: int) -> None:
        """Refuse to continue with another number of sequences than the cache holds."""
        states = (getattr(layer, "keys", None) for layer in self.target.layers)
        cached_rows = next((len(keys) for keys in states if isinstance(keys, Tensor) and keys.numel()), rows)
        if cached_rows != rows:
            raise UsageError(
                f"past_key_values holds {cached_rows} sequences, but the input has {rows} (beams and "
                "num_return_sequences included); give as many, or repeat them with batch_repeat_interleave()"
            )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens held, by every layer."""
        return self.check_length()

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Remove the last tokens from every part; the number is negative, as in transformers.

        Raises:
            RuntimeError: a part cannot be rolled back; nothing has been removed.
        """
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.17 passes a tensor in assisted decoding
        if tokens_to_remove > 0:
            raise RuntimeError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number")
        if tokens_to_remove and not all(can_roll_back(layer) for layer in self.layers):
            raise RuntimeError(
                "the cache of one part (a sliding window or recurrent state) cannot be rolled back; "
                "call activate_past_recording() before the tokens are added"
            )
        super().crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row; a recurrent state raises a RuntimeError."""
        self._check_selectable()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows with these indices; a recurrent state raises a RuntimeError."""
        self._check_selectable()
        super().batch_select_indices(indices)

    def _check_selectable(self) -> None:
        if not all(map(holds_tokens, self.layers)):
            raise RuntimeError("the cache of one part keeps a recurrent state, whose rows cannot be selected")

    def deactivate_past_recording(self) -> None:
        """Let sliding windows drop old tokens again; see `activate_past_recording`."""
        for layer in self.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False  # pyright: ignore[reportAttributeAccessIssue]


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
