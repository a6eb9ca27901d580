"""Training of the target with an objective, and of the helpers that inference-time methods combine with it."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from divdec.checkpoint import check_weights, load_config, load_model
from divdec.data.formatting import Example
from divdec.errors import UsageError
from divdec.model.bundle import model_card
from divdec.runs import write_text
from divdec.training.auxiliaries import load_for_training
from divdec.training.fine_tuning import CHECKPOINTS, Objective, fine_tune
from divdec.training.inputs import Companion
from divdec.training.settings import TrainingSettings
from divdec_research.baselines.annotations import PreTrainedModel
from divdec_research.baselines.composite import common_vocabulary_of
from divdec_research.baselines.job import Job
from divdec_research.baselines.method import BuiltModel, Method
from divdec_research.baselines.objective import RETAIN, TargetObjective
from divdec_research.stages import train_once


def _baseline_card(title: str, source: str, rows: dict[str, str]) -> str:
    """Return the model card of a baseline by its title in the paper's table, its source, and rows of facts."""
    text = (
        "Made with divdec, to be compared with Divergence Decoding: an unlearning method was applied to a target that\n"
        f"had learned a forget set. Whether it has forgotten has to be measured.\n\nMethod: {source}"
    )
    return model_card(title, "unlearning, baseline", text, rows)


def train_target(method: Method, objective: TargetObjective, output: Path) -> BuiltModel:
    """Train the target of the objective's job on the forget set, and save it."""
    job, settings = objective.job, objective.settings
    companions = {RETAIN: Companion(job.retain_examples)} if objective.uses_retain else {}
    companions |= {name: Companion(examples, drawn=False) for name, examples in objective.companions.items()}
    folder = job.work_folder(method.name, [dataclasses.asdict(settings), objective.key])
    resumed = any((folder / CHECKPOINTS).glob("checkpoint-*"))
    started = time.perf_counter()
    model = load_model(job.target, dtype=torch.float32)
    # The device that Trainer chooses, so that the reference is computed there too.
    device: Any = PartialState(cpu=not torch.accelerator.is_available()).device
    model.to(device)
    objective.prepare(model)
    model, _ = fine_tune(
        model, job.tokenizer, job.forget_examples, settings.training(job.seed), folder,
        title=method.name, measure=False, objective=objective, companions=companions,
    )  # fmt: skip
    seconds = time.perf_counter() - started
    if PartialState().is_main_process:
        job.save_model(model, output)
        rows = {
            "target": f"`{job.target}`",
            "forget set": job.forget.label,
            "retain set": job.retain.label,
            "seed": str(job.seed),
            **{name.replace("_", " "): str(value) for name, value in dataclasses.asdict(settings).items()},
        }
        write_text(output / "README.md", _baseline_card(method.title, method.source, rows))
        shutil.rmtree(folder, ignore_errors=True)
    PartialState().wait_for_everyone()
    notes = ("the run was resumed: its seconds are those since then",) if resumed else ()
    return BuiltModel(output, seconds, notes)


def train_helper(
    job: Job,
    name: str,
    start: Path,
    examples: Sequence[Example],
    settings: TrainingSettings,
    *,
    key: Any = None,
    load: Callable[[Path], PreTrainedModel] = load_for_training,
    objective: Objective | None = None,
) -> tuple[Path, float]:
    """Fine-tune a helper, unless the job's work folder holds it.

    Args:
        job: the job.
        name: name of the helper's folder and progress bar.
        start: checkpoint of the initial weights.
        examples: training examples.
        settings: training settings.
        key: further JSON values that determine the weights: the objective and its weights.
        load: loads the model of `start`.
        objective: the loss of a batch with retain sequences; by default the cross entropy of the examples.

    Returns:
        Its checkpoint's folder, and its training time in seconds.
    """
    role = "base" if job.base is not None and start == job.base else "target"
    decides = [name, role, dataclasses.asdict(settings), key]
    folder = job.work_folder(name, decides)
    dtype = load_config(start).dtype or torch.float32
    companions = {RETAIN: Companion(job.retain_examples)} if objective else None
    seconds = train_once(
        folder, name, lambda: load(start), job.tokenizer, examples, settings, job.report,
        dtype=dtype, objective=objective, companions=companions,
    )  # fmt: skip
    return folder, seconds


def check_base(job: Job, method: str) -> Path:
    """Return the folder of the job's base, the small model that a method's helpers start from.

    Raises:
        UsageError: the job has none, or it has other tokens than the target.
    """
    if job.base is None:
        raise UsageError(
            f"method {method} trains small helpers: give a small model of the target's vocabulary that has learned "
            "neither set as base"
        )
    folders = {"target": job.target, "base": job.base}
    for folder in folders.values():
        check_weights(folder)
    common_vocabulary_of(folders)
    return job.base
