"""Aggregates of figures, and their bootstrap intervals.

TOFU's Mem, Priv, Utility and Agg exist in three named variants, because the paper's code, its text and other
repositories define them differently (docs/paper.md); MUSE has distances to the retrained model. A figure is a
number, or an array with one value for each draw of a bootstrap.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float, Int

from divdec.errors import UsageError
from divdec.evaluation.metrics import holdout_wins
from divdec.evaluation.results import Results
from divdec_research.suites.metrics import EPSILON, prob_mean
from divdec_research.suites.results import GROUPS

Figure = int | float | np.ndarray  # a figure read from JSON may be an integer
Draws = Float[np.ndarray, " draws"]
Counts = Int[np.ndarray, "draws items"]
T = TypeVar("T")

VARIANTS = ("openunlearning", "dd-paper", "relative")
AGGREGATES = ("agg", "agg_without_privacy", "mem", "priv", "utility")
DISTANCES = ("verbmem_distance", "knowmem_distance")

ATTACKS = ("mia_loss", "mia_zlib", "mia_min_k", "mia_min_k_plus_plus")
CLOSER_TO_1, PROB_MEAN = "forget_truth_ratio", "forget_truth_ratio_prob_mean"
CORRECT, WRONG = "forget_Q_A_PARA_Prob", "forget_Q_A_PERT_Prob"
UTILITY, FLUENCY = "model_utility", "forget_Q_A_gibberish"
VERBMEM, FORGET_KNOWMEM, RETAIN_KNOWMEM = "forget_verbmem_ROUGE", "forget_knowmem_ROUGE", "retain_knowmem_ROUGE"
NO_FLUENCY = f"without fluency ({FLUENCY}): Utility is the model utility alone"
MAX_DRAWS = 20_000  # the counts of a set of 400 items then take 64 MB


@dataclasses.dataclass(frozen=True)
class Scores:
    """Aggregates of a result."""

    values: dict[str, Figure | None]
    """By aggregate; None if the figures do not allow it."""
    reasons: dict[str, str]
    notes: tuple[str, ...] = ()
    """Remarks that apply to every value."""


def harmonic_mean(values: Sequence[Figure]) -> Figure:
    """Number of values / Σ 1/value, elementwise over arrays; 0 if any value is 0 or below."""
    stacked = np.stack(np.broadcast_arrays(*values)).astype(float)
    positive = (stacked > 0).all(axis=0)
    with np.errstate(over="ignore"):  # the reciprocal of a denormal number is infinite, which makes the mean 0
        reciprocals = (1 / np.where(positive, stacked, 1.0)).sum(axis=0)
    return _plain(np.where(positive, len(stacked) / reciprocals, 0.0))


def needed(variant: str, *, fluency: bool = True) -> dict[str, tuple[str, ...]]:
    """List the figures that Mem, Priv and Utility (with or without `fluency`) are computed from."""
    if variant not in VARIANTS:
        raise UsageError(f"variant {variant!r} is not known; there are: {', '.join(VARIANTS)}")
    truth_ratio = CLOSER_TO_1 if variant == "dd-paper" else PROB_MEAN
    return {
        "mem": ("extraction_strength", "exact_memorization", CORRECT, truth_ratio),
        "priv": ATTACKS,
        "utility": (UTILITY, FLUENCY) if fluency else (UTILITY,),
    }


def memorization(figures: Mapping[str, Any], variant: str) -> Figure:
    """Mem: the harmonic mean of 1 − extraction strength, exact memorization, paraphrase probability, truth ratio.

    The truth ratio is the mean p_c/(p_c + p_w) (`openunlearning`, `relative`), which falls as the model forgets.
    `dd-paper` uses OpenUnlearning's "closer to 1", which rises as it forgets, so that 1 − it penalises forgetting; the
    tables of the Divergence Decoding paper are computed so. A `UsageError` names a figure that is missing, or not a
    number from 0 to 1.
    """
    return harmonic_mean([1 - value for value in _take(figures, needed(variant)["mem"], "the result's")])


def privacy(figures: Mapping[str, Any], retrain: Mapping[str, Any], variant: str) -> Figure:
    """Priv: the harmonic mean over four membership attacks of the closeness of the AUC to the retrained model's.

    Closeness is 1 − |a − a_r|, or in the variant `relative` 1 − |a − a_r| / a_r, but not below 0. Errors are those of
    `memorization`.
    """
    aucs = _take(figures, ATTACKS, "the result's")
    references = _take(retrain, ATTACKS, "the retrain model's")
    gaps = [abs(auc - reference) for auc, reference in zip(aucs, references, strict=True)]
    if variant == "relative":
        # An AUC of 0 cannot be divided by; any other AUC is then infinitely far from it.
        gaps = [gap / max(float(reference), 1e-12) for gap, reference in zip(gaps, references, strict=True)]
    return harmonic_mean([np.clip(1 - gap, 0.0, 1.0) for gap in gaps])


def utility(figures: Mapping[str, Any], target: Mapping[str, Any], *, fluency: bool = True) -> Figure:
    """Utility: the harmonic mean of model utility and fluency, divided by the target's; 0 if the target's is 0.

    Errors are those of `memorization`.
    """
    names = needed("openunlearning", fluency=fluency)["utility"]
    mean = harmonic_mean(_take(figures, names, "the result's"))
    of_target = float(harmonic_mean(_take(target, names, "the target's")))
    return mean / of_target if of_target > 0 else _plain(np.zeros_like(mean))


def aggregate(
    figures: Mapping[str, Any],
    target: Mapping[str, Any],
    retrain: Mapping[str, Any],
    variant: str = "openunlearning",
    *,
    fluency: bool | None = None,
) -> Scores:
    """TOFU's aggregates of a result: Mem, Priv, Utility, their harmonic mean Agg, and Agg without Priv.

    Figures have OpenUnlearning's names; those of the result may be arrays of draws. Utility is relative to the target,
    and Priv compares with the retrained model's AUCs. Utility includes fluency by default if both result and target
    have it.

    Returns:
        A value for each of `AGGREGATES`, and the reasons for missing ones.

    Raises:
        UsageError: the variant does not exist.
    """
    needed(variant)
    if fluency is None:
        fluency = all(of.get(FLUENCY) is not None for of in (figures, target))
    values, reasons = _collect(
        {
            "mem": lambda: memorization(figures, variant),
            "priv": lambda: privacy(figures, retrain, variant),
            "utility": lambda: utility(figures, target, fluency=fluency),
        }
    )
    for name, parts in (("agg", ("mem", "priv", "utility")), ("agg_without_privacy", ("mem", "utility"))):
        present = [value for other in parts if (value := values[other]) is not None]
        values[name] = harmonic_mean(present) if len(present) == len(parts) else None
        if values[name] is None:
            reasons[name] = f"it needs {' and '.join(other for other in parts if values[other] is None)}"
    return Scores({name: values[name] for name in AGGREGATES}, reasons, () if fluency else (NO_FLUENCY,))


def muse_distances(figures: Mapping[str, Any], target: Mapping[str, Any], retrain: Mapping[str, Any]) -> Scores:
    """Distance of a result to the retrained model on MUSE, in percent of the target's distance.

    The distance is Euclidean, over memorization of the forget set (word for word, or as knowledge) and knowledge of the
    retain set, each a ROUGE-L F1. The retrained model is at 0, the target at 100.
    """

    def distance(forgotten: str) -> Figure:
        return distance_to_retrain(figures, target, retrain, (forgotten, RETAIN_KNOWMEM))

    return Scores(
        *_collect({"verbmem_distance": lambda: distance(VERBMEM), "knowmem_distance": lambda: distance(FORGET_KNOWMEM)})
    )


def distance_to_retrain(
    figures: Mapping[str, Any], target: Mapping[str, Any], retrain: Mapping[str, Any], names: Sequence[str]
) -> Figure:
    """Euclidean distance of a result to the retrained model over some figures, in percent of the target's distance.

    Raises:
        UsageError: a figure is missing, or the target does not differ from the retrained model.
    """
    goal = _take(retrain, names, "the retrain model's")
    of_result, of_target = (
        _plain(
            functools.reduce(
                np.hypot, [value - ideal for value, ideal in zip(_take(of, names, owner), goal, strict=True)]
            )
        )
        for of, owner in ((figures, "the result's"), (target, "the target's"))
    )
    if not of_target > 0:
        raise UsageError("the target does not differ from the retrain model; give different --target and --retrain")
    return 100 * of_result / of_target


def tofu_figures(results: Results) -> dict[str, Any]:
    """Return a result's figures, with the truth ratio that `openunlearning` needs if the items allow it."""
    figures: dict[str, Any] = dict(results.figures)
    if figures.get(PROB_MEAN) is None and results.items.get(CORRECT) and results.items.get(WRONG):
        ratios = list(probability_truth_ratios(results).values())
        figures[PROB_MEAN] = math.fsum(ratios) / len(ratios)
    return figures


def probability_truth_ratios(results: Results) -> dict[str, float]:
    """Compute p_c/(p_c + p_w) of each item, the truth ratio as the paper defines it (OpenUnlearning's `prob_mean`).

    p_c is the length-normalised probability of the paraphrased answer, p_w that of the wrong ones, exp(−mean loss).

    Raises:
        UsageError: the items of the paraphrased or of the wrong answers are missing or do not belong together.
    """
    correct, wrong = results.items.get(CORRECT) or {}, results.items.get(WRONG) or {}
    shared = [index for index in correct if index in wrong]
    if not shared:
        raise UsageError(f"{results.name}: {PROB_MEAN} needs items of {CORRECT} and {WRONG}")
    ratios: dict[str, float] = {}
    for index in shared:
        try:
            wrong_losses = [float(loss) for loss in wrong[index]["avg_loss"]]
            ratios[index] = prob_mean(float(correct[index]["avg_loss"]), wrong_losses)
        except (KeyError, TypeError, ValueError, OverflowError):
            raise UsageError(f"{results.name}: item {index} of {CORRECT} or {WRONG} holds no avg_loss") from None
    return ratios


def _collect(computations: Mapping[str, Callable[[], T]]) -> tuple[dict[str, T | None], dict[str, str]]:
    """Compute each value, or None with the reason."""
    values: dict[str, T | None] = {}
    reasons: dict[str, str] = {}
    for name, compute in computations.items():
        try:
            values[name] = compute()
        except UsageError as error:
            values[name], reasons[name] = None, str(error)
    return values, reasons


def _take(figures: Mapping[str, Any], names: Sequence[str], owner: str) -> list[Any]:
    """Return the figures of these names, which must all be numbers from 0 to 1."""
    missing = [name for name in names if figures.get(name) is None]
    if missing:
        hint = (
            f" (items of {CORRECT} and {WRONG} give it; variant dd-paper does without)" if PROB_MEAN in missing else ""
        )
        raise UsageError(f"{owner} {', '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing{hint}")
    for name in names:
        value = figures[name]
        numeric = isinstance(value, int | float | np.ndarray) and not isinstance(value, bool)
        # A mean of float32 numbers may exceed 1 by its last digit.
        if not numeric or not np.all((np.asarray(value) >= -1e-6) & (np.asarray(value) <= 1 + 1e-6)):
            shown = "not such in every draw" if isinstance(value, np.ndarray) else repr(value)
            raise UsageError(f"{owner} {name} is {shown}; accepted: a number from 0 to 1")
    return [figures[name] for name in names]


def _plain(values: Any) -> Figure:
    return float(values) if np.ndim(values) == 0 else values


@dataclasses.dataclass(frozen=True)
class Bootstrap:
    """Percentile bootstrap.

    Items are resampled within their set, and metrics of one set share the items of a draw. The references (target and
    retrained model) are held fixed.
    """

    level: float = 0.99
    """Share of the draws within an interval."""
    draws: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.level < 1:
            raise UsageError(f"level is {self.level:g}; accepted: above 0 and below 1, such as 0.99")
        if not 1 <= self.draws <= MAX_DRAWS:
            raise UsageError(f"draws is {self.draws}; accepted: 1 to {MAX_DRAWS}")
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"seed is {self.seed}; accepted: 0 to {2**32 - 1}")

    def counts(self, items: int, name: str) -> Counts:
        """Count how often each item of a set is drawn; sets with different names are drawn independently."""
        generator = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        return generator.multinomial(items, np.full(items, 1 / items), size=self.draws)

    def interval(self, draws: Draws) -> tuple[float, float]:
        """Return the ends of the percentile interval of a figure's draws."""
        low, high = np.quantile(draws, [(1 - self.level) / 2, (1 + self.level) / 2])
        return float(low), float(high)


def mean_interval(values: Sequence[float], bootstrap: Bootstrap) -> tuple[float, float]:
    """Compute the interval of a mean over items, at least one."""
    if not len(values):
        raise ValueError("a mean needs at least one item")
    return bootstrap.interval(_means(np.asarray(values, float), _cached_counts(bootstrap, len(values), "items")))


@dataclasses.dataclass(frozen=True)
class _Mean:
    """A figure that is a mean over the resampled items of one set, of a field after `transform`."""

    group: str
    field: str
    transform: Callable[[np.ndarray], np.ndarray] = np.asarray


UTILITY_PARTS: dict[str, _Mean] = {}
for _prefix, _probability in (("retain", "Q_A_Prob"), ("ra", "Q_A_Prob_normalised"), ("wf", "Q_A_Prob_normalised")):
    UTILITY_PARTS |= {
        f"{_prefix}_{_probability}": _Mean(_prefix, "prob"),
        f"{_prefix}_Q_A_ROUGE": _Mean(_prefix, "rougeL_recall"),
        f"{_prefix}_Truth_Ratio": _Mean(_prefix, "score", lambda ratios: np.maximum(0, 1 - ratios)),
    }
_MEANS = {
    "extraction_strength": _Mean("forget", "score"),
    "exact_memorization": _Mean("forget", "score"),
    CORRECT: _Mean("forget", "prob"),
    CLOSER_TO_1: _Mean("forget", "score", lambda ratios: np.minimum(ratios, 1 / (ratios + EPSILON))),
    PROB_MEAN: _Mean("forget", "score"),
    FLUENCY: _Mean("forget", "score"),
    VERBMEM: _Mean("verbmem", "rougeL_f1"),
    FORGET_KNOWMEM: _Mean("forget_knowmem", "rougeL_f1"),
    RETAIN_KNOWMEM: _Mean("retain_knowmem", "rougeL_f1"),
}


class Resampler:
    """Computes the figures of one result in every draw, from its items."""

    def __init__(self, results: Results, bootstrap: Bootstrap) -> None:
        self.results, self.bootstrap = results, bootstrap
        members: dict[str, set[str]] = {}
        for metric, items in results.items.items():
            if group := _group(metric):
                members.setdefault(group, set()).update(items)
        # Draws depend on the order of the items, not of the file.
        self._columns = {
            group: {index: column for column, index in enumerate(sorted(indices, key=lambda text: (len(text), text)))}
            for group, indices in members.items()
        }

    def figures(self, names: Sequence[str]) -> tuple[dict[str, Draws], dict[str, str]]:
        """Return the draws of figures of TOFU or MUSE, and for figures without draws the reasons."""
        draws, reasons = _collect({name: functools.partial(self._draws, name) for name in names})
        return {name: values for name, values in draws.items() if values is not None}, reasons

    def _draws(self, name: str) -> Draws:
        if name in ATTACKS:
            return self._auc(name)
        if name == UTILITY:
            return np.asarray(harmonic_mean([self._mean(name, how) for name, how in UTILITY_PARTS.items()]))
        return self._mean(name, _MEANS[name])

    def _mean(self, metric: str, how: _Mean) -> Draws:
        if metric == PROB_MEAN and not self.results.items.get(PROB_MEAN):
            by_index = probability_truth_ratios(self.results)
        else:
            by_index = self._fields(metric, how.field)
        columns, values = self._arrange(how.group, by_index)
        return _means(how.transform(values), self._counts(how.group)[:, columns])

    def _auc(self, attack: str) -> Draws:
        (forget, forget_scores), (holdout, holdout_scores) = (
            self._arrange(group, self._fields(f"{attack}.{group}", "score")) for group in GROUPS
        )
        wins = holdout_wins(forget_scores, holdout_scores)
        forget_counts, holdout_counts = self._counts("forget")[:, forget], self._counts("holdout")[:, holdout]
        pairs = forget_counts.sum(axis=1) * holdout_counts.sum(axis=1)
        won = ((forget_counts @ wins) * holdout_counts).sum(axis=1)
        return np.divide(won, pairs, out=np.full(len(pairs), np.nan), where=pairs > 0)

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

    def _arrange(self, group: str, values: Mapping[str, float]) -> tuple[list[int], np.ndarray]:
        return [self._columns[group][index] for index in values], np.array(list(values.values()))

    def _counts(self, group: str) -> Counts:
        return _cached_counts(self.bootstrap, len(self._columns[group]), group)


@functools.lru_cache(maxsize=16)
def _cached_counts(bootstrap: Bootstrap, items: int, group: str) -> Counts:
    # The same for every metric of every result with a set of this size.
    return bootstrap.counts(items, group)


def _group(metric: str) -> str | None:
    """The set that a metric's items belong to, or None if no figure here needs them."""
    attack, _, group = metric.partition(".")
    if attack in ATTACKS:
        return group or None
    if metric == WRONG:
        return "forget"
    how = _MEANS.get(metric) or UTILITY_PARTS.get(metric)
    return how.group if how else None


def _means(values: Float[np.ndarray, " items"], counts: Counts) -> Draws:
    drawn = counts.sum(axis=1)  # fewer than the set has where a metric lacks some of its items
    return np.divide(counts @ values, drawn, out=np.full(len(counts), np.nan), where=drawn > 0)
