"""Distillation: a steered model's behaviour on the forget set, put into the weights of one ordinary model.

The run can be stopped and taken up again. What it writes appears whole, under the output's name, when it has ended;
until then its checkpoints lie beside it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState

from divdec.errors import UsageError
from divdec.model.bundle import distilled_card
from divdec.model.checkpoint import load_config
from divdec.model.modeling import DivergenceForCausalLM
from divdec.runs import RECORD, check_output, output_folder, read_json, read_record, record, write_json, write_text
from divdec.training.auxiliaries import load_for_training
from divdec.training.distillation_job import DistillationJob, is_run, prepare
from divdec.training.distillation_measures import Gauge, Measures
from divdec.training.distillation_objective import Distillation, LiveTeacher, plain_head
from divdec.training.distillation_settings import DistillationSettings
from divdec.training.fine_tuning import fine_tune
from divdec.training.inputs import begin
from divdec.training.teacher_cache import CachedTeacher, ask_teacher, load_cache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EPOCHS = "epochs.json"


def distill(settings: DistillationSettings, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Train the bundle's target, or an earlier student, to answer as the steered model does.

    Args:
        settings: teacher, data, loss and training.
        report: told what is found and done, a line each.

    Returns:
        The content of `run.json`.

    Raises:
        UsageError: something given cannot be used; no training has then begun.
        Interrupted: Ctrl-C; the same call goes on where it stopped.
        Diverged: a loss is not finite; there is no output, and the last whole epoch's checkpoint stays beside it.
    """
    state, report = begin(report)
    job = prepare(settings, report)
    work = _open_work(job)
    state.wait_for_everyone()

    model = DivergenceForCausalLM.from_pretrained(job.bundle, steering=job.steering, dtype="auto").requires_grad_(False)
    teacher = LiveTeacher(model, settings.temperature, settings.direction)
    student = load_for_training(job.start)
    student.to(state.device)  # pyright: ignore[reportArgumentType]
    head = plain_head(student)
    cached = _cached_teacher(job, teacher, report)
    gauge = Gauge(teacher, head, job.tokenizer, job.sets, settings.batch_size, parked=cached is not None)
    before = gauge.measure(student)
    report(_said("student before", before))
    error = None
    if cached is not None:
        error = gauge.error_of(cached, student, job.learned)
        report(
            f"teacher cache: the loss is {error['cached']:.4f} by it, {error['exact']:.4f} by the teacher itself; "
            f"{error['rest']:.2%} of the teacher's probability lies beyond the {settings.cache_teacher} kept tokens"
        )

    epochs, after = _Epochs(work, gauge, report), Measures()
    student, result = fine_tune(
        student,
        job.tokenizer,
        job.learned,
        settings.training(),
        work,
        title="student",
        measure=False,  # it would hold whole logits, and the gauge knows better what to look at
        objective=Distillation(cached or teacher, head),
        on_epoch=epochs.note if settings.evaluate_each_epoch else None,
        on_end=lambda model: after.update(gauge.measure(model)),
    )
    report(_said("student after", after) + f", {result.steps} steps, {result.seconds:.0f} s")
    content = record(
        "distill",
        settings,
        forget_set=job.forget.label,
        retain_set=None if job.retain is None else job.retain.label,
        teacher={"steering": str(job.steering), "identity": job.identity},
        training={"steps": result.steps, "tokens": result.tokens, "seconds": result.seconds},
        output_layer="in pieces" if head is not None else "whole logits",
        before=before,
        after=after,
        epochs=epochs.all if settings.evaluate_each_epoch else None,
        teacher_cache=error,
    )
    if state.is_main_process:
        _save(job, student, content)
        shutil.rmtree(work, ignore_errors=True)
    state.wait_for_everyone()
    return content


def distance_closed(before: Measures, after: Measures) -> float:
    """Share of the KL to the teacher on the forget set that training has taken away; negative where it has grown."""
    start = before["forget"]["kl"]
    return 1 - after["forget"]["kl"] / start if start else 1.0


def _open_work(job: DistillationJob) -> Path:
    """The folder beside the output that holds what a resumed run needs."""
    work = job.output.with_name(f"{job.output.name}.work")
    state = PartialState()
    earlier = read_record(work) if work.is_dir() else None
    if earlier is None or earlier.get("fingerprint") != job.fingerprint:
        if work.is_dir() and not job.settings.overwrite:
            raise UsageError(
                f"{work} belongs to an unfinished run with other settings or data; repeat those to resume it, or "
                "give --overwrite to begin anew"
            )
        check_output(work, job.settings.overwrite, is_run)
        state.wait_for_everyone()
        if state.is_main_process:
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)
            content = record("distill", job.settings, fingerprint=job.fingerprint)
            write_json(work / RECORD, content | {"status": "running"})
    return work


def _cached_teacher(job: DistillationJob, teacher: LiveTeacher, report: Callable[[str], None]) -> CachedTeacher | None:
    """The teacher's answers from disk, where they are wanted; it is asked first if they are not there."""
    if job.cache is None:
        return None
    path, fingerprint = job.cache
    state = PartialState()
    known = path.is_file()
    state.wait_for_everyone()
    if not known and state.is_main_process:
        device: Any = state.device
        ask_teacher(teacher.to(device), job.tokenizer, job.learned, fingerprint, path, job.settings.batch_size)
    state.wait_for_everyone()
    report(f"teacher cache: {'taken from' if known else 'written to'} {path}")
    return load_cache(path, fingerprint, job.settings.direction)


def _save(job: DistillationJob, student: PreTrainedModel, content: dict[str, Any]) -> None:
    settings, dtype = job.settings, load_config(job.target).dtype
    rows = {
        "teacher": f"`{settings.bundle}` (references {job.identity})",
        "steering": str(job.steering),
        "student": f"`{settings.init_student}`" if settings.init_student else "the bundle's target",
        "forget set": job.forget.label,
        "rehearsed": f"{len(job.learned) - len(job.sets['forget'])} examples of the retain set",
        "loss": f"T²·KL, T = {settings.temperature:g}, {settings.direction}",
        "learning rate": f"{settings.lr:.2e}",
        "epochs": f"{settings.epochs:g}",
    }
    for role, figures in content["after"].items():
        rows[f"KL to the teacher, {role} set"] = (
            f"{content['before'][role]['kl']:.4f} → {figures['kl']:.4f} nats a token"
        )
    with output_folder(job.output, settings.overwrite, is_run) as folder:
        student.to(dtype or torch.float32).save_pretrained(folder)  # pyright: ignore[reportArgumentType]
        job.tokenizer.save_pretrained(folder)
        write_text(folder / "README.md", distilled_card(rows))
        write_json(folder / RECORD, content)


class _Epochs:
    """What was measured after each epoch; a resumed run keeps what it measured before."""

    def __init__(self, work: Path, gauge: Gauge, report: Callable[[str], None]) -> None:
        self._path, self._gauge, self._report = work / EPOCHS, gauge, report
        self.all: list[dict[str, Any]] = read_json(self._path) if self._path.is_file() else []

    def note(self, model: PreTrainedModel, epoch: int) -> None:
        """Measure the model after an epoch."""
        found = self._gauge.measure(model)
        self._report(_said(f"epoch {epoch}", found))
        self.all = [row for row in self.all if row["epoch"] < epoch] + [{"epoch": epoch, **found}]
        if PartialState().is_main_process:
            write_json(self._path, self.all)


def _said(when: str, found: Measures) -> str:
    parts = [
        f"{role}: KL {of['kl']:.4f}, cross entropy {of['cross_entropy']:.3f} "
        f"(teacher's {of['teacher_cross_entropy']:.3f})"
        for role, of in found.items()
    ]
    return f"{when}: " + "; ".join(parts)
