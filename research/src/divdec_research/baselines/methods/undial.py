"""UNDIAL: learn from the target with the memorised tokens' logits lowered."""

from __future__ import annotations

import dataclasses

from divdec_research.baselines.annotations import Batch, Labels, Logits, Loss, PreTrainedModel
from divdec_research.baselines.method import METHODS, Method
from divdec_research.baselines.methods.grad_diff import GradDiff, GradDiffSettings
from divdec_research.baselines.objective import logits_of, predicted
from divdec_research.ranges import LearningRate, NonNegative, Positive


@dataclasses.dataclass(frozen=True)
class UNDIALSettings(GradDiffSettings):
    """Training with UNDIAL."""

    learning_rate: LearningRate = 1e-4
    """Peak learning rate of AdamW, with a cosine schedule to 0."""
    alpha: NonNegative = 0.0
    """Weight of the retain term. The default 0 disables it, as in the paper."""
    beta: Positive = 10.0
    """Amount by which the teacher's logit of the memorised token is lowered."""


class UNDIAL(GradDiff):
    """UNDIAL; the reference is the teacher before its logits are lowered."""

    def prepare(self, model: PreTrainedModel) -> None:
        """Load the teacher."""
        self.reference = self.job.load_frozen_target()

    def forget_loss(self, model: PreTrainedModel, batch: Batch) -> Loss:
        """See `undial`."""
        return undial(logits_of(model, batch), self.reference_logits(batch), batch["labels"], self.settings.beta)


def undial(logits: Logits, teacher_logits: Logits, labels: Labels, beta: float) -> Loss:
    """Cross entropy with softmax(teacher's logits − β · one-hot of the memorised token), mean over labelled tokens.

    Dong et al. 2024, the adjusted teacher and its loss.
    """
    import torch
    from torch.nn.functional import cross_entropy

    chosen = predicted(labels)
    tokens = labels[:, 1:][chosen]
    teacher = teacher_logits[:, :-1][chosen].float()
    lowered = teacher.scatter_add(-1, tokens[:, None], torch.full_like(teacher[:, :1], -beta))
    total = cross_entropy(logits[:, :-1][chosen].float(), lowered.softmax(-1), reduction="sum")
    return total / chosen.sum().clamp(min=1)


METHODS["undial"] = Method(
    "UNDIAL", UNDIALSettings, objective=UNDIAL,
    source="Dong et al. 2024, UNDIAL: Self-Distillation with Adjusted Logits, the adjusted teacher",
    summary="learn from the target with the memorised tokens' logits lowered",
)  # fmt: skip
