"""Counting n-grams by sorting, a chunk of tokens at a time.

Memory is bounded by the chunk: sorted runs are kept on disk and merged range by range.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from divdec.errors import UsageError
from divdec.experts.ngram_counts import LARGEST_ORDER, NgramCounts, describe

BOUNDARY = -1  # stands between documents, so that no n-gram crosses it
NOTHING = "the documents hold no token: there is nothing to count"
CHUNK = 1 << 22  # tokens; a chunk costs about 100 bytes each while it is sorted


def fit(
    documents: Iterable[Sequence[int] | np.ndarray],
    vocab_size: int,
    folder: Path,
    *,
    order: int = 3,
    chunk: int = CHUNK,
    progress: Callable[[int], object] | None = None,
    **about: Any,
) -> NgramCounts:
    """Count the n-grams of documents.

    Args:
        documents: token ids; no n-gram crosses from one to the next.
        vocab_size: token ids are below it.
        folder: an existing folder, into which arrays and description are written.
        order: length of the longest n-grams, 2 to 5.
        chunk: tokens that are held in memory at once.
        progress: told how many tokens have been read since it was told last.
        **about: what else the description shall say.

    Raises:
        UsageError: the order or a token id is out of range, or there is no token.
    """
    check_order(order)
    folder = Path(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fit.") as work:
        stream = _written(documents, vocab_size, Path(work) / "tokens", progress)
        unigrams = np.zeros(vocab_size, dtype=np.int64)
        for start in range(0, len(stream), chunk):
            tokens = stream[start : start + chunk]
            unigrams += np.bincount(tokens[tokens != BOUNDARY], minlength=vocab_size)
        np.save(folder / "unigrams.npy", unigrams)
        keys: list[np.ndarray] = []
        for length in range(2, order + 1):
            runs = _Runs(Path(work))
            for start in range(0, len(stream), chunk):
                runs.add(_keys_in(stream[start : start + chunk + length - 1], keys, vocab_size))
            runs.write(folder / f"keys-{length}.npy", folder / f"counts-{length}.npy", chunk)
            contexts = vocab_size if length == 2 else len(keys[-1])
            keys.append(np.load(folder / f"keys-{length}.npy", mmap_mode="r").view(np.ndarray))
            _write_rows(folder / f"rows-{length}.npy", keys[-1], contexts, vocab_size, chunk)
        total = int(unigrams.sum())
        del stream
    distinct = [int(np.count_nonzero(unigrams)), *map(len, keys)]
    describe(folder, order=order, vocab_size=vocab_size, tokens=total, distinct=distinct, **about)
    return NgramCounts.load(folder, verify=False)


def count(documents: Iterable[Sequence[int] | np.ndarray], vocab_size: int, order: int) -> NgramCounts:
    """Count the n-grams of documents that fit into memory; nothing is written anywhere.

    Raises:
        UsageError: see `fit`.
    """
    check_order(order)
    parts = [part for ids in _checked(documents, vocab_size) for part in (ids, np.array([BOUNDARY], dtype=np.int32))]
    if not parts:
        raise UsageError(NOTHING)
    stream = np.concatenate(parts)
    keys: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    rows: list[np.ndarray] = []
    for length in range(2, order + 1):
        found = np.sort(_keys_in(stream, keys, vocab_size))
        distinct, numbers = _counted(found, np.ones(len(found), dtype=np.int64))
        rows.append(_rows(distinct, 0, (vocab_size if length == 2 else len(keys[-1])) + 1, vocab_size))
        keys.append(distinct)
        counts.append(_narrow(numbers))
    unigrams = np.bincount(stream[stream != BOUNDARY], minlength=vocab_size)
    return NgramCounts(vocab_size, unigrams, tuple(keys), tuple(counts), tuple(rows))


def check_order(order: int) -> None:
    """Refuse an order for which there are no counts here."""
    if not 2 <= order <= LARGEST_ORDER:
        raise UsageError(f"order is {order}; accepted: 2 to {LARGEST_ORDER} (3 counts trigrams)")


def _written(
    documents: Iterable[Sequence[int] | np.ndarray],
    vocab_size: int,
    path: Path,
    progress: Callable[[int], object] | None,
) -> np.ndarray:
    """All documents in one file of 32-bit ids, mapped into memory."""
    boundary, found = np.array([BOUNDARY], dtype=np.int32), 0
    with path.open("wb") as file:
        for ids in _checked(documents, vocab_size):
            ids.tofile(file)
            boundary.tofile(file)
            found += len(ids)
            if progress is not None:
                progress(len(ids))
    if not found:
        raise UsageError(NOTHING)
    return np.memmap(path, dtype=np.int32, mode="r").view(np.ndarray)


def _checked(documents: Iterable[Sequence[int] | np.ndarray], vocab_size: int) -> Iterator[np.ndarray]:
    """Every document that is not empty, as 32-bit ids."""
    for document in documents:
        ids = np.asarray(document)
        if not len(ids):
            continue
        if ids.dtype.kind not in "iu" or ids.ndim != 1:
            raise UsageError(f"a document is an array of {ids.dtype} of {ids.ndim} dimensions; give token ids")
        if ids.min() < 0 or ids.max() >= vocab_size:
            wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
            raise UsageError(f"token id {wrong} lies outside the vocabulary of {vocab_size} tokens")
        yield ids.astype(np.int32)


def _keys_in(tokens: np.ndarray, shorter: Sequence[np.ndarray], vocab_size: int) -> np.ndarray:
    """The key of every n-gram that begins in a chunk; `shorter` holds the keys of lengths 2 to n−1."""
    length = len(shorter) + 2
    count = len(tokens) - length + 1
    if count < 1:
        return np.zeros(0, dtype=np.int64)
    windows = [tokens[place : place + count] for place in range(length)]
    whole = windows[0] != BOUNDARY
    for window in windows[1:]:
        whole &= window != BOUNDARY
    found = windows[0][whole].astype(np.int64)
    for place, window in enumerate(windows[1:]):
        found = found * vocab_size + window[whole]
        if place < len(shorter):
            found = np.searchsorted(shorter[place], found)
    return found


def _rows(keys: np.ndarray, start: int, stop: int, vocab_size: int) -> np.ndarray:
    """Where the keys of some contexts begin, in 32 bits where that is enough."""
    firsts = np.arange(start, stop, dtype=np.int64) * vocab_size
    return np.searchsorted(keys, firsts).astype(np.uint32 if len(keys) < 1 << 32 else np.int64)


def _write_rows(path: Path, keys: np.ndarray, contexts: int, vocab_size: int, chunk: int) -> None:
    rows = np.lib.format.open_memmap(path, mode="w+", dtype=_rows(keys, 0, 1, vocab_size).dtype, shape=(contexts + 1,))
    for start in range(0, contexts + 1, chunk):
        stop = min(start + chunk, contexts + 1)
        rows[start:stop] = _rows(keys, start, stop, vocab_size)
    rows.flush()


class _Runs:
    """Sorted lists of distinct keys and their counts, on disk as soon as there are several."""

    def __init__(self, work: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=work))
        self.runs: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, keys: np.ndarray) -> None:
        keys = np.sort(keys)
        self.runs.append(_counted(keys, np.ones(len(keys), dtype=np.int64)))
        if len(self.runs) > 1:
            for place in (0, -1) if len(self.runs) == 2 else (-1,):
                self.runs[place] = self._on_disk(self.runs[place], len(self.runs) if place else 1)

    def write(self, keys_path: Path, counts_path: Path, chunk: int) -> None:
        """Merge all runs into two files."""
        if len(self.runs) == 1:
            keys, counts = self.runs[0]
            np.save(keys_path, keys)
            np.save(counts_path, _narrow(counts))
        else:
            parts = self.folder / "keys", self.folder / "counts"
            with parts[0].open("wb") as keys_file, parts[1].open("wb") as counts_file:
                for keys, counts in self._merged(chunk):
                    keys.tofile(keys_file)
                    _narrow(counts).tofile(counts_file)
            for part, path, kind in zip(parts, (keys_path, counts_path), (np.int64, np.uint32), strict=True):
                empty = not part.stat().st_size
                np.save(path, np.zeros(0, dtype=kind) if empty else np.memmap(part, dtype=kind, mode="r"))
        shutil.rmtree(self.folder)

    def _merged(self, chunk: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        step = max(chunk // (2 * len(self.runs)), 1)
        samples = np.sort(np.concatenate([keys[::step] for keys, _ in self.runs]))
        bounds = np.unique(samples[:: len(self.runs)])[1:]
        places = [np.concatenate([[0], np.searchsorted(keys, bounds), [len(keys)]]) for keys, _ in self.runs]
        for part in range(len(bounds) + 1):
            slices = [slice(starts[part], starts[part + 1]) for starts in places]
            keys = np.concatenate([keys[cut] for (keys, _), cut in zip(self.runs, slices, strict=True)])
            counts = np.concatenate([counts[cut] for (_, counts), cut in zip(self.runs, slices, strict=True)])
            order = np.argsort(keys, kind="stable")
            yield _counted(keys[order], counts[order])

    def _on_disk(self, run: tuple[np.ndarray, np.ndarray], number: int) -> tuple[np.ndarray, np.ndarray]:
        mapped = []
        for name, array in zip(("keys", "counts"), run, strict=True):
            path = self.folder / f"{name}-{number}.npy"
            np.save(path, array)
            mapped.append(np.load(path, mmap_mode="r").view(np.ndarray) if len(array) else array)
        return mapped[0], mapped[1]


def _counted(keys: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorted keys without repetition, and the sums of their counts."""
    if not len(keys):
        return keys, counts
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    return keys[starts], np.add.reduceat(counts, starts)


def _narrow(counts: np.ndarray) -> np.ndarray:
    if len(counts) and counts.max() >= 1 << 32:
        raise UsageError("an n-gram occurs more often than 4,294,967,295 times; count fewer documents")
    return counts.astype(np.uint32)
