"""A pair of n-gram models on disk: two folders of counts, and what says that they belong together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from divdec.errors import UsageError
from divdec.experts.ngram import SPACES, NgramPair
from divdec.experts.ngram_counts import DESCRIPTION as COUNTS
from divdec.experts.ngram_counts import NgramCounts
from divdec.experts.ngram_fit import fit
from divdec.runs import file_sha256, read_json, write_json

DESCRIPTION, FORMAT = "ngram.json", "divdec n-gram pair 1"
SIDES = ("retain", "forget")
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
    **about: Any,
) -> dict[str, NgramCounts]:
    """Count both sides into an existing folder.

    Args:
        folder: it must be empty.
        documents: token ids by side, 'retain' and 'forget'.
        vocab_size: token ids are below it.
        order: length of the longest n-grams.
        space: of the scores, 'score' or 'log'.
        tokenizer: digest of the vocabulary that the ids belong to.
        progress: told how many tokens have been read since it was told last.
        **about: what else the description shall say.

    Raises:
        UsageError: a setting or a token id is out of range, or one side has no token.
    """
    if space not in SPACES:
        raise UsageError(f"space is {space!r}; accepted: {', '.join(map(repr, SPACES))}")
    counts = {}
    for side in SIDES:
        (folder / side).mkdir()
        counts[side] = fit(documents[side], vocab_size, folder / side, order=order, progress=progress)
    digests = {side: file_sha256(folder / side / COUNTS) for side in SIDES}
    _check_different(folder, digests)
    fixed = {"order": order, "vocab_size": vocab_size, "space": space, "tokenizer": tokenizer}
    write_json(folder / DESCRIPTION, {"format": FORMAT, **fixed, **about, "sha256": digests})
    return counts


def load_pair(folder: Path, *, verify: bool = True) -> NgramPair:
    """Load a pair; its arrays are mapped into memory.

    Raises:
        UsageError: a file is missing or has changed, or the sides do not belong together.
    """
    about = describe_pair(folder)
    for side in SIDES:
        if verify and (
            not (folder / side / COUNTS).is_file() or file_sha256(folder / side / COUNTS) != about["sha256"].get(side)
        ):
            raise UsageError(f"{folder / side / COUNTS} is missing or has changed; fit the n-grams again")
    _check_different(folder, about["sha256"])
    retain, forget = (NgramCounts.load(folder / side, verify=verify) for side in SIDES)
    pair = NgramPair(retain, forget, about["space"])
    if (pair.order, pair.vocab_size) != (about["order"], about["vocab_size"]):
        raise UsageError(f"{folder}: the counts are not those that {DESCRIPTION} names; fit the n-grams again")
    return pair


def describe_pair(folder: Path) -> dict[str, Any]:
    """What a pair's folder says of itself.

    Raises:
        UsageError: it is no such folder.
    """
    path = Path(folder) / DESCRIPTION
    if not path.is_file():
        raise UsageError(f"{folder} holds no n-gram pair: it has no {DESCRIPTION}; `divdec ngram` writes one")
    about = read_json(path)
    kinds = {"order": int, "vocab_size": int, "space": str, "tokenizer": str, "sha256": dict}
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise UsageError(f"{path} does not describe an n-gram pair of this divdec; fit the n-grams again")
    if wrong := [name for name, kind in kinds.items() if type(about.get(name)) is not kind]:
        raise UsageError(f"{path}: {wrong[0]} is missing or malformed; fit the n-grams again")
    return about


def is_pair(folder: Path) -> bool:
    """Whether a folder holds a pair, so that it may be replaced by one."""
    return (folder / DESCRIPTION).is_file()


def _check_different(folder: Path, digests: dict[str, str]) -> None:
    if digests.get("retain") == digests.get("forget"):
        raise UsageError(f"{folder}: retain and forget n-grams are the same: nothing would be forgotten")
