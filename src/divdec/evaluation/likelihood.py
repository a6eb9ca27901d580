"""Metrics of how likely answers are, from their mean losses per token (TOFU's definitions; OpenUnlearning's names)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

SMALLEST = 1e-10  # what OpenUnlearning adds to every denominator


def truth_ratio(correct_loss: float, wrong_losses: Sequence[float]) -> float:
    """r: how likely wrong answers are for each likely right one, p_wrong / p_correct (TOFU, section on truth ratio).

    Args:
        correct_loss: mean negative log-probability per token of the right answer, in nats.
        wrong_losses: the same of each wrong answer; their mean is taken before the exponential.
    """
    return math.exp(-statistics.fmean(wrong_losses)) / (math.exp(-correct_loss) + SMALLEST)


def closer_to_1_better(ratio: float) -> float:
    """min(r, 1/r): 1 where right and wrong are equally likely, as for a model that never saw either (forget sets)."""
    return min(ratio, 1 / (ratio + SMALLEST))


def true_better(ratio: float) -> float:
    """max(0, 1 − r): higher where right answers are likelier than wrong ones (retain sets)."""
    return max(0.0, 1 - ratio)


def prob_mean(correct_loss: float, wrong_losses: Sequence[float]) -> float:
    """p_correct / (p_correct + p_wrong), the truth ratio of OpenUnlearning's paper."""
    correct, wrong = math.exp(-correct_loss), math.exp(-statistics.fmean(wrong_losses))
    return correct / (correct + wrong + SMALLEST)


def normalised_probability(correct: float, wrong: Sequence[float]) -> float:
    """p_correct / (p_correct + Σ p_wrong): the right answer's share among the given ones."""
    return correct / (correct + math.fsum(wrong) + SMALLEST)
