"""Experts that other processes hold, as the target's process sees them: orders before its pass, answers after it.

It knows nothing of how the processes are started. Whatever does not come, or not in time, is an error.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Sequence
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache

from divdec.errors import FailedClosed, UsageError
from divdec.experts.placed_cache import Abilities, Orders, RemoteCache
from divdec.experts.placed_pass import RemotePass
from divdec.experts.placed_statistics import TransferStatistics
from divdec.experts.placed_transfer import unpacked
from divdec.experts.placed_wire import Link, Message
from divdec.experts.protocol import own_cache
from divdec.steering import Steering

_KINDS: dict[str, type[Exception]] = {"UsageError": UsageError}


class RemoteExperts:
    """Experts (`divdec.experts.protocol.Experts`) in one or two other processes. No gradient reaches them.

    Args:
        links: to the process that answers and, where the pair is held by two, to the other one.
        vocab_size: width of the divergence.
        abilities: of their caches.
        timeout: seconds that a process may take for an answer.
        entries: how many entries of a divergence cross for the linear rule; None for all.
        tolerance: total variation distance above which all entries are asked for.

    Attributes:
        entries: as given; may be changed between passes, as may be
        tolerance: as given.
        statistics: what has crossed.
    """

    def __init__(
        self,
        links: Sequence[Link],
        vocab_size: int,
        *,
        abilities: Abilities = Abilities(),  # noqa: B008
        timeout: float = 60.0,
        entries: int | None = None,
        tolerance: float = 0.01,
    ) -> None:
        self.vocab_size = vocab_size
        self.statistics = TransferStatistics()
        self._links, self._answers = tuple(links), links[0]
        self._abilities, self._timeout = abilities, timeout
        self._is_stateful = not abilities.croppable
        self.entries, self.tolerance = entries, tolerance
        self._orders: Orders = collections.deque()
        self._lock = threading.Lock()
        self._number = 0
        self._told: Steering | None = None
        self._lost: str | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteExperts:
        return self  # the processes are there once

    def new_cache(self) -> RemoteCache:
        """An empty cache, there and here."""
        return RemoteCache(self._orders, self._abilities)

    def divergence(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch past_and_tokens"] | None = None,
        position_ids: Int[Tensor, "batch_or_one tokens"] | None = None,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
    ) -> Float[Tensor, "batch kept vocab"]:
        """ℓ_q − ℓ_p; see `divdec.experts.protocol.Experts.divergence`."""
        return self.start(input_ids, attention_mask, position_ids, cache, logits_to_keep).finish()

    def start(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch past_and_tokens"] | None,
        position_ids: Int[Tensor, "batch_or_one tokens"] | None,
        cache: Cache | None,
        logits_to_keep: int = 0,
        steering: Steering | None = None,
    ) -> RemotePass:
        """Let the other processes begin; whoever calls this goes on, and calls `finish` or `abandon`.

        Args:
            input_ids: see `divergence`, as for the next four.
            attention_mask: likewise.
            position_ids: likewise.
            cache: likewise.
            logits_to_keep: likewise.
            steering: the only rule that what comes back will be applied with; None for any.

        Raises:
            FailedClosed: a process is gone, or was lost before.
        """
        held = own_cache(cache, RemoteCache)
        if not self._lock.acquire(timeout=self._timeout):
            raise FailedClosed(f"the experts have been busy with another pass for {self._timeout:g} seconds")
        try:
            facts = self._facts(held, logits_to_keep, steering)
            given = {"ids": input_ids, "mask": attention_mask, "positions": position_ids}
            # Copies: what shares memory cannot stand in one message.
            tensors = {name: tensor.clone() for name, tensor in given.items() if tensor is not None}
            self._send(Message(facts, tensors))
            self.statistics.passes += 1
        except BaseException:
            self._lock.release()
            raise
        return RemotePass(self, facts["number"], held, steering, attention_mask)

    def _whole(self, number: int) -> Float[Tensor, "batch kept vocab"]:
        """All of the divergence of a pass that has been answered."""
        with self._lock:
            self._number += 1
            self._send(Message({"do": "whole", "number": self._number, "of": number}), self._links[:1])
            return unpacked(self._receive().tensors, self.vocab_size)

    def close(self) -> None:
        """Let the other processes end; nothing can be asked afterwards."""
        if self._lost is None:
            with contextlib.suppress(FailedClosed):
                self._send(Message({"do": "end"}), timeout=5.0)
            self._lost = "the processes of the experts were told to end"

    def _facts(self, cache: RemoteCache | None, logits_to_keep: int, steering: Steering | None) -> dict[str, Any]:
        self._number += 1
        facts: dict[str, Any] = {
            "do": "pass",
            "number": self._number,
            "cache": None if cache is None else cache.layer.number,
            "keep": logits_to_keep,
            "one_rule": steering is not None,
            "entries": self.entries,
        }
        if steering is not None and steering is not self._told:
            self._told = steering
            facts["steering"] = steering.to_dict()
        # Others may add to them, or take: what is done to a cache comes before its next pass, or not at all.
        facts["orders"] = [self._orders.popleft() for _ in range(len(self._orders))]
        return facts

    def _send(self, message: Message, links: Sequence[Link] | None = None, timeout: float | None = None) -> None:
        if self._lost is not None:
            raise FailedClosed(self._lost)
        for link in links or self._links:
            try:
                link.send(message, timeout or self._timeout)
            except FailedClosed as error:
                raise self._gone(error) from None
            except Exception:
                self._gone(FailedClosed(f"an order to {link.name} could not be written"))
                raise

    def _gone(self, error: FailedClosed) -> FailedClosed:
        """From now on nothing is asked any longer."""
        self._lost = f"{error}; nothing is answered unsteered"
        return FailedClosed(self._lost)

    def _receive(self) -> Message:
        """The answer to the last order.

        Raises:
            FailedClosed: it did not come, or says that the experts failed.
            UsageError: it says that what was given cannot be used.
        """
        if self._lost is not None:
            raise FailedClosed(self._lost)
        before = self._answers.received
        try:
            answer = self._answers.receive(self._timeout)
            if answer.facts.get("number") != self._number:
                raise FailedClosed(f"{self._answers.name} answered another question")
        except FailedClosed as error:
            raise self._gone(error) from None
        except Exception:  # where the next message begins is not known
            self._gone(FailedClosed(f"an answer of {self._answers.name} could not be read"))
            raise
        self.statistics.bytes += self._answers.received - before
        if answer.facts.get("lost"):
            self._lost = answer.facts["error"]
        if (error := answer.facts.get("error")) is not None:
            raise _KINDS.get(answer.facts.get("kind", ""), FailedClosed)(error)
        return answer
