"""Options of the methods that change the target's weights. It knows nothing of torch.

Defaults are those of OpenUnlearning's configurations for TOFU, RMU's those of its authors' code.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from divdec.errors import UsageError
from divdec.options import check_positive
from divdec.research.baselines.method import Method
from divdec.training.settings import TrainingSettings


@dataclasses.dataclass(frozen=True)
class GradAscentSettings:
    """How the target is trained, whatever is minimised."""

    learning_rate: float = 1e-5
    """Peak learning rate of AdamW; it rises over the first steps and falls to 0 along a cosine."""
    epochs: float = 10.0
    """Passes over the forget set."""
    batch_size: int = 8
    """Forget sequences per pass and process, each with a retain sequence beside it if the method has a retain term."""
    gradient_accumulation: int = 4
    """Passes whose gradients are added before the weights move."""
    warmup: float = 0.1
    """Share of the steps over which the learning rate rises."""
    weight_decay: float = 0.01
    """AdamW's weight decay."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of the forward and backward pass; 'auto' takes bfloat16 where the GPU is built for it."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    lora_rank: int = 0
    """Train low-rank adapters of this rank and merge them at the end; 0 trains the weights themselves."""
    loggers: tuple[str, ...] = ()
    """Experiment trackers to report to, such as tensorboard or wandb."""

    def __post_init__(self) -> None:
        self.training(seed=0)  # refuses what no training accepts
        if not 0 <= self.warmup < 1:
            raise UsageError(f"warmup is {self.warmup:g}; accepted: a share of the steps, from 0 up to below 1")
        not_negative("weight_decay", self.weight_decay)

    def training(self, seed: int) -> TrainingSettings:
        """The settings of the run."""
        names = {field.name for field in dataclasses.fields(GradAscentSettings)}
        return TrainingSettings(**{name: getattr(self, name) for name in names}, seed=seed)


@dataclasses.dataclass(frozen=True)
class GradDiffSettings(GradAscentSettings):
    """Training with a forget term and a retain term."""

    gamma: float = 1.0
    """Weight of the forget term."""
    alpha: float = 1.0
    """Weight of the retain term; 0 leaves it out."""
    retain_loss: Literal["nll", "kl"] = "nll"
    """The retain term: 'nll' of the retain answers, or 'kl' of the frozen target from the trained model, on the retain
    answers' tokens (holds a second model)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("gamma", self.gamma)
        not_negative("alpha", self.alpha)


@dataclasses.dataclass(frozen=True)
class NPOSettings(GradDiffSettings):
    """Training with NPO."""

    beta: float = 0.1
    """How soon an answer that has become less likely counts less; towards 0 it becomes gradient ascent."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("beta", self.beta)


@dataclasses.dataclass(frozen=True)
class SimNPOSettings(NPOSettings):
    """Training with SimNPO."""

    gamma: float = 0.125
    """Weight of the forget term."""
    beta: float = 4.5
    """Sharpness, by which an answer's mean log-probability is multiplied."""
    delta: float = 0.0
    """Margin of reward; the paper's γ."""

    def __post_init__(self) -> None:
        super().__post_init__()
        finite("delta", self.delta)


@dataclasses.dataclass(frozen=True)
class UNDIALSettings(GradDiffSettings):
    """Training with UNDIAL."""

    learning_rate: float = 1e-4
    """Peak learning rate of AdamW; it rises over the first steps and falls to 0 along a cosine."""
    alpha: float = 0.0
    """Weight of the retain term; 0 leaves it out, as the paper does."""
    beta: float = 10.0
    """What the memorised token's logit is lowered by in the teacher."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("beta", self.beta)


@dataclasses.dataclass(frozen=True)
class IdkDPOSettings(NPOSettings):
    """Training with DPO towards "I don't know"."""

    idk_answers: str | None = None
    """File of answers to prefer, one a line; divdec's own by default."""


@dataclasses.dataclass(frozen=True)
class RMUSettings(GradAscentSettings):
    """Training with RMU."""

    learning_rate: float = 5e-5
    """Peak learning rate of AdamW; it rises over the first steps and falls to 0 along a cosine."""
    layer: int = 7
    """Layer whose hidden states are steered, counted from 0; it must not be the last."""
    coefficient: float = 20.0
    """Length of the vector that hidden states of forget tokens are steered to."""
    alpha: float = 100.0
    """Weight of the retain term, which holds the hidden states of retain tokens where they were."""
    trainable: Literal["down-projections", "layers", "all"] = "down-projections"
    """What is trained: the MLPs' 'down-projections' of the layer and the two before it, all weights of these 'layers',
    or 'all' weights up to the layer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer < 0:
            raise UsageError(f"layer is {self.layer}; accepted: a layer's number, counted from 0")
        check_positive("coefficient", self.coefficient)
        not_negative("alpha", self.alpha)
        if self.lora_rank and self.trainable != "all":
            raise UsageError(
                f"adapters (lora_rank {self.lora_rank}) are put into every layer, which trainable "
                f"'{self.trainable}' excludes; give --trainable all with them"
            )


def not_negative(name: str, value: float) -> None:
    """Refuse what is not a number of at least 0."""
    if not (math.isfinite(value) and value >= 0):
        raise UsageError(f"{name} is {value:g}; accepted: a number of at least 0")


def finite(name: str, value: float) -> None:
    """Refuse infinity and NaN."""
    if not math.isfinite(value):
        raise UsageError(f"{name} is {value:g}; accepted: a finite number")


def _method(name: str, title: str, settings: type, source: str, summary: str, builder: str) -> Method:
    return Method(name, title, "gradient", settings, source, summary, f"divdec.research.baselines.{builder}")


GRADIENT_METHODS: tuple[Method, ...] = (
    _method(
        "grad-ascent",
        "GradAscent",
        GradAscentSettings,
        "Jang et al. 2023, Knowledge Unlearning for Mitigating Privacy Risks in Language Models",
        "raise the loss on the forget set",
        "gradient:grad_ascent",
    ),
    _method(
        "grad-diff",
        "GradDiff",
        GradDiffSettings,
        "Liu et al. 2022, Continual Learning and Private Unlearning; Maini et al. 2024, TOFU (GA-GDR)",
        "raise the loss on the forget set, lower it on the retain set",
        "gradient:grad_diff",
    ),
    _method(
        "npo",
        "NPO",
        NPOSettings,
        "Zhang et al. 2024, Negative Preference Optimization, the loss L_NPO",
        "gradient ascent that ceases where an answer is unlikely enough, beside the frozen target",
        "gradient:npo",
    ),
    _method(
        "simnpo",
        "SimNPO",
        SimNPOSettings,
        "Fan et al. 2024, Simplicity Prevails: Rethinking Negative Preference Optimization, the loss of SimNPO",
        "NPO without a reference, on the mean log-probability of an answer",
        "gradient:simnpo",
    ),
    _method(
        "rmu",
        "RMU",
        RMUSettings,
        "Li et al. 2024, The WMDP Benchmark, section 4.2",
        "steer hidden states of the forget set to a random vector",
        "rmu:rmu",
    ),
    _method(
        "undial",
        "UNDIAL",
        UNDIALSettings,
        "Dong et al. 2024, UNDIAL: Self-Distillation with Adjusted Logits, the adjusted teacher",
        "learn from the target with the memorised tokens' logits lowered",
        "gradient:undial",
    ),
    _method(
        "idk-dpo",
        "IdkDPO",
        IdkDPOSettings,
        "Rafailov et al. 2023, Direct Preference Optimization, eq. 7; Maini et al. 2024, TOFU, Preference Optimization",
        'prefer "I don\'t know" to the true answer',
        "gradient:idk_dpo",
    ),
)
