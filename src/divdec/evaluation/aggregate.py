"""From many figures to few: TOFU's Mem, Priv, Utility and Agg in three named variants, and MUSE's distances.

Pure arithmetic on figures by name. A figure is a number, or an array with one value for each draw of a bootstrap. The
paper's code, its text and other repositories differ in what they call by these names (docs/paper_tables.md), so that an
aggregate means nothing without its variant's name.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from divdec.errors import UsageError
from divdec.evaluation.likelihood import prob_mean
from divdec.evaluation.results import Results

Figure = int | float | np.ndarray  # a figure read from JSON may be a whole number

VARIANTS = ("paper", "dd-repo", "relative")
AGGREGATES = ("agg", "agg_without_privacy", "mem", "priv", "utility")
DISTANCES = ("verbmem_distance", "knowmem_distance")

ATTACKS = ("mia_loss", "mia_zlib", "mia_min_k", "mia_min_k_plus_plus")
CLOSER_TO_1, PROB_MEAN = "forget_truth_ratio", "forget_truth_ratio_prob_mean"
CORRECT, WRONG = "forget_Q_A_PARA_Prob", "forget_Q_A_PERT_Prob"
UTILITY, FLUENCY = "model_utility", "forget_Q_A_gibberish"
VERBMEM, FORGET_KNOWMEM, RETAIN_KNOWMEM = "forget_verbmem_ROUGE", "forget_knowmem_ROUGE", "retain_knowmem_ROUGE"
NO_FLUENCY = f"without fluency ({FLUENCY}): Utility is the model utility alone"


@dataclasses.dataclass(frozen=True)
class Scores:
    """What a result's figures come to."""

    values: dict[str, Figure | None]
    """By aggregate; None where the figures do not allow it."""
    reasons: dict[str, str]
    """Why a value is None, by aggregate."""
    notes: tuple[str, ...] = ()
    """What a reader of every value has to know."""


def harmonic_mean(values: Sequence[Figure]) -> Figure:
    """Number of values / Σ 1/value, elementwise over arrays; 0 where any value is 0 or below."""
    stacked = np.stack(np.broadcast_arrays(*values)).astype(float)
    positive = (stacked > 0).all(axis=0)
    with np.errstate(over="ignore"):  # the reciprocal of a denormal number is infinite, which makes the mean 0
        reciprocals = (1 / np.where(positive, stacked, 1.0)).sum(axis=0)
    return _plain(np.where(positive, len(stacked) / reciprocals, 0.0))


def needed(variant: str, *, fluency: bool = True) -> dict[str, tuple[str, ...]]:
    """The figures of a result that Mem, Priv and Utility are made from.

    Args:
        variant: one of `VARIANTS`.
        fluency: whether Utility holds fluency.

    Raises:
        UsageError: there is no such variant.
    """
    if variant not in VARIANTS:
        raise UsageError(f"variant {variant!r} is not known; there are: {', '.join(VARIANTS)}")
    return {
        "mem": ("extraction_strength", "exact_memorization", CORRECT, truth_ratio_of(variant)),
        "priv": ATTACKS,
        "utility": (UTILITY, FLUENCY) if fluency else (UTILITY,),
    }


def truth_ratio_of(variant: str) -> str:
    """The figure that a variant takes for the truth ratio."""
    return CLOSER_TO_1 if variant == "dd-repo" else PROB_MEAN


def memorization(figures: Mapping[str, Any], variant: str) -> Figure:
    """Mem: the harmonic mean of 1 − extraction strength, exact memorization, paraphrase probability, truth ratio.

    The truth ratio is the mean p_c/(p_c + p_w) (`paper`, `relative`), which falls as the model forgets. `dd-repo` takes
    OpenUnlearning's "closer to 1", which rises as it forgets, so that 1 − it penalises forgetting; the paper's tables
    were computed so.

    Raises:
        UsageError: a figure is missing, or no number from 0 to 1.
    """
    return harmonic_mean([1 - value for value in _take(figures, needed(variant)["mem"], "the result's")])


def privacy(figures: Mapping[str, Any], retrain: Mapping[str, Any], variant: str) -> Figure:
    """Priv: the harmonic mean over four membership attacks of how near the AUC is to the retrained model's.

    An attack counts 1 − |a − a_r|, or in the variant `relative` 1 − |a − a_r| / a_r, but not below 0.

    Raises:
        UsageError: a figure is missing, or no number from 0 to 1.
    """
    found = _take(figures, ATTACKS, "the result's")
    references = _take(retrain, ATTACKS, "the retrain model's")
    gaps = [abs(auc - reference) for auc, reference in zip(found, references, strict=True)]
    if variant == "relative":
        # An AUC of 0 cannot be divided by; any other AUC is then infinitely far from it.
        gaps = [gap / max(float(reference), 1e-12) for gap, reference in zip(gaps, references, strict=True)]
    return harmonic_mean([np.clip(1 - gap, 0.0, 1.0) for gap in gaps])


def utility(figures: Mapping[str, Any], target: Mapping[str, Any], *, fluency: bool = True) -> Figure:
    """Utility: the harmonic mean of model utility and fluency, divided by the target's; above 1 where it is better.

    Args:
        figures: of the result.
        target: of the target, before anything was forgotten.
        fluency: False takes the model utility alone.

    Returns:
        The ratio; 0 where the target's own utility is 0.

    Raises:
        UsageError: a figure is missing, or no number from 0 to 1.
    """
    names = needed("paper", fluency=fluency)["utility"]
    own = harmonic_mean(_take(figures, names, "the result's"))
    whole = float(harmonic_mean(_take(target, names, "the target's")))
    return own / whole if whole > 0 else _plain(np.zeros_like(own))


def aggregate(
    figures: Mapping[str, Any],
    target: Mapping[str, Any],
    retrain: Mapping[str, Any],
    variant: str = "paper",
    *,
    fluency: bool | None = None,
) -> Scores:
    """TOFU's aggregates of a result: Mem, Priv, Utility, their harmonic mean Agg, and Agg without Priv.

    Args:
        figures: of the result, as OpenUnlearning names them; arrays where they are draws.
        target: the target's figures; Utility is relative to it.
        retrain: the retrained model's figures; Priv compares with its AUCs.
        variant: one of `VARIANTS`.
        fluency: whether Utility holds fluency; by default where both result and target have it.

    Returns:
        A value for each of `AGGREGATES`, and the reasons where there is none.

    Raises:
        UsageError: there is no such variant.
    """
    needed(variant)
    if fluency is None:
        fluency = all(of.get(FLUENCY) is not None for of in (figures, target))
    scores = _collect(
        {
            "mem": lambda: memorization(figures, variant),
            "priv": lambda: privacy(figures, retrain, variant),
            "utility": lambda: utility(figures, target, fluency=fluency),
        }
    )
    values, reasons = scores.values, scores.reasons
    for name, parts in (("agg", ("mem", "priv", "utility")), ("agg_without_privacy", ("mem", "utility"))):
        found = [value for part in parts if (value := values[part]) is not None]
        values[name] = harmonic_mean(found) if len(found) == len(parts) else None
        if values[name] is None:
            reasons[name] = f"it needs {' and '.join(part for part in parts if values[part] is None)}"
    return Scores({name: values[name] for name in AGGREGATES}, reasons, () if fluency else (NO_FLUENCY,))


def muse_distances(figures: Mapping[str, Any], target: Mapping[str, Any], retrain: Mapping[str, Any]) -> Scores:
    """How far a result lies from the retrained model on MUSE, in percent of the target's distance.

    The distance is Euclidean, over what is remembered of the forget set (word for word, or as knowledge) and what is
    known of the retain set, each a ROUGE-L F1. 0 is the retrained model, 100 the target.

    Args:
        figures: of the result, as OpenUnlearning names them; arrays where they are draws.
        target: the target's figures.
        retrain: the retrained model's figures.

    Returns:
        A value for each of `DISTANCES`, and the reasons where there is none.
    """

    def distance(forgotten: str) -> Figure:
        names = (forgotten, RETAIN_KNOWMEM)
        goal = _take(retrain, names, "the retrain model's")
        own, whole = (
            _plain(np.hypot(*(value - ideal for value, ideal in zip(_take(of, names, whose), goal, strict=True))))
            for of, whose in ((figures, "the result's"), (target, "the target's"))
        )
        if not whole > 0:
            raise UsageError("the target does not differ from the retrain model; give --target and --retrain apart")
        return 100 * own / whole

    return _collect(
        {"verbmem_distance": lambda: distance(VERBMEM), "knowmem_distance": lambda: distance(FORGET_KNOWMEM)}
    )


def tofu_figures(results: Results) -> dict[str, Any]:
    """A result's figures, with the truth ratio that `paper` needs where its items allow it."""
    figures: dict[str, Any] = dict(results.figures)
    if figures.get(PROB_MEAN) is None and results.items.get(CORRECT) and results.items.get(WRONG):
        ratios = list(probability_truth_ratios(results).values())
        figures[PROB_MEAN] = math.fsum(ratios) / len(ratios)
    return figures


def probability_truth_ratios(results: Results) -> dict[str, float]:
    """By item p_c/(p_c + p_w), the truth ratio as the paper defines it (OpenUnlearning's `prob_mean`).

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


def _collect(parts: Mapping[str, Callable[[], Figure]]) -> Scores:
    scores = Scores({}, {})
    for name, part in parts.items():
        try:
            scores.values[name] = part()
        except UsageError as error:
            scores.values[name] = None
            scores.reasons[name] = str(error)
    return scores


def _take(figures: Mapping[str, Any], names: Sequence[str], whose: str) -> list[Any]:
    """The figures of these names, all of them numbers from 0 to 1."""
    missing = [name for name in names if figures.get(name) is None]
    if missing:
        hint = (
            f" (items of {CORRECT} and {WRONG} give it; variant dd-repo does without)" if PROB_MEAN in missing else ""
        )
        raise UsageError(f"{whose} {', '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing{hint}")
    for name in names:
        value = figures[name]
        numeric = isinstance(value, int | float | np.ndarray) and not isinstance(value, bool)
        # A mean of float32 numbers may pass 1 by its last digit.
        if not numeric or not np.all((np.asarray(value) >= -1e-6) & (np.asarray(value) <= 1 + 1e-6)):
            shown = "not such in every draw" if isinstance(value, np.ndarray) else repr(value)
            raise UsageError(f"{whose} {name} is {shown}; accepted: a number from 0 to 1")
    return [figures[name] for name in names]


def _plain(values: Any) -> Figure:
    return float(values) if np.ndim(values) == 0 else values
