"""Options of the methods that wrap the target. It knows nothing of torch."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from divdec.errors import UsageError
from divdec.options import check_at_least
from divdec.research.baselines.method import Method
from divdec.training.settings import TrainingSettings


@dataclasses.dataclass(frozen=True)
class HelperSettings:
    """How a helper model is fine-tuned."""

    epochs: float = 10.0
    """Passes over the data."""
    learning_rate: float = 1e-5
    """Peak learning rate of AdamW."""
    batch_size: int = 16
    """Sequences per step."""

    def __post_init__(self) -> None:
        self.training(0)  # which refuses what is out of range

    def training(self, seed: int, lora_rank: int = 0) -> TrainingSettings:
        """The settings of the run."""
        return TrainingSettings(
            epochs=self.epochs,
            learning_rate=self.learning_rate,
            batch_size=self.batch_size,
            lora_rank=lora_rank,
            seed=seed,
        )


@dataclasses.dataclass(frozen=True)
class WHPSettings(HelperSettings):
    """Who's Harry Potter: P − α·ReLU(reinforced − P)."""

    alpha: float = 3.0
    """α, how much of what the reinforced model raises is taken away."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _within("alpha", self.alpha, 0.0, math.inf)


@dataclasses.dataclass(frozen=True)
class OffsetSettings(HelperSettings):
    """δ-Unlearning: the offset of a small model, trained on the logits of the ensemble."""

    epochs: float = 5.0
    """Passes over the forget set."""
    retain_weight: float = 1.0
    """Weight of KL(target ‖ ensemble) on the retain set beside the gradient ascent on the forget set."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _within("retain_weight", self.retain_weight, 0.0, math.inf)


@dataclasses.dataclass(frozen=True)
class ULDSettings(HelperSettings):
    """Unlearning from Logit Difference: an assistant that remembers the forget set alone, taken away."""

    learning_rate: float = 1e-3
    """Peak learning rate of AdamW."""
    weight: float = 0.8
    """What the assistant's logits are multiplied by before they are taken away."""
    plausibility: float = 0.01
    """Only tokens of at least this share of the likeliest token's probability are changed (top filter)."""
    retain_weight: float = 5.0
    """Weight of KL(uniform ‖ assistant) on the retain set beside the cross entropy on the forget set."""
    assistant: Literal["target", "base"] = "target"
    """What the assistant begins as: the target's first layers, or the whole of the base model."""
    layers: int | None = None
    """How many of the target's layers the assistant has; a quarter by default (the paper: 8 of 32)."""
    lora_rank: int = 16
    """Train adapters of this rank, as the paper does; 0 trains every weight."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.training(0, self.lora_rank)
        _within("weight", self.weight, 0.0, math.inf)
        _within("plausibility", self.plausibility, 0.0, 1.0)
        _within("retain_weight", self.retain_weight, 0.0, math.inf)


@dataclasses.dataclass(frozen=True)
class UCDSettings(HelperSettings):
    """Unlearning via contrastive decoding: P + α·(clean − unclean) among plausible tokens."""

    alpha: float = 1.0
    """α, strength of the contrast."""
    plausibility: float = 0.1
    """Only tokens of at least this share of the target's likeliest token's probability may be chosen."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _within("alpha", self.alpha, 0.0, math.inf)
        _within("plausibility", self.plausibility, 0.0, 1.0)


@dataclasses.dataclass(frozen=True)
class ClassifierSettings:
    """How prompts about the forget set are told from others."""

    threshold: float = 0.5
    """A prompt is one about the forget set where the classifier's probability is above this; 1 never."""
    classifier_width: int = 256
    """Width of the classifier's hidden layer; 0 makes it a logistic regression."""
    window: int = 32
    """Where no marker separates prompt from answer (plain text, completions): so many tokens are the prompt."""

    def __post_init__(self) -> None:
        _within("threshold", self.threshold, 0.0, 1.0)
        check_at_least("classifier_width", self.classifier_width, 0)
        check_at_least("window", self.window, 1)


@dataclasses.dataclass(frozen=True)
class GUARDSettings(ClassifierSettings):
    """GUARD: prompts are classified, and the words of the nearest forget answer are forbidden."""

    beta: float = 1.0
    """β: a forbidden word is blocked at the token that completes this share of its tokens."""
    delta: float = 0.5
    """δ: a token is blocked too where its embedding's cosine with a forbidden word's is at least this."""
    penalty: float = 30.0
    """What blocked tokens lose, in nats; the paper's is infinite, which likelihoods cannot bear."""
    similarity_weight: float = 1.0
    """What tokens below δ lose, in nats per unit of cosine."""
    common: float = 0.02
    """A word is forbidden only if at most this share of the retain answers hold it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _within("beta", self.beta, 1e-6, 1.0)
        _within("delta", self.delta, -1.0, math.inf)
        _within("penalty", self.penalty, 0.0, math.inf)
        _within("similarity_weight", self.similarity_weight, 0.0, math.inf)
        _within("common", self.common, 0.0, 1.0)


@dataclasses.dataclass(frozen=True)
class ECOSettings(ClassifierSettings):
    """Embedding-corrupted prompts: prompts are classified, and the embeddings of forget prompts corrupted."""

    threshold: float = 0.99
    """A prompt is one about the forget set where the classifier's probability is above this; 1 never."""
    corruption: Literal["noise", "zero", "flip"] = "noise"
    """What is done to the first dimensions of a prompt token's embedding."""
    strength: float = 50.0
    """σ, standard deviation of the noise."""
    dims: int = 1
    """How many dimensions are corrupted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _within("strength", self.strength, 0.0, math.inf)
        check_at_least("dims", self.dims, 1)


@dataclasses.dataclass(frozen=True)
class LUNARSettings:
    """LUNAR: one down-projection sends forget prompts where prompts lie that the model cannot answer."""

    layer: int | None = None
    """Which layer's projection is changed, from 0; by default the one at which redirection does best."""
    coefficient: float = 2.0
    """How many times the direction is added."""
    ridge: float = 1e-3
    """Weight of keeping the projection as it is, as a share of the activations' mean square."""
    reference: str | None = None
    """File of texts, a line each, that the model cannot answer; by default questions about what does not exist."""
    batch_size: int = 16
    """Prompts read together."""

    def __post_init__(self) -> None:
        if self.layer is not None:
            check_at_least("layer", self.layer, 0)
        if not math.isfinite(self.coefficient):
            raise UsageError(f"coefficient is {self.coefficient}; accepted: a finite number")
        _within("ridge", self.ridge, 1e-12, math.inf)
        check_at_least("batch_size", self.batch_size, 1)


def _within(name: str, value: float, least: float, most: float) -> None:
    if not (math.isfinite(value) and least <= value <= most):
        bounds = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        raise UsageError(f"{name} is {value:g}; accepted: a finite number {bounds}")


INFERENCE_METHODS: tuple[Method, ...] = (
    Method(
        "whp", "WHP", "inference", WHPSettings,
        "Eldan and Russinovich 2023, Who's Harry Potter? Approximate Unlearning in LLMs, section 2.1",
        "takes away what a model raises that was fine-tuned further on the forget set",
        "divdec.research.baselines.logits:make_whp",
    ),
    Method(
        "offset", "δ-Unlearning", "inference", OffsetSettings,
        "Huang et al. 2024, Offset Unlearning for Large Language Models, section 3",
        "adds the offset of a small model that was trained to make the ensemble forget",
        "divdec.research.baselines.offset:make_offset",
    ),
    Method(
        "uld", "ULD", "inference", ULDSettings,
        "Ji et al. 2024, Reversing the Forget-Retain Objectives, sections 3.1 and 3.2",
        "takes away a small assistant that knows the forget set and nothing else",
        "divdec.research.baselines.logits:make_uld",
    ),
    Method(
        "ucd", "UCD", "inference", UCDSettings,
        "Suriyakumar, Sekhari and Wilson 2025, UCD: Unlearning in LLMs via Contrastive Decoding",
        "contrasts a small model without the forget set with one that saw it, among plausible tokens",
        "divdec.research.baselines.logits:make_ucd",
    ),
    Method(
        "guard", "GUARD", "inference", GUARDSettings,
        "Deng et al. 2025, GUARD: Generation-time LLM Unlearning via Adaptive Restriction and Detection",
        "recognises prompts about the forget set and forbids the words of the answer",
        "divdec.research.baselines.guard:make_guard",
    ),
    Method(
        "eco", "ECO", "inference", ECOSettings,
        "Liu et al. 2024, Large Language Model Unlearning via Embedding-Corrupted Prompts, section 3",
        "recognises prompts about the forget set and corrupts their embeddings",
        "divdec.research.baselines.eco:make_eco",
    ),
    Method(
        "lunar", "LUNAR", "inference", LUNARSettings,
        "Shen et al. 2025, LLM Unlearning via Neural Activation Redirection, section 3",
        "changes one projection so that forget prompts look like those the model cannot answer",
        "divdec.research.baselines.lunar:make_lunar",
    ),
)  # fmt: skip
