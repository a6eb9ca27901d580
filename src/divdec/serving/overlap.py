"""Passages of a text that counts were made of: what the retain set holds q would go on repeating."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from divdec.experts.ngram_counts import NgramCounts

PASSAGE = 48  # n-grams in a row: a text that the retain set holds, not a phrase that others use too


def passages(counts: NgramCounts, documents: Iterable[np.ndarray]) -> list[np.ndarray]:
    """The long passages of some documents that are among those counted, and short documents that are as a whole.

    Args:
        counts: of the retain set.
        documents: token ids.
    """
    found = []
    for ids in documents:
        length = min(len(ids), counts.order)
        windows = np.lib.stride_tricks.sliding_window_view(ids, length).astype(np.int64)
        bounds = np.concatenate([[-1], np.flatnonzero(counts.ids_of(windows) < 0), [len(windows)]])
        for before, after in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            if after - before - 1 >= min(PASSAGE, len(windows)):
                found.append(ids[before + 1 : after - 1 + length])
    return found
