"""Distillation: train an ordinary model to answer as a steered model does on the forget set.

A run can be interrupted and resumed. The output folder appears when the run has finished; until then a folder beside it
holds the checkpoints.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from torch import nn

from divdec.checkpoint import (
    CheckpointReference,
    check_apart,
    check_plain,
    check_weights,
    digests,
    dtype_for_passes,
    load_config,
    load_tokenizer,
    vocabulary_sha256,
    vocabulary_width,
)
from divdec.configuration import DivergenceConfig
from divdec.data.formatting import Example, Format
from divdec.data.records import RecordSet, read_records
from divdec.errors import UsageError
from divdec.model.bundle import distilled_card
from divdec.model.loading import bundle_identity, find_bundle, read_config
from divdec.model.modeling import DivergenceForCausalLM
from divdec.options import read_template_kwargs
from divdec.runs import RECORD, RunFolder, check_output, made_by, output_folder, record, write_json, write_text
from divdec.steering import Steering
from divdec.training.auxiliaries import load_for_training
from divdec.training.distillation_loss import (
    Distillation,
    SteeredTeacher,
    plain_head,
    predicting,
    sum_over_positions,
)
from divdec.training.fine_tuning import fine_tune, uses_bfloat16
from divdec.training.inputs import (
    Collator,
    encode,
    join_processes,
    limit_length,
    on_main,
    report_set,
    resolve_trainable,
    sample_indices,
)
from divdec.training.settings import DistillationSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SAMPLE = 256
"""Number of examples of a set that are measured, the same ones each time."""
Figures = dict[str, dict[str, float]]
"""By set: `kl`, `cross_entropy`, `teacher_cross_entropy`, in nats per labelled token at temperature 1."""


def distill(settings: DistillationSettings, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Train the bundle's target, or an earlier student, to answer as the steered model does.

    Args:
        settings: teacher, data, loss and training.
        report: receives one line at a time.

    Returns:
        The content of `run.json`.

    Raises:
        UsageError: an input cannot be used; training has not begun.
        Interrupted: Ctrl-C; the same call resumes the run.
        Diverged: a loss is not finite; there is no output, and the last whole epoch's checkpoint stays beside it.
    """
    _, report = join_processes(report)
    job = prepare(settings, report)
    run = RunFolder.open(
        job.output.with_name(f"{job.output.name}.work"),
        "distill",
        settings,
        job.decides,
        overwrite=settings.overwrite,
        stale=("*",),
        on_main=on_main,
    )
    with run:
        return _distill(job, run.path, report)


def _distill(job: DistillationJob, work: Path, report: Callable[[str], None]) -> dict[str, Any]:
    settings, state = job.settings, PartialState()
    dtype = dtype_for_passes()
    # Not frozen: on a CPU torch copies a frozen output layer for each sequence (Qwen pair: 42 s a batch, not 14).
    model = DivergenceForCausalLM.from_pretrained(job.bundle, steering=job.steering, dtype=dtype)
    teacher = SteeredTeacher(model, settings.temperature, settings.direction)
    student = load_for_training(job.start)
    student.to(state.device)  # pyright: ignore[reportArgumentType]
    head = plain_head(student)
    bfloat16 = uses_bfloat16(settings.training(), student)
    metrics = DistillationMetrics(teacher, head, job.tokenizer, job.sets, settings.batch_size, bfloat16)
    before, after = metrics.measure(student), Figures()
    report(_summarize("student before", before))
    student, result = fine_tune(
        student,
        job.tokenizer,
        job.examples,
        settings.training(),
        work,
        title="student",
        measure=False,  # it would hold whole logits
        objective=Distillation(teacher, head),
        on_end=lambda model: after.update(metrics.measure(model)),
    )
    report(_summarize("student after", after) + f", {result.steps} steps, {result.seconds:.0f} s")
    content = record(
        "distill",
        settings,
        forget_set=job.forget.label,
        retain_set=None if job.retain is None else job.retain.label,
        teacher={"steering": model.rule, "identity": job.identity},
        training={"steps": result.steps, "tokens": result.tokens, "seconds": result.seconds},
        output_layer="in pieces" if head is not None else "whole logits",
        before=before,
        after=after,
    )
    if state.is_main_process:
        _save(job, student, content)
        shutil.rmtree(work, ignore_errors=True)
    state.wait_for_everyone()
    return content


def distance_closed(before: Figures, after: Figures) -> float:
    """Share of the KL to the teacher on the forget set that training removed; negative if the KL has grown."""
    start = before["forget"]["kl"]
    return 1 - after["forget"]["kl"] / start if start else 1.0


@dataclasses.dataclass
class DistillationMetrics:
    """Compares students with one teacher on fixed samples of fixed sets."""

    teacher: SteeredTeacher
    head: nn.Linear | None
    """The student's output layer, or None; see `divdec.training.distillation_loss.plain_head`."""
    tokenizer: PreTrainedTokenizerBase
    sets: Mapping[str, Sequence[Example]]
    """By role: 'forget', 'retain'."""
    batch_size: int
    bfloat16: bool = False
    """Run the student in bfloat16, as in training."""

    def measure(self, model: PreTrainedModel) -> Figures:
        """Compute KL(teacher ‖ student) and both cross entropies of each set, at temperature 1 in every run."""
        teacher = dataclasses.replace(self.teacher, temperature=1.0, direction="teacher-student")
        was_training, result = model.training, Figures()
        model.eval()
        teacher.to(model.device)
        for role, examples in self.sets.items():
            sums, count = [], 0
            indices = sample_indices(len(examples), SAMPLE, 0)
            for batch in Collator(self.tokenizer).batches(examples, indices, self.batch_size, model.device):
                with torch.no_grad(), torch.autocast(model.device.type, torch.bfloat16, enabled=self.bfloat16):
                    figures = sum_over_positions(model, self.head, batch, teacher.figures(batch))
                sums.append(figures.double().cpu())
                count += int(predicting(batch["labels"]).sum())
            kl, student, teacher_entropy = (torch.stack(sums).sum(dim=0) / count).tolist()
            result[role] = {"kl": kl, "cross_entropy": student, "teacher_cross_entropy": teacher_entropy}
        model.train(was_training)
        return result


@dataclasses.dataclass(frozen=True)
class DistillationJob:
    """Checked inputs of a run."""

    settings: DistillationSettings
    output: Path
    bundle: Path
    identity: str
    """Digest of the bundle's references without their folders."""
    steering: Steering
    """The teacher's rule."""
    start: Path
    """The checkpoint from which the student starts."""
    target: Path
    tokenizer: PreTrainedTokenizerBase
    forget: RecordSet
    retain: RecordSet | None
    sets: dict[str, list[Example]]
    """By role: 'forget', and 'retain' if there is a retain set."""

    @functools.cached_property
    def examples(self) -> list[Example]:
        """The student's training examples: the forget set, and the rehearsed part of the retain set."""
        retain = self.sets.get("retain", [])
        count = min(self.settings.rehearse, len(retain))
        indices = sorted(random.Random(self.settings.seed).sample(range(len(retain)), count))
        return self.sets["forget"] + [retain[index] for index in indices]

    @property
    def decides(self) -> dict[str, Any]:
        """All inputs of the student."""
        return {
            **dataclasses.asdict(dataclasses.replace(self.settings, overwrite=False)),
            "bundle parts": self.identity,
            "bundle rule": self.steering.to_dict(),
            "forget records": self.forget.sha256,
            "retain records": None if self.retain is None else self.retain.sha256,
            # The bundle's tokenizer and chat template decide these.
            "tokens": [(example.input_ids, example.labels) for name in self.sets for example in self.sets[name]],
            "start files": digests(self.start),
        }


def prepare(settings: DistillationSettings, report: Callable[[str], None]) -> DistillationJob:
    """Check all inputs before a model is loaded.

    Raises:
        UsageError: an input cannot be used.
    """
    bundle = find_bundle(settings.bundle)
    config = read_config(bundle)
    steering = Steering.from_dict(config.steering or {})
    if settings.steering is not None:
        steering = steering.revised(settings.steering)
    elif steering.rule == "rank" and steering.fill == "hard":
        steering = dataclasses.replace(steering, fill="soft")
        report(f"teacher: {steering}; with the hard fill masked tokens have probability 0, and the loss is infinite")
    _check_teacher(config, steering)
    target = CheckpointReference.from_dict(config.target, "target").resolve(bundle, weights=True)
    check_plain(target, "target")
    check_weights(target)
    tokenizer = load_tokenizer(bundle)
    start = target if settings.init_student is None else _resolve_student(settings.init_student, tokenizer, config)
    output = Path(settings.output).expanduser().absolute()
    texts = [settings.bundle, settings.forget, settings.retain or "", settings.init_student or ""]
    paths = [Path(text).expanduser() for text in texts if text]
    check_apart(output.resolve(), [path.resolve() for path in (*paths, target) if path.exists()])
    check_output(output, settings.overwrite, made_by("distill"))
    forget = read_records(settings.forget)
    retain = None if settings.retain is None else read_records(settings.retain)
    max_length = limit_length(limit_length(settings.max_length, start, report), bundle, report)
    template_kwargs = read_template_kwargs(settings.chat_template_kwargs)
    form = Format(settings.system_prompt, settings.date, max_length, template_kwargs)
    sets = {}
    for role, records in (("forget", forget), ("retain", retain)):
        if records is not None:
            report_set(role, records, report)
            sets[role] = encode(records, tokenizer, form, report)
    return DistillationJob(
        settings, output, bundle, bundle_identity(config), steering, start, target, tokenizer, forget, retain, sets
    )


def _check_teacher(config: DivergenceConfig, steering: Steering) -> None:
    steering.check_vocabulary(config.vocab_size)
    if steering.rule == "rank" and steering.fill == "hard":
        raise UsageError(
            f"the rule {steering} gives masked tokens probability 0, so that the loss is infinite; distil from "
            f"{steering}:soft or linear:ALPHA (--steering)"
        )
    if steering.rule == "linear" and steering.alpha == 0:
        raise UsageError("linear:0 steers nothing: the student would learn the target itself (--steering linear:1.5)")
    if config.registry is not None:
        raise UsageError(
            "the bundle follows a registry of takedown requests, which may change while the student learns; count the "
            "texts as n-grams (divdec ngram) and distil from a bundle of these"
        )


def _resolve_student(reference: str, tokenizer: PreTrainedTokenizerBase, config: DivergenceConfig) -> Path:
    folder = resolve_trainable(reference, "init-student")
    width, own_tokenizer = vocabulary_width(load_config(folder)), load_tokenizer(folder)
    if vocabulary_sha256(own_tokenizer) != vocabulary_sha256(tokenizer) or width < config.vocab_size:
        raise UsageError(
            f"init-student {folder} has another vocabulary ({len(own_tokenizer)} tokens, {width} logits) than the "
            f"teacher ({len(tokenizer)} tokens, {config.vocab_size} logits); both must have the same"
        )
    return folder


def _save(job: DistillationJob, student: PreTrainedModel, content: dict[str, Any]) -> None:
    settings, dtype = job.settings, load_config(job.target).dtype
    rows = {
        "teacher": f"`{settings.bundle}` (references {job.identity})",
        "steering": content["teacher"]["steering"],
        "student": f"`{settings.init_student}`" if settings.init_student else "the bundle's target",
        "forget set": job.forget.label,
        "rehearsed": f"{len(job.examples) - len(job.sets['forget'])} examples of the retain set",
        "loss": f"T²·KL, T = {settings.temperature:g}, {settings.direction}",
        "learning rate": f"{settings.learning_rate:.2e}",
        "epochs": f"{settings.epochs:g}",
    }
    for role, figures in content["after"].items():
        before = content["before"][role]["kl"]
        rows[f"KL to the teacher, {role} set"] = f"{before:.4f} → {figures['kl']:.4f} nats a token"
    with output_folder(job.output, settings.overwrite, made_by("distill")) as folder:
        student.to(dtype or torch.float32).save_pretrained(folder)  # pyright: ignore[reportArgumentType]
        job.tokenizer.save_pretrained(folder)
        write_text(folder / "README.md", distilled_card(rows))
        write_json(folder / RECORD, content)


def _summarize(title: str, figures: Figures) -> str:
    parts = [
        f"{role}: KL {of['kl']:.4f}, cross entropy {of['cross_entropy']:.3f} "
        f"(teacher's {of['teacher_cross_entropy']:.3f})"
        for role, of in figures.items()
    ]
    return f"{title}: " + "; ".join(parts)
