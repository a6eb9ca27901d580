"""What has crossed from experts in other processes, and what was left out. It knows nothing of how."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class TransferStatistics:
    """What has crossed so far, and how far answers may be from what all of it would have given."""

    passes: int = 0
    bytes: int = 0
    """Received, over all passes."""
    positions: int = 0
    """Steered with the largest entries alone."""
    whole: int = 0
    """Passes that asked for all entries after all, because the bound was above the tolerance."""
    largest_bound: float = 0.0
    """Of the total variation distance at any of those positions."""
    sum_of_bounds: float = 0.0

    @property
    def mean_bound(self) -> float:
        """Of the total variation distance, over those positions."""
        return self.sum_of_bounds / self.positions if self.positions else 0.0

    def said(self, entries: int, vocab_size: int) -> str:
        """In one line, where only so many entries of a divergence crossed."""
        return (
            f"{entries} of {vocab_size} entries crossed; at {self.positions} positions that was enough (total "
            f"variation to the exact distribution at most {self.largest_bound:.2g}, on average {self.mean_bound:.2g}), "
            f"{self.whole} of {self.passes} passes asked for all; {self.bytes / max(self.passes, 1):.0f} bytes a pass"
        )
