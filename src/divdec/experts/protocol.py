"""What every kind of expert offers: a divergence over the target's vocabulary, and a cache of its own.

The protocol knows nothing of the target or of rules; `divdec.model` joins the three.
"""

from __future__ import annotations

from typing import Protocol, TypeVar, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache

OwnCache = TypeVar("OwnCache", bound=Cache)


@runtime_checkable
class Experts(Protocol):
    """A pair (retain, forget) that answers: given the tokens so far, what is ℓ_q − ℓ_p?"""

    vocab_size: int
    """Width of the divergence: the common vocabulary of the pair."""

    def new_cache(self) -> Cache:
        """An empty cache that `divergence` fills; it can be cropped, reordered and selected from by batch."""
        ...

    def divergence(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch past_and_tokens"] | None = None,
        position_ids: Int[Tensor, "batch_or_one tokens"] | None = None,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
    ) -> Float[Tensor, "batch kept vocab"]:
        """ℓ_q − ℓ_p after each of the last `logits_to_keep` tokens (after every token where it is 0), in float32.

        Args:
            input_ids: the tokens since what `cache` holds.
            attention_mask: 1 for real tokens, 0 for padding, the cached ones included.
            position_ids: place of each token in its sequence, padding not counted.
            cache: what `new_cache` made; it is extended by `input_ids`. None computes without one.
            logits_to_keep: how many positions are returned, counted from the end.
        """
        ...


def own_cache(cache: Cache | None, kind: type[OwnCache]) -> OwnCache | None:
    """The cache, once it is one of those that the experts' `new_cache` makes.

    Raises:
        TypeError: it is of another kind.
    """
    if cache is not None and not isinstance(cache, kind):
        raise TypeError(f"the experts' cache is a {type(cache).__name__}; it must come from new_cache()")
    return cache
