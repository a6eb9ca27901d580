"""WHP: subtract the increase in logits of a model that was fine-tuned further on the forget set."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from divdec_research.baselines.annotations import Job, Logits
from divdec_research.baselines.decoding import TARGET, LogitCombination
from divdec_research.baselines.method import METHODS, BuiltModel, Method
from divdec_research.baselines.settings import HelperSettings
from divdec_research.ranges import NonNegative


@dataclasses.dataclass(frozen=True)
class WHPSettings(HelperSettings):
    """Who's Harry Potter: P − α·ReLU(reinforced − P)."""

    alpha: NonNegative = 3.0
    """α, strength of the subtraction."""


class WHP(LogitCombination):
    """Target and reinforced model."""

    parts = (TARGET, "reinforced")

    @staticmethod
    def formula(target: Logits, reinforced: Logits, alpha: float) -> Logits:
        """P − α·ReLU(reinforced − P) (Eldan and Russinovich 2023, equation 1)."""
        return target - alpha * (reinforced - target).relu()


def build(job: Job, settings: WHPSettings, output: Path) -> BuiltModel:
    """Fine-tune the target further on the forget set, and write the composite; see `build_method`."""
    from divdec_research.baselines.composite import write_composite
    from divdec_research.baselines.training import train_helper

    reinforced, seconds = train_helper(job, "reinforced", job.target, job.forget_examples, settings.training(job.seed))
    write_composite(job, output, "whp", {"alpha": settings.alpha}, reinforced=reinforced)
    return BuiltModel(output, seconds)


METHODS["whp"] = Method(
    "WHP", WHPSettings, build=build, decoding=WHP,
    source="Eldan and Russinovich 2023, Who's Harry Potter? Approximate Unlearning in LLMs, section 2.1",
    summary="subtract the increase in logits of a model that was fine-tuned further on the forget set",
)  # fmt: skip
