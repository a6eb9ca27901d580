"""Percentile bootstrap intervals: of means, of AUCs, and of whatever is computed from them.

Items are resampled within their own set, and metrics of one set share the items of a draw. The references (target and
retrained model) are no part of it: they stay as they are. It knows figures by name, not how they become aggregates.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int

from divdec.errors import UsageError
from divdec.evaluation.aggregate import (
    ATTACKS,
    CLOSER_TO_1,
    CORRECT,
    FLUENCY,
    FORGET_KNOWMEM,
    PROB_MEAN,
    RETAIN_KNOWMEM,
    UTILITY,
    VERBMEM,
    WRONG,
    harmonic_mean,
    probability_truth_ratios,
)
from divdec.evaluation.likelihood import SMALLEST
from divdec.evaluation.privacy import holdout_wins
from divdec.evaluation.results import Results

MOST_DRAWS = 20_000  # the counts of a set of 400 items then take 64 MB

Draws = Float[np.ndarray, " draws"]
Counts = Int[np.ndarray, "draws items"]


@dataclasses.dataclass(frozen=True)
class Bootstrap:
    """How intervals are drawn."""

    level: float = 0.99
    """Share of the draws that lies within an interval."""
    draws: int = 1000
    """How often every set is resampled."""
    seed: int = 0
    """The same seed gives the same intervals, whatever else is computed beside them."""

    def __post_init__(self) -> None:
        if not 0 < self.level < 1:
            raise UsageError(f"level is {self.level:g}; accepted: above 0 and below 1, such as 0.99")
        if not 1 <= self.draws <= MOST_DRAWS:
            raise UsageError(f"draws is {self.draws}; accepted: 1 to {MOST_DRAWS}")
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"seed is {self.seed}; accepted: 0 to {2**32 - 1}")

    def counts(self, items: int, name: str) -> Counts:
        """How often each item of a set is drawn: as many draws as it has items, with replacement.

        Args:
            items: how many the set has.
            name: of the set; sets of other names are drawn independently.
        """
        generator = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        return generator.multinomial(items, np.full(items, 1 / items), size=self.draws)

    def interval(self, draws: Draws) -> tuple[float, float]:
        """The percentile interval of a figure's draws: its lower and its upper end."""
        low, high = np.quantile(draws, [(1 - self.level) / 2, (1 + self.level) / 2])
        return float(low), float(high)


def mean_interval(values: Sequence[float], bootstrap: Bootstrap) -> tuple[float, float]:
    """The interval of a mean over items.

    Raises:
        ValueError: there are no items.
    """
    if not len(values):
        raise ValueError("a mean needs at least one item")
    return bootstrap.interval(_means(np.asarray(values, float), bootstrap.counts(len(values), "items")))


def auc_interval(
    forget_scores: Sequence[float], holdout_scores: Sequence[float], bootstrap: Bootstrap
) -> tuple[float, float]:
    """The interval of `attack_auc`; forget and holdout items are resampled independently.

    Raises:
        ValueError: a set is empty, or a score is not finite.
    """
    wins = holdout_wins(np.asarray(forget_scores, float), np.asarray(holdout_scores, float))
    forget, holdout = wins.shape
    return bootstrap.interval(_aucs(wins, bootstrap.counts(forget, "forget"), bootstrap.counts(holdout, "holdout")))


def _same(values: np.ndarray) -> np.ndarray:
    return values


def _closer_to_1(ratios: np.ndarray) -> np.ndarray:
    return np.minimum(ratios, 1 / (ratios + SMALLEST))


def _true_better(ratios: np.ndarray) -> np.ndarray:
    return np.maximum(0, 1 - ratios)


@dataclasses.dataclass(frozen=True)
class _Mean:
    """A figure that is a mean over the items of one set."""

    group: str
    """The set whose items are resampled."""
    field: str
    of: Callable[[np.ndarray], np.ndarray] = _same
    """From an item's field to what is averaged (METRICS: closer_to_1, true_better)."""


_UTILITY_PARTS: dict[str, _Mean] = {}
for _prefix, _probability in (("retain", "Q_A_Prob"), ("ra", "Q_A_Prob_normalised"), ("wf", "Q_A_Prob_normalised")):
    _UTILITY_PARTS |= {
        f"{_prefix}_{_probability}": _Mean(_prefix, "prob"),
        f"{_prefix}_Q_A_ROUGE": _Mean(_prefix, "rougeL_recall"),
        f"{_prefix}_Truth_Ratio": _Mean(_prefix, "score", _true_better),
    }
_MEANS = {
    "extraction_strength": _Mean("forget", "score"),
    "exact_memorization": _Mean("forget", "score"),
    CORRECT: _Mean("forget", "prob"),
    CLOSER_TO_1: _Mean("forget", "score", _closer_to_1),
    PROB_MEAN: _Mean("forget", "score"),
    FLUENCY: _Mean("forget", "score"),
    VERBMEM: _Mean("verbmem", "rougeL_f1"),
    FORGET_KNOWMEM: _Mean("forget_knowmem", "rougeL_f1"),
    RETAIN_KNOWMEM: _Mean("retain_knowmem", "rougeL_f1"),
}


class Resampler:
    """Figures of one result under every draw, from its items."""

    def __init__(self, results: Results, bootstrap: Bootstrap) -> None:
        self.results, self.bootstrap = results, bootstrap
        members: dict[str, set[str]] = {}
        for metric, items in results.items.items():
            if group := _group(metric):
                members.setdefault(group, set()).update(items)
        # The order of the items, not of the file, decides which are drawn.
        self._places = {
            group: {index: place for place, index in enumerate(sorted(indices, key=lambda text: (len(text), text)))}
            for group, indices in members.items()
        }

    def figures(self, names: Sequence[str]) -> tuple[dict[str, Draws], dict[str, str]]:
        """The draws of these figures, and for the others why there are none.

        Args:
            names: figures of TOFU or MUSE that an aggregate needs.
        """
        found: dict[str, Draws] = {}
        reasons: dict[str, str] = {}
        for name in names:
            try:
                found[name] = self._draws(name)
            except UsageError as error:
                reasons[name] = str(error)
        return found, reasons

    def _draws(self, name: str) -> Draws:
        if name in ATTACKS:
            return self._auc(name)
        if name == UTILITY:
            return np.asarray(harmonic_mean([self._mean(part, how) for part, how in _UTILITY_PARTS.items()]))
        return self._mean(name, _MEANS[name])

    def _mean(self, metric: str, how: _Mean) -> Draws:
        if metric == PROB_MEAN and not self.results.items.get(PROB_MEAN):
            ratios = probability_truth_ratios(self.results)
        else:
            ratios = self._fields(metric, how.field)
        columns, values = self._laid_out(how.group, ratios)
        return _means(how.of(values), self._counts(how.group)[:, columns])

    def _auc(self, attack: str) -> Draws:
        forget, holdout = (
            self._laid_out(group, self._fields(f"{attack}.{group}", "score")) for group in ("forget", "holdout")
        )
        return _aucs(
            holdout_wins(forget[1], holdout[1]),
            self._counts("forget")[:, forget[0]],
            self._counts("holdout")[:, holdout[0]],
        )

    def _fields(self, metric: str, field: str) -> dict[str, float]:
        items = self.results.items.get(metric)
        if not items:
            raise UsageError(f"there are no items of {metric}")
        values: dict[str, float] = {}
        for index, fields in items.items():
            value = fields.get(field) if isinstance(fields, Mapping) else None
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise UsageError(f"item {index} of {metric} has no finite {field}")
            values[index] = float(value)
        return values

    def _laid_out(self, group: str, values: Mapping[str, float]) -> tuple[list[int], np.ndarray]:
        places = self._places[group]
        return [places[index] for index in values], np.array(list(values.values()))

    def _counts(self, group: str) -> Counts:
        return _cached_counts(self.bootstrap, len(self._places[group]), group)


@functools.lru_cache(maxsize=16)
def _cached_counts(bootstrap: Bootstrap, items: int, group: str) -> Counts:
    # Every metric of every result with a set of this size asks for the same ones.
    return bootstrap.counts(items, group)


def _group(metric: str) -> str | None:
    """The set that a metric's items belong to, or None where no figure here needs them."""
    attack, _, group = metric.partition(".")
    if attack in ATTACKS:
        return group or None
    if metric == WRONG:
        return "forget"
    how = _MEANS.get(metric) or _UTILITY_PARTS.get(metric)
    return how.group if how else None


def _means(values: Float[np.ndarray, " items"], counts: Counts) -> Draws:
    drawn = counts.sum(axis=1)  # fewer than the set has where a metric lacks some of its items
    return np.divide(counts @ values, drawn, out=np.full(len(counts), np.nan), where=drawn > 0)


def _aucs(
    wins: Float[np.ndarray, "forget holdout"],
    forget_counts: Int[np.ndarray, "draws forget"],
    holdout_counts: Int[np.ndarray, "draws holdout"],
) -> Draws:
    pairs = forget_counts.sum(axis=1) * holdout_counts.sum(axis=1)
    won = ((forget_counts @ wins) * holdout_counts).sum(axis=1)
    return np.divide(won, pairs, out=np.full(len(pairs), np.nan), where=pairs > 0)
