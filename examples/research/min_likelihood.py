"""An unlearning method of your own in one file: lower the likelihood π(y | x) of forget answers instead of its log."""

import dataclasses

from divdec_research.baselines.methods.grad_diff import GradDiff, GradDiffSettings, Method
from divdec_research.baselines.table import METHODS, TITLES


@dataclasses.dataclass(frozen=True)
class MinLikelihoodSettings(GradDiffSettings):
    """Its options: fields with defaults, here those of GradDiff."""


class MinLikelihood(GradDiff):
    """GradDiff with a bounded forget term: an answer that is already unlikely is no longer pushed."""

    def forget_loss(self, model, batch):
        """Mean likelihood of the forget answers."""
        return self.log_probabilities(model, batch).exp().mean()


METHODS["min-likelihood"] = Method(
    "MinLikelihood", MinLikelihoodSettings, "this example", "lower π(y | x)", objective=MinLikelihood
)
TITLES["min-likelihood"] = METHODS["min-likelihood"].title
