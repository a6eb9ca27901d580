"""Weighted sums of experts, and experts with a divergence of 0."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import Cache

from divdec.errors import UsageError
from divdec.experts.protocol import Experts, Inputs
from divdec.passes import lengths_of
from divdec.steering import NO_RULE, Steering


class CombinedExperts(Experts, nn.Module):
    """Σ wᵢ·divergenceᵢ, so that the linear rule applies each with α·wᵢ (paper, eq. 1)."""

    def __init__(self, parts: Sequence[tuple[Experts, float]]) -> None:
        super().__init__()
        if not parts:
            raise UsageError("there are no experts: nothing would be forgotten")
        self.cache_class = CombinedCache
        self.parts = tuple(experts for experts, _ in parts)
        self.weights = tuple(float(weight) for _, weight in parts)
        self.vocab_size = min(experts.vocab_size for experts in self.parts)
        self.embeddings = min(getattr(experts, "embeddings", math.inf) for experts in self.parts)
        # Where one part alone knows a text, the others' divergence is near 0.
        self.largest = min((abs(weight) * experts.largest for experts, weight in parts if weight), default=0.0)
        # Submodules, so that `to` and `parameters` reach them.
        self.models = nn.ModuleList(experts for experts in self.parts if isinstance(experts, nn.Module))

    def new_cache(self) -> CombinedCache:
        """Return an empty cache for all experts."""
        return CombinedCache([experts.new_cache() for experts in self.parts])

    def compute(self, inputs: Inputs, cache: CombinedCache | None, logits_to_keep: int) -> Tensor:
        """Compute Σ wᵢ·divergenceᵢ."""
        caches = cache.caches if cache is not None else [None] * len(self.parts)
        total = None
        for experts, weight, part_cache in zip(self.parts, self.weights, caches, strict=True):
            divergence = experts.divergence(*inputs, part_cache, logits_to_keep)[..., : self.vocab_size]
            if weight != 1:
                divergence = weight * divergence
            total = divergence if total is None else total + divergence.to(total.device)
        assert total is not None
        return total


class NoExperts(Experts):
    """A divergence of 0, for a model that only takedown requests steer."""

    def __init__(self, vocab_size: int) -> None:
        self.cache_class = CombinedCache
        self.vocab_size = vocab_size

    def new_cache(self) -> CombinedCache:
        """Return a cache without layers."""
        return CombinedCache([])

    def compute(self, inputs: Inputs, cache: Cache | None, logits_to_keep: int) -> Tensor:
        """Return 0 for every token."""
        rows, positions = inputs.input_ids.shape
        positions = min(logits_to_keep or positions, positions)
        return torch.zeros(rows, positions, self.vocab_size, device=inputs.input_ids.device)


def rule_name(steering: Steering, experts: Experts, takedowns: object) -> str:
    """Name the steering: 'linear:1.5', 'takedowns' or 'linear:1.5 and takedowns'."""
    rules = [] if isinstance(experts, NoExperts) else [str(steering)]
    return " and ".join([*rules, "takedowns"] if takedowns is not None else rules)


def check_rule(steering: Steering, experts: Experts) -> None:
    """Refuse a rule that has no experts to apply to, and a margin that they never reach."""
    if isinstance(experts, NoExperts) and steering != Steering():
        raise UsageError(f"{steering}: {NO_RULE}")
    if steering.margin is not None and steering.margin > experts.largest:
        without = dataclasses.replace(steering, margin=None, full=False)
        raise UsageError(
            f"{steering}: the scores of these n-grams differ by at most {experts.largest:g}, so no token would reach "
            f"the margin of {steering.margin:g}; give a smaller one, none ({without}) or a larger --ngram-weight"
        )


class CombinedCache(Cache):
    """The caches of several experts; its layers are those of all."""

    def __init__(self, caches: Sequence[Cache]) -> None:
        super().__init__(layers=[layer for cache in caches for layer in cache.layers])
        self.caches = list(caches)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens in each cache."""
        return [length for cache in self.caches for length in lengths_of(cache)]
