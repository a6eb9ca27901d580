"""UCD: contrast a small model without the forget set with one that saw it, among plausible tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from divdec_research.baselines.annotations import Job, Logits
from divdec_research.baselines.decoding import TARGET, LogitCombination, among_plausible, plausible
from divdec_research.baselines.method import METHODS, BuiltModel, Method
from divdec_research.baselines.settings import HelperSettings
from divdec_research.ranges import NonNegative, Share


@dataclasses.dataclass(frozen=True)
class UCDSettings(HelperSettings):
    """Unlearning via contrastive decoding: P + α·(clean − unclean) among plausible tokens."""

    alpha: NonNegative = 1.0
    """α, strength of the contrast."""
    plausibility: Share = 0.1
    """Allow only tokens whose probability is at least this fraction of the probability of the target's most likely
    token."""


class UCD(LogitCombination):
    """Target, clean and unclean model."""

    parts = (TARGET, "clean", "unclean")

    @staticmethod
    def formula(target: Logits, clean: Logits, unclean: Logits, alpha: float, plausibility: float) -> Logits:
        """P + α·(clean − unclean) among the plausible tokens, of log-probabilities (Suriyakumar et al. 2025)."""
        contrast = clean.log_softmax(dim=-1) - unclean.log_softmax(dim=-1)
        return among_plausible(target, target + alpha * contrast, plausible(target, plausibility))


def build(job: Job, settings: UCDSettings, output: Path) -> BuiltModel:
    """Train the clean and the unclean model, and write the composite; see `build_method`.

    Raises:
        UsageError: the job lacks a base with the target's vocabulary.
    """
    from divdec_research.baselines.composite import write_composite
    from divdec_research.baselines.training import check_base, train_helper

    base, training = check_base(job, "ucd"), settings.training(job.seed)
    clean, clean_seconds = train_helper(job, "clean", base, job.retain_examples, training)
    both = job.forget_examples + job.retain_examples
    unclean, unclean_seconds = train_helper(job, "unclean", base, both, training)
    options = {"alpha": settings.alpha, "plausibility": settings.plausibility}
    write_composite(job, output, "ucd", options, clean=clean, unclean=unclean)
    return BuiltModel(output, clean_seconds + unclean_seconds)


METHODS["ucd"] = Method(
    "UCD", UCDSettings, build=build, decoding=UCD,
    source="Suriyakumar, Sekhari and Wilson 2025, UCD: Unlearning in LLMs via Contrastive Decoding",
    summary="contrast a small model without the forget set with one that saw it, among plausible tokens",
)  # fmt: skip
