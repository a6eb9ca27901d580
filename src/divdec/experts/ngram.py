"""A pair of n-gram language models: Stupid Backoff (Brants et al. 2007) over the target's tokens."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from divdec.errors import UsageError
from divdec.experts.ngram_counts import BACKOFF, SPACES, Counts
from divdec.experts.protocol import BaseExperts, Inputs
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
        """Return the score of every token after contexts, int64 [contexts, order − 1], with −1 before shorter ones."""
        lengths = (contexts != PADDING).sum(axis=1)
        table = self._dense_table()
        cached = self._cached_rows(table, contexts[:, -1], lengths)
        scores = table.scores.index_select(0, torch.from_numpy(np.where(cached > 0, cached, lengths)))
        # Longer contexts come later, so that their followers override those of shorter ones.
        for length in range(1, self._longest + 1):
            rows = np.flatnonzero((lengths >= length) & ((cached == 0) | (length > 1)))
            if len(rows):
                indices, values = self._follower_scores(rows, contexts[rows, self._longest - length :], lengths[rows])
                scores.view(-1).numpy()[indices] = values
        return scores

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
class _DenseTable:
    """Dense scores: one row for each context length, then one for each frequent token."""

    scores: Float[Tensor, "rows vocab"]
    rows: np.ndarray
    """The row of each token; 0 if it is not frequent."""
    is_computed: np.ndarray
    """Which rows of frequent tokens hold scores."""


class NgramPair(BaseExperts):
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
        self.cache_class = TokenCache
        self.retain = scorer
        self.forget = StupidBackoff(forget, space)
        self.vocab_size = retain.vocab_size
        self.order = retain.order
        if space == "score":
            self.largest = 1.0

    def new_cache(self) -> TokenCache:
        """Return an empty cache of tokens."""
        return TokenCache()

    def compute(self, inputs: Inputs, cache: TokenCache | None, logits_to_keep: int) -> Tensor:
        """Compute S_q − S_p."""
        read = masked if cache is None else cache.token_layer.extend
        tokens = read(inputs.input_ids, inputs.attention_mask)
        number = min(logits_to_keep or inputs.input_ids.shape[1], inputs.input_ids.shape[1])
        contexts = contexts_of(tokens.numpy(), number, self.order - 1)
        flat = contexts.reshape(-1, self.order - 1)
        divergence = self.retain.scores(flat).sub_(self.forget.scores(flat))
        return divergence.view(*contexts.shape[:2], self.vocab_size).to(inputs.input_ids.device)


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
