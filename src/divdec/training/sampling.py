"""The order in which examples are learned: batches of similar length, the same again after a resumed run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.utils.data import Sampler

# So many batches are filled together by length. Few, so that batches stay mixed: sorting a whole small set puts the
# same wordings together in every epoch, and models then learn visibly worse.
GROUP = 4


class LengthGroupedByEpoch(Sampler[int]):
    """Batches of similar length in random order, drawn from (seed, epoch) alone.

    transformers' own length-grouped sampler draws from torch's global state, so that a run resumed within an epoch
    would repeat some examples of that epoch and miss others; it also takes batches from long to short.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self.lengths = torch.tensor(lengths)
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0
        self.followers: list[Callable[[int], object]] = []
        """Told each epoch before it begins."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of this epoch; accelerate calls it before each."""
        self.epoch = epoch
        for follower in self.followers:
            follower(epoch)

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 100_003 + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator)
        batches: list[list[int]] = []
        for group in order.split(GROUP * self.batch_size):
            by_length = group[self.lengths[group].argsort(stable=True)]
            batches += [batch.tolist() for batch in by_length.split(self.batch_size)]
        # A batch that is not full must come last, for batches are cut from the stream at fixed places.
        full = [batch for batch in batches if len(batch) == self.batch_size]
        rest = [batch for batch in batches if len(batch) < self.batch_size]
        shuffled = [full[place] for place in torch.randperm(len(full), generator=generator).tolist()]
        return iter([index for batch in (*shuffled, *rest) for index in batch])
