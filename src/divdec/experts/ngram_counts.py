"""Counts of n-grams in sorted, memory-mapped arrays.

An n-gram's id is its index in the sorted array of its length. Its key is the id of its first n−1 tokens times the
vocabulary size, plus its last token. So keys of any order fit into 64 bits, and the followers of a context are
contiguous: each array is a sparse matrix (CSR) whose rows are contexts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from divdec.errors import UsageError, first_line
from divdec.runs import file_sha256, read_json

MAX_ORDER = 5
BACKOFF = 0.4  # Brants et al. 2007, section 4
MAX_SAMPLED = 10_000  # n-grams of a text that `mean_difference` scores
FORMAT = "divdec n-gram counts 1"
DESCRIPTION = "counts.json"


@dataclasses.dataclass(frozen=True)
class Followers:
    """The tokens that follow each of several contexts of one length."""

    totals: np.ndarray
    """Occurrences of each context, [contexts]."""
    rows: np.ndarray
    """Index of the context that each follower belongs to, [followers]."""
    tokens: np.ndarray
    """Token ids, [followers]; distinct for each context."""
    counts: np.ndarray
    """Occurrences of each follower after its context, [followers]."""


@dataclasses.dataclass(frozen=True)
class NgramCounts:
    """Counts of the n-grams of documents, up to an order."""

    vocab_size: int
    unigrams: np.ndarray
    keys: tuple[np.ndarray, ...]
    """Sorted keys for lengths 2 to order, int64."""
    counts: tuple[np.ndarray, ...]
    """Occurrences of each n-gram, for the same lengths."""
    rows: tuple[np.ndarray, ...]
    """Index in `keys` at which the n-grams of each context begin, then the end of the last, for the same lengths."""

    @property
    def order(self) -> int:
        """Length of the longest n-grams."""
        return len(self.keys) + 1

    @functools.cached_property
    def tokens(self) -> int:
        """Number of tokens counted."""
        return int(self.unigrams.sum())

    @property
    def distinct(self) -> int:
        """Number of distinct n-grams of all lengths."""
        return int(np.count_nonzero(self.unigrams)) + sum(map(len, self.keys))

    @classmethod
    def load(cls, folder: Path, *, verify: bool = True) -> NgramCounts:
        """Memory-map the arrays of a folder; `verify` compares every file with its digest.

        Raises:
            UsageError: the folder holds no counts, or a file of it is missing or has changed.
        """
        if not (folder / DESCRIPTION).is_file():
            raise UsageError(f"{folder} holds no n-gram counts: it has no {DESCRIPTION}; `divdec ngram` writes them")
        description = read_json(folder / DESCRIPTION)
        try:
            if description["format"] != FORMAT:
                raise ValueError(f"it is not the description of {FORMAT!r}")
            order, digests = int(description["order"]), dict(description["sha256"])
            names = {name: [f"{name}-{n}.npy" for n in range(2, order + 1)] for name in ("keys", "counts", "rows")}
            for name in sorted(["unigrams.npy", *itertools.chain(*names.values())]):
                if not (folder / name).is_file():
                    raise UsageError(f"{folder}: {name} is missing; fit the counts again")
                if verify and file_sha256(folder / name) != digests.get(name):
                    raise UsageError(f"{folder / name} has changed since it was written; fit the counts again")
            arrays = [tuple(_load_array(folder / name) for name in files) for files in names.values()]
            return cls(int(description["vocab_size"]), np.asarray(_load_array(folder / "unigrams.npy")), *arrays)
        except UsageError:
            raise
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{folder}: the counts cannot be read ({first_line(error)}); fit them again") from None

    def ids_of(self, ngrams: np.ndarray) -> np.ndarray:
        """Return the id of each n-gram, int64 [n-grams, length]; −1 if it never occurs."""
        ids = np.where((ngrams[:, 0] >= 0) & (ngrams[:, 0] < self.vocab_size), ngrams[:, 0], -1)
        for column in range(1, ngrams.shape[1]):
            token, keys = ngrams[:, column], self.keys[column - 1]
            sought = ids * self.vocab_size + token
            index = np.minimum(np.searchsorted(keys, sought), max(len(keys) - 1, 0))
            possible = (ids >= 0) & (token >= 0) & (token < self.vocab_size)
            ids = np.where(possible & (keys[index] == sought), index, -1) if len(keys) else np.full_like(ids, -1)
        return ids

    def frequencies(self, ngrams: np.ndarray) -> np.ndarray:
        """Return the occurrences of each n-gram, int64 [n-grams]; see `ids_of`."""
        ids = self.ids_of(ngrams)
        counts = self.unigrams if ngrams.shape[1] == 1 else self.counts[ngrams.shape[1] - 2]
        return np.where(ids >= 0, _take(counts, np.where(ids >= 0, ids, 0)), 0).astype(np.int64)

    def followers(self, contexts: np.ndarray) -> Followers:
        """Return the followers of contexts, ordered by context and token id."""
        length = contexts.shape[1]
        ids = self.ids_of(contexts)
        known = ids >= 0
        indices = np.where(known, ids, 0)
        totals = self.unigrams[indices] if length == 1 else _take(self.counts[length - 2], indices)
        rows = self.rows[length - 1]
        # If no document is as long as the context, there is one row and every id is unknown.
        starts, ends = (rows[np.minimum(row, len(rows) - 1)].astype(np.int64) for row in (indices, indices + 1))
        lengths = np.where(known, ends - starts, 0)
        follower_rows = np.repeat(np.arange(len(ids)), lengths)
        # The indices from each start, as many as its length, concatenated.
        entries = np.arange(int(lengths.sum())) + np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
        tokens = self.keys[length - 1][entries] - np.repeat(indices * self.vocab_size, lengths)
        return Followers(np.where(known, totals, 0), follower_rows, tokens, self.counts[length - 1][entries])


class SummedCounts:
    """Sum of counts, equal to counting the documents of all."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = tuple(parts)
        """The largest first."""
        self.vocab_size, self.order = parts[0].vocab_size, parts[0].order

    @property
    def unigrams(self) -> np.ndarray:
        """Occurrences by token id, [vocab]."""
        return functools.reduce(np.add, (part.unigrams for part in self.parts))

    def followers(self, contexts: np.ndarray) -> Followers:
        """Return the followers of contexts in any of them."""
        followers = (part.followers(contexts) for part in self.parts)
        return functools.reduce(lambda larger, other: summed(larger, other, self.vocab_size), followers)


class CountDifference:
    """Counts `whole` without the documents of `removed`, which it includes."""

    def __init__(self, whole: Counts, removed: Counts) -> None:
        self.whole, self.removed = whole, removed
        self.vocab_size, self.order = whole.vocab_size, whole.order

    @property
    def unigrams(self) -> np.ndarray:
        """Occurrences by token id, [vocab]."""
        return np.maximum(self.whole.unigrams - self.removed.unigrams, 0)

    def followers(self, contexts: np.ndarray) -> Followers:
        """Return the followers of contexts in the remaining documents."""
        followers, other = self.whole.followers(contexts), self.removed.followers(contexts)
        minus = dataclasses.replace(other, totals=-other.totals.astype(np.int64), counts=-other.counts.astype(np.int64))
        rest = summed(followers, minus, self.vocab_size)
        positive = (rest.counts > 0) & (rest.totals[rest.rows] > 0)
        rows = rest.rows[positive]
        # A context at the end of a removed document has no follower there, so a follower may outnumber its context.
        counts = np.minimum(rest.counts[positive], rest.totals[rows])
        return Followers(np.maximum(rest.totals, 0), rows, rest.tokens[positive], counts)


Counts = NgramCounts | SummedCounts | CountDifference


def backoff_scores(counts: Counts, ngrams: np.ndarray) -> np.ndarray:
    """Return the Stupid Backoff score of each n-gram's last token after the others (Brants et al. 2007, eq. 5).

    `ngrams` is int64 [n-grams, length], the result float64 [n-grams]. `divdec.experts.ngram.StupidBackoff` computes the
    same for the whole vocabulary.
    """
    unigrams = np.asarray(counts.unigrams)
    score = unigrams[ngrams[:, -1]] / max(int(unigrams.sum()), 1)
    for length in range(1, ngrams.shape[1]):
        contexts, rows = np.unique(ngrams[:, -1 - length : -1], axis=0, return_inverse=True)
        followers = counts.followers(contexts)
        score = BACKOFF * score
        if not len(followers.tokens):
            continue
        keys = followers.rows * counts.vocab_size + followers.tokens
        order = np.argsort(keys)
        sought = rows.reshape(-1) * counts.vocab_size + ngrams[:, -1]
        nearest = order[np.minimum(np.searchsorted(keys, sought, sorter=order), len(keys) - 1)]
        matches = keys[nearest] == sought
        hits = nearest[matches]
        score[matches] = followers.counts[hits] / followers.totals[followers.rows[hits]]
    return score


def mean_difference(q: Counts, p: Counts, text_counts: Counts) -> float:
    """Return the mean of S_q − S_p over the longest n-grams of a text, weighted by their occurrences.

    It is −1 if only p, which counts the text, predicts it, and 0 if q does too. `text_counts` counts the text
    alone. Long texts are sampled.
    """
    weights = np.asarray(text_counts.unigrams)
    ngrams = np.flatnonzero(weights)[:, None]
    weights = weights[ngrams[:, 0]]
    for _ in range(1, text_counts.order):
        followers = text_counts.followers(ngrams)
        if not len(followers.tokens):  # the text is shorter than the order
            break
        ngrams = np.concatenate([ngrams[followers.rows], followers.tokens[:, None]], axis=1)
        weights = followers.counts
    step = 1 + len(ngrams) // MAX_SAMPLED
    ngrams, weights = ngrams[::step], weights[::step]
    return float(np.average(backoff_scores(q, ngrams) - backoff_scores(p, ngrams), weights=weights))


def summed(followers: Followers, other: Followers, vocab_size: int) -> Followers:
    """Add up the followers of the same contexts in two counts."""
    totals = followers.totals + other.totals
    if not len(other.tokens):
        return dataclasses.replace(followers, totals=totals)
    keys = followers.rows * vocab_size + followers.tokens
    other_keys = other.rows * vocab_size + other.tokens
    if len(keys) > 1 and not np.all(keys[1:] > keys[:-1]):
        order = np.argsort(keys)
        followers = Followers(followers.totals, followers.rows[order], followers.tokens[order], followers.counts[order])
        keys = keys[order]
    indices = np.searchsorted(keys, other_keys)
    shared = indices < len(keys)
    shared[shared] = keys[indices[shared]] == other_keys[shared]
    counts = followers.counts.astype(np.int64)
    counts[indices[shared]] += other.counts[shared]
    new = ~shared
    return Followers(
        totals,
        np.concatenate([followers.rows, other.rows[new]]),
        np.concatenate([followers.tokens, other.tokens[new]]),
        np.concatenate([counts, other.counts[new]]),
    )


def _load_array(path: Path) -> np.ndarray:
    """Memory-map an array; one too small for that is read."""
    return np.load(path, mmap_mode="r" if path.stat().st_size > 256 else None).view(np.ndarray)


def _take(array: np.ndarray, indices: np.ndarray) -> np.ndarray:
    return array[indices] if len(array) else np.zeros(len(indices), dtype=np.int64)
