"""Counts of n-grams in sorted arrays that stay on disk.

An n-gram's place in the sorted list of its length is its id; the key of an n-gram is the id of its first n−1 tokens
times the size of the vocabulary plus its last token. Keys of any order so fit into 64 bits, and all that follows a
context lies side by side: each list is a sparse matrix (CSR) whose rows are contexts.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from divdec.errors import UsageError, first_line
from divdec.runs import file_sha256, read_json, write_json

LARGEST_ORDER = 5
BACKOFF = 0.4  # Brants et al. 2007, section 4
LOOKED_AT = 10_000  # n-grams of a text whose scores are compared
FORMAT = "divdec n-gram counts 1"
DESCRIPTION = "counts.json"


@dataclasses.dataclass(frozen=True)
class Followers:
    """What follows each of some contexts of one length."""

    totals: np.ndarray
    """How often each context itself occurs, [contexts]; 0 where it never does."""
    rows: np.ndarray
    """Which of the contexts each follower belongs to, [followers]."""
    tokens: np.ndarray
    """Token ids, [followers]; none stands twice in a row."""
    counts: np.ndarray
    """How often each follows its context, [followers]."""


@runtime_checkable
class Counts(Protocol):
    """What Stupid Backoff reads."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        ...

    @property
    def order(self) -> int:
        """Length of the longest n-grams."""
        ...

    @property
    def unigrams(self) -> np.ndarray:
        """Occurrences by token id, int64 [vocab]."""
        ...

    def followers(self, contexts: np.ndarray) -> Followers:
        """What follows each context; int64 [contexts, length] of tokens, with a length of 1 to the order less one."""
        ...


@dataclasses.dataclass(frozen=True)
class NgramCounts:
    """How often each n-gram up to an order occurs in some documents (a `Counts`)."""

    vocab_size: int
    unigrams: np.ndarray
    keys: tuple[np.ndarray, ...]
    """For lengths 2 to the order, the sorted keys, int64."""
    counts: tuple[np.ndarray, ...]
    """For the same lengths, how often each occurs."""
    rows: tuple[np.ndarray, ...]
    """For the same lengths, where the n-grams of each context begin in `keys`, and where the last ones end."""

    @property
    def order(self) -> int:
        """Length of the longest n-grams."""
        return len(self.keys) + 1

    @functools.cached_property
    def tokens(self) -> int:
        """How many tokens have been counted."""
        return int(self.unigrams.sum())

    @property
    def distinct(self) -> int:
        """How many distinct n-grams there are, of every length."""
        return int(np.count_nonzero(self.unigrams)) + sum(map(len, self.keys))

    @classmethod
    def load(cls, folder: Path, *, verify: bool = True) -> NgramCounts:
        """Map the arrays of a folder into memory; pages are read when they are needed.

        Args:
            folder: what `divdec.experts.ngram_fit.fit` wrote.
            verify: compare every file with its digest first.

        Raises:
            UsageError: the folder holds no counts, or a file of it is missing or has changed.
        """
        about = read_description(folder)
        try:
            order, vocab_size = int(about["order"]), int(about["vocab_size"])
        except (KeyError, TypeError, ValueError):
            raise UsageError(f"{folder / DESCRIPTION} is malformed; fit the counts again") from None
        expected = {f"{name}-{n}.npy" for name in ("keys", "counts", "rows") for n in range(2, order + 1)}
        if verify:
            check_digests(folder, about, {"unigrams.npy", *expected})
        try:
            arrays = [
                tuple(load_array(folder / f"{name}-{length}.npy") for length in range(2, order + 1))
                for name in ("keys", "counts", "rows")
            ]
            return cls(vocab_size, np.asarray(load_array(folder / "unigrams.npy")), *arrays)
        except (OSError, ValueError, KeyError) as error:
            raise UsageError(f"{folder}: the counts cannot be read ({first_line(error)}); fit them again") from None

    def ids_of(self, ngrams: np.ndarray) -> np.ndarray:
        """The id of each n-gram among those of its length; −1 for one that never occurs.

        Args:
            ngrams: int64 [n-grams, length].
        """
        ids = np.where((ngrams[:, 0] >= 0) & (ngrams[:, 0] < self.vocab_size), ngrams[:, 0], -1)
        for place in range(1, ngrams.shape[1]):
            token, keys = ngrams[:, place], self.keys[place - 1]
            sought = ids * self.vocab_size + token
            found = np.minimum(np.searchsorted(keys, sought), max(len(keys) - 1, 0))
            possible = (ids >= 0) & (token >= 0) & (token < self.vocab_size)
            ids = np.where(possible & (keys[found] == sought), found, -1) if len(keys) else np.full_like(ids, -1)
        return ids

    def frequencies(self, ngrams: np.ndarray) -> np.ndarray:
        """How often each n-gram occurs, int64 [n-grams]; see `ids_of`."""
        ids = self.ids_of(ngrams)
        places = np.where(ids >= 0, ids, 0)
        counted = self.unigrams if ngrams.shape[1] == 1 else self.counts[ngrams.shape[1] - 2]
        return np.where(ids >= 0, _at(counted, places), 0).astype(np.int64)

    def followers(self, contexts: np.ndarray) -> Followers:
        """What follows each context, by row and token id."""
        length = contexts.shape[1]
        ids = self.ids_of(contexts)
        known = ids >= 0
        places = np.where(known, ids, 0)
        totals = self.unigrams[places] if length == 1 else _at(self.counts[length - 2], places)
        rows = self.rows[length - 1]
        # Where no text is as long as the context there is one row, and every id is unknown.
        starts, ends = (rows[np.minimum(row, len(rows) - 1)].astype(np.int64) for row in (places, places + 1))
        lengths = np.where(known, ends - starts, 0)
        listed = np.repeat(np.arange(len(ids)), lengths)
        entries = ranges(starts, lengths)
        tokens = self.keys[length - 1][entries] - np.repeat(places * self.vocab_size, lengths)
        return Followers(np.where(known, totals, 0), listed, tokens, self.counts[length - 1][entries])


@dataclasses.dataclass(frozen=True)
class _Two:
    one: Counts
    other: Counts
    """The smaller one."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.one.vocab_size

    @property
    def order(self) -> int:
        """Length of the longest n-grams."""
        return self.one.order


class SummedCounts(_Two):
    """Two counts together, as if they had been made of the documents of both (a `Counts`)."""

    @property
    def unigrams(self) -> np.ndarray:
        """Occurrences by token id, [vocab]."""
        return self.one.unigrams + self.other.unigrams

    def followers(self, contexts: np.ndarray) -> Followers:
        """What follows each context in either."""
        one, other = self.one.followers(contexts), self.other.followers(contexts)
        return summed(one, other, self.vocab_size)


class LessCounts(_Two):
    """Counts `one` without the documents of `other`, which were among those counted (a `Counts`)."""

    @property
    def unigrams(self) -> np.ndarray:
        """Occurrences by token id, [vocab]."""
        return np.maximum(self.one.unigrams - self.other.unigrams, 0)

    def followers(self, contexts: np.ndarray) -> Followers:
        """What follows each context elsewhere."""
        one, other = self.one.followers(contexts), self.other.followers(contexts)
        minus = dataclasses.replace(other, totals=-other.totals, counts=-other.counts.astype(np.int64))
        left = summed(one, minus, self.vocab_size)
        some = (left.counts > 0) & (left.totals[left.rows] > 0)
        rows = left.rows[some]
        # A context that ends a document left out is gone, and what follows it in `one` is not: no share is above 1.
        counts = np.minimum(left.counts[some], left.totals[rows])
        return Followers(np.maximum(left.totals, 0), rows, left.tokens[some], counts)


def backoff_scores(counts: Counts, ngrams: np.ndarray) -> np.ndarray:
    """Stupid Backoff's score of each n-gram's last token after the others (Brants et al. 2007, eq. 5).

    Args:
        counts: of n-grams.
        ngrams: int64 [n-grams, length], no longer than the counts' order.

    Returns:
        float64 [n-grams]; `divdec.experts.ngram.StupidBackoff` gives the same for the whole vocabulary.
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
        places = order[np.minimum(np.searchsorted(keys, sought, sorter=order), len(keys) - 1)]
        found = keys[places] == sought
        hits = places[found]
        score[found] = followers.counts[hits] / followers.totals[followers.rows[hits]]
    return score


def mean_difference(q: Counts, p: Counts, own: Counts) -> float:
    """Mean S_q − S_p of the longest n-grams of a text, each as often as the text has it.

    −1 where p alone knows what comes next, 0 where q knows it as well. Of a long text some n-grams stand for all.

    Args:
        q: counts without the text.
        p: counts with it.
        own: counts of the text alone.
    """
    often = np.asarray(own.unigrams)
    ngrams = np.flatnonzero(often)[:, None]
    often = often[ngrams[:, 0]]
    for _ in range(1, own.order):
        followers = own.followers(ngrams)
        if not len(followers.tokens):  # the text is shorter than the order
            break
        ngrams = np.concatenate([ngrams[followers.rows], followers.tokens[:, None]], axis=1)
        often = followers.counts
    step = 1 + len(ngrams) // LOOKED_AT
    ngrams, often = ngrams[::step], often[::step]
    return float(np.average(backoff_scores(q, ngrams) - backoff_scores(p, ngrams), weights=often))


def summed(one: Followers, other: Followers, vocab_size: int) -> Followers:
    """The followers of the same contexts in two counts, added up."""
    totals = one.totals + other.totals
    if not len(other.tokens):
        return dataclasses.replace(one, totals=totals)
    places = one.rows * vocab_size + one.tokens
    sought = other.rows * vocab_size + other.tokens
    if len(places) > 1 and not np.all(places[1:] > places[:-1]):
        order = np.argsort(places)
        one = Followers(one.totals, one.rows[order], one.tokens[order], one.counts[order])
        places = places[order]
    found = np.searchsorted(places, sought)
    shared = found < len(places)
    shared[shared] = places[found[shared]] == sought[shared]
    counts = one.counts.astype(np.int64)
    counts[found[shared]] += other.counts[shared]
    new = ~shared
    return Followers(
        totals,
        np.concatenate([one.rows, other.rows[new]]),
        np.concatenate([one.tokens, other.tokens[new]]),
        np.concatenate([counts, other.counts[new]]),
    )


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The whole numbers from each start on, as many as its length says, one after the other."""
    return np.arange(int(lengths.sum())) + np.repeat(starts - np.cumsum(lengths) + lengths, lengths)


def load_array(path: Path) -> np.ndarray:
    """An array on disk, mapped into memory; an empty one cannot be mapped and is read."""
    array = np.load(path, mmap_mode="r", allow_pickle=False) if path.stat().st_size > 256 else np.load(path)
    return array.view(np.ndarray)


def describe(folder: Path, **about: Any) -> None:
    """Write what a folder of arrays holds, with the digest of every array."""
    digests = {path.name: file_sha256(path) for path in sorted(folder.glob("*.npy"))}
    write_json(folder / DESCRIPTION, {"format": FORMAT, **about, "sha256": digests})


def read_description(folder: Path) -> dict[str, Any]:
    """What a folder of arrays holds.

    Raises:
        UsageError: it holds none, or those of another program.
    """
    if not (folder / DESCRIPTION).is_file():
        raise UsageError(f"{folder} holds no n-gram counts: it has no {DESCRIPTION}; `divdec ngram` writes them")
    about = read_json(folder / DESCRIPTION)
    if not isinstance(about, dict) or about.get("format") != FORMAT or not isinstance(about.get("sha256"), dict):
        raise UsageError(f"{folder / DESCRIPTION} is not the description of {FORMAT!r}; fit the counts again")
    return about


def check_digests(folder: Path, about: dict[str, Any], names: set[str]) -> None:
    """Compare the arrays of a folder with its description.

    Raises:
        UsageError: one is missing or has changed.
    """
    for name in sorted(names):
        if not (folder / name).is_file():
            raise UsageError(f"{folder}: {name} is missing; fit the counts again")
        if file_sha256(folder / name) != about["sha256"].get(name):
            raise UsageError(f"{folder / name} has changed since it was written; fit the counts again")


def _at(array: np.ndarray, places: np.ndarray) -> np.ndarray:
    return array[places] if len(array) else np.zeros(len(places), dtype=np.int64)
