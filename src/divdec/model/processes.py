"""The processes that torchrun has started for one model, and the links between them. It knows nothing of models."""

from __future__ import annotations

import dataclasses
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from divdec.errors import UsageError
from divdec.experts.placed import Placement
from divdec.experts.placed_wire import Link

LOADING = 1800.0  # seconds that processes may take to start and to load what they hold
_NEVER = timedelta(days=3650)
_START = "torchrun --nproc-per-node 2 (all experts in one) or 3 (p and q in one each)"


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes that torchrun has started, and how they talk."""

    rank: int
    number: int
    slow: dist.ProcessGroup
    fast: dist.ProcessGroup | None
    ours: bool
    """Whether the process group was made here."""

    @classmethod
    def joined(cls, placement: Placement) -> Processes:
        """Meet the other processes.

        Raises:
            UsageError: there are none, or another number than two or three.
        """
        ours = not dist.is_initialized()
        number = int(os.environ.get("WORLD_SIZE", "1")) if ours else dist.get_world_size()
        if number not in (2, 3):
            raise UsageError(f"experts in processes of their own need two or three processes, not {number}: {_START}")
        nccl = placement.backend == "nccl"
        if nccl and not torch.cuda.is_available():
            raise UsageError("the experts' backend nccl needs GPUs; accepted here: gloo")
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        if ours:
            dist.init_process_group("cpu:gloo,cuda:nccl" if nccl else "gloo", timeout=timedelta(seconds=LOADING))
        slow: Any = dist.new_group(backend="gloo", timeout=_NEVER)
        fast: Any = dist.new_group(backend="nccl", timeout=timedelta(seconds=placement.timeout)) if nccl else None
        return cls(dist.get_rank(), dist.get_world_size(), slow, fast, ours)

    def link(self, rank: int) -> Link:
        """To another process."""
        held = "the experts" if self.number == 2 else "the forget auxiliary" if rank == 1 else "the retain auxiliary"
        name = "the target's process" if rank == 0 else f"process {rank} ({held})"
        return Link(rank, name, self.slow, self.fast)

    def leave(self) -> None:
        """Part from the others."""
        if self.ours and dist.is_initialized():
            dist.destroy_process_group()
