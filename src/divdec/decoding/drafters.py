"""Drafters of speculative decoding: an auxiliary, the pair at small scale, n-grams, or the text itself.

A drafter decides how many tokens are accepted, never which tokens an answer has.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache

from divdec.errors import UsageError
from divdec.experts.combined import CombinedCache, CombinedExperts
from divdec.experts.correction import Correction
from divdec.experts.neural import NeuralPair, PairCache
from divdec.experts.protocol import TokenPredictor
from divdec.experts.token_cache import PADDING
from divdec.sampling import NONE
from divdec.steering import Steering

DRAFTERS = ("auto", "retain", "steered", "ngram", "lookup")
MAX_MATCH = 3  # tokens of the text's end that are searched for in it
_log = logging.getLogger(__name__)
_warned: set[str] = set()


@dataclasses.dataclass
class Block:
    """Columns to draft, and what a drafter may read."""

    size: int
    """Number of tokens to draft; the target reads all but the last."""
    last: Int[Tensor, "rows 1"]
    """The newest token of each sequence, which no model has read yet."""
    mask: Int[Tensor, "rows past_and_block"] | None
    positions: Int[Tensor, "rows block"]
    cache: Cache
    """The experts' cache."""
    vocab_size: int
    choose: Callable[[int, Float[Tensor, "rows 1 vocab"]], tuple[Int[Tensor, "rows 1"], Float[Tensor, "rows 1 vocab"]]]
    """Draws a token from logits at a step of the block; returns it with the processed scores."""
    texts: Callable[[], list[np.ndarray]]
    """Returns all tokens of each sequence without padding, int64 [tokens]."""

    def mask_until(self, step: int) -> Int[Tensor, "rows past_and_step"] | None:
        """Return the attention mask up to the input of a step."""
        return None if self.mask is None else self.mask[:, : self.mask.shape[1] - self.size + step + 1]


Draft = tuple[Int[Tensor, "rows block"], Float[Tensor, "rows block vocab"] | None]


@runtime_checkable
class Drafter(Protocol):
    """Proposes the tokens of a block."""

    name: str

    def draft(self, block: Block) -> Draft:
        """Return tokens (−1 for none) and the scores they were drawn from; None if they were not drawn."""
        ...


class NeuralDrafter:
    """Drafts with q, or with p steered by q and p; their logits are kept, so that verification reads nothing twice."""

    def __init__(self, pair: NeuralPair, cache_of: Callable[[Cache], PairCache], steering: Steering | None) -> None:
        self.name = "retain" if steering is None else "steered"
        self._pair = pair
        self._cache_of = cache_of
        self._steering = steering

    def draft(self, block: Block) -> Draft:
        """Draw each token of the block from q, or with a steering from the rule applied to p instead of the target."""
        tokens, scores, token = [], [], block.last
        cache = self._cache_of(block.cache)
        for step in range(block.size):
            inputs = (token, block.mask_until(step), block.positions[:, step : step + 1], cache)
            logits = self._pair.read_ahead("retain", *inputs).float()
            if self._steering is not None:
                forget = self._pair.read_ahead("forget", *inputs).to(logits.device).float()
                logits = self._steering.apply(forget, logits - forget)
            token, score = block.choose(step, logits[..., : block.vocab_size])
            tokens.append(token)
            scores.append(score)
        return torch.cat(tokens, dim=1), torch.cat(scores, dim=1)


class TextDrafter:
    """Drafts the most frequent continuation in q's n-grams, if there are any, or the latest one in the text.

    A draft depends on the tokens before it, not on where its block begins.
    """

    def __init__(self, ngrams: TokenPredictor | None = None) -> None:
        self.name = "lookup" if ngrams is None else "ngram"
        self._ngrams = ngrams

    def draft(self, block: Block) -> Draft:
        """Continue each text, up to the first token without a known continuation."""
        texts = block.texts()
        drafts = np.full((len(texts), block.size), NONE, dtype=np.int64)
        for row, text in enumerate(texts):
            extended = np.concatenate([text, np.zeros(block.size, dtype=np.int64)])
            for step in range(block.size):
                token = self._next(extended[: len(text) + step])
                if not 0 <= token < block.vocab_size:
                    break
                drafts[row, step] = extended[len(text) + step] = token
        return torch.from_numpy(drafts).to(block.last.device), None

    def _next(self, text: np.ndarray) -> int:
        if self._ngrams is not None and (token := self._ngrams.likeliest(text)) != PADDING:
            return token
        return repeated(text)


def repeated(text: np.ndarray) -> int:
    """Return the token after the latest earlier occurrence of the text's longest repeated end; −1 for none."""
    for length in range(min(MAX_MATCH, len(text) - 1), 0, -1):
        windows = np.lib.stride_tricks.sliding_window_view(text[:-1], length)
        matches = np.flatnonzero((windows == text[-length:]).all(axis=1))
        if len(matches):
            return int(text[matches[-1] + length])
    return NONE


def make_drafter(name: str, experts: Any, steering: Steering, takedowns: Correction | None = None) -> Drafter:
    """Create a drafter; 'auto' selects the best that the experts offer, and warns once if it is not q.

    Without n-gram experts, the n-grams of a registry's retain set are used.

    Raises:
        UsageError: the experts lack what the drafter needs.
    """
    pair, ngrams = _find_pair(experts), _find_ngrams(experts, takedowns)
    if name in ("retain", "steered") and pair is None:
        raise UsageError(
            f"drafter {name!r} needs auxiliaries with the target's own tokens, which these experts do not have; "
            "accepted: 'auto', 'lookup'" + (", 'ngram'" if ngrams is not None else "")
        )
    if name == "ngram" and ngrams is None:
        raise UsageError("drafter 'ngram' needs n-gram experts; accepted: 'auto', 'retain', 'steered', 'lookup'")
    if pair is not None and name in ("auto", "retain", "steered"):
        return NeuralDrafter(*pair, steering if name == "steered" else None)
    drafter = TextDrafter(ngrams if name != "lookup" else None)
    if name == "auto" and drafter.name not in _warned:
        _warned.add(drafter.name)
        source = "q's n-grams" if ngrams is not None else "repetitions in the text"
        _log.warning("no auxiliary has the target's own tokens: drafts come from %s", source)
    return drafter


def _find_pair(experts: Any) -> tuple[NeuralPair, Callable[[Cache], PairCache]] | None:
    """Return the neural pair among the experts, and a function that finds its cache in theirs."""
    if isinstance(experts, NeuralPair):
        return experts, lambda cache: cache  # pyright: ignore[reportReturnType]
    for index, member in enumerate(_members(experts)):
        if isinstance(member, NeuralPair):

            def cache_of(cache: Cache, index: int = index) -> PairCache:
                assert isinstance(cache, CombinedCache)
                return cache.caches[index]  # pyright: ignore[reportReturnType]

            return member, cache_of
    return None


def _find_ngrams(experts: Any, takedowns: Correction | None) -> TokenPredictor | None:
    for member in (experts, *_members(experts)):
        if isinstance(predictor := getattr(member, "retain", None), TokenPredictor):
            return predictor
    return None if takedowns is None else takedowns.retain


def _members(experts: Any) -> Sequence[Any]:
    return experts.parts if isinstance(experts, CombinedExperts) else ()
