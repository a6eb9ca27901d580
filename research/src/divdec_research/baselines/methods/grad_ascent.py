"""Gradient ascent on the forget set (Jang et al. 2023; Thudi et al. 2022)."""

from __future__ import annotations

from divdec_research.baselines.annotations import Batch, Loss, PreTrainedModel, Tensor
from divdec_research.baselines.method import METHODS, Method
from divdec_research.baselines.objective import TargetObjective, logits_of, nll
from divdec_research.baselines.settings import TargetTrainingSettings


class GradAscent(TargetObjective):
    """−NLL of the forget answers. It has no lower bound."""

    counts_tokens = True
    uses_retain = False

    def loss(self, model: PreTrainedModel, batch: Batch, labelled: Tensor | int | None) -> Loss:
        """See `BatchObjective.loss`."""
        return -nll(logits_of(model, batch), batch["labels"], labelled)


METHODS["grad-ascent"] = Method(
    "GradAscent", TargetTrainingSettings, objective=GradAscent,
    source="Jang et al. 2023, Knowledge Unlearning for Mitigating Privacy Risks in Language Models",
    summary="raise the loss on the forget set",
)  # fmt: skip
