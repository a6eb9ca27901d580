"""A result's aggregates and figures with their intervals, where target, retrained model and items allow them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from divdec.evaluation.aggregate import (
    ATTACKS,
    CLOSER_TO_1,
    CORRECT,
    DISTANCES,
    FLUENCY,
    FORGET_KNOWMEM,
    PROB_MEAN,
    RETAIN_KNOWMEM,
    UTILITY,
    VERBMEM,
    Scores,
    aggregate,
    muse_distances,
    tofu_figures,
)
from divdec.evaluation.bootstrap import Bootstrap, Resampler
from divdec.evaluation.results import Results
from divdec.report.collect import Entry
from divdec.report.measures import MEASURES, SCORES

# The figures whose items can be resampled.
RESAMPLED = {
    "tofu": (
        "extraction_strength", "exact_memorization", CORRECT, CLOSER_TO_1, PROB_MEAN, *ATTACKS, UTILITY, FLUENCY,
    ),
    "muse": (VERBMEM, FORGET_KNOWMEM, RETAIN_KNOWMEM, "mia_min_k"),
}  # fmt: skip
NO_TARGET = "no target was given (--target)"
NO_RETRAIN = "no retrained model was given (--retrain)"
# Both are best where a figure equals the reference's, from which resampling can only lead away.
ONE_SIDED = ("priv", *DISTANCES)
OUTSIDE = " lies outside its interval: resampled items are never as near to the reference as all items together"
NO_ITEMS = "no intervals: the folder holds figures only, no items"

Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Row:
    """One result in numbers."""

    entry: Entry
    values: dict[str, float | None]
    """By name, aggregates and figures; None where one could not be had."""
    intervals: dict[str, Interval]
    """Of those that have one."""
    reasons: dict[str, str]
    """Why an aggregate is None."""
    notes: tuple[str, ...] = ()
    """What a reader of the values has to know."""

    def text(self, name: str) -> str:
        """The value as it is printed, without its interval."""
        return MEASURES[name].text(self.values.get(name))

    def interval_text(self, name: str) -> str:
        """The interval as it is printed; empty where there is none."""
        if self.values.get(name) is None or name not in self.intervals:
            return ""
        return f"[{', '.join(map(MEASURES[name].text, self.intervals[name]))}]"

    def as_json(self) -> dict[str, Any]:
        """The row as JSON values."""
        return {
            "name": self.entry.name,
            "folder": str(self.entry.folder),
            "role": self.entry.role,
            **self.values,
            "ci": self.intervals,
            "reason": self.reasons,
            "notes": list(self.notes),
        }


@dataclasses.dataclass(frozen=True)
class Scorer:
    """Scores results against the same references."""

    target: Results | None
    retrain: Results | None
    variant: str
    """TOFU's; see `divdec.evaluation.aggregate.VARIANTS`."""
    bootstrap: Bootstrap

    def row(self, entry: Entry) -> Row:
        """All that can be said of a result.

        Raises:
            UsageError: the variant is not known, or an item does not hold what it must.
        """
        results = entry.results
        figures = tofu_figures(results) if results.suite == "tofu" else results.figures
        scores = self._scores(results.suite, figures)
        values: dict[str, float | None] = {name: _number(value) for name, value in scores.values.items()}
        values |= {name: _number(figures.get(name)) for name in MEASURES if name not in SCORES[results.suite]}
        values = {name: values.get(name) for name in MEASURES if name in values}
        if not results.items:
            return Row(entry, values, {}, scores.reasons, (*scores.notes, NO_ITEMS))
        names = [name for name in RESAMPLED[results.suite] if values.get(name) is not None]
        draws, lacking = Resampler(results, self.bootstrap).figures(names)
        rescored = self._scores(results.suite, draws, fluency=values.get(FLUENCY) is not None)
        intervals = {
            name: interval
            for name, drawn in {**draws, **rescored.values}.items()
            if drawn is not None and values.get(name) is not None and (interval := self._interval(drawn))
        }
        outside = [
            MEASURES[name].short for name in ONE_SIDED
            if (ends := intervals.get(name)) and not ends[0] <= (values[name] or 0.0) <= ends[1]
        ]  # fmt: skip
        notes = [
            *scores.notes,
            *(f"{name}{OUTSIDE}" for name in outside),
            *(f"no interval of {MEASURES[name].short}: {why}" for name, why in lacking.items()),
        ]
        return Row(entry, values, intervals, scores.reasons, tuple(notes))

    def _scores(self, suite: str, figures: Mapping[str, Any], *, fluency: bool = True) -> Scores:
        target, retrain = (of.figures if of is not None else {} for of in (self.target, self.retrain))
        if suite == "tofu":
            fluent = fluency and all(of.get(FLUENCY) is not None for of in (figures, target))
            scores = aggregate(figures, target, retrain, self.variant, fluency=fluent)
        elif self.target is None or self.retrain is None:
            scores = Scores(dict.fromkeys(SCORES["muse"]), {})
        else:
            scores = muse_distances(figures, target, retrain)
        reasons = dict(scores.reasons)
        if suite == "tofu":
            reasons |= {"utility": NO_TARGET} if self.target is None else {}
            reasons |= {"priv": NO_RETRAIN} if self.retrain is None else {}
        else:
            lacking = [why for of, why in ((self.target, NO_TARGET), (self.retrain, NO_RETRAIN)) if of is None]
            reasons |= dict.fromkeys(SCORES["muse"], ", ".join(lacking)) if lacking else {}
        notes = scores.notes if scores.values.get("utility") is not None else ()
        return Scores(scores.values, reasons, notes)

    def _interval(self, drawn: Any) -> Interval | None:
        low, high = self.bootstrap.interval(drawn)
        return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def _number(value: Any) -> float | None:
    """A figure as a number; None where a file holds something else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None
