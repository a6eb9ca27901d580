"""One pass of experts in other processes, from its order to its answer."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from jaxtyping import Float, Int
from torch import Tensor

from divdec.errors import FailedClosed, UsageError
from divdec.experts.placed_cache import RemoteCache
from divdec.experts.placed_transfer import Tail, unpacked
from divdec.steering import Steering

if TYPE_CHECKING:
    from divdec.experts.placed_remote import RemoteExperts


class RemotePass:
    """An answer that is on its way (`divdec.experts.placed.Pending`)."""

    def __init__(
        self,
        experts: RemoteExperts,
        number: int,
        cache: RemoteCache | None,
        steering: Steering | None,
        mask: Int[Tensor, "batch past_and_tokens"] | None,
    ) -> None:
        self._experts, self._number, self._cache = experts, number, cache
        self._steering, self._mask = steering, mask
        self._tail: Tail | None = None
        self._open = True

    def finish(self) -> Float[Tensor, "batch kept vocab"]:
        """The divergence, or what steers as it does by the one rule that `start` was given.

        Raises:
            FailedClosed: it did not come, or the experts failed.
            UsageError: what was given cannot be used.
        """
        self._open = False
        try:
            answer = self._experts._receive()
        finally:
            self._experts._lock.release()
        if self._cache is not None:
            self._cache.layer.length = answer.facts["length"]
            self._cache.layer.is_initialized = True
        self._tail = Tail.of(answer.tensors)
        return unpacked(answer.tensors, self._experts.vocab_size)

    def complete(self, logits: Float[Tensor, "batch kept vocab"]) -> Float[Tensor, "batch kept vocab"] | None:
        """All of the divergence, where what came leaves more open than is tolerated; None where it does not.

        Args:
            logits: steered by what came.

        Raises:
            FailedClosed: a process is gone.
        """
        if self._tail is None or self._steering is None:
            return None
        bound = self._tail.bound(logits, self._steering.alpha)
        if self._mask is not None:
            bound = bound.masked_fill(self._mask[:, -bound.shape[1] :].to(bound.device) == 0, 0.0)
        experts, told = self._experts, self._experts.statistics
        if not float(bound.max()) <= experts.tolerance:
            told.whole += 1
            return experts._whole(self._number)
        told.positions += bound.numel()
        told.largest_bound = max(told.largest_bound, float(bound.max()))
        told.sum_of_bounds += float(bound.sum())
        return None

    def abandon(self) -> None:
        """Wait for the answer without using it, so that the next one is not mistaken."""
        if self._open:
            with contextlib.suppress(FailedClosed, UsageError):
                self.finish()
