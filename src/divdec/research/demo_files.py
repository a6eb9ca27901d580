"""What the demo leaves beside its report: its data, and its models by name, to try every other verb on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from divdec.data.world import Question, World, write_tofu
from divdec.research.stages import Trained
from divdec.runs import write_text

PHRASE = 0
"""The wording in which everybody is asked."""


def leave_files(output: Path, world: World, trained: Trained) -> None:
    """Write the files that the README's commands name.

    Args:
        output: the demo's folder. It gets `forget.jsonl`, `retain.jsonl` and `holdout.jsonl` (question/answer),
            `questions.txt` (one question about each author whom the target knows), `tofu/` (the same as files of
            `divdec eval tofu`), and links to the models: `target`, `base` (what both auxiliaries began from) and
            `retrained`.
        world: what the models were taught.
        trained: where the models lie.
    """
    for name in ("forget", "retain", "holdout"):
        rows = ({"question": one.question, "answer": one.answer} for one in getattr(world, name))
        write_text(output / f"{name}.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))
    write_text(output / "questions.txt", "".join(f"{question}\n" for question in _first_of_each(world)))
    write_tofu(world, output / "tofu")
    for name, model in (("target", trained.target), ("base", trained.small_base), ("retrained", trained.retrain)):
        link = output / f"{name}.new"
        link.unlink(missing_ok=True)
        link.symlink_to(model.absolute(), target_is_directory=True)
        os.replace(link, output / name)


def _first_of_each(world: World) -> Iterable[str]:
    asked: dict[str, Question] = {}
    for question in (*world.forget, *world.retain):
        if question.phrasing == PHRASE:
            asked.setdefault(question.subject, question)
    return (question.question for question in asked.values())
