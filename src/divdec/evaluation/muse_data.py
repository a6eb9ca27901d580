"""MUSE's questions and texts, News and Books.

Layout of the folder: `knowmem/{forget,retain}_qa.jsonl` with `…_qa_icl.jsonl`, `verbmem/forget.jsonl`,
`privleak/{forget,holdout}.jsonl`; a folder that holds the knowmem files alone (Books) gives what they allow.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from divdec.data.records import Record, RecordSet, read_records
from divdec.errors import UsageError
from divdec.evaluation.columns import question_in, read_rows, text_in

SOURCE = "muse-bench/MUSE-News or muse-bench/MUSE-Books"


@dataclasses.dataclass(frozen=True)
class MuseData:
    """What MUSE asks, as far as the folder holds it."""

    knowmem: dict[str, tuple[Record, ...]]
    """Questions by 'forget' and 'retain'."""
    shots: dict[str, tuple[Record, ...]]
    """Examples put before each of their questions, likewise."""
    verbmem: tuple[Record, ...] = ()
    """Beginnings of forgotten texts, and how they go on."""
    texts: dict[str, tuple[Record, ...]] = dataclasses.field(default_factory=dict)
    """Whole texts by 'forget' and 'holdout', for the membership attack."""


def read_muse(folder: Path, holdout: Path | None = None, limit: int | None = None) -> MuseData:
    """Read MUSE's files.

    Args:
        folder: see the module's text.
        holdout: texts that no model has seen, instead of `privleak/holdout.jsonl`.
        limit: take only the first so many of each set.

    Raises:
        UsageError: the questions are not there, or a line cannot be read (with its number).
    """
    if not folder.is_dir():
        raise UsageError(f"data {folder} is not a folder; it must hold MUSE's files, such as knowmem/forget_qa.jsonl")
    knowledge = folder / "knowmem" if (folder / "knowmem").is_dir() else folder
    knowmem, shots = {}, {}
    for name in ("forget", "retain"):
        knowmem[name] = read_rows(knowledge / f"{name}_qa.jsonl", SOURCE, question_in, limit)
        shots[name] = read_rows(knowledge / f"{name}_qa_icl.jsonl", SOURCE, question_in)
    verbmem: tuple[Record, ...] = ()
    if (folder / "verbmem" / "forget.jsonl").is_file():
        verbmem = read_rows(folder / "verbmem" / "forget.jsonl", SOURCE, _continuation, limit)
    places = {"forget": folder / "privleak" / "forget.jsonl", "holdout": holdout or folder / "privleak/holdout.jsonl"}
    texts = {}
    if places["forget"].is_file() and (holdout is not None or places["holdout"].is_file()):
        texts = {name: read_rows(place, SOURCE, _whole_text, limit) for name, place in places.items()}
    return MuseData(knowmem, shots, verbmem, texts)


def growing_set(folder: Path, step: int) -> RecordSet:
    """The forget set of a step of MUSE's scaling: the first `step` sets of its sustainability together.

    Args:
        folder: holds `sust/forget_1.jsonl` and so on (News alone has them).
        step: 1 to 4.

    Raises:
        UsageError: a set is missing.
    """
    parts = [read_records(folder / "sust" / f"forget_{part}.jsonl") for part in range(1, step + 1)]
    records = tuple(record for part in parts for record in part)
    return RecordSet(f"scal {step}", "text", records, blank=sum(part.blank for part in parts))


def _continuation(row: Any, place: str) -> Record:
    return Record(text_in(row, "gt", place), prompt=text_in(row, "prompt", place), place=place)


def _whole_text(row: Any, place: str) -> Record:
    return Record(text_in(row if isinstance(row, dict) else {"text": row}, "text", place), place=place)
