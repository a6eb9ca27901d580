"""Fit n-gram pairs, and write and load their folders.

Counting sorts a chunk of tokens at a time. The chunk bounds memory: sorted runs are stored on disk and merged.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from divdec.errors import UsageError
from divdec.experts.ngram_counts import DESCRIPTION as COUNTS
from divdec.experts.ngram_counts import LARGEST_ORDER, SPACES, NgramCounts, describe
from divdec.runs import file_sha256, read_json, write_json

if TYPE_CHECKING:
    from divdec.experts.ngram import NgramPair

DESCRIPTION, FORMAT = "ngram.json", "divdec n-gram pair 1"
SIDES = ("retain", "forget")
BOUNDARY = -1  # between documents, so that no n-gram crosses it
NOTHING = "the documents hold no token: there is nothing to count"
CHUNK = 1 << 22  # tokens; sorting takes about 100 bytes for each token of a chunk
Documents = Iterable[Sequence[int] | np.ndarray]


def write_pair(
    folder: Path,
    documents: dict[str, Documents],
    vocab_size: int,
    *,
    order: int,
    space: str,
    tokenizer: str,
    progress: Callable[[int], object] | None = None,
    **metadata: Any,
) -> dict[str, NgramCounts]:
    """Count the n-grams of both sides and write them into an empty folder.

    Args:
        folder: an existing, empty folder.
        documents: token ids for 'retain' and 'forget'.
        vocab_size: token ids are below it.
        order: length of the longest n-grams.
        space: space of the scores, 'score' or 'log'.
        tokenizer: digest of the vocabulary of the ids.
        progress: called with the number of tokens read since its last call.
        **metadata: further entries of the description file.

    Raises:
        UsageError: a setting or token id is out of range, or one side has no token.
    """
    if space not in SPACES:
        raise UsageError(f"space is {space!r}; accepted: {', '.join(map(repr, SPACES))}")
    counts = {}
    for side in SIDES:
        (folder / side).mkdir()
        counts[side] = fit(documents[side], vocab_size, folder / side, order=order, progress=progress)
    digests = {side: file_sha256(folder / side / COUNTS) for side in SIDES}
    _check_different(folder, digests)
    settings = {"order": order, "vocab_size": vocab_size, "space": space, "tokenizer": tokenizer}
    write_json(folder / DESCRIPTION, {"format": FORMAT, **settings, **metadata, "sha256": digests})
    return counts


def load_pair(folder: Path, *, verify: bool = True) -> NgramPair:
    """Load a pair; its arrays are memory-mapped.

    Raises:
        UsageError: a file is missing or has changed, or the two sides do not fit each other.
    """
    from divdec.experts.ngram import NgramPair  # imports torch, which counting does not need

    description = describe_pair(folder)
    for side in SIDES:
        path = folder / side / COUNTS
        if verify and (not path.is_file() or file_sha256(path) != description["sha256"].get(side)):
            raise UsageError(f"{path} is missing or has changed; fit the n-grams again")
    _check_different(folder, description["sha256"])
    retain, forget = (NgramCounts.load(folder / side, verify=verify) for side in SIDES)
    pair = NgramPair(retain, forget, description["space"])
    if (pair.order, pair.vocab_size) != (description["order"], description["vocab_size"]):
        raise UsageError(f"{folder}: the counts are not those that {DESCRIPTION} names; fit the n-grams again")
    return pair


def describe_pair(folder: Path) -> dict[str, Any]:
    """Read the description of a pair's folder.

    Raises:
        UsageError: it has none, or a malformed one.
    """
    path = Path(folder) / DESCRIPTION
    if not path.is_file():
        raise UsageError(f"{folder} holds no n-gram pair: it has no {DESCRIPTION}; `divdec ngram` writes one")
    description = read_json(path)
    types = {"order": int, "vocab_size": int, "space": str, "tokenizer": str, "sha256": dict}
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise UsageError(f"{path} does not describe an n-gram pair of this divdec; fit the n-grams again")
    if wrong := [name for name, kind in types.items() if type(description.get(name)) is not kind]:
        raise UsageError(f"{path}: {wrong[0]} is missing or malformed; fit the n-grams again")
    return description


def is_pair(folder: Path) -> bool:
    """Whether a folder holds an n-gram pair, so that a new one may replace it."""
    return (folder / DESCRIPTION).is_file()


def _check_different(folder: Path, digests: dict[str, str]) -> None:
    if digests.get("retain") == digests.get("forget"):
        raise UsageError(f"{folder}: retain and forget n-grams are the same: nothing would be forgotten")


def fit(
    documents: Documents,
    vocab_size: int,
    folder: Path,
    *,
    order: int = 3,
    chunk: int = CHUNK,
    progress: Callable[[int], object] | None = None,
    **metadata: Any,
) -> NgramCounts:
    """Count the n-grams of documents into a folder.

    Args:
        documents: token ids; no n-gram crosses from one document to the next.
        vocab_size: token ids are below it.
        folder: an existing folder for the arrays and their description.
        order: length of the longest n-grams, 2 to 5.
        chunk: number of tokens held in memory at once.
        progress: called with the number of tokens read since its last call.
        **metadata: further entries of the description file.

    Raises:
        UsageError: the order or a token id is out of range, or there is no token.
    """
    check_order(order)
    folder = Path(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fit.") as work:
        stream = _write_stream(documents, vocab_size, Path(work) / "tokens", progress)
        unigrams = np.zeros(vocab_size, dtype=np.int64)
        for start in range(0, len(stream), chunk):
            tokens = stream[start : start + chunk]
            unigrams += np.bincount(tokens[tokens != BOUNDARY], minlength=vocab_size)
        np.save(folder / "unigrams.npy", unigrams)
        keys: list[np.ndarray] = []
        for length in range(2, order + 1):
            runs = _SortedRuns(Path(work))
            for start in range(0, len(stream), chunk):
                runs.add(_ngram_keys(stream[start : start + chunk + length - 1], keys, vocab_size))
            runs.write(folder / f"keys-{length}.npy", folder / f"counts-{length}.npy", chunk)
            contexts = vocab_size if length == 2 else len(keys[-1])
            keys.append(np.load(folder / f"keys-{length}.npy", mmap_mode="r").view(np.ndarray))
            _write_rows(folder / f"rows-{length}.npy", keys[-1], contexts, vocab_size, chunk)
        total = int(unigrams.sum())
        del stream
    distinct = [int(np.count_nonzero(unigrams)), *map(len, keys)]
    describe(folder, order=order, vocab_size=vocab_size, tokens=total, distinct=distinct, **metadata)
    return NgramCounts.load(folder, verify=False)


def count(documents: Documents, vocab_size: int, order: int) -> NgramCounts:
    """Count the n-grams of documents in memory; write nothing.

    Raises:
        UsageError: see `fit`.
    """
    check_order(order)
    boundary = np.array([BOUNDARY], dtype=np.int32)
    arrays = [array for ids in _checked(documents, vocab_size) for array in (ids, boundary)]
    if not arrays:
        raise UsageError(NOTHING)
    stream = np.concatenate(arrays)
    keys: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    rows: list[np.ndarray] = []
    for length in range(2, order + 1):
        occurrences = np.sort(_ngram_keys(stream, keys, vocab_size))
        distinct, numbers = _sum_repeated(occurrences, np.ones(len(occurrences), dtype=np.int64))
        rows.append(_row_starts(distinct, 0, (vocab_size if length == 2 else len(keys[-1])) + 1, vocab_size))
        keys.append(distinct)
        counts.append(_to_uint32(numbers))
    unigrams = np.bincount(stream[stream != BOUNDARY], minlength=vocab_size)
    return NgramCounts(vocab_size, unigrams, tuple(keys), tuple(counts), tuple(rows))


def check_order(order: int) -> None:
    """Refuse an order outside the supported range."""
    if not 2 <= order <= LARGEST_ORDER:
        raise UsageError(f"order is {order}; accepted: 2 to {LARGEST_ORDER} (3 counts trigrams)")


def _write_stream(
    documents: Documents, vocab_size: int, path: Path, progress: Callable[[int], object] | None
) -> np.ndarray:
    """Write all documents into one file of 32-bit ids, and return it memory-mapped."""
    boundary, total = np.array([BOUNDARY], dtype=np.int32), 0
    with path.open("wb") as file:
        for ids in _checked(documents, vocab_size):
            ids.tofile(file)
            boundary.tofile(file)
            total += len(ids)
            if progress is not None:
                progress(len(ids))
    if not total:
        raise UsageError(NOTHING)
    return np.memmap(path, dtype=np.int32, mode="r").view(np.ndarray)


def _checked(documents: Documents, vocab_size: int) -> Iterator[np.ndarray]:
    """Yield every document that is not empty, as 32-bit ids."""
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


def _ngram_keys(tokens: np.ndarray, shorter: Sequence[np.ndarray], vocab_size: int) -> np.ndarray:
    """Return the key of every n-gram that begins in a chunk; `shorter` holds the keys of lengths 2 to n−1."""
    length = len(shorter) + 2
    number = len(tokens) - length + 1
    if number < 1:
        return np.zeros(0, dtype=np.int64)
    windows = [tokens[offset : offset + number] for offset in range(length)]
    within_document = windows[0] != BOUNDARY
    for window in windows[1:]:
        within_document &= window != BOUNDARY
    keys = windows[0][within_document].astype(np.int64)
    for index, window in enumerate(windows[1:]):
        keys = keys * vocab_size + window[within_document]
        if index < len(shorter):
            keys = np.searchsorted(shorter[index], keys)
    return keys


def _row_starts(keys: np.ndarray, start: int, stop: int, vocab_size: int) -> np.ndarray:
    """Return where the keys of each context begin, in 32 bits if that is enough."""
    firsts = np.arange(start, stop, dtype=np.int64) * vocab_size
    return np.searchsorted(keys, firsts).astype(np.uint32 if len(keys) < 1 << 32 else np.int64)


def _write_rows(path: Path, keys: np.ndarray, contexts: int, vocab_size: int, chunk: int) -> None:
    dtype = _row_starts(keys, 0, 1, vocab_size).dtype
    rows = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(contexts + 1,))
    for start in range(0, contexts + 1, chunk):
        stop = min(start + chunk, contexts + 1)
        rows[start:stop] = _row_starts(keys, start, stop, vocab_size)
    rows.flush()


class _SortedRuns:
    """Sorted arrays of distinct keys with their counts; stored on disk when there are several."""

    def __init__(self, work: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=work))
        self.runs: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, keys: np.ndarray) -> None:
        keys = np.sort(keys)
        self.runs.append(_sum_repeated(keys, np.ones(len(keys), dtype=np.int64)))
        if len(self.runs) > 1:
            for index in (0, -1) if len(self.runs) == 2 else (-1,):
                self.runs[index] = self._store(self.runs[index], len(self.runs) if index else 1)

    def write(self, keys_path: Path, counts_path: Path, chunk: int) -> None:
        """Merge all runs into two files."""
        if len(self.runs) == 1:
            keys, counts = self.runs[0]
            np.save(keys_path, keys)
            np.save(counts_path, _to_uint32(counts))
        else:
            raw_files = self.folder / "keys", self.folder / "counts"
            with raw_files[0].open("wb") as keys_file, raw_files[1].open("wb") as counts_file:
                for keys, counts in self._merged(chunk):
                    keys.tofile(keys_file)
                    _to_uint32(counts).tofile(counts_file)
            for raw, path, dtype in zip(raw_files, (keys_path, counts_path), (np.int64, np.uint32), strict=True):
                empty = not raw.stat().st_size
                np.save(path, np.zeros(0, dtype=dtype) if empty else np.memmap(raw, dtype=dtype, mode="r"))
        shutil.rmtree(self.folder)

    def _merged(self, chunk: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        step = max(chunk // (2 * len(self.runs)), 1)
        samples = np.sort(np.concatenate([keys[::step] for keys, _ in self.runs]))
        bounds = np.unique(samples[:: len(self.runs)])[1:]
        starts = [np.concatenate([[0], np.searchsorted(keys, bounds), [len(keys)]]) for keys, _ in self.runs]
        for index in range(len(bounds) + 1):
            slices = [slice(run_starts[index], run_starts[index + 1]) for run_starts in starts]
            keys = np.concatenate([keys[cut] for (keys, _), cut in zip(self.runs, slices, strict=True)])
            counts = np.concatenate([counts[cut] for (_, counts), cut in zip(self.runs, slices, strict=True)])
            order = np.argsort(keys, kind="stable")
            yield _sum_repeated(keys[order], counts[order])

    def _store(self, run: tuple[np.ndarray, np.ndarray], number: int) -> tuple[np.ndarray, np.ndarray]:
        mapped = []
        for name, array in zip(("keys", "counts"), run, strict=True):
            path = self.folder / f"{name}-{number}.npy"
            np.save(path, array)
            mapped.append(np.load(path, mmap_mode="r").view(np.ndarray) if len(array) else array)
        return mapped[0], mapped[1]


def _sum_repeated(keys: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return sorted keys without repetition, and the sums of their counts."""
    if not len(keys):
        return keys, counts
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    return keys[starts], np.add.reduceat(counts, starts)


def _to_uint32(counts: np.ndarray) -> np.ndarray:
    if len(counts) and counts.max() >= 1 << 32:
        raise UsageError("an n-gram occurs more often than 4,294,967,295 times; count fewer documents")
    return counts.astype(np.uint32)
