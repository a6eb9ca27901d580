"""Options of `divdec gradient-depth`."""

import dataclasses

from divdec.errors import UsageError
from divdec.options import (
    BundleArgument,
    ModelLoading,
    OutputFolder,
    SteeringChoice,
    TrainingData,
    check_at_least,
    check_positive,
)
from divdec.training.settings import DistillationLoss


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientDepthSettings(DistillationLoss, TrainingData, SteeringChoice, ModelLoading, OutputFolder, BundleArgument):
    """Which gradients are measured, and on what data."""

    temperature: float = 1.0
    """Temperature T of the loss T²·KL."""
    samples: int = 100
    """Number of random examples from each set. 0 uses all examples."""
    seed: int = 0
    """Seed of the drawn examples and of the bootstrap."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("temperature", self.temperature)
        if self.dtype == "float16":
            raise UsageError("--dtype is 'float16', in which gradients overflow; accepted: auto, float32, bfloat16")
        for name in ("samples", "seed"):
            check_at_least(name, getattr(self, name), 0)
