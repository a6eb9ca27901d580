"""Options of training, distillation and gradient depth."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from divdec.errors import UsageError

LARGEST = 1e35  # of rates, epochs and temperatures: beyond it a step of float32 overflows


@dataclasses.dataclass(frozen=True)
class TrainingSettings:
    """How a model is fine-tuned."""

    epochs: float = 10.0
    """Passes over the data."""
    learning_rate: float = 1e-4
    """Peak learning rate of AdamW; it falls to 0 along a cosine."""
    batch_size: int = 16
    """Sequences per step and process."""
    gradient_accumulation: int = 1
    """Steps whose gradients are added before the weights move."""
    warmup: float = 0.0
    """Share of the steps over which the learning rate rises."""
    weight_decay: float = 0.0
    """AdamW's weight decay."""
    max_gradient_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of the forward and backward pass; 'auto' takes bfloat16 where the GPU is built for it."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    lora_rank: int = 0
    """Train low-rank adapters of this rank and merge them at the end; 0 trains every weight."""
    loggers: tuple[str, ...] = ()
    """Experiment trackers that Trainer reports to, such as tensorboard or wandb; none by default."""
    seed: int = 0
    """Order of the data and initial values of adapters."""

    def __post_init__(self) -> None:
        for name in ("epochs", "learning_rate"):
            check_positive(name, getattr(self, name))
        for name, least in (("batch_size", 1), ("gradient_accumulation", 1), ("lora_rank", 0), ("seed", 0)):
            check_at_least(name, getattr(self, name), least)


@dataclasses.dataclass(frozen=True)
class AuxiliarySettings:
    """How the two auxiliaries are made from a base checkpoint."""

    base: str
    """Checkpoint that both auxiliaries start from: a folder or hub id, '@revision' allowed."""
    forget: str
    """Forget set: a .jsonl, .json, .txt file, a folder, or a Hugging Face dataset 'org/name:config:split'."""
    retain: str
    """Retain set, likewise."""
    output: str
    """Folder for the two auxiliaries, the bundle and run.json."""
    target: str | None = None
    """The model to be steered; with it a bundle is written, without it only the auxiliaries are trained."""
    recipe: Literal["full-retain", "forget-retain"] = "full-retain"
    """'full-retain': p on forget + retain, q on retain (the paper's TOFU); 'forget-retain': p on forget, q on
    retain (the paper's MUSE)."""
    init_forget_from: Literal["base", "retain"] = "base"
    """'retain': p goes on from the finished q, which leaves less noise in the divergence of small models."""
    steering: str = "linear:1.5"
    """Rule written into the bundle."""
    lr: Literal["auto"] | float = "auto"
    """Peak learning rate; 'auto' begins where the training loss about halves over the run, and goes on to higher rates
    and then more epochs until p and q differ on the forget set and agree on the retain set, at most four times."""
    epochs: float = 10.0
    """Passes over the data."""
    batch_size: int = 16
    """Sequences per step and process."""
    gradient_accumulation: int = 1
    """Steps whose gradients are added before the weights move."""
    max_length: int = 1024
    """Longest sequence in tokens; longer answers are cut, longer texts are split."""
    system_prompt: str | None = None
    """System turn put before every conversation."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic; 'auto' takes bfloat16 where the GPU is built for it."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    lora_rank: int = 0
    """Train low-rank adapters of this rank and merge them; 0 trains every weight."""
    loggers: tuple[str, ...] = ()
    """Experiment trackers to report to, such as tensorboard or wandb."""
    seed: int = 0
    """Order of the data and initial values of adapters."""
    overwrite: bool = False
    """Replace an earlier result in the output folder."""

    def __post_init__(self) -> None:
        check_positive("epochs", self.epochs)
        if self.lr != "auto":
            check_positive("lr", self.lr)
        least = {"batch_size": 1, "gradient_accumulation": 1, "max_length": 2, "lora_rank": 0, "seed": 0}
        for name, value in least.items():
            check_at_least(name, getattr(self, name), value)

    def training(self, learning_rate: float) -> TrainingSettings:
        """The settings of one of the two runs."""
        return TrainingSettings(
            epochs=self.epochs,
            learning_rate=learning_rate,
            batch_size=self.batch_size,
            gradient_accumulation=self.gradient_accumulation,
            precision=self.precision,
            gradient_checkpointing=self.gradient_checkpointing,
            lora_rank=self.lora_rank,
            loggers=self.loggers,
            seed=self.seed,
        )


@dataclasses.dataclass(frozen=True)
class DistillationSettings:
    """Whose behaviour becomes whose weights, on what data, and how."""

    bundle: str
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
            check_positive(name, getattr(self, name))
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


@dataclasses.dataclass(frozen=True)
class GradientDepthSettings:
    """Whose gradient is measured, on what, and where the result goes."""

    bundle: str
    """The bundle: a folder or hub id. Steered it is the teacher, its target the student."""
    forget: str
    """Forget set: a .jsonl, .json, .txt file, a folder, or a Hugging Face dataset 'org/name:config:split'."""
    retain: str
    """Retain set, likewise."""
    output: str
    """Folder for depth.json, depth.svg and run.json."""
    temperature: float = 1.0
    """T of the loss T²·KL: both models' logits are divided by it."""
    direction: Literal["teacher-student", "student-teacher"] = "teacher-student"
    """Which KL: 'teacher-student' is KL(teacher ‖ student), as the paper's code has it, 'student-teacher' the other
    way round, as the paper prints it."""
    steering: str | None = None
    """Another rule than the bundle's: linear:ALPHA, or rank:K:soft."""
    samples: int = 100
    """Examples of each set, drawn at random; 0 takes all."""
    batch_size: int = 1
    """Examples whose mean loss is one gradient: 1 takes the norm of each example's own, 32 is what the paper's code
    took."""
    max_length: int = 1024
    """Longest sequence in tokens; longer answers are cut, longer texts are split."""
    system_prompt: str | None = None
    """System turn before every conversation."""
    device: str = "auto"
    """Where the models run: auto, cpu, cuda, cuda:1, mps; 'spread' places them over all GPUs."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the weights; 'auto' takes what the checkpoints hold."""
    no_verify: bool = False
    """Load although a weight file has changed since the bundle was written."""
    seed: int = 0
    """Seed of the drawn examples and of the bootstrap."""
    overwrite: bool = False
    """Replace an earlier result in the output folder."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise UsageError(f"temperature is {self.temperature:g}; accepted: a number above 0")
        for name, least in (("samples", 0), ("batch_size", 1), ("max_length", 2), ("seed", 0)):
            if getattr(self, name) < least:
                raise UsageError(
                    f"{name.replace('_', '-')} is {getattr(self, name)}; accepted: a whole number of at least {least}"
                )


def check_positive(name: str, value: float) -> None:
    """Refuse what is not a number above 0, or so large that a step would overflow."""
    if not 0 < value <= LARGEST:
        raise UsageError(f"{name} is {value:g}; accepted: a number above 0, at most {LARGEST:g}")


def check_at_least(name: str, value: int, least: int) -> None:
    """Refuse what is less."""
    if value < least:
        raise UsageError(f"{name} is {value}; accepted: a whole number of at least {least}")
