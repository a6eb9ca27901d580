"""What of a text stands in the retain set, as far as its counts tell: q would go on repeating it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from divdec.experts.ngram_counts import NgramCounts

PASSAGE = 48  # n-grams in a row: a text that the retain set holds, not a phrase that others use too
SPAN = 16  # n-grams in a row: shared with a text that is almost the same


@dataclasses.dataclass(frozen=True)
class Overlap:
    """What the retain set shares with some documents."""

    held: list[np.ndarray]
    """Long passages that it holds, and short documents that it holds whole: token ids, once for each copy."""
    copies: int
    """How often the most frequent of them stands there."""
    spans: int
    """How many shorter spans it shares with them, each of at least `SPAN` n-grams in a row."""


def overlap(counts: NgramCounts, documents: Iterable[np.ndarray]) -> Overlap:
    """Find the passages and spans of some documents that are among those counted.

    A passage of which n copies were counted is found n times, so that leaving out what is found leaves none of them.
    n-grams that also stand elsewhere keep their other counts.

    Args:
        counts: of the retain set.
        documents: token ids.
    """
    held: dict[bytes, list[np.ndarray]] = {}
    most, spans = 0, 0
    for ids in documents:
        length = min(len(ids), counts.order)
        windows = np.lib.stride_tricks.sliding_window_view(ids, length).astype(np.int64)
        often = counts.frequencies(windows)
        shortest = min(PASSAGE, len(windows))
        for start, end in _runs(often > 0):
            if end - start < shortest:
                spans += end - start >= SPAN
                continue
            copies = _copies(often[start:end], shortest)
            most = max(most, int(copies.max()))
            levels = np.unique(copies)
            found = []
            for least, times in zip(levels, np.diff(levels, prepend=0), strict=True):
                for first, last in _runs(copies >= least):
                    found += [ids[start + first : start + last - 1 + length]] * int(times)
            # A passage that the documents repeat is the same one in the retain set.
            held.setdefault(ids[start : end - 1 + length].tobytes(), found)
    return Overlap([passage for found in held.values() for passage in found], most, spans)


def _runs(where: np.ndarray) -> list[tuple[int, int]]:
    """Begin and end of each run of true values."""
    steps = np.flatnonzero(np.diff(np.concatenate([[False], where, [False]]).astype(np.int8)))
    return list(zip(steps[::2].tolist(), steps[1::2].tolist(), strict=True))


def _copies(often: np.ndarray, length: int) -> np.ndarray:
    """How many copies of a passage of at least `length` n-grams can hold each n-gram of a run.

    No more than its rarest n-gram has: the best of all passages of that length around an n-gram.
    """
    rarest = np.lib.stride_tricks.sliding_window_view(often, length).min(axis=1)
    padded = np.pad(rarest, length - 1)
    return np.lib.stride_tricks.sliding_window_view(padded, length).max(axis=1)
