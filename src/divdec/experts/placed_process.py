"""The process that holds experts for a target elsewhere: it follows orders until there are no more.

It knows nothing of the target, nor of how processes are started.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import Cache

from divdec.errors import FailedClosed, UsageError, first_line
from divdec.experts.forward import lengths_of
from divdec.experts.placed_cache import Abilities
from divdec.experts.placed_halves import JoinedPair, Lost, OneOfPair
from divdec.experts.placed_transfer import packed
from divdec.experts.placed_wire import Link, Message
from divdec.experts.protocol import Experts
from divdec.experts.shifting import can_shift, holds_tokens, take_columns
from divdec.steering import Steering


def abilities_of(experts: Experts | OneOfPair) -> Abilities:
    """What can be done to the caches of these experts."""
    layers: list[Any] = experts.new_cache().layers
    windows = [window for layer in layers if (window := getattr(layer, "sliding_window", None)) is not None]
    return Abilities(
        window=min(windows, default=None),
        croppable=all(map(holds_tokens, layers)),
        shiftable=all(map(can_shift, layers)),
    )


class Worker:
    """Follows the orders of the target's process.

    Args:
        experts: what answers.
        orders: where orders come from.
        answers: where answers go to.
        vocab_size: width of what is answered.
    """

    def __init__(self, experts: Experts | OneOfPair, orders: Link, answers: Link, vocab_size: int) -> None:
        self._experts, self._orders, self._answers = experts, orders, answers
        self._vocab_size = vocab_size
        self._only_half = type(experts) is OneOfPair
        self._caches: dict[int, Cache] = {}
        self._failed: dict[int, str] = {}  # caches that are not what the target's process takes them for, and why
        self._steering: Steering | None = None
        self._eligible: Bool[Tensor, " vocab"] | None = None
        self._last: tuple[int, Float[Tensor, "batch kept vocab"]] | None = None

    def work(self) -> None:
        """Answer until the target's process says that it ends.

        Raises:
            FailedClosed: it is gone without having said so.
        """
        while True:
            order = self._orders.receive()
            if order.facts["do"] == "end":
                return
            answer = self._answer(order)
            # A process that lives may be long in its own pass before it reads.
            self._answers.send(dataclasses.replace(answer, facts=answer.facts | {"number": order.facts["number"]}))

    def _answer(self, order: Message) -> Message:
        facts = order.facts
        if facts["do"] == "whole":
            of, divergence = self._last or (None, None)
            if divergence is None or of != facts["of"]:
                return Message({"error": "another pass has come between; nothing is answered unsteered"})
            return Message({}, packed(divergence, None))
        # First of all: the other side takes both for done, whatever becomes of this pass.
        self._follow(facts["orders"])
        if facts.get("steering") is not None:
            self._steering = Steering.from_dict(facts["steering"])
            self._eligible = self._steering.eligible(self._vocab_size)
        joined = self._experts if isinstance(self._experts, JoinedPair) else None
        if joined is not None:
            joined.expect(facts["number"])
        number = facts["cache"]
        try:
            if number in self._failed:
                raise FailedClosed(f"this cache was lost ({self._failed[number]}); begin with a new one")
            with torch.inference_mode():
                return self._run(order)
        except Exception as error:
            if number is not None:
                self._failed[number] = _told(error)
            lost = isinstance(error, Lost)
            try:
                if joined is not None and not lost:
                    joined.owed()
            except FailedClosed as another:
                lost, error = True, another
            kind = type(error).__name__ if isinstance(error, UsageError) else ""
            return Message({"error": _told(error), "kind": kind, "lost": lost})

    def _run(self, order: Message) -> Message:
        facts, tensors = order.facts, order.tensors
        cache = None if facts["cache"] is None else self._caches[facts["cache"]]
        given = tensors["ids"], tensors.get("mask"), tensors.get("positions"), cache, facts["keep"]
        found = self._experts.divergence(*given)[..., : self._vocab_size]
        lengths = [0] if cache is None else lengths_of(cache)
        if len(set(lengths)) > 1:
            raise FailedClosed(f"the experts' caches hold different numbers of tokens {lengths}")
        length = {"length": lengths[0]}
        if self._only_half:
            return Message(length, {"divergence": found})
        if self._eligible is not None:
            self._eligible = self._eligible.to(found.device)
        steering = self._steering if facts["one_rule"] else None
        answer = packed(found, steering, self._eligible, facts["entries"])
        self._last = (facts["number"], found) if "half" in answer else None  # what was all sent is not asked for again
        return Message(length, answer)

    @torch.inference_mode()
    def _follow(self, orders: Sequence[list[Any]]) -> None:
        """Do to the caches what was done to those that stand for them; one that fails does not stop the others."""
        for what, number, *given in orders:
            try:
                self._change(what, number, given)
            except Exception as error:
                self._failed[number] = _told(error)

    def _change(self, what: str, number: int, given: list[Any]) -> None:
        if what == "drop":
            self._caches.pop(number, None)
            self._failed.pop(number, None)
            return
        if what in ("new", "reset"):
            self._caches[number] = self._experts.new_cache()
            self._failed.pop(number, None)
            return
        if what == "copy":
            if given[0] in self._failed:
                raise FailedClosed(self._failed[given[0]])
            self._caches[number] = copy.deepcopy(self._caches[given[0]])
            return
        cache: Any = self._caches[number]
        if what == "record":
            for layer in cache.layers:
                if hasattr(layer, "record_past"):
                    layer.record_past = given[0]
        elif what == "crop":
            cache.crop(-given[0])
        elif what == "repeat":
            cache.batch_repeat_interleave(given[0])
        elif what == "reorder":
            cache.reorder_cache(torch.tensor(given[0]))
        elif what == "select":
            cache.batch_select_indices(torch.tensor(given[0], dtype=torch.long))
        elif what == "columns":
            columns = torch.tensor(given[0])
            for layer in cache.layers:
                take_columns(layer, columns)
        else:
            raise FailedClosed(f"an order that is not known: {what}")


def _told(error: Exception) -> str:
    if isinstance(error, UsageError | FailedClosed):
        return str(error)
    return f"the experts failed ({type(error).__name__}: {first_line(error)}); nothing is answered unsteered"
