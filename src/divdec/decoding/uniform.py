"""Chance by row and position, so that a seed gives the same answer however its positions are grouped."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

_DRAWN = 64  # positions for which numbers are drawn at a time


class Uniform:
    """Uniform numbers by row and position: whatever the blocks, a position always gets its own."""

    def __init__(self, rows: int, device: torch.device, seed: int | None = None) -> None:
        """Make a source.

        Args:
            rows: how many sequences there are.
            device: where the numbers are wanted.
            seed: None takes one number of the global generator, at the first call.
        """
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)
        self._device = device
        self._rows = rows
        self._drawn = torch.empty(rows, 0, 3, dtype=torch.float64, device=device)

    def __call__(self, rows: Sequence[int], places: Sequence[int], size: int) -> Float[Tensor, "rows size 3"]:
        """Numbers that draft, that accept, and that replace, at `size` positions from each row's place."""
        if self._generator is None:
            # One number of the global generator, however much is drawn in the end; none where all is greedy.
            self._generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        while self._drawn.shape[1] < max(places) + size:
            more = torch.rand(self._rows, _DRAWN, 3, generator=self._generator, dtype=torch.float64)
            self._drawn = torch.cat([self._drawn, more.to(self._device)], dim=1)
        columns = torch.tensor(places)[:, None] + torch.arange(size)[None]
        return self._drawn[torch.tensor(rows)[:, None], columns]
