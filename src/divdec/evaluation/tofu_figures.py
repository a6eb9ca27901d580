"""TOFU's figures from its items: ratios, means, AUCs and model utility, under OpenUnlearning's names."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import scipy.stats

from divdec.evaluation.likelihood import (
    closer_to_1_better,
    normalised_probability,
    prob_mean,
    true_better,
    truth_ratio,
)
from divdec.evaluation.privacy import attack_auc, forget_quality, privleak
from divdec.evaluation.results import Items, Results

ATTACKS = ("loss", "zlib", "min_k", "min_k_plus_plus", "reference", "gradnorm")
UTILITY = tuple(
    f"{name}_{metric}"
    for name in ("retain", "ra", "wf")
    for metric in ("Q_A_Prob" if name == "retain" else "Q_A_Prob_normalised", "Q_A_ROUGE", "Truth_Ratio")
)


def derive(found: Results, retained: Results | None) -> None:
    """Every figure that follows from the items at hand; each may be computed again without harm."""
    for name, aggregate in (
        ("forget", closer_to_1_better),
        ("retain", true_better),
        ("ra", true_better),
        ("wf", true_better),
    ):
        right = f"{name}_Q_A_PARA_Prob" if name in ("forget", "retain") else f"{name}_Q_A_Prob"
        wrong = f"{name}_Q_A_PERT_Prob"
        if right in found.items and wrong in found.items:
            losses = list(zip(found.scores(right, "avg_loss"), found.scores(wrong, "avg_loss"), strict=True))
            metric = "forget_truth_ratio" if name == "forget" else f"{name}_Truth_Ratio"
            ratios = [truth_ratio(correct, wrongs) for correct, wrongs in losses]
            found.items[metric] = _numbered(ratios)
            found.figures[metric] = statistics.fmean(map(aggregate, ratios))
            if name == "forget":
                found.figures["forget_truth_ratio_true_better"] = statistics.fmean(map(true_better, ratios))
                means = [prob_mean(correct, wrongs) for correct, wrongs in losses]
                found.figures["forget_truth_ratio_prob_mean"] = statistics.fmean(means)
        if name in ("ra", "wf") and wrong in found.items:
            pairs = zip(found.scores(right, "prob"), found.scores(wrong, "prob"), strict=True)
            shares = [normalised_probability(correct, wrongs) for correct, wrongs in pairs]
            found.items[f"{name}_Q_A_Prob_normalised"] = _numbered(shares, "prob")
    for metric in found.items:
        if metric in found.figures and metric.endswith(("Truth_Ratio", "truth_ratio")):
            continue
        found.figures[metric] = _mean(metric, found)
    _attacks(found, retained)
    parts = [found.figures.get(metric) for metric in UTILITY]
    if all(part is not None for part in parts):
        found.figures["model_utility"] = float(scipy.stats.hmean(parts)) if all(parts) else 0.0


def _attacks(found: Results, retained: Results | None) -> None:
    for attack in ATTACKS:
        forget, holdout = (found.items.get(f"mia_{attack}.{name}") for name in ("forget", "holdout"))
        if forget and holdout:
            scores = (found.scores(f"mia_{attack}.{name}", "score") for name in ("forget", "holdout"))
            found.figures[f"mia_{attack}"] = attack_auc(*scores)
    auc = found.figures.get("mia_min_k")
    if auc is not None:
        expected = 0.5 if retained is None else retained.figures.get("mia_min_k")
        if expected is not None:
            found.figures["privleak"] = privleak(auc, expected)
    if retained is not None and "forget_truth_ratio" in found.items:
        ours, theirs = (run.scores("forget_truth_ratio", "score") for run in (found, retained))
        found.figures["forget_quality"] = forget_quality(ours, theirs)


def _mean(metric: str, found: Results) -> float:
    field = "prob" if "Prob" in metric else "rougeL_recall" if "ROUGE" in metric else "score"
    values = found.scores(metric, field)
    # Several answers to a question count as one item.
    means = [statistics.fmean(value) if isinstance(value, list) else value for value in values]
    return statistics.fmean(value for value in means if value == value)


def _numbered(values: Sequence[float], field: str = "score") -> Items:
    return {str(index): {field: value} for index, value in enumerate(values)}
