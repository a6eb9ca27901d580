"""Aggregate results into TOFU's Mem, Priv, Utility and Agg, or MUSE's distances, with bootstrap intervals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from divdec.errors import UsageError

if TYPE_CHECKING:
    from divdec.evaluation.aggregate import Scores
    from divdec.evaluation.bootstrap import Bootstrap
    from divdec.evaluation.results import Results

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
    from divdec.evaluation.bootstrap import Bootstrap

    bootstrap = Bootstrap(settings.level, settings.draws, settings.seed)
    target, retrain = (_read(folder, settings.suite) for folder in (settings.target, settings.retrain))
    score = _tofu if settings.suite == "tofu" else _muse
    rows = [
        score(folder, _read(folder, settings.suite), target, retrain, settings, bootstrap)
        for folder in settings.results
    ]
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


def _tofu(
    folder: str, results: Results, target: Results, retrain: Results, settings: Settings, bootstrap: Bootstrap
) -> Row:
    from divdec.evaluation.aggregate import UTILITY, aggregate, needed, tofu_figures

    if target.figures.get(UTILITY) is None:
        raise UsageError(f"target {settings.target} has no {UTILITY}, and Utility is relative to the target's")
    scores = aggregate(tofu_figures(results), target.figures, retrain.figures, settings.variant)
    fluency = not scores.notes
    parts = needed(settings.variant, fluency=fluency)
    return _row(
        folder,
        results,
        scores,
        [name for part, names in parts.items() if scores.values[part] is not None for name in names],
        lambda draws: aggregate(draws, target.figures, retrain.figures, settings.variant, fluency=fluency),
        bootstrap,
    )


def _muse(
    folder: str, results: Results, target: Results, retrain: Results, settings: Settings, bootstrap: Bootstrap
) -> Row:
    from divdec.evaluation.aggregate import FORGET_KNOWMEM, RETAIN_KNOWMEM, VERBMEM, muse_distances

    scores = muse_distances(results.figures, target.figures, retrain.figures)
    forgotten = dict(zip(scores.values, (VERBMEM, FORGET_KNOWMEM), strict=True))
    return _row(
        folder,
        results,
        scores,
        [*(name for score, name in forgotten.items() if scores.values[score] is not None), RETAIN_KNOWMEM],
        lambda draws: muse_distances(draws, target.figures, retrain.figures),
        bootstrap,
    )


def _row(folder: str, results: Results, scores: Scores, figures: list[str], rescore: Any, bootstrap: Bootstrap) -> Row:
    """Scores and their intervals; a result of which nothing can be said is an error."""
    if all(value is None for value in scores.values.values()):
        reasons = "; ".join(dict.fromkeys(scores.reasons.values()))
        raise UsageError(f"{folder} has no figures that can be scored: {reasons}")
    name = Path(folder).expanduser().absolute().name
    if not results.items:
        return Row(name, folder, scores, None, "the folder holds figures only, no items")
    from divdec.evaluation.bootstrap import Resampler, score_intervals

    draws, reasons = Resampler(results, bootstrap).figures(figures)
    rescored = rescore(draws)
    intervals = score_intervals(rescored, bootstrap)
    unexplained = [
        reason
        for part, reason in rescored.reasons.items()
        if not reasons and scores.values[part] is not None and intervals[part] is None
    ]
    why = "; ".join(dict.fromkeys([*reasons.values(), *unexplained])) or None
    return Row(name, folder, scores, intervals if any(intervals.values()) else None, why)
