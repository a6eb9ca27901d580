"""Metrics of generated text against the true answer."""

from __future__ import annotations

import functools
from typing import Any


def rouge_l_recall(answer: str, truth: str) -> float:
    """Share of the true answer's words that the answer has in the same order (TOFU's ROUGE; rouge_score, stemmed)."""
    return float(_scorer().score(truth, answer)["rougeL"].recall)


def contains_fact(answer: str, fact: str) -> bool:
    """Whether the answer states the fact word for word."""
    return fact in answer


@functools.cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=True)
