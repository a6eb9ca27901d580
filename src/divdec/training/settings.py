"""Settings of fine-tuning and of the auxiliaries' recipes. It knows nothing of torch, so that `--help` is instant."""

from __future__ import annotations

import dataclasses
from typing import Literal

from divdec.errors import UsageError

LARGEST = 1e35  # of rates, epochs and temperatures: beyond it a step of float32 overflows


@dataclasses.dataclass(frozen=True, kw_only=True)
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
            positive(name, getattr(self, name))
        for name, least in (("batch_size", 1), ("gradient_accumulation", 1), ("lora_rank", 0), ("seed", 0)):
            at_least(name, getattr(self, name), least)


@dataclasses.dataclass(frozen=True, kw_only=True)
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
        positive("epochs", self.epochs)
        if self.lr != "auto":
            positive("lr", self.lr)
        least = {"batch_size": 1, "gradient_accumulation": 1, "max_length": 2, "lora_rank": 0, "seed": 0}
        for name, value in least.items():
            at_least(name, getattr(self, name), value)

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


def positive(name: str, value: float) -> None:
    """Refuse what is not a number above 0, or so large that a step would overflow."""
    if not 0 < value <= LARGEST:
        raise UsageError(f"{name} is {value:g}; accepted: a number above 0, at most {LARGEST:g}")


def at_least(name: str, value: int, least: int) -> None:
    """Refuse what is less."""
    if value < least:
        raise UsageError(f"{name} is {value}; accepted: a whole number of at least {least}")
