"""How well membership can be told from scores, and how far that is from a retrained model.

It knows nothing of models or of how a score was had: a score is any number that is high for what was not trained on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from divdec.evaluation.likelihood import SMALLEST


def attack_auc(forget_scores: Sequence[float], holdout_scores: Sequence[float]) -> float:
    """Probability that a holdout item scores above a forget item, ties counting half (area under the ROC curve).

    The same as scikit-learn's `roc_auc_score` with label 0 for forget and 1 for holdout: 1 means memorised, 0.5 that
    the two sets cannot be told apart; the value of a retrained model is the reference, not 0.5.

    Args:
        forget_scores: one an item of the forget set; high means "was not trained on".
        holdout_scores: one an item of the holdout set.

    Raises:
        ValueError: a set is empty, or a score is not finite.
    """
    return float(holdout_wins(np.asarray(forget_scores, float), np.asarray(holdout_scores, float)).mean())


def holdout_wins(
    forget_scores: Float[np.ndarray, " forget"], holdout_scores: Float[np.ndarray, " holdout"]
) -> Float[np.ndarray, "forget holdout"]:
    """For each pair 1 where the holdout item scores higher, 0.5 on a tie, else 0; the AUC is the mean.

    Raises:
        ValueError: a set is empty, or a score is not finite.
    """
    if not (forget_scores.size and holdout_scores.size):
        raise ValueError("an AUC needs scores of both sets, but one is empty")
    if not (np.isfinite(forget_scores).all() and np.isfinite(holdout_scores).all()):
        raise ValueError("an AUC needs finite scores; hard rank masking gives others: score with the soft fill")
    higher = forget_scores[:, None] < holdout_scores[None, :]
    return higher + 0.5 * (forget_scores[:, None] == holdout_scores[None, :])


def forget_quality(truth_ratios: Sequence[float], retain_truth_ratios: Sequence[float]) -> float:
    """TOFU's forget quality: the p-value of a two-sided Kolmogorov–Smirnov test between two models' truth ratios.

    It depends on ranks alone: ratios and their reciprocals give the same.

    Args:
        truth_ratios: one a forget question, of the model in question.
        retain_truth_ratios: the same, of the retrained model.

    Returns:
        The p-value, 0 to 1: high means that the two cannot be told apart (`scipy.stats.ks_2samp`).

    Raises:
        ValueError: a set is empty.
    """
    from scipy.stats import ks_2samp

    return float(ks_2samp(truth_ratios, retain_truth_ratios).pvalue)  # pyright: ignore[reportAttributeAccessIssue]


def privleak(auc: float, retain_auc: float) -> float:
    """PrivLeak of MUSE in percent, as OpenUnlearning computes it: 0 is ideal, negative is under-unlearned.

    Args:
        auc: `attack_auc` of min-k 40 % on the model in question.
        retain_auc: the same of the retrained model.
    """
    return ((1 - auc) - (1 - retain_auc)) / ((1 - retain_auc) + SMALLEST) * 100
