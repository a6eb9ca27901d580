"""NPO: gradient ascent whose weight falls as an answer becomes less likely than under the frozen target."""

from __future__ import annotations

import dataclasses

from divdec_research.baselines.annotations import Batch, Loss, PerSequence, PreTrainedModel, Tensor
from divdec_research.baselines.method import METHODS, Method
from divdec_research.baselines.methods.grad_diff import GradDiff, GradDiffSettings
from divdec_research.ranges import Positive


@dataclasses.dataclass(frozen=True)
class NPOSettings(GradDiffSettings):
    """Training with NPO."""

    beta: Positive = 0.1
    """Inverse temperature β of the loss. With a larger β, the weight of an answer falls faster as it becomes less
    likely; β → 0 is gradient ascent."""


class NPO(GradDiff):
    """NPO; the frozen target's log-probabilities of the forget sequences are computed before training."""

    forget_reference: Tensor

    def prepare(self, model: PreTrainedModel) -> None:
        """Compute the reference log-probabilities."""
        super().prepare(model)
        self.forget_reference = self.untrained_log_probabilities(model, self.job.forget_examples)

    def forget_loss(self, model: PreTrainedModel, batch: Batch) -> Loss:
        """See `npo`."""
        reference = self.forget_reference[batch["index"]]
        return npo(self.log_probabilities(model, batch), reference, self.settings.beta)


def npo(log_probabilities: PerSequence, reference: PerSequence, beta: float) -> Loss:
    """(2/β) · mean of −log σ(−β · log(π/π_ref)) (Zhang et al. 2024, L_NPO).

    As β → 0 its gradient becomes that of gradient ascent on the sequences' NLL; at π = π_ref it equals that at any β.

    Args:
        log_probabilities: log π(y | x) of the forget sequences, summed over tokens.
        reference: the same of the frozen target.
        beta: how soon a sequence that has become less likely counts less.
    """
    from torch.nn.functional import logsigmoid

    return -2 / beta * logsigmoid(-beta * (log_probabilities - reference)).mean()


METHODS["npo"] = Method(
    "NPO", NPOSettings, objective=NPO,
    source="Zhang et al. 2024, Negative Preference Optimization, the loss L_NPO",
    summary="gradient ascent whose weight falls as an answer becomes less likely than under the frozen target",
)  # fmt: skip
