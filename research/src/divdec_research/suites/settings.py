"""Options of `divdec eval tofu`, `muse` and `rwku`, and of `divdec results`. It does not import torch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from cyclopts import Group, Parameter

from divdec.evaluation.settings import EvalSettings, QuestionSettings

if TYPE_CHECKING:
    from divdec_research.suites.aggregate import Bootstrap

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class RwkuSettings(QuestionSettings):
    """Options of `divdec eval rwku`."""

    suite: ClassVar[str] = "rwku"

    subjects: tuple[str, ...] = ()
    """Names of the people to forget; by default all people of the data."""
    screen: bool = False
    """Measure forget levels 1 and 2 alone, and rank the people by how much the model knows about them."""
    limit: int | None = None
    """Use only the first N questions of each person, level and kind of attack. Of a file that names no people, such as
    mmlu.jsonl, use N times the number of people."""
    system_prompt: str | None = None
    """System prompt before every question. By default none is given, as by the authors."""
    max_length: Annotated[int, Parameter(parse=False)] = 512


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoring:
    """How aggregates and their intervals are computed."""

    level: Annotated[float, SCORING] = 0.99
    """Level of the percentile bootstrap intervals."""
    draws: Annotated[int, SCORING] = 1000
    """Number of bootstrap resamples of the items."""
    seed: Annotated[int, SCORING] = 0
    """Seed of the resampling."""
    variant: Variant = "openunlearning"
    """How TOFU's aggregates are computed: 'openunlearning' takes OpenUnlearning's definition of the truth ratio,
    'dd-paper' is the code behind the tables of the Divergence Decoding paper, 'relative' measures attacks relative to
    the retrained model's AUC. Published summaries support only 'dd-paper'."""

    def bootstrap(self) -> Bootstrap:
        """Return the bootstrap of the intervals."""
        from divdec_research.suites.aggregate import Bootstrap

        return Bootstrap(self.level, self.draws, self.seed)
