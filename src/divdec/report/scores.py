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
    Bootstrap,
    Resampler,
    Scores,
    aggregate,
    muse_distances,
    needed,
    tofu_figures,
)
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
class Scored:
    """A result's aggregates and figures, before they are put into words."""

    scores: Scores
    values: dict[str, float | None]
    """By name, aggregates and figures; None where one could not be had."""
    intervals: dict[str, Interval]
    """Of those that have one."""
    lacking: dict[str, str]
    """Why one of them has none although there are items."""


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

    def scored(self, results: Results, *, aggregates_alone: bool = False) -> Scored:
        """A result's aggregates, and the intervals of these and of its figures.

        Args:
            results: figures, and items where there are any.
            aggregates_alone: resample only the figures that an aggregate is made from.

        Raises:
            UsageError: the variant is not known, or an item does not hold what it must.
        """
        suite = results.suite
        own = tofu_figures(results) if suite == "tofu" else results.figures
        scores = self._scores(suite, own)
        values = {name: _number(value) for name, value in {**own, **scores.values}.items()}
        if not results.items:
            return Scored(scores, values, {}, {})
        figures = self._needed(suite, scores) if aggregates_alone else RESAMPLED[suite]
        names = [name for name in figures if values.get(name) is not None]
        draws, lacking = Resampler(results, self.bootstrap).figures(names)
        rescored = self._scores(suite, draws, fluency=values.get(FLUENCY) is not None)
        intervals = {
            name: interval
            for name, drawn in {**draws, **rescored.values}.items()
            if drawn is not None and values.get(name) is not None and (interval := self._interval(drawn))
        }
        if not lacking:
            lacking = {
                name: reason for name, reason in rescored.reasons.items()
                if values.get(name) is not None and name not in intervals
            }  # fmt: skip
        return Scored(scores, values, intervals, lacking)

    def row(self, entry: Entry) -> Row:
        """All that a page says of a result.

        Raises:
            UsageError: see `scored`.
        """
        found = self.scored(entry.results)
        values = {name: found.values.get(name) for name in MEASURES}
        notes = list(found.scores.notes if values["utility"] is not None else ())
        if not entry.results.items:
            return Row(entry, values, {}, found.scores.reasons, (*notes, NO_ITEMS))
        outside = [
            MEASURES[name].short for name in ONE_SIDED
            if (ends := found.intervals.get(name)) and not ends[0] <= (values[name] or 0.0) <= ends[1]
        ]  # fmt: skip
        notes += [f"{name}{OUTSIDE}" for name in outside]
        notes += [f"no interval of {MEASURES[name].short}: {why}" for name, why in found.lacking.items()]
        return Row(entry, values, found.intervals, found.scores.reasons, tuple(notes))

    def _needed(self, suite: str, scores: Scores) -> list[str]:
        if suite == "tofu":
            parts = needed(self.variant, fluency=not scores.notes)
        else:
            parts = {
                score: (name, RETAIN_KNOWMEM) for score, name in zip(DISTANCES, (VERBMEM, FORGET_KNOWMEM), strict=True)
            }
        return [name for part, names in parts.items() if scores.values[part] is not None for name in names]

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
        return Scores(scores.values, reasons, scores.notes)

    def _interval(self, drawn: Any) -> Interval | None:
        low, high = self.bootstrap.interval(drawn)
        return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def _number(value: Any) -> float | None:
    """A figure as a number; None where a file holds something else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None
