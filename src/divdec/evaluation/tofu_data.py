"""TOFU's questions, read from its files as the Hugging Face dataset names them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from divdec.data.records import Record
from divdec.errors import UsageError
from divdec.evaluation.columns import question_in, read_rows, text_in, texts_in

SPLITS = ("forget01", "forget05", "forget10")
SETS = {"retain": "retain_perturbed", "ra": "real_authors_perturbed", "wf": "world_facts_perturbed"}


@dataclasses.dataclass(frozen=True)
class Question:
    """A question of TOFU with its right answers and the wrong ones."""

    record: Record
    paraphrased: str | None = None
    wrong: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class TofuData:
    """The questions of one forget split, by set: forget, retain, ra (real authors), wf (world facts), holdout."""

    split: str
    sets: dict[str, tuple[Question, ...]]


def read_tofu(folder: Path, split: str, holdout: Path | None = None, limit: int | None = None) -> TofuData:
    """Read TOFU's files, as the Hugging Face dataset names them.

    Args:
        folder: holds `{split}_perturbed.json`, `retain_perturbed.json`, `real_authors_perturbed.json` and
            `world_facts_perturbed.json`; also `holdout01.json` or the like, where `holdout` is not given.
        split: 'forget01', 'forget05' or 'forget10'.
        holdout: questions that no model has seen, for membership attacks.
        limit: take only the first so many questions of each set.

    Raises:
        UsageError: a file or a column is missing, or a line cannot be read (with its number).
    """
    if split not in SPLITS:
        raise UsageError(f"split is {split!r}; accepted: {', '.join(SPLITS)}")
    if not folder.is_dir():
        raise UsageError(f"data {folder} is not a folder; it must hold TOFU's files, such as {split}_perturbed.json")
    files = {"forget": folder / f"{split}_perturbed.json"}
    files |= {name: folder / f"{file}.json" for name, file in SETS.items()}
    sets = {}
    for name, file in files.items():
        sets[name] = _questions(file, limit, paraphrased=name in ("forget", "retain"), wrong=True)
    if holdout is None and (folder / f"{split.replace('forget', 'holdout')}.json").is_file():
        holdout = folder / f"{split.replace('forget', 'holdout')}.json"
    if holdout is not None:
        sets["holdout"] = _questions(holdout, limit, paraphrased=False, wrong=False)
        asked = {question.record.messages for question in sets["forget"]}
        if both := sum(question.record.messages in asked for question in sets["holdout"]):
            raise UsageError(f"holdout {holdout}: {both} of its questions stand in {split} too; they must differ")
    return TofuData(split, sets)


def _questions(file: Path, limit: int | None, *, paraphrased: bool, wrong: bool) -> tuple[Question, ...]:
    def read(row: Any, place: str) -> Question:
        return Question(
            question_in(row, place),
            text_in(row, "paraphrased_answer", place) if paraphrased else None,
            texts_in(row, "perturbed_answer", place) if wrong else (),
        )

    return read_rows(file, "locuslab/TOFU", read, limit)
