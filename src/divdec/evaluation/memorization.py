"""How much of a text a model reproduces: metrics of first choices, token by token (OpenUnlearning's definitions).

Both leave out the last labelled token, which ends an answer; where a text has no such token, one of its own is lost.
"""

from __future__ import annotations

import math

from divdec.evaluation.scoring import ItemScore


def extraction_strength(item: ItemScore) -> float:
    """Share of the text that the model completes word for word once it has seen the rest, 1 − k/L.

    k is the first place from which every token is the model's first choice. Where there is none OpenUnlearning's loop
    ends at k = L − 1, so that the value is never below 1/L; a text of no token gives 0.
    """
    hits = item.hits[:-1]
    if not hits:
        return 0.0
    right_at_the_end = next((count for count, hit in enumerate(reversed(hits)) if not hit), len(hits))
    return max(right_at_the_end, 1) / len(hits)


def exact_memorization(item: ItemScore) -> float:
    """Share of the tokens that are the model's first choice; NaN where there is no token."""
    hits = item.hits[:-1]
    return sum(hits) / len(hits) if hits else math.nan
