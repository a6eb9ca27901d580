"""N-gram counts of takedown requests: their encoding, their sum, and what a text shares with the retain set."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from divdec.experts.ngram_counts import NgramCounts, SummedCounts

MIN_PASSAGE = 48  # n-grams in a row: a text that the retain set holds, not a phrase that others use too
MIN_SPAN = 16  # n-grams in a row: shared with a text that is almost the same


@dataclasses.dataclass(frozen=True)
class PackedCounts:
    """N-gram counts as they are stored: per length the keys of `NgramCounts`, without its index of contexts."""

    keys: tuple[np.ndarray, ...]
    """For lengths 1 to the order, sorted int64 keys; those of length 1 are token ids."""
    counts: tuple[np.ndarray, ...]
    """For the same lengths, the number of occurrences, uint32."""

    @classmethod
    def from_counts(cls, counts: NgramCounts) -> PackedCounts:
        """Pack counts."""
        tokens = np.flatnonzero(counts.unigrams)
        return cls((tokens, *counts.keys), (counts.unigrams[tokens], *counts.counts))

    def to_bytes(self) -> bytes:
        """Encode as the order, the lengths of the arrays, and the arrays, all little-endian."""
        header = np.array([len(self.keys), *map(len, self.keys)], dtype="<i8")
        arrays = [header, *(keys.astype("<i8") for keys in self.keys), *(c.astype("<u4") for c in self.counts)]
        return b"".join(array.tobytes() for array in arrays)

    @classmethod
    def from_bytes(cls, content: bytes) -> PackedCounts:
        """Decode what `to_bytes` wrote."""
        order = int(np.frombuffer(content, "<i8", 1)[0])
        lengths = np.frombuffer(content, "<i8", order, offset=8).tolist()
        offset = 8 * (order + 1)
        arrays: list[np.ndarray] = []
        for dtype, width in (("<i8", 8), ("<u4", 4)):
            for length in lengths:
                arrays.append(np.frombuffer(content, dtype, length, offset=offset))
                offset += width * length
        return cls(tuple(arrays[:order]), tuple(arrays[order:]))


def sum_counts(summands: Sequence[PackedCounts], vocab_size: int) -> NgramCounts:
    """Add up one or more n-gram counts of one order, as if they had been made of all documents together."""
    tokens = np.concatenate([part.keys[0] for part in summands])
    occurrences = np.concatenate([part.counts[0] for part in summands])
    unigrams = np.bincount(tokens, weights=occurrences, minlength=vocab_size).astype(np.int64)
    keys, counts, rows = [], [], []
    ids = np.zeros(0, np.int64)  # the id in the sum of each n-gram of the level before, summand by summand
    for level in range(1, len(summands[0].keys)):
        combined = np.concatenate([part.keys[level] for part in summands])
        if level > 1:  # the keys name their contexts by the ids that these have in their own summand
            sizes = [len(part.keys[level - 1]) for part in summands]
            starts = np.cumsum([0, *sizes[:-1]])
            prefixes, last = np.divmod(combined, vocab_size)
            prefixes += np.repeat(starts, [len(part.keys[level]) for part in summands])
            combined = ids[prefixes] * vocab_size + last
        distinct, ids = np.unique(combined, return_inverse=True)
        often = np.concatenate([part.counts[level] for part in summands])
        contexts = vocab_size if level == 1 else len(keys[-1])
        followers = np.bincount(distinct // vocab_size, minlength=contexts)
        rows.append(np.concatenate([[0], np.cumsum(followers)]))
        keys.append(distinct)
        counts.append(np.bincount(ids, weights=often, minlength=len(distinct)).astype(np.uint32))
    return NgramCounts(vocab_size, unigrams, tuple(keys), tuple(counts), tuple(rows))


def extended(counts: SummedCounts | None, summands: Sequence[PackedCounts], vocab_size: int) -> SummedCounts | None:
    """Return the counts of requests with more of them, or None where there are none; `counts` does not change.

    Parts of similar size are merged, so that there are few and each n-gram is moved rarely.
    """
    if not summands:
        return counts
    parts = [] if counts is None else list(counts.parts)
    added = sum_counts(summands, vocab_size)
    while parts and parts[-1].distinct <= 2 * added.distinct:
        added = sum_counts([PackedCounts.from_counts(part) for part in (parts.pop(), added)], vocab_size)
    return SummedCounts([*parts, added])


@dataclasses.dataclass(frozen=True)
class RetainedPassages:
    """Passages that the retain set shares with the documents of a request."""

    passages: list[np.ndarray]
    """Token ids of long passages that the retain set holds, and of short documents that it holds whole; one for each
    copy."""
    max_copies: int
    """How often the retain set holds the most frequent passage."""
    shared_spans: int
    """Number of shorter spans that it shares with the documents, each of at least `MIN_SPAN` n-grams in a row."""


def find_retained_passages(retain: NgramCounts, documents: Iterable[np.ndarray]) -> RetainedPassages:
    """Find the passages of documents that the retain set holds: q would go on repeating them.

    A passage that was counted n times is listed n times, so that subtracting the list removes every copy. Other
    occurrences of its n-grams keep their counts. Copies within a longer passage of the documents count once.
    """
    retained: list[tuple[np.ndarray, np.ndarray]] = []  # passages, and for each of their n-grams its copies
    spans = 0
    for ids in documents:
        length = min(len(ids), retain.order)
        windows = np.lib.stride_tricks.sliding_window_view(ids, length).astype(np.int64)
        frequencies = retain.frequencies(windows)
        shortest = max(MIN_SPAN, min(MIN_PASSAGE, len(windows)))  # "I don't know." is nobody's text
        for start, end in _true_ranges(frequencies > 0):
            if end - start < shortest:
                spans += end - start >= MIN_SPAN
                continue
            retained.append((ids[start : end - 1 + length], _copies(frequencies[start:end], shortest)))
    most = max((int(copies.max()) for _, copies in retained), default=0)
    heads = {passage[: retain.order].tobytes() for passage, _ in retained}
    places: dict[bytes, list[tuple[np.ndarray, np.ndarray]]] = {}  # where longer passages go on as these begin
    listed: list[np.ndarray] = []
    for passage, copies in sorted(retained, key=lambda pair: len(pair[0]), reverse=True):
        # A passage that the documents repeat, or quote, is the same one in the retain set.
        for longer, listed_copies in places.get(passage[: retain.order].tobytes(), ()):
            if np.array_equal(longer[: len(passage)], passage):
                copies = np.maximum(copies - listed_copies[: len(copies)], 0)
        for start in range(len(copies)):
            if (head := passage[start : start + retain.order].tobytes()) in heads:
                places.setdefault(head, []).append((passage[start:], copies[start:]))
        levels = np.unique(np.append(copies, 0))
        for level, repeats in zip(levels[1:], np.diff(levels), strict=True):
            for first, last in _true_ranges(copies >= level):
                listed += [passage[first : last - 1 + retain.order]] * int(repeats)
    return RetainedPassages(listed, most, spans)


def _true_ranges(flags: np.ndarray) -> list[tuple[int, int]]:
    """Return start and end of each range of true values."""
    steps = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return list(zip(steps[::2].tolist(), steps[1::2].tolist(), strict=True))


def _copies(frequencies: np.ndarray, length: int) -> np.ndarray:
    """Bound the number of copies of a passage of at least `length` n-grams around each n-gram.

    A passage occurs at most as often as its rarest n-gram; the bound is the best of all passages around an n-gram.
    """
    rarest = np.lib.stride_tricks.sliding_window_view(frequencies, length).min(axis=1)
    padded = np.pad(rarest, length - 1)
    return np.lib.stride_tricks.sliding_window_view(padded, length).max(axis=1)
