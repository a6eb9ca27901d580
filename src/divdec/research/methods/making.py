"""From a cell to a model on disk: steering, distillation and every baseline behind one function."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from filelock import FileLock

from divdec.data.records import write_records
from divdec.model.bundle import is_bundle, write_bundle
from divdec.model.checkpoint import load_tokenizer
from divdec.research.baselines.job import Job
from divdec.research.baselines.registry import find
from divdec.research.methods.arena import Arena
from divdec.research.methods.cell import Cell
from divdec.runs import output_folder
from divdec.steering import Steering
from divdec.training.distillation import distill
from divdec.training.settings import DistillationSettings

TEACHER = "linear:1.5"  # the paper's, for every distilled model of its table


@dataclasses.dataclass(frozen=True)
class Model:
    """A method that has been made."""

    folder: Path
    """What `from_pretrained` loads."""
    seconds: float | None
    """Of training."""
    notes: tuple[str, ...] = ()


def make(cell: Cell, arena: Arena, output: Path, work: Path) -> Model:
    """Train or wrap.

    Args:
        cell: method and setting.
        arena: models and data.
        output: folder for the model; it does not exist yet.
        work: folder for what several cells share.

    Raises:
        UsageError: the method cannot be had with this setting or these models.
        Diverged: training broke.
    """
    if cell.method == "target":
        return Model(arena.target, 0.0)
    if cell.method == "retrain":
        return Model(arena.retrain, arena.retrain_seconds)
    if cell.steering is not None:
        return Model(_bundle(arena, output, cell.steering), arena.pair_seconds)
    if cell.method == "distill":
        return _distilled(cell, arena, output, work)
    method = find(cell.method)
    job = Job(
        arena.target,
        load_tokenizer(arena.target),
        arena.forget,
        arena.retain,
        work,
        arena.form,
        arena.base,
        arena.seed,
        report=lambda line: None,
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    with output_folder(output) as temporary:
        made = method.make(job, method.settings(**cell.settings), temporary)
    return Model(output, made.seconds, made.notes)


def _bundle(arena: Arena, output: Path, steering: str) -> Path:
    return write_bundle(
        output,
        target=str(arena.target),
        retain_auxiliary=str(arena.retain_auxiliary),
        forget_auxiliary=str(arena.forget_auxiliary),
        steering=dataclasses.replace(Steering.parse(steering), vocabulary=arena.vocabulary),
        overwrite=True,
        forget_set=arena.forget.label,
    )


def _distilled(cell: Cell, arena: Arena, output: Path, work: Path) -> Model:
    options: dict[str, Any] = {"steering": TEACHER, **cell.settings}
    work.mkdir(parents=True, exist_ok=True)
    with FileLock(work / "teacher.lock"):  # cells run side by side
        rule = str(options["steering"]).replace(":", "-")
        bundle = work / f"teacher-{rule}-{arena.identity}"
        if not is_bundle(bundle):
            _bundle(arena, bundle, str(options["steering"]))
        forget, retain = work / "forget.jsonl", work / "retain.jsonl"
        write_records(forget, arena.forget)
        write_records(retain, arena.retain)
    settings = DistillationSettings(
        bundle=str(bundle),
        forget=str(forget),
        retain=str(retain),
        output=str(output),
        system_prompt=arena.form.system_prompt,
        date=arena.form.date,
        max_length=arena.form.max_length,
        seed=arena.seed,
        overwrite=True,
        **options,
    )
    content = distill(settings, report=lambda line: None)
    own = float(content["training"]["seconds"])
    return Model(output, None if arena.pair_seconds is None else arena.pair_seconds + own)
