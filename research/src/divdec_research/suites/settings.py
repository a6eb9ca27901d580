"""Options of `divdec eval tofu`, `divdec eval muse` and `divdec results`. It does not import torch."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

from cyclopts import Group, Parameter

from divdec.errors import UsageError
from divdec.evaluation.settings import EvalSettings, QuestionSettings

SCORING = Parameter(group=Group("Intervals", sort_key=4))
Variant = Literal["openunlearning", "dd-paper", "relative"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkSettings(EvalSettings):
    """Options of TOFU and MUSE."""

    holdout: str | None = None
    """Questions (TOFU) or texts (MUSE) that no model has seen; a JSON or JSONL file."""
    retain_results: str | None = None
    """Result folder of the retrained model, from divdec or OpenUnlearning. It is the reference for forget quality and
    privacy leakage."""
    openunlearning: bool = False
    """Also write TOFU_EVAL.json and TOFU_SUMMARY.json (or MUSE_…), as OpenUnlearning does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TofuSettings(QuestionSettings, BenchmarkSettings):
    """Options of `divdec eval tofu`."""

    suite: ClassVar[str] = "tofu"
    files: ClassVar[tuple[str, ...]] = ("retain_results", "fluency", "reference")

    split: str = "forget10"  # pyright: ignore[reportIncompatibleMethodOverride]
    """The forget split, forget01, forget05 or forget10."""
    fluency: str | None = None
    """Text classifier for fluency, whose class 0 means fluent: a folder or hub id. 'none' skips fluency. By default
    OpenUnlearning's (madhurjindal/autonlp-Gibberish-Detector-492513457), if it can be loaded."""
    reference: str | None = None
    """Reference model for the reference attack, with the same tokenizer: a folder or hub id."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuseSettings(BenchmarkSettings):
    """Options of `divdec eval muse`."""

    suite: ClassVar[str] = "muse"
    files: ClassVar[tuple[str, ...]] = ("retain_results",)

    sequence: Literal["none", "scal", "sust"] = "none"
    """Treat the models, in the given order, as steps with growing forget sets (scal) or with successive requests
    (sust)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sequence != "none" and (len(self.models) < 2 or self.sweep):
            raise UsageError("--sequence takes two models or more, one a step, and no --sweep")

    def step(self, number: int) -> dict[str, Any]:
        """See `EvalSettings.step`."""
        return {} if self.sequence == "none" else {"sequence": self.sequence, "step": number}


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Resampling:
    """Percentile bootstrap intervals."""

    level: Annotated[float, SCORING] = 0.99
    """Level of the percentile bootstrap intervals."""
    draws: Annotated[int, SCORING] = 1000
    """Number of bootstrap resamples of the items."""
    seed: Annotated[int, SCORING] = 0
    """Seed of the resampling."""


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoring(Resampling):
    """How aggregates and their intervals are computed."""

    variant: Variant = "openunlearning"
    """How TOFU's aggregates are computed: 'openunlearning' takes OpenUnlearning's definition of the truth ratio,
    'dd-paper' is the code behind the tables of the Divergence Decoding paper, 'relative' measures attacks relative to
    the retrained model's AUC. Published summaries support only 'dd-paper'."""
