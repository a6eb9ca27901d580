"""From cells to the paper's main table: aggregates with intervals over seeds and items, the best setting by method.

It knows results, not how they came about.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from divdec.evaluation.aggregate import AGGREGATES, FLUENCY, Bootstrap, Resampler, aggregate, needed, tofu_figures
from divdec.evaluation.results import Results
from divdec.report.scores import MEASURES, best_index

SHOWN = ("agg", "mem", "priv", "utility")
FIGURES = ("forget_Q_A_Prob", "forget_Q_A_ROUGE", "retain_Q_A_Prob", "retain_Q_A_ROUGE", "model_utility")


@dataclasses.dataclass(frozen=True)
class Measured:
    """A method's setting on the models of one seed."""

    results: Results
    seconds: float | None
    """Of training."""
    extra_bytes: int | None
    """Weights in memory beyond the target's."""
    draw: int = 0
    """Seeds that are asked the same questions have the same number: their items are resampled together."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A method under one setting: means over the seeds."""

    method: str
    setting: str
    values: dict[str, float | None]
    """Aggregates and figures by name."""
    intervals: dict[str, tuple[float, float]]
    """Of the aggregates."""
    seeds: dict[int, dict[str, float | None]]
    """The same values of each seed."""
    seconds: float | None
    extra_bytes: float | None
    failed: str | None = None
    """Why there are no values, or why some seed is missing."""
    notes: tuple[str, ...] = ()

    @property
    def rank(self) -> float:
        """By which the best setting of a method is chosen."""
        value = self.values.get("agg")
        if value is None:
            value = self.values.get("agg_without_privacy")
        return -1.0 if value is None or self.failed else value

    def to_dict(self) -> dict[str, Any]:
        """The line as JSON values."""
        return dataclasses.asdict(self)


def line_of(
    method: str,
    setting: str,
    found: Mapping[int, Measured],
    references: Mapping[int, tuple[Results, Results]],
    variant: str,
    bootstrap: Bootstrap,
    failures: Mapping[int, str],
    notes: Sequence[str] = (),
) -> Line:
    """Put the seeds of one setting together.

    Args:
        method: its name.
        setting: as the table shows it.
        found: what was measured, by seed.
        references: target's and retrained model's results, by seed; they are held fixed.
        variant: of the aggregates.
        bootstrap: how intervals are drawn: seeds are resampled, then items within each.
        failures: why a seed has no results, by seed.
        notes: what a reader has to know.
    """
    seeds = {seed: _values(measured.results, *references[seed], variant) for seed, measured in sorted(found.items())}
    names = (*AGGREGATES, *FIGURES)
    values = {name: _mean([own.get(name) for own in seeds.values()]) for name in names} if seeds else {}
    draws = [
        _draws(one.results, *references[seed], variant, dataclasses.replace(bootstrap, seed=bootstrap.seed + one.draw))
        for seed, one in sorted(found.items())
    ]
    intervals = {}
    for name in AGGREGATES:
        own = [drawn[name] for drawn in draws if name in drawn]
        if values.get(name) is not None and len(own) == len(draws):
            intervals[name] = bootstrap.interval(_over_seeds(own, bootstrap))
    failed = "; ".join(dict.fromkeys(failures.values())) or None
    if failed and found:
        failed = f"without seed {', '.join(map(str, sorted(failures)))}: {failed}"
    return Line(
        method,
        setting,
        values,
        intervals,
        seeds,
        _mean([measured.seconds for measured in found.values()]),
        _mean([measured.extra_bytes for measured in found.values()]),
        failed,
        tuple(notes),
    )


def best_of(lines: Sequence[Line]) -> dict[str, Line]:
    """Of each method the setting with the highest Agg, on the very questions that are reported, as in the paper.

    Of several with the same Agg it is the first; `without_best` tells which methods those are.
    """
    found: dict[str, Line] = {}
    for line in lines:
        if line.method not in found or line.rank > found[line.method].rank:
            found[line.method] = line
    return found


def without_best(lines: Sequence[Line]) -> set[str]:
    """Methods of which no setting is the best: several share the highest Agg, or none is above 0."""
    return {
        method
        for method, best in best_of(lines).items()
        if not best.failed
        and best_index([line.rank for line in lines if line.method == method], "higher", MEASURES["agg"].digits) is None
    }


def _values(results: Results, target: Results, retrain: Results, variant: str) -> dict[str, float | None]:
    figures = tofu_figures(results)
    scores = aggregate(figures, target.figures, retrain.figures, variant)
    found: dict[str, Any] = {**{name: figures.get(name) for name in FIGURES}, **scores.values}
    return {name: None if value is None else float(value) for name, value in found.items()}


def _draws(
    results: Results, target: Results, retrain: Results, variant: str, bootstrap: Bootstrap
) -> dict[str, np.ndarray]:
    fluency = all(of.figures.get(FLUENCY) is not None for of in (results, target))
    names = [name for part in needed(variant, fluency=fluency).values() for name in part]
    figures, _ = Resampler(results, bootstrap).figures(names)
    scores = aggregate(figures, target.figures, retrain.figures, variant, fluency=fluency)
    return {name: np.asarray(value) for name, value in scores.values.items() if value is not None}


def _over_seeds(draws: Sequence[np.ndarray], bootstrap: Bootstrap) -> np.ndarray:
    """In each draw as many seeds as there are, with replacement, and the mean of their values in that draw."""
    stacked = np.stack(draws)
    seeds, number = stacked.shape
    chosen = np.random.default_rng(bootstrap.seed).integers(seeds, size=(seeds, number))
    return stacked[chosen, np.arange(number)].mean(axis=0)


def _mean(values: Sequence[float | int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) and known else None
