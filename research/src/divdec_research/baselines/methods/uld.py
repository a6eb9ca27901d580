"""ULD: subtract the logits of a small assistant model that remembers only the forget set."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

from divdec.errors import UsageError
from divdec_research.baselines.annotations import Batch, Float, Job, Logits, Loss, PreTrainedModel, Tensor
from divdec_research.baselines.decoding import TARGET, LogitCombination, among_plausible, plausible
from divdec_research.baselines.method import METHODS, BuiltModel, Method
from divdec_research.baselines.objective import RETAIN, BatchObjective, answer_logits
from divdec_research.baselines.settings import HelperSettings
from divdec_research.ranges import LearningRate, NonNegative, Share


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
    layers: int | None = None
    """Number of the target's first layers from which the assistant starts; a quarter by default (the paper: 8 of
    32)."""
    lora_rank: int = 16
    """Train adapters of this rank, as the paper does; 0 trains every weight."""


class ULD(LogitCombination):
    """Target and assistant."""

    parts = (TARGET, "assistant")

    @staticmethod
    def formula(target: Logits, assistant: Logits, weight: float, plausibility: float) -> Logits:
        """P − w·A among the plausible tokens (Ji et al. 2024, equation 3 and the filter of section 3.2).

        A is log p + log V, log-probabilities against the uniform distribution, so that an assistant that is uniform,
        as it is trained to be outside the forget set, changes nothing. Within the plausible tokens this is the paper's
        formula, because a constant added to all logits has no effect.
        """
        against_uniform = assistant.log_softmax(dim=-1) + math.log(assistant.shape[-1])
        return among_plausible(target, target - weight * against_uniform, plausible(target, plausibility))


class RememberAndForget(BatchObjective):
    """Cross entropy on the forget set, and KL(uniform ‖ model) on the retain set (ULD, equations 4 and 5)."""

    def __init__(self, retain_weight: float) -> None:
        self.retain_weight = retain_weight

    def loss(self, model: PreTrainedModel, batch: Batch, labelled: Tensor | int | None) -> Loss:
        """See `BatchObjective.loss`."""
        from torch.nn.functional import cross_entropy

        logits, labels = answer_logits(model, batch)
        retain_logits, _ = answer_logits(model, self.inputs(batch, RETAIN))
        return cross_entropy(logits, labels) + self.retain_weight * kl_from_uniform(retain_logits)


def kl_from_uniform(logits: Float[Tensor, "positions vocab"]) -> Loss:
    """Mean of KL(uniform ‖ softmax(logits)) over positions, in nats: −log V − mean log p."""
    return -logits.log_softmax(dim=-1).mean(dim=-1).mean() - math.log(logits.shape[-1])


def build(job: Job, settings: ULDSettings, output: Path) -> BuiltModel:
    """Train the assistant, and write the composite; see `build_method`.

    Raises:
        UsageError: the target has fewer layers.
    """
    from divdec_research.baselines.composite import write_composite
    from divdec_research.baselines.training import train_helper

    layers, load = first_layers(job.target, settings.layers)
    assistant, seconds = train_helper(
        job, "assistant", job.target, job.forget_examples, settings.training(job.seed),
        key=[layers, settings.retain_weight], load=load, objective=RememberAndForget(settings.retain_weight),
    )  # fmt: skip
    options = {"weight": settings.weight, "plausibility": settings.plausibility}
    write_composite(job, output, "uld", options, assistant=assistant)
    note = "without the paper's paraphrased and perturbed answers beside forget and retain set"
    return BuiltModel(output, seconds, (note,))


def first_layers(folder: Path, layers: int | None) -> tuple[int, Callable[[Path], PreTrainedModel]]:
    """Load a checkpoint's first layers (default: a quarter) with embeddings, last norm and head as a model.

    Returns:
        The number of layers, and a function that loads them from the folder.

    Raises:
        UsageError: the checkpoint has fewer layers.
    """
    import torch

    from divdec.checkpoint import load_config, load_model

    config = load_config(folder)
    text = config.get_text_config(decoder=True)
    available = text.num_hidden_layers
    wanted = max(1, available // 4) if layers is None else layers
    if not 1 <= wanted <= available:
        raise UsageError(f"layers is {wanted}; {folder} has {available}: give a whole number from 1 to {available}")
    text.num_hidden_layers = wanted
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:wanted]
    return wanted, lambda path: load_model(path, config=config, dtype=torch.float32)


METHODS["uld"] = Method(
    "ULD", ULDSettings, build=build, decoding=ULD,
    source="Ji et al. 2024, Reversing the Forget-Retain Objectives, sections 3.1 and 3.2",
    summary="subtract the logits of a small assistant model that remembers only the forget set",
)  # fmt: skip
