"""A pair of n-gram language models: Stupid Backoff (Brants et al. 2007) over the target's tokens."""

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
from divdec.experts.ngram_counts import BACKOFF, SPACES, Counts
from divdec.experts.protocol import own_cache
from divdec.experts.token_cache import PADDING, TokenCache, masked

MIN_FREQUENCY = 8  # a token is frequent if it occurs more than vocab_size / 8 times
MAX_CACHED = 1 << 24  # scores stored for frequent tokens (64 MiB a model)


class StupidBackoff:
    """Scores S(w | context) = f(context w) / f(context), or 0.4·S(w | shorter context) if that is 0 (eq. 5).

    In the space 'log' the scores are logarithms, and every unigram counts once more.

    Scores are a dense row, equal for all contexts of one length, into which the scores of the context's followers are
    written. Frequent tokens have too many followers for that: their dense rows with followers are cached.
    """

    def __init__(self, counts: Counts, space: str = "score") -> None:
        self.counts = counts
        self.space = space
        self._longest = counts.order - 1
        self._table: _DenseTable | None = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"counts": self.counts, "space": self.space}  # the table can be computed again

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def scores(self, contexts: np.ndarray) -> Float[Tensor, "contexts vocab"]:
        """Return the score of every token after each context.

        Args:
            contexts: int64 [contexts, order − 1]; shorter ones have −1 in front.
        """
        sparse = self._sparse_scores(contexts)
        scores = sparse.table.index_select(0, torch.from_numpy(sparse.rows))
        scores.view(-1).numpy()[sparse.indices] = sparse.values
        return scores

    def subtract_scores(self, scores: Float[Tensor, "contexts vocab"], contexts: np.ndarray) -> None:
        """Subtract the score of every token after each context, in place; see `scores`."""
        sparse = self._sparse_scores(contexts)
        flat = scores.view(-1).numpy()
        follower_scores = flat[sparse.indices] - sparse.values
        # Most contexts share one dense row, which then stays in the processor's cache.
        common = int(np.bincount(sparse.rows).argmax())
        others = np.flatnonzero(sparse.rows != common).tolist()
        other_rows = [(row, scores[row] - sparse.table[sparse.rows[row]]) for row in others]
        scores.sub_(sparse.table[common])
        for row, difference in other_rows:
            scores[row] = difference
        flat[sparse.indices] = follower_scores

    def likeliest(self, tokens: np.ndarray) -> int:
        """Return the most frequent follower of the longest known context at a text's end; −1 if there is none.

        Args:
            tokens: int64 [tokens].
        """
        for length in range(min(self._longest, len(tokens)), 0, -1):
            followers = self.counts.followers(tokens[None, -length:])
            if len(followers.tokens):
                return int(followers.tokens[np.argmax(followers.counts)])
        return PADDING

    def _sparse_scores(self, contexts: np.ndarray) -> _SparseScores:
        lengths = (contexts != PADDING).sum(axis=1)
        table = self._dense_table()
        cached = self._cached_rows(table, contexts[:, -1], lengths)
        indices, values = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.float32)]
        # Longer contexts come later, so that their followers override those of shorter ones.
        for length in range(1, self._longest + 1):
            rows = np.flatnonzero((lengths >= length) & ((cached == 0) | (length > 1)))
            if len(rows):
                written = self._follower_scores(rows, contexts[rows, self._longest - length :], lengths[rows])
                indices.append(written[0])
                values.append(written[1])
        rows = np.where(cached > 0, cached, lengths)
        return _SparseScores(table.scores, rows, np.concatenate(indices), np.concatenate(values))

    def _follower_scores(
        self, rows: np.ndarray, contexts: np.ndarray, lengths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return flat indices and scores of the followers of contexts, given the lengths of the rows' full contexts."""
        followers = self.counts.followers(contexts)
        score = followers.counts / followers.totals[followers.rows]
        steps = lengths - contexts.shape[1]
        same = int(steps[0]) if (steps == steps[0]).all() else None
        for step in range(int(steps.max())):
            if same is not None:
                score *= BACKOFF
            else:
                score = np.where(step < steps[followers.rows], BACKOFF * score, score)
        indices = (rows * self.counts.vocab_size)[followers.rows] + followers.tokens
        return indices, (np.log(score) if self.space == "log" else score).astype(np.float32)

    def _dense_table(self) -> _DenseTable:
        if self._table is None:
            with self._lock:
                self._table = self._table or self._new_table()
        return self._table

    def _new_table(self) -> _DenseTable:
        """Compute the dense rows of all context lengths, and reserve rows for frequent tokens."""
        order, vocab_size = self.counts.order, self.counts.vocab_size
        counts = np.asarray(self.counts.unigrams)
        unigrams = counts.astype(np.float64) + (1 if self.space == "log" else 0)
        score = unigrams / max(unigrams.sum(), 1.0)
        # Fewer followers are written faster than a row is read from memory.
        frequent = np.argsort(-counts, kind="stable")[: min(MAX_CACHED // vocab_size, vocab_size)]
        frequent = frequent[counts[frequent] > vocab_size // MIN_FREQUENCY]
        scores = torch.empty(order + len(frequent), vocab_size)
        for length in range(order):
            scores[length] = torch.from_numpy(np.log(score) if self.space == "log" else score)
            score = BACKOFF * score
        rows = np.zeros(vocab_size, dtype=np.int64)
        rows[frequent] = np.arange(order, len(scores))
        return _DenseTable(scores, rows, np.zeros(len(scores), dtype=bool))

    def _cached_rows(self, table: _DenseTable, last: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the table's row for each context of full length that ends in a frequent token; 0 for the others."""
        possible = (lengths == self._longest) & (last >= 0) & (last < self.counts.vocab_size)
        rows = np.where(possible, table.rows[np.where(possible, last, 0)], 0)
        if not table.is_computed[rows[rows > 0]].all():
            with self._lock:
                tokens = np.unique(last[(rows > 0) & ~table.is_computed[rows]])
                if len(tokens):
                    scores = table.scores[self._longest].repeat(len(tokens), 1)
                    lengths = np.full(len(tokens), self._longest)
                    indices, values = self._follower_scores(np.arange(len(tokens)), tokens[:, None], lengths)
                    scores.view(-1).numpy()[indices] = values
                    table.scores[torch.from_numpy(table.rows[tokens])] = scores
                    table.is_computed[table.rows[tokens]] = True
        return rows


@dataclasses.dataclass(frozen=True)
class _SparseScores:
    """Scores as rows of a dense table, and the values that override them; the last value at an index counts."""

    table: Float[Tensor, "rows vocab"]
    rows: np.ndarray
    """The table's row for each context, [contexts]."""
    indices: np.ndarray
    """Flat index of each value: context times vocabulary plus token, [values]."""
    values: np.ndarray
    """float32 [values]."""


@dataclasses.dataclass(frozen=True)
class _DenseTable:
    """Dense scores: one row for each context length, then one for each frequent token."""

    scores: Float[Tensor, "rows vocab"]
    rows: np.ndarray
    """The row of each token; 0 if it is not frequent."""
    is_computed: np.ndarray
    """Which rows of frequent tokens hold scores."""


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
        """Return an empty cache of tokens."""
        return TokenCache()

    def divergence(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch past_and_tokens"] | None = None,
        position_ids: Int[Tensor, "batch_or_one tokens"] | None = None,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
    ) -> Float[Tensor, "batch kept vocab"]:
        """Return S_q − S_p; see `divdec.experts.protocol.Experts.divergence`."""
        tokens = tokens_of(input_ids, attention_mask, cache)
        number = min(logits_to_keep or input_ids.shape[1], input_ids.shape[1])
        contexts = contexts_of(tokens.numpy(), number, self.order - 1)
        flat = contexts.reshape(-1, self.order - 1)
        divergence = self.retain.scores(flat)
        self.forget.subtract_scores(divergence, flat)
        return divergence.view(*contexts.shape[:2], self.vocab_size).to(input_ids.device)


def tokens_of(
    input_ids: Int[Tensor, "batch tokens"],
    attention_mask: Int[Tensor, "batch past_and_tokens"] | None,
    cache: Cache | None,
) -> Int[Tensor, "batch past_and_tokens"]:
    """Return all tokens, cached ones included; −1 for padding."""
    own = own_cache(cache, TokenCache)
    return masked(input_ids, attention_mask) if own is None else own.token_layer.extend(input_ids, attention_mask)


def contexts_of(tokens: np.ndarray, number: int, length: int) -> np.ndarray:
    """Return the last tokens up to each of the last positions, without padding.

    Args:
        tokens: int64 [batch, tokens], −1 for padding.
        number: number of positions, counted from the end.
        length: number of tokens of each context.

    Returns:
        int64 [batch, positions, length], −1 in front of shorter contexts.
    """
    batch, width = tokens.shape
    tail = tokens[:, max(width - number - length + 1, 0) :]
    if tail.shape[1] == number + length - 1 and (tail != PADDING).all():
        return np.lib.stride_tricks.sliding_window_view(tail, length, axis=1)
    columns = np.where(tokens != PADDING, np.arange(width), -1)
    latest = np.maximum.accumulate(columns, axis=1)  # the last token at or before each column
    rows = np.arange(batch)[:, None]
    current = latest[:, width - number :]
    contexts = np.full((batch, number, length), PADDING, dtype=np.int64)
    for step in range(length - 1, -1, -1):
        contexts[..., step] = np.where(current >= 0, tokens[rows, current], PADDING)
        current = np.where(current > 0, latest[rows, np.maximum(current - 1, 0)], -1)
    return contexts
