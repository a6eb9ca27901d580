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
    from rouge_score import tokenize, tokenizers
    from rouge_score.rouge_scorer import RougeScorer

    class Words(tokenizers.Tokenizer):
        """The words of rouge_score's `use_stemmer=True`, each stemmed once: that is most of its time."""

        def __init__(self) -> None:
            self.stemmer = tokenizers.porter.PorterStemmer()
            self.stemmer.stem = functools.lru_cache(maxsize=1 << 16)(self.stemmer.stem)

        def tokenize(self, text: str) -> list[str]:
            return tokenize.tokenize(text, self.stemmer)

    return RougeScorer(["rouge1", "rougeL"], tokenizer=Words())
