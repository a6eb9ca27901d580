"""Scores of results: names and directions of the metrics, aggregates and intervals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from divdec.errors import UsageError
from divdec.evaluation.results import Results
from divdec_research.suites.aggregate import (
    AGGREGATES,
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
    tofu_figures,
)

Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Measure:
    """Name, direction and format of a metric."""

    short: str
    """Column header in tables."""
    better: Literal["higher", "lower", "like the retrained model's"]
    long: str = ""
    """Name on an axis, if it differs."""
    digits: int = 3

    @property
    def axis(self) -> str:
        """Label of an axis."""
        return f"{self.long or self.short} ({self.better} is better)"

    @property
    def arrow(self) -> str:
        """Arrow for the direction."""
        return {"higher": "↑", "lower": "↓"}.get(self.better, "")

    def text(self, value: float | None) -> str:
        """Format a value; very small ones are in scientific notation."""
        if value is None:
            return "–"
        if 0 < abs(value) < 0.5 * 10**-self.digits and self.digits > 2:
            mantissa, exponent = f"{value:.1e}".split("e")
            return f"{mantissa}e{int(exponent)}"
        return f"{value:.{self.digits}f}".replace("-", "−")


RETRAINED: Literal["like the retrained model's"] = "like the retrained model's"
MEASURES: dict[str, Measure] = {
    "agg": Measure("Agg", "higher", digits=2),
    "agg_without_privacy": Measure("Agg w/o Priv", "higher", digits=2),
    "mem": Measure("Mem", "higher", "Mem, how little is remembered", digits=2),
    "priv": Measure("Priv", "higher", digits=2),
    "utility": Measure("Utility", "higher", "Utility, the target’s = 1", digits=2),
    "distance": Measure("Distance %", "lower", "Distance to the retrained model, the target’s = 100 %", digits=1),
    "verbmem_distance": Measure("Verbatim distance %", "lower", digits=1),
    "knowmem_distance": Measure("Knowledge distance %", "lower", digits=1),
    "extraction_strength": Measure("Extraction strength", "lower"),
    "exact_memorization": Measure("Exact memorization", "lower"),
    CORRECT: Measure("Paraphrase prob.", "lower", "Probability of the paraphrased answer"),
    PROB_MEAN: Measure("Truth ratio (prob. mean)", "lower"),
    CLOSER_TO_1: Measure("Truth ratio (closer to 1)", "higher"),
    "forget_Q_A_ROUGE": Measure("Forget ROUGE-L", "lower"),
    "retain_Q_A_ROUGE": Measure("Retain ROUGE-L", "higher"),
    UTILITY: Measure("Model utility", "higher"),
    FLUENCY: Measure("Fluency", "higher"),
    "forget_quality": Measure("Forget quality", "higher"),
    "mia_loss": Measure("AUC loss", RETRAINED),
    "mia_zlib": Measure("AUC zlib", RETRAINED),
    "mia_min_k": Measure("AUC min-k", RETRAINED, "AUC of the attack min-k"),
    "mia_min_k_plus_plus": Measure("AUC min-k++", RETRAINED),
    "mia_gradnorm": Measure("AUC gradient norm", RETRAINED),
    "mia_reference": Measure("AUC reference", RETRAINED),
    "privleak": Measure("PrivLeak %", RETRAINED, digits=1),
    VERBMEM: Measure("Forget verbmem", "lower", "Forget verbmem ROUGE-L"),
    FORGET_KNOWMEM: Measure("Forget knowmem", "lower", "Forget knowmem ROUGE-L"),
    RETAIN_KNOWMEM: Measure("Retain knowmem", "higher", "Retain knowmem ROUGE-L"),
}
ATTACK_NAMES = {name: measure.short[4:] for name, measure in MEASURES.items() if name.startswith("mia_")}
SCORES = {"tofu": AGGREGATES, "muse": DISTANCES}
# Figures with intervals.
RESAMPLED = {
    "tofu": (
        "extraction_strength", "exact_memorization", CORRECT, CLOSER_TO_1, PROB_MEAN, *ATTACKS, UTILITY, FLUENCY,
    ),
    "muse": (VERBMEM, FORGET_KNOWMEM, RETAIN_KNOWMEM, "mia_min_k"),
}  # fmt: skip
NO_TARGET = "no target was given (--target)"
NO_RETRAIN = "no retrained model was given (--retrain)"
# Scores that are best where a figure equals the reference's; resampling only leads away from it.
ONE_SIDED = ("priv", *DISTANCES)
OUTSIDE = " lies outside its interval: resampled items are never as near to the reference as all items together"
NO_ITEMS = "the folder holds figures only, no items"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A result with its name in a table."""

    name: str
    folder: Path
    results: Results


@dataclasses.dataclass(frozen=True, eq=False)
class ScoredResult:
    """Aggregates and metrics of a result, with their intervals."""

    entry: Entry
    aggregates: Scores
    values: dict[str, float | None]
    """Metrics and aggregates by name; None if a value is missing."""
    intervals: dict[str, Interval]
    missing_intervals: dict[str, str]
    """Reason why a value has no interval although there are items."""

    @property
    def notes(self) -> list[str]:
        """Remarks on values and intervals."""
        notes = list(self.aggregates.notes if self.has("utility") else ())
        if not self.entry.results.items:
            return [*notes, f"no intervals: {NO_ITEMS}"]
        for name in ONE_SIDED:
            low, high = self.intervals.get(name, (-math.inf, math.inf))
            if not low <= (self.values.get(name) or 0.0) <= high:
                notes.append(f"{MEASURES[name].short}{OUTSIDE}")
        return notes + [f"no interval of {MEASURES[name].short}: {why}" for name, why in self.missing_intervals.items()]

    @property
    def remarks(self) -> list[str]:
        """Why an aggregate is missing, and the notes."""
        return [f"no {MEASURES[name].short}: {why}" for name, why in self.aggregates.reasons.items()] + self.notes

    def has(self, name: str) -> bool:
        """Whether there is a value of this name."""
        return self.values.get(name) is not None


@dataclasses.dataclass(frozen=True)
class Scorer:
    """Scores results against a fixed target and retrained model."""

    target: Results | None
    retrain: Results | None
    variant: str
    """Computation of TOFU's aggregates; see `divdec_research.suites.aggregate.VARIANTS`."""
    bootstrap: Bootstrap

    def score(self, entry: Entry) -> ScoredResult:
        """Compute a result's aggregates, and the intervals of aggregates and figures if it has items.

        Raises:
            UsageError: the variant does not exist, or an item lacks a field.
        """
        results, suite = entry.results, entry.results.suite
        splits = [of.split for of in (results, self.target, self.retrain) if of is not None and of.split]
        if len(set(splits)) > 1:
            raise UsageError(f"{entry.folder}, target and retrained model are of different splits: {', '.join(splits)}")
        figures = tofu_figures(results) if suite == "tofu" else results.figures
        aggregates = self._aggregate(suite, figures)
        values: dict[str, float | None] = {}
        for name, value in {**figures, **aggregates.values}.items():
            numeric = isinstance(value, int | float) and not isinstance(value, bool)
            values[name] = float(value) if numeric and math.isfinite(value) else None
        if not results.items:
            return ScoredResult(entry, aggregates, values, {}, {})
        resampled = [name for name in RESAMPLED[suite] if values.get(name) is not None]
        draws, missing = Resampler(results, self.bootstrap).figures(resampled)
        rescored = self._aggregate(suite, draws)
        intervals = {
            name: interval
            for name, drawn in {**draws, **rescored.values}.items()
            if drawn is not None
            and values.get(name) is not None
            and all(map(math.isfinite, interval := self.bootstrap.interval(drawn)))  # pyright: ignore[reportArgumentType]
        }
        if not missing:
            missing = {
                name: reason
                for name, reason in rescored.reasons.items()
                if values.get(name) is not None and name not in intervals
            }
        return ScoredResult(entry, aggregates, values, intervals, missing)

    def _aggregate(self, suite: str, figures: Mapping[str, Any]) -> Scores:
        target, retrain = (model.figures if model is not None else {} for model in (self.target, self.retrain))
        missing = [why for model, why in ((self.target, NO_TARGET), (self.retrain, NO_RETRAIN)) if model is None]
        if suite == "tofu":
            scores = aggregate(figures, target, retrain, self.variant)
            reasons = {name: why for name, why in (("utility", NO_TARGET), ("priv", NO_RETRAIN)) if why in missing}
            return dataclasses.replace(scores, reasons={**scores.reasons, **reasons})
        if missing:
            return Scores(dict.fromkeys(DISTANCES), dict.fromkeys(DISTANCES, ", ".join(missing)))
        return muse_distances(figures, target, retrain)
