"""The gradient methods: how each is trained and saved. What they minimise is in `objectives.py` and `losses.py`."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from jaxtyping import Float
from torch import Tensor

from divdec.data.formatting import Example, encode_records
from divdec.model.bundle import baseline_card
from divdec.model.checkpoint import load_config, load_model
from divdec.research.baselines.gradient_settings import (
    GradAscentSettings,
    GradDiffSettings,
    IdkDPOSettings,
    NPOSettings,
    SimNPOSettings,
    UNDIALSettings,
)
from divdec.research.baselines.idk_answers import idk_set, read_answers
from divdec.research.baselines.job import Job
from divdec.research.baselines.method import Made
from divdec.research.baselines.objectives import (
    IDK,
    NPO,
    RETAIN,
    UNDIAL,
    GradAscent,
    GradDiff,
    IdkDPO,
    SimNPO,
    reference_log_probabilities,
)
from divdec.research.baselines.registry import find
from divdec.runs import write_text
from divdec.training.fine_tuning import CHECKPOINTS, Objective, fine_tune, uses_bfloat16
from divdec.training.inputs import Companion

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def grad_ascent(job: Job, settings: GradAscentSettings, output: Path) -> Made:
    """Train with GradAscent; see `Method.make`."""
    return unlearn(job, "grad-ascent", settings, output, lambda model: GradAscent(), companions={})


def grad_diff(job: Job, settings: GradDiffSettings, output: Path) -> Made:
    """Train with GradDiff; see `Method.make`."""
    return unlearn(job, "grad-diff", settings, output, lambda model: GradDiff(settings, _frozen_for_kl(job, settings)))


def npo(job: Job, settings: NPOSettings, output: Path) -> Made:
    """Train with NPO; see `Method.make`."""

    def objective(model: PreTrainedModel) -> Objective:
        return NPO(settings, _reference(job, settings, model, job.forget_examples), _frozen_for_kl(job, settings))

    return unlearn(job, "npo", settings, output, objective)


def simnpo(job: Job, settings: SimNPOSettings, output: Path) -> Made:
    """Train with SimNPO; see `Method.make`."""
    return unlearn(job, "simnpo", settings, output, lambda model: SimNPO(settings, _frozen_for_kl(job, settings)))


def undial(job: Job, settings: UNDIALSettings, output: Path) -> Made:
    """Train with UNDIAL; see `Method.make`."""
    return unlearn(job, "undial", settings, output, lambda model: UNDIAL(settings, frozen_target(job)))


def idk_dpo(job: Job, settings: IdkDPOSettings, output: Path) -> Made:
    """Train with DPO towards "I don't know"; see `Method.make`.

    Raises:
        UsageError: the forget set is plain text, or the file of answers cannot be used.
    """
    answers = idk_set(job.forget, read_answers(settings.idk_answers), job.seed)
    idk = encode_records(answers.records, job.tokenizer, job.form)

    def objective(model: PreTrainedModel) -> Objective:
        forget_reference = _reference(job, settings, model, job.forget_examples)
        idk_reference = _reference(job, settings, model, idk)
        return IdkDPO(settings, forget_reference, idk_reference, _frozen_for_kl(job, settings))

    companions = {RETAIN: Companion(job.retain_examples), IDK: Companion(idk, drawn=False)}
    return unlearn(job, "idk-dpo", settings, output, objective, companions=companions, key=answers.sha256)


def unlearn(
    job: Job,
    name: str,
    settings: GradAscentSettings,
    output: Path,
    objective: Callable[[PreTrainedModel], Objective],
    *,
    companions: Mapping[str, Companion] | None = None,
    key: Any = None,
) -> Made:
    """Train the target on the forget set with an objective, and save it.

    Args:
        job: target and data.
        name: the method's.
        settings: how.
        output: an empty folder that exists; the checkpoint with its tokenizer and card is written there.
        objective: given the target before it is trained, on the device where it will be, makes what is minimised; it
            may freeze weights.
        companions: what each batch holds beside the forget set; by default retain examples, drawn.
        key: JSON values that decide the weights beside settings, target, data and seed.

    Returns:
        The seconds that loading, references and training took.
    """
    training = settings.training(job.seed)
    if companions is None:
        companions = {RETAIN: Companion(job.retain_examples)}
    folder = job.place(name, [dataclasses.asdict(settings), key])
    resumed = any((folder / CHECKPOINTS).glob("checkpoint-*"))
    started = time.perf_counter()
    model = load_model(job.target, dtype=torch.float32)
    model.to(_device())  # pyright: ignore[reportArgumentType]
    model, _ = fine_tune(
        model,
        job.tokenizer,
        job.forget_examples,
        training,
        folder,
        title=name,
        measure=False,
        objective=objective(model),
        companions=companions,
    )
    seconds = time.perf_counter() - started
    if PartialState().is_main_process:
        _save(job, name, settings, model, output)
        shutil.rmtree(folder, ignore_errors=True)
    PartialState().wait_for_everyone()
    notes = ("the run was resumed: its seconds are those since then",) if resumed else ()
    return Made(seconds=seconds, notes=notes)


def frozen_target(job: Job) -> PreTrainedModel:
    """The target as it is and stays, in float32."""
    return load_model(job.target, dtype=torch.float32).eval().requires_grad_(False)


def _frozen_for_kl(job: Job, settings: GradDiffSettings) -> PreTrainedModel | None:
    return frozen_target(job) if settings.retain_loss == "kl" and settings.alpha else None


def _reference(
    job: Job, settings: GradDiffSettings, model: PreTrainedModel, examples: Sequence[Example]
) -> Float[Tensor, " examples"]:
    bfloat16 = uses_bfloat16(settings.training(job.seed))
    return reference_log_probabilities(model, job.tokenizer, examples, settings.batch_size, bfloat16)


def _device() -> torch.device:
    # As Trainer will choose: what is computed before it begins is then computed alike.
    device = PartialState(cpu=not torch.accelerator.is_available()).device
    assert isinstance(device, torch.device)
    return device


def _save(job: Job, name: str, settings: GradAscentSettings, model: PreTrainedModel, output: Path) -> None:
    method = find(name)
    dtype = load_config(job.target).dtype or torch.float32
    model.to(dtype).save_pretrained(output)  # pyright: ignore[reportArgumentType]
    job.tokenizer.save_pretrained(output)
    rows = {
        "target": f"`{job.target}`",
        "forget set": job.forget.label,
        "retain set": job.retain.label,
        "seed": str(job.seed),
        **{field.name.replace("_", " "): str(getattr(settings, field.name)) for field in dataclasses.fields(settings)},
    }
    write_text(output / "README.md", baseline_card(method.title, method.source, rows))
