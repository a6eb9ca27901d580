"""SimNPO: NPO without a reference, on the mean log-probability of an answer."""

from __future__ import annotations

import dataclasses

from divdec_research.baselines.annotations import Batch, Int, Loss, PerSequence, PreTrainedModel, Tensor
from divdec_research.baselines.method import METHODS, Method
from divdec_research.baselines.methods.grad_diff import GradDiff
from divdec_research.baselines.methods.npo import NPOSettings
from divdec_research.baselines.objective import predicted
from divdec_research.ranges import Finite, Positive


@dataclasses.dataclass(frozen=True)
class SimNPOSettings(NPOSettings):
    """Training with SimNPO."""

    gamma: Positive = 0.125
    """Weight of the forget term."""
    beta: Positive = 4.5
    """Factor β of an answer's mean log-probability."""
    delta: Finite = 0.0
    """Reward margin δ (γ in the paper)."""


class SimNPO(GradDiff):
    """SimNPO."""

    def forget_loss(self, model: PreTrainedModel, batch: Batch) -> Loss:
        """See `simnpo`."""
        lengths = predicted(batch["labels"]).sum(-1)
        return simnpo(self.log_probabilities(model, batch), lengths, self.settings.beta, self.settings.delta)


def simnpo(log_probabilities: PerSequence, lengths: Int[Tensor, " batch"], beta: float, delta: float) -> Loss:
    """(2/β) · mean of −log σ(−(β/|y|) · log π − δ) (Fan et al. 2024, where δ is called γ)."""
    from torch.nn.functional import logsigmoid

    return -2 / beta * logsigmoid(-beta * log_probabilities / lengths - delta).mean()


METHODS["simnpo"] = Method(
    "SimNPO", SimNPOSettings, objective=SimNPO,
    source="Fan et al. 2024, Simplicity Prevails: Rethinking Negative Preference Optimization, the loss of SimNPO",
    summary="NPO without a reference, on the mean log-probability of an answer",
)  # fmt: skip
