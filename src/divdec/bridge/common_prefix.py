"""What two sequences of tokens have in common at their beginning."""

from __future__ import annotations

from collections.abc import Sequence


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many elements two sequences have in common at their beginning."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(place for place in range(length) if one[place] != other[place])
