"""A pair of n-gram language models: Stupid Backoff (Brants et al. 2007) over the target's own tokens.

It knows nothing of how counts are made or kept; anything that says what follows a context will do.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache

from divdec.errors import UsageError
from divdec.experts.ngram_counts import BACKOFF, Counts
from divdec.experts.protocol import own_cache
from divdec.experts.token_cache import PADDING, TokenCache, masked

SPACES = ("score", "log")
FEW = 8  # a token that occurs no more often than a share of the vocabulary is followed by few
KEPT = 1 << 24  # numbers that may be kept for frequent tokens (64 MiB a model)


class StupidBackoff:
    """Scores S(w | context) = f(context w) / f(context), or 0.4·S(w | shorter context) where that is 0 (eq. 5).

    In the space 'log' the logarithm of that, for which every token counts one more at the lowest level. A score is a
    dense part, the same for every context of a length, on which what follows the context is written; after frequent
    tokens, which so much follows that writing it would be most of the work, the dense part is kept with it.
    """

    def __init__(self, counts: Counts, space: str = "score") -> None:
        self.counts = counts
        self.space = space
        self._longest = counts.order - 1
        self._dense: _Dense | None = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"counts": self.counts, "space": self.space}  # what is kept can be made again

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def scores(self, contexts: np.ndarray) -> Float[Tensor, "contexts vocab"]:
        """The score of every token after each context.

        Args:
            contexts: int64 [contexts, order − 1], −1 in front of those that are shorter.
        """
        parts = self._parts(contexts)
        found = parts.table.index_select(0, torch.from_numpy(parts.rows))
        found.view(-1).numpy()[parts.places] = parts.values
        return found

    def likeliest(self, tokens: np.ndarray) -> int:
        """What most often follows the longest known context at the end of a text; −1 where nothing is known.

        Args:
            tokens: int64 [tokens].
        """
        for length in range(min(self._longest, len(tokens)), 0, -1):
            followers = self.counts.followers(tokens[None, -length:])
            if len(followers.tokens):
                return int(followers.tokens[np.argmax(followers.counts)])
        return PADDING

    def take_from(self, scores: Float[Tensor, "contexts vocab"], contexts: np.ndarray) -> None:
        """Subtract the score of every token after each context, in place; see `scores`."""
        parts = self._parts(contexts)
        flat = scores.view(-1).numpy()
        written = flat[parts.places] - parts.values
        # Most contexts share one dense part, which then stays in the processor's own memory.
        common = int(np.bincount(parts.rows).argmax())
        others = np.flatnonzero(parts.rows != common).tolist()
        own = [(row, scores[row] - parts.table[parts.rows[row]]) for row in others]
        scores.sub_(parts.table[common])
        for row, difference in own:
            scores[row] = difference
        flat[parts.places] = written

    def _parts(self, contexts: np.ndarray) -> _Parts:
        """The same as rows of a table, and what is to be written on them."""
        lengths = (contexts != PADDING).sum(axis=1)
        dense = self._prepared()
        kept = self._kept_rows(dense, contexts[:, -1], lengths)
        places, values = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.float32)]
        # The longer the context, the later it is written: a follower of the longest one overrides the others.
        for length in range(1, self._longest + 1):
            rows = np.flatnonzero((lengths >= length) & ((kept == 0) | (length > 1)))
            if len(rows):
                written = self._following(rows, contexts[rows, self._longest - length :], lengths[rows])
                places.append(written[0])
                values.append(written[1])
        return _Parts(dense.table, np.where(kept > 0, kept, lengths), np.concatenate(places), np.concatenate(values))

    def _following(self, rows: np.ndarray, contexts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Places and scores of what follows contexts of one length, in rows whose whole contexts have some lengths."""
        followers = self.counts.followers(contexts)
        score = followers.counts / followers.totals[followers.rows]
        steps = lengths - contexts.shape[1]
        same = int(steps[0]) if (steps == steps[0]).all() else None
        for step in range(int(steps.max())):
            if same is not None:
                score *= BACKOFF
            else:
                score = np.where(step < steps[followers.rows], BACKOFF * score, score)
        places = (rows * self.counts.vocab_size)[followers.rows] + followers.tokens
        return places, (np.log(score) if self.space == "log" else score).astype(np.float32)

    def _prepared(self) -> _Dense:
        """The dense parts by length of context, and room for those of frequent tokens."""
        if self._dense is None:
            with self._lock:
                self._dense = self._dense or self._made()
        return self._dense

    def _made(self) -> _Dense:
        order, vocab_size = self.counts.order, self.counts.vocab_size
        counts = np.asarray(self.counts.unigrams)
        unigrams = counts.astype(np.float64) + (1 if self.space == "log" else 0)
        score = unigrams / max(unigrams.sum(), 1.0)
        # Fewer followers are written faster than a row is read from memory.
        frequent = np.argsort(-counts, kind="stable")[: min(KEPT // vocab_size, vocab_size)]
        frequent = frequent[counts[frequent] > vocab_size // FEW]
        table = torch.empty(order + len(frequent), vocab_size)
        for length in range(order):
            table[length] = torch.from_numpy(np.log(score) if self.space == "log" else score)
            score = BACKOFF * score
        rows = np.zeros(vocab_size, dtype=np.int64)
        rows[frequent] = np.arange(order, len(table))
        return _Dense(table, rows, np.zeros(len(table), dtype=bool))

    def _kept_rows(self, dense: _Dense, last: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The table's row for each context of full length that ends in a frequent token; 0 for the others."""
        possible = (lengths == self._longest) & (last >= 0) & (last < self.counts.vocab_size)
        found = np.where(possible, dense.rows[np.where(possible, last, 0)], 0)
        if not dense.made[found[found > 0]].all():
            with self._lock:
                tokens = np.unique(last[(found > 0) & ~dense.made[found]])
                if len(tokens):
                    made = dense.table[self._longest].repeat(len(tokens), 1)
                    full = np.full(len(tokens), self._longest)
                    places, values = self._following(np.arange(len(tokens)), tokens[:, None], full)
                    made.view(-1).numpy()[places] = values
                    dense.table[torch.from_numpy(dense.rows[tokens])] = made
                    dense.made[dense.rows[tokens]] = True
        return found


@dataclasses.dataclass(frozen=True)
class _Parts:
    """Scores as rows of a table and what is written on them, the last of several at one place."""

    table: Float[Tensor, "rows vocab"]
    rows: np.ndarray
    """The table's row for each context, [contexts]."""
    places: np.ndarray
    """Where something is written, context times vocabulary plus token, [written]."""
    values: np.ndarray
    """float32 [written]."""


@dataclasses.dataclass(frozen=True)
class _Dense:
    """Dense parts of scores: one for each length of context, then one for each frequent token."""

    table: Float[Tensor, "rows vocab"]
    rows: np.ndarray
    """The row of each token; 0 for one that is not frequent."""
    made: np.ndarray
    """Which rows of frequent tokens have been written."""


class NgramPair:
    """Retain model q and forget model p as n-gram counts; the divergence is S_q − S_p (paper, section 4.4)."""

    def __init__(self, retain: Counts | StupidBackoff, forget: Counts, space: str = "score") -> None:
        scorer = retain if isinstance(retain, StupidBackoff) else StupidBackoff(retain, space)
        retain = scorer.counts
        if space not in SPACES:
            raise UsageError(f"space is {space!r}; accepted: 'score', 'log'")
        if (retain.vocab_size, retain.order) != (forget.vocab_size, forget.order):
            raise UsageError(
                f"the n-gram counts do not belong together: retain has order {retain.order} over {retain.vocab_size} "
                f"tokens, forget order {forget.order} over {forget.vocab_size}"
            )
        if retain is forget:
            raise UsageError("retain and forget n-grams are the same: nothing would be forgotten")
        self.retain = scorer
        self.forget = StupidBackoff(forget, space)
        self.vocab_size = retain.vocab_size
        self.order = retain.order

    def new_cache(self) -> TokenCache:
        """An empty cache of tokens."""
        return TokenCache()

    def divergence(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch past_and_tokens"] | None = None,
        position_ids: Int[Tensor, "batch_or_one tokens"] | None = None,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
    ) -> Float[Tensor, "batch kept vocab"]:
        """S_q − S_p; see `divdec.experts.protocol.Experts.divergence`."""
        tokens = tokens_of(input_ids, attention_mask, cache)
        kept = logits_to_keep or input_ids.shape[1]
        contexts = contexts_of(tokens.numpy(), min(kept, input_ids.shape[1]), self.order - 1)
        flat = contexts.reshape(-1, self.order - 1)
        divergence = self.retain.scores(flat)
        self.forget.take_from(divergence, flat)
        return divergence.view(*contexts.shape[:2], self.vocab_size).to(input_ids.device)


def tokens_of(
    input_ids: Int[Tensor, "batch tokens"],
    attention_mask: Int[Tensor, "batch past_and_tokens"] | None,
    cache: Cache | None,
) -> Int[Tensor, "batch past_and_tokens"]:
    """All tokens up to now, the cached ones included; −1 for padding."""
    held = own_cache(cache, TokenCache)
    return masked(input_ids, attention_mask) if held is None else held.token_layer.extend(input_ids, attention_mask)


def contexts_of(tokens: np.ndarray, kept: int, length: int) -> np.ndarray:
    """The last tokens up to each of the last positions, padding left out wherever it stands.

    Args:
        tokens: int64 [batch, tokens], −1 for padding.
        kept: how many positions, from the end.
        length: how many tokens each context has.

    Returns:
        int64 [batch, kept, length], −1 in front of contexts that are shorter.
    """
    batch, width = tokens.shape
    tail = tokens[:, max(width - kept - length + 1, 0) :]
    if tail.shape[1] == kept + length - 1 and (tail != PADDING).all():
        return np.lib.stride_tricks.sliding_window_view(tail, length, axis=1)
    places = np.where(tokens != PADDING, np.arange(width), -1)
    latest = np.maximum.accumulate(places, axis=1)  # the last token at or before each place
    rows = np.arange(batch)[:, None]
    current = latest[:, width - kept :]
    found = np.full((batch, kept, length), PADDING, dtype=np.int64)
    for step in range(length - 1, -1, -1):
        found[..., step] = np.where(current >= 0, tokens[rows, current], PADDING)
        current = np.where(current > 0, latest[rows, np.maximum(current - 1, 0)], -1)
    return found
