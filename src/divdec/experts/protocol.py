"""The interface of experts."""

from __future__ import annotations

import abc
import math
from typing import Any, NamedTuple, TypeVar

from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache

OwnCache = TypeVar("OwnCache", bound=Cache)


class Inputs(NamedTuple):
    """The tokens of a pass; see `Experts.divergence`."""

    input_ids: Int[Tensor, "batch tokens"]
    attention_mask: Int[Tensor, "batch past_and_tokens"] | None
    position_ids: Int[Tensor, "batch_or_one tokens"] | None


class Experts(abc.ABC):
    """A retain and a forget model that compute log q − log p over the target's vocabulary."""

    vocab_size: int
    """Width of the divergence: the vocabulary that both models share."""
    cache_class: type[Cache]
    """Type of cache that `new_cache` returns."""
    largest: float = math.inf
    """Largest absolute value of the divergence; of several experts, the smallest such value."""

    @abc.abstractmethod
    def new_cache(self) -> Cache:
        """Return an empty cache for `divergence`; it can be cropped, reordered and selected from by row."""

    @abc.abstractmethod
    def compute(self, inputs: Inputs, cache: Any, logits_to_keep: int) -> Tensor:
        """Compute the divergence; `cache` is a `cache_class`, or None."""

    def divergence(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch past_and_tokens"] | None = None,
        position_ids: Int[Tensor, "batch_or_one tokens"] | None = None,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
    ) -> Float[Tensor, "batch kept vocab"]:
        """Return log q − log p after each of the last `logits_to_keep` tokens (after every token if 0), in float32.

        Args:
            input_ids: the tokens that `cache` does not hold yet.
            attention_mask: 1 for tokens, 0 for padding, cached tokens included.
            position_ids: position of each token in its sequence, padding not counted.
            cache: from `new_cache`; it is extended by `input_ids`. None computes without a cache.
            logits_to_keep: number of positions to return, counted from the end.

        Raises:
            TypeError: the cache is not from `new_cache`.
        """
        experts_cache = own_cache(cache, self.cache_class)
        return self.compute(Inputs(input_ids, attention_mask, position_ids), experts_cache, logits_to_keep)


def own_cache(cache: Cache | None, kind: type[OwnCache]) -> OwnCache | None:
    """Return the cache if it is of the type that the experts' `new_cache` returns."""
    if cache is not None and not isinstance(cache, kind):
        raise TypeError(f"the experts' cache is a {type(cache).__name__}; it must come from new_cache()")
    return cache
