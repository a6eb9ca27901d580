"""Settings of distillation. It knows nothing of torch, so that `--help` is instant."""

from __future__ import annotations

import dataclasses
from typing import Literal

from divdec.errors import UsageError
from divdec.training.settings import TrainingSettings, positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillationSettings:
    """Whose behaviour becomes whose weights, on what data, and how."""

    bundle: str = dataclasses.field(kw_only=False)
    """The teacher: a bundle's folder or hub id. Its target, unsteered, is the student."""
    forget: str
    """Forget set: a .jsonl, .json, .txt file, a folder, or a Hugging Face dataset 'org/name:config:split'."""
    output: str
    """Folder for the student: an ordinary checkpoint, with its model card and run.json."""
    retain: str | None = None
    """Retain set, on which the student is measured; it is trained on it only with --rehearse."""
    rehearse: int = 0
    """So many examples of the retain set, drawn by the seed, are distilled beside the forget set. 0 is the paper's;
    small students lose what nothing in the loss holds."""
    steering: str | None = None
    """Another rule than the bundle's: linear:ALPHA, or rank:K:soft."""
    temperature: float = 1.5
    """T of the loss T²·KL: teacher's and student's logits are divided by it."""
    direction: Literal["teacher-student", "student-teacher"] = "teacher-student"
    """Which KL: 'teacher-student' is KL(teacher ‖ student), as the paper's code has it, 'student-teacher' the other
    way round, as the paper prints it."""
    lr: float = 4e-5
    """Peak learning rate of AdamW."""
    epochs: float = 10.0
    """Passes over the forget set."""
    batch_size: int = 16
    """Sequences per step and process."""
    gradient_accumulation: int = 1
    """Steps whose gradients are added before the weights move."""
    max_length: int = 1024
    """Longest sequence in tokens; longer answers are cut, longer texts are split."""
    system_prompt: str | None = None
    """System turn put before every conversation."""
    date: str | None = None
    """Date for chat templates that print one; the template's own by default."""
    init_student: str | None = None
    """Another checkpoint to start from than the bundle's target: the student of an earlier request."""
    lora_rank: int = 0
    """Train low-rank adapters of this rank and merge them; 0 trains every weight."""
    cache_teacher: int | None = None
    """Ask the teacher once and keep its so many likeliest tokens at each position, for this run and later ones. The
    loss is then a lower bound of the true one; run.json says by how much."""
    teacher_cache: str | None = None
    """Folder for what --cache-teacher keeps; by default one in the user's cache. It tells what the forget set says:
    remove it when it has served."""
    evaluate_each_epoch: bool = False
    """Measure KL to the teacher and cross entropy after every epoch, on forget and retain set."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of the student; 'auto' takes bfloat16 where the GPU is built for it."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    loggers: tuple[str, ...] = ()
    """Experiment trackers to report to, such as tensorboard or wandb."""
    seed: int = 0
    """Order of the data and initial values of adapters."""
    overwrite: bool = False
    """Replace an earlier result in the output folder."""

    def __post_init__(self) -> None:
        for name in ("temperature", "lr"):
            positive(name, getattr(self, name))
        if self.max_length < 2:
            raise UsageError(f"max-length is {self.max_length}; accepted: a whole number of at least 2")
        if self.rehearse < 0:
            raise UsageError(f"rehearse is {self.rehearse}; accepted: a number of examples, 0 for none")
        if self.rehearse and self.retain is None:
            raise UsageError(f"--rehearse {self.rehearse} needs the retain set: give it with --retain")
        if self.cache_teacher is not None and self.cache_teacher < 1:
            raise UsageError(f"cache-teacher is {self.cache_teacher}; accepted: a number of tokens of at least 1")
        if self.teacher_cache is not None and self.cache_teacher is None:
            raise UsageError("--teacher-cache names the place of a cache: give --cache-teacher K with it")
        self.training()  # refuses what it is made of

    def training(self) -> TrainingSettings:
        """How the student is fine-tuned."""
        return TrainingSettings(
            epochs=self.epochs,
            learning_rate=self.lr,
            batch_size=self.batch_size,
            gradient_accumulation=self.gradient_accumulation,
            precision=self.precision,
            gradient_checkpointing=self.gradient_checkpointing,
            lora_rank=self.lora_rank,
            loggers=self.loggers,
            seed=self.seed,
        )
