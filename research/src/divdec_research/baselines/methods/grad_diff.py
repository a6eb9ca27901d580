"""GradDiff: gradient ascent on the forget set with a retain term; the base of other methods with one."""

from __future__ import annotations

import dataclasses
from typing import Literal

from divdec_research.baselines.annotations import Batch, Logits, Loss, PreTrainedModel, Tensor
from divdec_research.baselines.method import METHODS, Method
from divdec_research.baselines.objective import RETAIN, TargetObjective, kl_from_reference, logits_of, nll
from divdec_research.baselines.settings import TargetTrainingSettings
from divdec_research.ranges import NonNegative, Positive


@dataclasses.dataclass(frozen=True)
class GradDiffSettings(TargetTrainingSettings):
    """Training with a forget term and a retain term."""

    gamma: Positive = 1.0
    """Weight of the forget term."""
    alpha: NonNegative = 1.0
    """Weight of the retain term. 0 disables it."""
    retain_loss: Literal["nll", "kl"] = "nll"
    """Retain term: 'nll' is the NLL of the retain answers; 'kl' is KL(frozen target ‖ trained model) on their tokens
    and keeps a second model in memory."""


class GradDiff(TargetObjective):
    """γ · forget term + α · retain term; subclasses override the forget term.

    Means over tokens are taken per micro-batch, as in OpenUnlearning: forget and retain terms have different numbers
    of tokens, and only one could be counted over a whole step.
    """

    reference: PreTrainedModel | None = None
    """The frozen target, where a term needs its logits."""

    def prepare(self, model: PreTrainedModel) -> None:
        """Load the frozen target for the KL retain term."""
        if self.settings.retain_loss == "kl" and self.settings.alpha:
            self.reference = self.job.load_frozen_target()

    def loss(self, model: PreTrainedModel, batch: Batch, labelled: Tensor | int | None) -> Loss:
        """See `BatchObjective.loss`."""
        loss = self.settings.gamma * self.forget_loss(model, batch)
        if self.settings.alpha:
            loss = loss + self.settings.alpha * self.retain_loss(model, self.inputs(batch, RETAIN))
        return loss

    def forget_loss(self, model: PreTrainedModel, batch: Batch) -> Loss:
        """The forget term."""
        return -nll(logits_of(model, batch), batch["labels"])

    def retain_loss(self, model: PreTrainedModel, retain: Batch) -> Loss:
        """The retain term."""
        logits = logits_of(model, retain)
        if self.settings.retain_loss == "nll":
            return nll(logits, retain["labels"])
        return kl_from_reference(logits, self.reference_logits(retain), retain["labels"])

    def reference_logits(self, inputs: Batch) -> Logits:
        """Logits of the frozen target."""
        import torch

        assert self.reference is not None
        with torch.no_grad():
            return logits_of(self.reference, inputs)


METHODS["grad-diff"] = Method(
    "GradDiff", GradDiffSettings, objective=GradDiff,
    source="Liu et al. 2022, Continual Learning and Private Unlearning; Maini et al. 2024, TOFU (GA-GDR)",
    summary="raise the loss on the forget set, lower it on the retain set",
)  # fmt: skip
