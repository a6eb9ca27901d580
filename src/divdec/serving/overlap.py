"""Whether counts were made of a text: what the retain set holds q would go on repeating."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from divdec.experts.ngram_counts import NgramCounts

PASSAGE = 48  # n-grams in a row: a text that the retain set holds, not a phrase that others use too


def holds(counts: NgramCounts, documents: Iterable[np.ndarray]) -> bool:
    """Whether one of some documents, or a long passage of it, is among those counted.

    Args:
        counts: of the retain set.
        documents: token ids.
    """
    for ids in documents:
        windows = np.lib.stride_tricks.sliding_window_view(ids, min(len(ids), counts.order)).astype(np.int64)
        unknown = np.flatnonzero(counts.ids_of(windows) < 0)
        longest = np.diff(unknown, prepend=-1, append=len(windows)).max() - 1
        if longest >= min(PASSAGE, len(windows)):
            return True
    return False
