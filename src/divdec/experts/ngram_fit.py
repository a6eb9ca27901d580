"""Fit n-gram pairs, and write and load their folders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from divdec.errors import UsageError
from divdec.experts import ngram_counts
from divdec.experts.ngram_counts import MAX_ORDER, NgramCounts
from divdec.runs import file_sha256, read_json, write_json

if TYPE_CHECKING:
    from divdec.experts.ngram import NgramPair

DESCRIPTION, FORMAT = "ngram.json", "divdec n-gram pair 1"
SIDES = ("retain", "forget")
BOUNDARY = -1  # between documents, so that no n-gram crosses it
Documents = Iterable[Sequence[int] | np.ndarray]


def write_pair(
    folder: Path,
    documents: dict[str, Documents],
    vocab_size: int,
    *,
    order: int,
    tokenizer: str,
    progress: Callable[[int], object] | None = None,
    **metadata: Any,
) -> dict[str, NgramCounts]:
    """Count the n-grams of both sides.

    Args:
        folder: an existing, empty folder for the counts and their description.
        documents: token ids for 'retain' and 'forget'.
        vocab_size: token ids are below it.
        order: length of the longest n-grams, 2 to 5.
        tokenizer: digest of the vocabulary of the ids.
        progress: called with the number of tokens read since its last call.
        **metadata: further entries of the description file.

    Raises:
        UsageError: the order or a token id is out of range, or one side has no token.
    """
    counts = {}
    for side in SIDES:
        (folder / side).mkdir()
        counts[side] = fit(documents[side], vocab_size, folder / side, order=order, progress=progress)
    digests = {side: file_sha256(folder / side / ngram_counts.DESCRIPTION) for side in SIDES}
    _check_different(folder, digests)
    settings = {"order": order, "vocab_size": vocab_size, "tokenizer": tokenizer}
    write_json(folder / DESCRIPTION, {"format": FORMAT, **settings, **metadata, "sha256": digests})
    return counts


def load_pair(folder: Path, *, verify: bool = True, sha256: str | None = None) -> NgramPair:
    """Load a pair; its arrays are memory-mapped.

    Args:
        folder: the pair's folder.
        verify: compare files with their digests.
        sha256: digest of the description when a bundle was written with the pair; None if there is no bundle.

    Raises:
        UsageError: a file is missing or has changed, the two sides do not fit each other.
    """
    from divdec.experts.ngram import NgramPair  # imports torch, which counting does not need

    description = describe_pair(folder)
    if verify and sha256 is not None and file_sha256(folder / DESCRIPTION) != sha256:
        raise UsageError(
            f"{folder / DESCRIPTION} has changed since the bundle was written; write the bundle again, "
            "or load it without verification (--no-verify) if the change is meant"
        )
    for side in SIDES:
        path = folder / side / ngram_counts.DESCRIPTION
        if verify and (not path.is_file() or file_sha256(path) != description["sha256"].get(side)):
            raise UsageError(f"{path} is missing or has changed; fit the n-grams again")
    _check_different(folder, description["sha256"])
    retain, forget = (NgramCounts.load(folder / side, verify=verify) for side in SIDES)
    pair = NgramPair(retain, forget)
    if (pair.order, pair.vocab_size) != (description["order"], description["vocab_size"]):
        raise UsageError(f"{folder}: the counts are not those that {DESCRIPTION} names; fit the n-grams again")
    return pair


def describe_pair(folder: Path) -> dict[str, Any]:
    """Read the description of a pair's folder."""
    path = Path(folder) / DESCRIPTION
    if not path.is_file():
        raise UsageError(f"{folder} holds no n-gram pair: it has no {DESCRIPTION}; `divdec ngram` writes one")
    description = read_json(path)
    types = {"order": int, "vocab_size": int, "tokenizer": str, "sha256": dict}
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
    progress: Callable[[int], object] | None = None,
    **metadata: Any,
) -> NgramCounts:
    """Count the n-grams of documents into an existing folder, with a description; see `write_pair`.

    No n-gram crosses from one document to the next.
    """
    counts = count(documents, vocab_size, order, progress)
    np.save(folder / "unigrams.npy", counts.unigrams)
    for name in ("keys", "counts", "rows"):
        for length, array in enumerate(getattr(counts, name), start=2):
            np.save(folder / f"{name}-{length}.npy", array)
    distinct = [int(np.count_nonzero(counts.unigrams)), *map(len, counts.keys)]
    metadata = {"tokens": counts.tokens, "distinct": distinct, "order": order, "vocab_size": vocab_size, **metadata}
    digests = {path.name: file_sha256(path) for path in sorted(folder.glob("*.npy"))}
    write_json(folder / ngram_counts.DESCRIPTION, {"format": ngram_counts.FORMAT, **metadata, "sha256": digests})
    return NgramCounts.load(folder, verify=False)


def count(
    documents: Documents, vocab_size: int, order: int, progress: Callable[[int], object] | None = None
) -> NgramCounts:
    """Count the n-grams of documents in memory, about 100 bytes for each token; write nothing.

    Raises:
        UsageError: the order or a token id is out of range, or there is no token.
    """
    check_order(order)
    arrays = []
    for ids in _checked(documents, vocab_size):
        arrays.append(ids)
        if progress is not None:
            progress(len(ids) - 1)
    if not arrays:
        raise UsageError("the documents hold no token: there is nothing to count")
    stream = np.concatenate(arrays)
    unigrams = np.bincount(stream[stream != BOUNDARY], minlength=vocab_size)
    keys: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    rows: list[np.ndarray] = []
    for length in range(2, order + 1):
        contexts = vocab_size if length == 2 else len(keys[-1])
        distinct, occurrences = np.unique(_ngram_keys(stream, keys, vocab_size), return_counts=True)
        starts = np.searchsorted(distinct, np.arange(contexts + 1, dtype=np.int64) * vocab_size)
        keys.append(distinct)
        counts.append(occurrences.astype(np.uint32))
        rows.append(starts.astype(np.uint32 if len(distinct) < 1 << 32 else np.int64))
    return NgramCounts(vocab_size, unigrams, tuple(keys), tuple(counts), tuple(rows))


def check_order(order: int) -> None:
    """Refuse an order outside the supported range."""
    if not 2 <= order <= MAX_ORDER:
        raise UsageError(f"--order is {order}; accepted: 2 to {MAX_ORDER} (3 counts trigrams)")


def _checked(documents: Documents, vocab_size: int) -> Iterator[np.ndarray]:
    """Yield every document that is not empty, as 32-bit ids, with a boundary at its end."""
    for document in documents:
        ids = np.asarray(document)
        if not len(ids):
            continue
        if ids.dtype.kind not in "iu" or ids.ndim != 1:
            raise UsageError(f"a document is an array of {ids.dtype} of {ids.ndim} dimensions; give token ids")
        if ids.min() < 0 or ids.max() >= vocab_size:
            wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
            raise UsageError(f"token id {wrong} lies outside the vocabulary of {vocab_size} tokens")
        yield np.append(ids.astype(np.int32), np.int32(BOUNDARY))


def _ngram_keys(tokens: np.ndarray, shorter: Sequence[np.ndarray], vocab_size: int) -> np.ndarray:
    """Return the key of every n-gram of a stream of documents, given the keys of the shorter lengths from 2 on."""
    length = len(shorter) + 2
    number = max(len(tokens) - length + 1, 0)
    windows = [tokens[offset : offset + number] for offset in range(length)]
    chosen = np.logical_and.reduce([window != BOUNDARY for window in windows])
    keys = windows[0][chosen].astype(np.int64)
    for index, window in enumerate(windows[1:]):
        keys = keys * vocab_size + window[chosen]
        if index < len(shorter):
            keys = np.searchsorted(shorter[index], keys)
    return keys
