"""Metrics of one answer and of sets of answers, as OpenUnlearning defines them.

Membership inference attacks and their AUC, ROUGE. A membership score is high if the model seems not to have been
trained on an item.
"""

from __future__ import annotations

import functools
import math
import statistics
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from divdec.evaluation.phrases import words

if TYPE_CHECKING:
    from divdec.evaluation.scoring import ItemScore

MIN_K_SHARE = 0.4  # of an item's tokens that min-k and min-k++ use
MIN_VARIANCE = 1e-6


def min_k(item: ItemScore, share: float = MIN_K_SHARE) -> float:
    """Minus the mean log-probability of the least likely tokens; the last labelled token is left out."""
    return _least(item.log_probabilities[:-1], share)


def min_k_plus_plus(item: ItemScore, share: float = MIN_K_SHARE) -> float:
    """`min_k` of z = (log p − μ) / σ, with mean and deviation over the vocabulary; needs `vocabulary_moments`."""
    standardised = [
        (log_p - mean) / math.sqrt(max(variance, MIN_VARIANCE))
        for log_p, (mean, variance) in zip(item.log_probabilities[:-1], item.vocabulary_moments[:-1], strict=True)
    ]
    return _least(standardised, share)


def membership_scores(item: ItemScore, text: str) -> dict[str, float]:
    """Compute the attacks that read one teacher-forced pass: loss, zlib (loss per compressed byte), min-k, min-k++."""
    return {
        "loss": item.loss,
        "zlib": item.loss / len(zlib.compress(text.encode())),
        "min_k": min_k(item),
        "min_k_plus_plus": min_k_plus_plus(item),
    }


def _least(values: Sequence[float], share: float) -> float:
    if not values:
        return 0.0
    count = max(1, int(share * len(values)))
    return -statistics.fmean(sorted(values)[:count])


def attack_auc(forget_scores: Sequence[float], holdout_scores: Sequence[float]) -> float:
    """Probability that a holdout item scores above a forget item, ties counting half (area under the ROC curve).

    1 means memorised, 0.5 that the two sets cannot be distinguished; the value of a retrained model is the reference,
    not 0.5. Errors are those of `holdout_wins`.
    """
    return float(holdout_wins(np.asarray(forget_scores, float), np.asarray(holdout_scores, float)).mean())


def holdout_wins(
    forget_scores: Float[np.ndarray, " forget"], holdout_scores: Float[np.ndarray, " holdout"]
) -> Float[np.ndarray, "forget holdout"]:
    """For each pair 1 if the holdout item scores higher, 0.5 on a tie, else 0; the AUC is the mean.

    Raises:
        ValueError: a set is empty, or a score is not finite.
    """
    if not (forget_scores.size and holdout_scores.size):
        raise ValueError("an AUC needs scores of both sets, but one is empty")
    if not (np.isfinite(forget_scores).all() and np.isfinite(holdout_scores).all()):
        raise ValueError("an AUC needs finite scores; hard rank masking gives others: score with the soft fill")
    higher = forget_scores[:, None] < holdout_scores[None, :]
    return higher + 0.5 * (forget_scores[:, None] == holdout_scores[None, :])


def rouge_l_recall(answer: str, truth: str) -> float:
    """ROUGE-L recall: share of the true answer's words that the answer has in the same order.

    Words are those of Unicode (`divdec.evaluation.phrases.words`), English ones stemmed.
    """
    return float(rouge_scorer(unicode=True).score(truth, answer)["rougeL"].recall)


@functools.cache
def rouge_scorer(*, unicode: bool) -> Any:
    """Return rouge_score's scorer of ROUGE-1 and ROUGE-L by stemmed words: those of Unicode, or its own of a to z."""
    from rouge_score import tokenize, tokenizers
    from rouge_score.rouge_scorer import RougeScorer

    class Words(tokenizers.Tokenizer):
        """The words of rouge_score's `use_stemmer=True`, with a cache: stemming takes most of its time."""

        def __init__(self) -> None:
            self.stemmer = tokenizers.porter.PorterStemmer()
            self.stemmer.stem = functools.lru_cache(maxsize=1 << 16)(self.stemmer.stem)

        def tokenize(self, text: str) -> list[str]:
            if not unicode:
                return tokenize.tokenize(text, self.stemmer)
            # As in rouge_score, words of three letters are not stemmed.
            return [self.stemmer.stem(word) if len(word) > 3 and word.isascii() else word for word in words(text)]

    return RougeScorer(["rouge1", "rougeL"], tokenizer=Words())
