"""Where experts run, and how a pass of theirs begins before the target's and is waited for after it.

It knows nothing of the target. What is begun is either taken (`finish`) or waited for and dropped.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxtyping import Int
from torch import Tensor
from transformers import Cache

from divdec.errors import UsageError
from divdec.experts.placed_beside import Beside, Pending
from divdec.experts.placed_pass import RemotePass
from divdec.experts.placed_remote import RemoteExperts
from divdec.experts.protocol import Experts
from divdec.steering import Steering

WHERE = ("inside", "beside", "processes")


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where and how experts run."""

    where: str = "inside"
    """'inside' runs them after the target, 'beside' at the same time in this process (streams of their own on CUDA
    devices, else a thread), 'processes' in the other processes that torchrun has started."""
    timeout: float = 60.0
    """Seconds that another process may take for an answer."""
    entries: int | None = None
    """How many entries of a divergence come from another process for the linear rule; None for all."""
    tolerance: float = 0.01
    """With `entries`: the total variation distance to the exact distribution above which all entries are asked for."""
    backend: str = "gloo"
    """How logits and divergences travel between processes on GPUs: 'gloo' by the hosts' memory, 'nccl' directly."""

    def __post_init__(self) -> None:
        if self.where not in WHERE:
            raise UsageError(f"experts placed {self.where!r}; accepted: {', '.join(WHERE)}")
        if not 0 < self.timeout < 1e6:
            raise UsageError(f"the experts' timeout is {self.timeout:g} seconds; accepted: above 0, below a million")
        if self.entries is not None and self.entries < 1:
            raise UsageError(f"the experts' entries are {self.entries}; accepted: a whole number of at least 1")
        if not 0 <= self.tolerance <= 1:
            raise UsageError(f"the experts' tolerance is {self.tolerance:g}; accepted: 0 to 1")
        if self.backend not in ("gloo", "nccl"):
            raise UsageError(f"the experts' backend is {self.backend!r}; accepted: gloo, nccl")

    @classmethod
    def parse(cls, given: Any) -> Placement:
        """Read what `from_pretrained` was given: None, a name or a Placement.

        Raises:
            UsageError: it is none of these.
        """
        if isinstance(given, Placement):
            return given
        if given is None or isinstance(given, str):
            return cls() if given is None else cls(given)
        raise UsageError(f"experts_placement is {given!r}; accepted: {', '.join(WHERE)}, or a Placement")


@contextlib.contextmanager
def started(
    experts: Experts,
    beside: Beside | None,
    input_ids: Int[Tensor, "batch tokens"],
    attention_mask: Int[Tensor, "batch past_and_tokens"] | None,
    position_ids: Int[Tensor, "batch_or_one tokens"] | None,
    cache: Cache | None,
    logits_to_keep: int,
    steering: Steering | None = None,
) -> Iterator[Pending | RemotePass]:
    """Let experts begin; within, the target runs, and what is given waits for their divergence.

    Args:
        experts: of any kind.
        beside: what runs those of this process while the target does; None runs them when they are waited for.
        input_ids: see `divdec.experts.protocol.Experts.divergence`, as for the next four.
        attention_mask: likewise.
        position_ids: likewise.
        cache: likewise.
        logits_to_keep: likewise.
        steering: the only rule that the divergence will be applied with; None for any.

    Raises:
        FailedClosed: another process is gone.
    """
    given = input_ids, attention_mask, position_ids, cache, logits_to_keep
    if isinstance(experts, RemoteExperts):
        pending = experts.start(*given, steering)
    elif beside is not None and beside.can_run(cache):
        pending = beside.start(experts, *given)
    else:
        pending = Pending(lambda: experts.divergence(*given))
    try:
        yield pending
    finally:
        pending.abandon()
