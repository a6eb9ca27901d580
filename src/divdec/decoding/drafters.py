"""What proposes tokens before the target is asked: an auxiliary, the pair at small scale, n-grams, the text itself.

Whatever they propose, what is kept follows the steered model; they decide only how much of a draft is kept.
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
from divdec.experts.ngram import NgramPair, StupidBackoff
from divdec.experts.token_cache import PADDING
from divdec.sampling import NONE
from divdec.steering import Steering

DRAFTERS = ("auto", "retain", "steered", "ngram", "lookup")
LONGEST_MATCH = 3  # tokens of the newest text that are looked for earlier in it
_log = logging.getLogger(__name__)
_told: set[str] = set()


@dataclasses.dataclass
class Block:
    """What a drafter may know: the sequences that go on, and the columns that it is to fill."""

    size: int
    """How many tokens are drafted; all but the last are judged by the target in one pass."""
    last: Int[Tensor, "rows 1"]
    """The newest token of each sequence, which no model has read yet."""
    mask: Int[Tensor, "rows past_and_block"] | None
    positions: Int[Tensor, "rows block"]
    cache: Cache
    """The experts'."""
    vocab_size: int
    choose: Callable[[int, Float[Tensor, "rows 1 vocab"]], tuple[Int[Tensor, "rows 1"], Float[Tensor, "rows 1 vocab"]]]
    """Given a place in the block and logits: a token drawn after all processors, and the scores it was drawn from."""
    texts: Callable[[], list[np.ndarray]]
    """All tokens of each sequence, padding left out, int64 [tokens]."""

    def mask_until(self, step: int) -> Int[Tensor, "rows past_and_step"] | None:
        """The mask of what has been read once the block's token `step` is."""
        return None if self.mask is None else self.mask[:, : self.mask.shape[1] - self.size + step + 1]


Draft = tuple[Int[Tensor, "rows block"], Float[Tensor, "rows block vocab"] | None]


@runtime_checkable
class Drafter(Protocol):
    """Proposes the tokens of a block, the last of which is never read by anybody."""

    name: str

    def draft(self, block: Block) -> Draft:
        """Tokens (−1 for none), and the scores that they were drawn from; None where they were not drawn."""
        ...


class NeuralDrafter:
    """An auxiliary goes ahead alone and its logits are kept, so that it reads nothing twice; or both do."""

    def __init__(self, pair: NeuralPair, cache_of: Callable[[Cache], PairCache], steering: Steering | None) -> None:
        self.name = "retain" if steering is None else "steered"
        self._pair = pair
        self._cache_of = cache_of
        self._steering = steering

    def draft(self, block: Block) -> Draft:
        """What q prefers; with a steering, what q, p and the rule prefer with p in the place of the target."""
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
    """What followed the newest tokens before: in q's n-grams where there are any, else in the text itself.

    A proposal depends on the tokens before it alone, and not on where a block begins.
    """

    def __init__(self, ngrams: StupidBackoff | None = None) -> None:
        self.name = "lookup" if ngrams is None else "ngram"
        self._ngrams = ngrams

    def draft(self, block: Block) -> Draft:
        """The most frequent continuation in the n-grams, or the latest in the text."""
        texts = block.texts()
        found = np.full((len(texts), block.size), NONE, dtype=np.int64)
        for row, text in enumerate(texts):
            text = np.concatenate([text, np.zeros(block.size, dtype=np.int64)])
            for step in range(block.size):
                known = text[: len(text) - block.size + step]
                token = self._next(known)
                if not 0 <= token < block.vocab_size:
                    break  # what comes next is not known, so neither is what follows it
                found[row, step] = text[len(known)] = token
        tokens = torch.from_numpy(found).to(block.last.device)
        return tokens, None

    def _next(self, text: np.ndarray) -> int:
        if self._ngrams is not None and (token := self._ngrams.likeliest(text)) != PADDING:
            return token
        return repeated(text)


def repeated(text: np.ndarray) -> int:
    """What followed the latest earlier place that ends like the text, the longest likeness first; −1 for none."""
    for length in range(min(LONGEST_MATCH, len(text) - 1), 0, -1):
        windows = np.lib.stride_tricks.sliding_window_view(text[:-1], length)
        places = np.flatnonzero((windows == text[-length:]).all(axis=1))
        if len(places):
            return int(text[places[-1] + length])
    return NONE


def make_drafter(name: str, experts: Any, steering: Steering, takedowns: Correction | None = None) -> Drafter:
    """The drafter of that name; 'auto' takes the best that these experts have, and says when that is not q.

    Without n-gram experts the n-grams of a registry's retain set draft.

    Raises:
        UsageError: the experts have nothing that could draft so.
    """
    pair, ngrams = _pair_of(experts), _ngrams_of(experts, takedowns)
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
    if name == "auto" and drafter.name not in _told:
        _told.add(drafter.name)
        what = "q's n-grams propose" if ngrams is not None else "what the text itself repeats is proposed as"
        _log.warning("no auxiliary has the target's own tokens to draft with: %s the next tokens", what)
    return drafter


def _pair_of(experts: Any) -> tuple[NeuralPair, Callable[[Cache], PairCache]] | None:
    if isinstance(experts, NeuralPair):
        return experts, lambda cache: cache  # pyright: ignore[reportReturnType]
    for place, part in enumerate(_parts_of(experts)):
        if isinstance(part, NeuralPair):

            def cache_of(cache: Cache, place: int = place) -> PairCache:
                assert isinstance(cache, CombinedCache)
                return cache.caches[place]  # pyright: ignore[reportReturnType]

            return part, cache_of
    return None


def _ngrams_of(experts: Any, takedowns: Correction | None) -> StupidBackoff | None:
    for part in (experts, *_parts_of(experts)):
        if isinstance(part, NgramPair):
            return part.retain
    return None if takedowns is None else takedowns.retain


def _parts_of(experts: Any) -> Sequence[Any]:
    return experts.parts if isinstance(experts, CombinedExperts) else ()
