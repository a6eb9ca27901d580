"""Base classes and helpers of the decodings of composites. Free of torch at import, as the methods' files are."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from divdec_research.baselines.annotations import (
    Bool,
    Cache,
    Float,
    Int,
    Logits,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Tensor,
)

TARGET = "target"
DISTANCE = 30.0
"""Forbidden tokens lie this many nats below the least likely other token: never greedy, and with a finite loss."""


@dataclasses.dataclass(frozen=True)
class Step:
    """Inputs of one forward pass."""

    input_ids: Int[Tensor, "batch tokens"]
    attention_mask: Int[Tensor, "batch past_and_tokens"] | None
    position_ids: Int[Tensor, "batch_or_one tokens"]
    logits_to_keep: int
    """Number of positions to return, counted from the end; 0 for all."""


def read_tokens(step: Step, cache: Cache | None) -> Int[Tensor, "batch past_and_tokens"]:
    """Add the new tokens to a `TokenCache`, if one is given, and return all tokens on the CPU, −1 for padding."""
    from divdec.experts.token_cache import TokenCache, TokenLayer

    assert cache is None or isinstance(cache, TokenCache)
    layer = TokenLayer() if cache is None else cache.token_layer
    return layer.extend(step.input_ids, step.attention_mask)


class CompositeDecoding:
    """Computes a method's logits from target and helpers.

    The composite moves and counts the models, and the modules among a decoding's attributes.
    """

    def __init__(self, models: Mapping[str, PreTrainedModel], options: Mapping[str, Any], folder: Path) -> None:
        """Take target and helpers by name, and `load` the rest."""
        self.models = dict(models)
        self.load(options, folder)

    def load(self, options: Mapping[str, Any], folder: Path) -> None:
        """Read the options that `write_composite` was given, and files in the composite's folder."""

    def new_caches(self) -> list[Cache]:
        """Create empty caches, by default of target and tokens; each grows by one column per token."""
        return [self.new_cache(), self.new_token_cache()]

    def logits(self, step: Step, caches: Sequence[Cache | None]) -> Float[Tensor, "batch kept width"]:
        """Compute finite logits at the kept positions; each depends on the tokens before it only.

        Args:
            step: the tokens after those in the caches.
            caches: the caches of `new_caches`, or None in place of each.
        """
        raise NotImplementedError

    def new_cache(self, name: str = TARGET) -> Cache:
        """Create an empty cache of one model."""
        from divdec.passes import new_cache

        return new_cache(self.models[name])

    def new_token_cache(self) -> Cache:
        """Create an empty cache of token ids, for `read_tokens`."""
        from divdec.experts.token_cache import TokenCache

        return TokenCache()

    def model_logits(self, step: Step, cache: Cache | None, name: str = TARGET) -> Float[Tensor, "batch kept width"]:
        """Compute one model's logits at the kept positions in float32."""
        from divdec.passes import logits_of

        inputs = (step.input_ids, step.attention_mask, step.position_ids)
        return logits_of(self.models[name], *inputs, cache, step.logits_to_keep).float()


class LogitCombination(CompositeDecoding):
    """A formula over the logits of several models."""

    parts: tuple[str, ...]
    """Names of the models, in the order of the formula's arguments."""
    formula: Callable[..., Tensor]
    """Takes each model's logits, and the options by name."""

    def load(self, options: Mapping[str, Any], folder: Path) -> None:
        """Keep the options."""
        self.options = {name: float(value) for name, value in options.items()}

    def new_caches(self) -> list[Cache]:
        """One cache per model."""
        return [self.new_cache(name) for name in self.parts]

    def logits(self, step: Step, caches: Sequence[Cache | None]) -> Float[Tensor, "batch kept width"]:
        """See `CompositeDecoding.logits`."""
        results: list[Tensor] = []
        for name, cache in zip(self.parts, caches, strict=True):
            logits = self.model_logits(step, cache, name)
            results.append(logits.to(results[0].device) if results else logits)
        width = min(logits.shape[-1] for logits in results)
        return type(self).formula(*(logits[..., :width] for logits in results), **self.options)


def plausible(target: Logits, share: float) -> Bool[Tensor, "*positions vocab"]:
    """Mark tokens of at least `share` of the likeliest token's probability (Li et al. 2023, equation 2)."""
    # log 0 is -inf, and all finite logits are above it
    least = math.log(share) if share else -math.inf
    return target >= target.amax(dim=-1, keepdim=True) + least


def among_plausible(target: Logits, changed: Logits, head: Bool[Tensor, "*positions vocab"]) -> Logits:
    """Use the changed logits of plausible tokens, and keep all other tokens below them.

    The papers set the others to −∞, which likelihoods do not allow. Here they keep the target's logits, lowered by a
    constant where needed, so that the highest of them does not exceed the lowest plausible one. The ranking of tokens
    is the papers', all logits are finite, and where nothing is changed the result is the target's logits.
    """
    least = changed.masked_fill(~head, math.inf).amin(dim=-1, keepdim=True)
    highest = target.masked_fill(head, -math.inf).amax(dim=-1, keepdim=True)
    # Where all tokens are plausible `highest` is -inf and nothing is lowered.
    return changed.where(head, target - (highest - least).relu())


class Trie:
    """Forbidden words by the tokens before the token at which they are blocked (the paper's trie, flat)."""

    def __init__(self, words: Sequence[Sequence[int]], beta: float) -> None:
        self.blocked: dict[tuple[int, ...], set[int]] = {}
        for word in words:
            last = max(1, math.ceil(beta * len(word) - 1e-9)) - 1  # ⌈β·length⌉ tokens complete the match
            self.blocked.setdefault(tuple(word[:last]), set()).add(word[last])
        self.lengths = sorted({len(prefix) for prefix in self.blocked})

    def after(self, tokens: Sequence[int]) -> set[int]:
        """The tokens that are blocked after these tokens."""
        blocked: set[int] = set()
        for length in self.lengths:
            if length <= len(tokens):
                blocked |= self.blocked.get(tuple(tokens[len(tokens) - length :]), set())
        return blocked


def tokenize_words(words: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Tokenize words, both at the beginning of an answer and after a space."""
    tokens: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (f" {word}", word):
            ids: Any = tokenizer(text, add_special_tokens=False)["input_ids"]
            tokens[tuple(ids)] = None
    return [list(ids) for ids in tokens if ids]


def contexts(step: Step, cache: Cache | None, kept: int) -> Iterator[tuple[int, int, list[int]]]:
    """Yield row, kept position and the tokens up to it, −1 for padding; see `read_tokens`."""
    for row, ids in enumerate(read_tokens(step, cache).tolist()):
        for position in range(kept):
            yield row, position, ids[: len(ids) - kept + position + 1]


def blocked_logit(logits: Float[Tensor, " width"]) -> Float[Tensor, ""]:
    """The logit of a blocked token."""
    return logits.detach().amin() - DISTANCE
