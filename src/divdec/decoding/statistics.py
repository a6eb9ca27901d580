"""What speculative decoding did: acceptance by position, tokens a target pass, and where the time went."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


@dataclasses.dataclass
class SpeculationStatistics:
    """Counts over all answers that were generated with one `Speculation`."""

    drafter: str = ""
    """What proposed the tokens."""
    passes: int = 0
    """Passes of the target, the prompt's not counted."""
    rows: int = 0
    """Sequences in those passes, summed."""
    tokens: int = 0
    """Tokens that those passes gave."""
    offered: list[int] = dataclasses.field(default_factory=list)
    """By position in the draft: how often a token was offered after others that were accepted."""
    accepted: list[int] = dataclasses.field(default_factory=list)
    """By position in the draft: how often it was accepted."""
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    """Time in the target, in each auxiliary and in all else ('rest'), the prompt's passes not counted."""

    @property
    def tokens_per_pass(self) -> float:
        """Tokens a sequence that one pass of the target gave, on average."""
        return self.tokens / self.rows if self.rows else 0.0

    @property
    def acceptance(self) -> list[float]:
        """Share accepted by position in the draft, given that those before it were accepted."""
        return [accepted / offered for accepted, offered in zip(self.accepted, self.offered, strict=True) if offered]

    @property
    def acceptance_rate(self) -> float:
        """Share accepted of all drafted tokens that came to be judged."""
        return sum(self.accepted) / sum(self.offered) if sum(self.offered) else 0.0

    def count(self, drafted: int, accepted: Sequence[int], grown: Sequence[int]) -> None:
        """Add one pass.

        Args:
            drafted: how many tokens were drafted for each sequence.
            accepted: how many of them each sequence accepted.
            grown: how many tokens the pass gave each sequence.
        """
        self.passes += 1
        self.rows += len(accepted)
        self.tokens += sum(grown)
        missing = drafted - len(self.offered)
        self.offered += [0] * missing
        self.accepted += [0] * missing
        for right, number in zip(accepted, grown, strict=True):
            for position in range(min(number, drafted)):
                self.offered[position] += 1
                self.accepted[position] += position < right

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {
            "drafter": self.drafter,
            "passes": self.passes,
            "tokens": self.tokens,
            "tokens_per_pass": self.tokens_per_pass,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_by_position": self.acceptance,
            "seconds": dict(self.seconds),
        }

    @contextlib.contextmanager
    def timed(self, target: nn.Module, experts: Any) -> Iterator[None]:
        """Measure what happens within: the time of each model's passes, and of all else."""
        models = {"target": target} | {
            name: model
            for name, model in (experts.named_modules() if isinstance(experts, nn.Module) else ())
            if isinstance(model, PreTrainedModel) and name
        }
        outermost = [name for name in models if not any(name.startswith(f"{other}.") for other in models)]
        clocks = [_Clock(models[name]) for name in outermost]
        started = time.perf_counter()
        try:
            yield
        finally:
            total = time.perf_counter() - started
            for name, clock in zip(outermost, clocks, strict=True):
                clock.remove()
                self._add(name, clock.seconds)
            self._add("rest", total - sum(clock.seconds for clock in clocks))

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


class _Clock:
    """The time of one model's passes; a GPU is waited for, which slows what is measured a little."""

    def __init__(self, model: nn.Module) -> None:
        self.seconds = 0.0
        self._started = 0.0
        self._hooks = (
            model.register_forward_pre_hook(lambda *_: self._start()),
            model.register_forward_hook(lambda *_: self._stop()),
        )

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _start(self) -> None:
        _wait()
        self._started = time.perf_counter()

    def _stop(self) -> None:
        _wait()
        self.seconds += time.perf_counter() - self._started


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
