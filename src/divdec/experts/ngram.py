"""A pair of n-gram language models: Stupid Backoff (Brants et al. 2007) over the target's tokens."""

from __future__ import annotations

import functools

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from divdec.errors import UsageError
from divdec.experts.ngram_counts import BACKOFF, Counts
from divdec.experts.protocol import Experts, Inputs
from divdec.experts.token_cache import PADDING, TokenCache, TokenLayer


class StupidBackoff:
    """Scores S(w | context) = f(context w) / f(context), or 0.4·S(w | shorter context) if that is 0 (eq. 5).

    Scores are a dense row, equal for all contexts of one length, into which the scores of the context's followers are
    written.
    """

    def __init__(self, counts: Counts, parts: int = 1) -> None:
        """`parts` interleaved vocabularies are counted apart: entry e of the counts is token e // parts of one."""
        self.counts, self._parts = counts, parts
        self._longest, self._width = counts.order - 1, counts.vocab_size // parts

    def scores(self, contexts: np.ndarray, part: int = 0) -> Float[Tensor, "contexts vocab"]:
        """Return the score of every token after contexts, int64 [contexts, order − 1], with −1 before shorter ones.

        Contexts are entries of the counts, all of the same `part`.
        """
        lengths = (contexts != PADDING).sum(axis=1)
        scores = self._without_followers[part].index_select(0, torch.from_numpy(lengths))
        # Longer contexts come later, so that their followers override those of shorter ones.
        for length in range(1, self._longest + 1):
            rows = np.flatnonzero(lengths >= length)
            if len(rows):
                indices, values = self._follower_scores(rows, contexts[rows, self._longest - length :], lengths[rows])
                scores.view(-1).numpy()[indices] = values
        return scores

    @functools.cached_property
    def _without_followers(self) -> Float[Tensor, "parts order vocab"]:
        """The scores after a context without followers, for each part and length of contexts."""
        counts = np.asarray(self.counts.unigrams).astype(np.float64)
        score = (counts / max(counts.sum(), 1.0)).reshape(self._width, self._parts).T
        scores = torch.empty(self._parts, self.counts.order, self._width)
        for length in range(self.counts.order):
            scores[:, length] = torch.from_numpy(score)
            score = BACKOFF * score
        return scores

    def _follower_scores(
        self, rows: np.ndarray, contexts: np.ndarray, lengths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return flat indices and scores of the followers of contexts, given the lengths of the rows' full contexts."""
        followers = self.counts.followers(contexts)
        score = followers.counts / followers.totals[followers.rows]
        steps = (lengths - contexts.shape[1])[followers.rows]
        for step in range(int(steps.max(initial=0))):
            score = np.where(step < steps, BACKOFF * score, score)
        indices = (rows * self._width)[followers.rows] + followers.tokens // self._parts
        return indices, score.astype(np.float32)


class NgramPair(Experts):
    """Retain model q and forget model p as n-gram counts; the divergence is S_q − S_p (paper, section 4.4)."""

    def __init__(self, retain: Counts, forget: Counts) -> None:
        if (retain.vocab_size, retain.order) != (forget.vocab_size, forget.order):
            raise UsageError(
                f"the n-gram counts do not belong together: retain has order {retain.order} over {retain.vocab_size} "
                f"tokens, forget order {forget.order} over {forget.vocab_size}"
            )
        if retain is forget:
            raise UsageError("retain and forget n-grams are the same: nothing would be forgotten")
        self.cache_class = TokenCache
        self.retain = StupidBackoff(retain)
        self.forget = StupidBackoff(forget)
        self.vocab_size = retain.vocab_size
        self.order = retain.order
        self.largest = 1.0

    def new_cache(self) -> TokenCache:
        """Return an empty cache of tokens."""
        return TokenCache()

    def compute(self, inputs: Inputs, cache: TokenCache | None, logits_to_keep: int) -> Tensor:
        """Compute S_q − S_p."""
        layer = TokenLayer() if cache is None else cache.token_layer
        tokens = layer.extend(inputs.input_ids, inputs.attention_mask)
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
