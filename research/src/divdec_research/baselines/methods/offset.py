"""δ-Unlearning: add the logit offset of a small model, trained so that the ensemble forgets.

The formula is linear steering with α = 1, so the method writes an ordinary bundle.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from divdec_research.baselines.annotations import Batch, Job, Logits, Loss, PreTrainedModel, Tensor
from divdec_research.baselines.method import METHODS, BuiltModel, Method
from divdec_research.baselines.objective import RETAIN, BatchObjective, answer_logits
from divdec_research.baselines.settings import HelperSettings
from divdec_research.ranges import NonNegative


@dataclasses.dataclass(frozen=True)
class OffsetSettings(HelperSettings):
    """δ-Unlearning: the offset of a small model, trained on the logits of the ensemble."""

    epochs: float = 5.0
    """Number of epochs over the forget set."""
    retain_weight: NonNegative = 1.0
    """Weight of KL(target ‖ ensemble) on the retain set beside the gradient ascent on the forget set."""


def offset(target: Logits, trained: Logits, base: Logits) -> Logits:
    """P + (q − p): linear steering with α = 1 (δ-Unlearning, equation 1)."""
    return target + (trained - base)


class OffsetAscent(BatchObjective):
    """Gradient ascent on the forget set, and KL(P ‖ ensemble) on the retain set, of P + q − p (δ-Unlearning, eq. 2)."""

    def __init__(self, target: PreTrainedModel, base: PreTrainedModel, retain_weight: float) -> None:
        self.target = target.eval().requires_grad_(False)
        self.base = base.eval().requires_grad_(False)
        self.retain_weight = retain_weight

    def loss(self, model: PreTrainedModel, batch: Batch, labelled: Tensor | int | None) -> Loss:
        """See `BatchObjective.loss`."""
        from torch.nn.functional import cross_entropy, kl_div

        _, ensemble, labels = self._logits(model, batch)
        target, retained, _ = self._logits(model, self.inputs(batch, RETAIN))
        divergence = kl_div(
            retained.log_softmax(dim=-1), target.log_softmax(dim=-1), reduction="batchmean", log_target=True
        )
        return self.retain_weight * divergence - cross_entropy(ensemble, labels)

    def _logits(self, model: PreTrainedModel, batch: Batch) -> tuple[Logits, Logits, Tensor]:
        """The target's and the ensemble's logits of the labelled tokens, and these tokens."""
        import torch

        with torch.no_grad():
            (target, _), (base, _) = answer_logits(self.target, batch), answer_logits(self.base, batch)
        trained, labels = answer_logits(model, batch)
        width = min(target.shape[-1], base.shape[-1])
        return target[:, :width], offset(target[:, :width], trained[:, :width], base[:, :width]), labels


def build(job: Job, settings: OffsetSettings, output: Path) -> BuiltModel:
    """Train the offset, and write a bundle; see `build_method`.

    Raises:
        UsageError: the job lacks a base with the target's vocabulary.
    """
    from divdec.model.bundle import write_bundle
    from divdec.training.auxiliaries import load_for_training
    from divdec_research.baselines.training import check_base, train_helper

    base = check_base(job, "offset")
    trained, seconds = train_helper(
        job, "offset", base, job.forget_examples, settings.training(job.seed), key=settings.retain_weight,
        objective=OffsetAscent(load_for_training(job.target), load_for_training(base), settings.retain_weight),
    )  # fmt: skip
    write_bundle(
        output, target=str(job.target), retain_auxiliary=str(trained), forget_auxiliary=str(base),
        steering="linear:1", forget_set=job.forget.label,
    )  # fmt: skip
    return BuiltModel(output, seconds)


METHODS["offset"] = Method(
    "δ-Unlearning", OffsetSettings, build=build,
    source="Huang et al. 2024, Offset Unlearning for Large Language Models, section 3",
    summary="add the logit offset of a small model, trained so that the ensemble forgets",
)  # fmt: skip
