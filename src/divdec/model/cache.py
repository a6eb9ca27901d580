"""One cache for target and experts together: what is done to it is done to all of them, or to none."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Cache

from divdec.errors import FailedClosed


class DivergenceCache(Cache):
    """The target's cache and the experts', of equal length at all times.

    Its layers are those of its parts, so that reordering, repeating and selecting by batch, resetting and
    cropping reach every model. `owner` tells the steered models of a process apart: the keys and values of one
    mean nothing to another.
    """

    def __init__(self, target: Cache, experts: Cache, owner: int) -> None:
        super().__init__(layers=[*target.layers, *experts.layers])
        self.owner = owner
        self.target = target
        self.experts = experts

    @property
    def parts(self) -> tuple[Cache, ...]:
        """The caches that must hold the same tokens."""
        return self.target, *getattr(self.experts, "parts", (self.experts,))

    def check_length(self) -> int:
        """The number of tokens held.

        Raises:
            FailedClosed: the parts hold different numbers of tokens; the divergence would then belong to
                another context than the target's logits.
        """
        lengths = [_length(part) for part in self.parts]
        if len(set(lengths)) > 1:
            raise FailedClosed(
                f"the caches of target and experts hold different numbers of tokens {lengths}: "
                "change them only through DivergenceCache"
            )
        return lengths[0]

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Remove the last tokens (given as transformers does, as a negative number) from every part.

        Raises:
            RuntimeError: one part cannot be rolled back; nothing has then been removed from any.
        """
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding of transformers 5.17 gives a tensor
        if tokens_to_remove > 0:
            raise RuntimeError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number")
        if tokens_to_remove and not all(_can_roll_back(layer) for layer in self.layers):
            raise RuntimeError(
                "the cache of one part (a sliding window or recurrent state) cannot be rolled back; "
                "call activate_past_recording() before the tokens are added"
            )
        super().crop(tokens_to_remove)


def _length(cache: Cache) -> int:
    # Layers that share another's keys and values stay empty, so the fullest one tells.
    layers: list[Any] = [layer for layer in cache.layers if hasattr(layer, "get_seq_length")]
    return max((layer.get_seq_length() for layer in layers), default=0)


def _can_roll_back(layer: Any) -> bool:
    if getattr(layer, "record_past", False):
        return True
    window = getattr(layer, "sliding_window", None)
    if window is not None:
        return layer.get_seq_length() < window
    return getattr(layer, "is_croppable", True)
