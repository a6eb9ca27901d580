"""Aggregate results into TOFU's Mem, Priv, Utility and Agg, or MUSE's distances, with bootstrap intervals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from divdec.errors import UsageError

if TYPE_CHECKING:
    from divdec.evaluation.aggregate import Scores
    from divdec.evaluation.results import Results
    from divdec.report.scores import Scorer

POSITIONAL = ("suite", "results")
EXAMPLE = "divdec score tofu runs/linear runs/rank --target runs/target --retrain runs/retrain --variant paper --latex"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of `divdec score`."""

    suite: Literal["tofu", "muse"]
    """Which benchmark the results are of."""
    results: tuple[str, ...]
    """One or more folders that `divdec eval` or OpenUnlearning wrote; of the latter the *_SUMMARY.json will do, but
    intervals need items."""
    target: str
    """Results of the target, before anything was forgotten; held fixed in the intervals."""
    retrain: str
    """Results of the model retrained without the forget set; held fixed in the intervals."""
    variant: Literal["paper", "dd-repo", "relative"] = "paper"
    """How TOFU's aggregates are computed: as the paper's text says, as its tables were computed, or with attacks
    measured relative to the retrained model's AUC."""
    level: float = 0.99
    """Level of the percentile bootstrap intervals."""
    draws: int = 1000
    """How often the items are resampled."""
    seed: int = 0
    """Seed of the resampling."""
    json: bool = False
    """Print a JSON list with one object per result."""
    latex: bool = False
    """Print a LaTeX table (booktabs)."""

    def __post_init__(self) -> None:
        if self.json and self.latex:
            raise UsageError("give --json or --latex, not both")


@dataclasses.dataclass(frozen=True)
class Row:
    """One result's scores, as they are printed."""

    name: str
    folder: str
    scores: Scores
    intervals: dict[str, tuple[float, float] | None] | None
    """By score; None where there is no interval at all."""
    why_no_interval: str | None

    def as_json(self, settings: Settings) -> dict[str, Any]:
        """The object that `--json` prints."""
        variant = {"variant": settings.variant} if settings.suite == "tofu" else {}
        lacking = {"ci": self.why_no_interval} if self.why_no_interval else {}
        return {
            "name": self.name,
            "folder": self.folder,
            **variant,
            **self.scores.values,
            "ci": self.intervals,
            "level": settings.level,
            "reason": self.scores.reasons | lacking,
            "notes": list(self.scores.notes),
        }


def run(settings: Settings) -> None:
    """Score every result against the same target and retrained model."""
    from divdec.evaluation.aggregate import UTILITY, Bootstrap
    from divdec.report.scores import Scorer

    target, retrain = (_read(folder, settings.suite) for folder in (settings.target, settings.retrain))
    if settings.suite == "tofu" and target.figures.get(UTILITY) is None:
        raise UsageError(f"target {settings.target} has no {UTILITY}, and Utility is relative to the target's")
    bootstrap = Bootstrap(settings.level, settings.draws, settings.seed)
    scorer = Scorer(target, retrain, settings.variant, bootstrap)
    rows = [_row(folder, _read(folder, settings.suite), scorer) for folder in settings.results]
    if settings.json:
        print(json.dumps([row.as_json(settings) for row in rows], indent=2, ensure_ascii=False))
    else:
        from divdec.cli.score_tables import print_latex, print_table

        (print_latex if settings.latex else print_table)(rows, settings)


def _read(folder: str, suite: str) -> Results:
    from divdec.evaluation.results import read_results

    results = read_results(folder)
    if results.suite != suite:
        raise UsageError(f"{folder} holds results of {results.suite}, but {suite} was asked for")
    return results


def _row(folder: str, results: Results, scorer: Scorer) -> Row:
    """Scores and their intervals; a result of which nothing can be said is an error."""
    found = scorer.scored(results, aggregates_alone=True)
    scores = found.scores
    if all(value is None for value in scores.values.values()):
        reasons = "; ".join(dict.fromkeys(scores.reasons.values()))
        raise UsageError(f"{folder} has no figures that can be scored: {reasons}")
    name = Path(folder).expanduser().absolute().name
    if not results.items:
        return Row(name, folder, scores, None, "the folder holds figures only, no items")
    intervals = {part: found.intervals.get(part) for part in scores.values}
    why = "; ".join(dict.fromkeys(found.lacking.values())) or None
    return Row(name, folder, scores, intervals if any(intervals.values()) else None, why)
