"""Settings of the measured limits. It knows nothing of torch."""

from __future__ import annotations

import dataclasses

from divdec.errors import UsageError
from divdec.research.methods.cell import Cell

STEERED = "linear:1.5"  # the best of the comparison's grid on this world (docs/benchmarks.md)
STRENGTHS = ("linear:0.5", "linear:1", "linear:1.5", "linear:2", "linear:3", "linear:4")
NGRAM, FORGET_AUXILIARY = "n-grams", "p alone"
_BATCHES = (("batch_size", 16), ("gradient_accumulation", 1))
# Gradient methods and the rehearsed student under their best setting in the comparison (docs/benchmarks.md), so that
# none of them is attacked at a weak point of its grid; the student of the forget set alone is the paper's.
CHECKPOINTS: dict[str, Cell] = {
    "distilled": Cell("distill", (("lr", 3e-4), ("rehearse", 0))),
    "distilled, rehearsed": Cell("distill", (("lr", 3e-4), ("rehearse", 200))),
    "GradDiff": Cell("grad-diff", (("learning_rate", 2e-4), ("epochs", 5.0)), constant=_BATCHES),
    "NPO": Cell("npo", (("learning_rate", 3e-4), ("epochs", 3.0)), constant=_BATCHES),
    "SimNPO": Cell("simnpo", (("learning_rate", 1e-3), ("epochs", 10.0)), constant=_BATCHES),
}
REFERENCES: dict[str, Cell] = {"target": Cell("target"), "retrain": Cell("retrain")}
BUNDLES: dict[str, Cell] = {
    STEERED: Cell("linear", steering=STEERED),
    "rank:30": Cell("rank", steering="rank:30"),
}
PARTS = ("prompts", "candidates", "relearning")


@dataclasses.dataclass(frozen=True)
class LimitsSettings:
    """What is measured, and where it goes."""

    output: str
    """Folder for models and figures; the same call goes on in it after it was stopped."""
    seeds: int = 3
    """So many worlds with models of their own."""
    parts: tuple[str, ...] = PARTS
    """Of 'prompts', 'candidates' and 'relearning'."""
    prompts: int = 20
    """Attack prompts a question."""
    samples: int = 16
    """Sampled answers a question."""
    steps: tuple[int, ...] = (0, 5, 10, 20, 40)
    """After how many steps of fine-tuning the attacked model is asked; the last ends the attack."""
    rate: float = 5e-4
    """Peak learning rate of the attack (AdamW, falling to 0 along a cosine)."""

    def __post_init__(self) -> None:
        for name in ("seeds", "prompts", "samples"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; accepted: a whole number of at least 1")
        if unknown := [part for part in self.parts if part not in PARTS]:
            raise UsageError(f"part {unknown[0]!r} is not known; there are: {', '.join(PARTS)}")
        if list(self.steps) != sorted(set(self.steps)) or self.steps[0] != 0 or len(self.steps) < 2:
            raise UsageError(f"steps are {self.steps}; accepted: rising numbers that begin with 0")
        if self.rate <= 0:
            raise UsageError(f"rate is {self.rate:g}; accepted: a learning rate greater than 0")
