"""Metrics of generated text against the true answer."""

from __future__ import annotations

import functools
from typing import Any


def rouge_l_recall(answer: str, truth: str) -> float:
    """Share of the true answer's words that the answer has in the same order (TOFU's ROUGE; rouge_score, stemmed)."""
    return float(_scorer().score(truth, answer)["rougeL"].recall)


def rouge(answer: str, truth: str) -> dict[str, float]:
    """ROUGE of one answer under the names that OpenUnlearning gives: rouge1_recall, rougeL_f1, rougeL_recall."""
    found = _scorer().score(truth, answer)
    return {
        "rouge1_recall": float(found["rouge1"].recall),
        "rougeL_f1": float(found["rougeL"].fmeasure),
        "rougeL_recall": float(found["rougeL"].recall),
    }


def contains_fact(answer: str, fact: str) -> bool:
    """Whether the answer states the fact word for word."""
    return fact in answer


@functools.cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rouge1", "rougeL"], use_stemmer=True)
