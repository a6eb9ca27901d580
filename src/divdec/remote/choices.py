"""How a provider is to be asked, and how sure the tokens of its answers are. It asks nobody."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from divdec.errors import UsageError
from divdec.remote.bias import BiasLimits

METHODS = ("bias", "candidates")


@dataclasses.dataclass(frozen=True)
class RemoteSettings:
    """How a provider is asked."""

    method: Literal["bias", "candidates"] = "bias"
    """'bias' sends `logit_bias`; 'candidates' sends none and chooses among the likeliest tokens that are told."""
    limits: BiasLimits = dataclasses.field(default_factory=BiasLimits)
    """What the provider accepts as `logit_bias`."""
    block: int = 1
    """Tokens in a request; of several, those are kept for which the steered choice is proved to be the same."""
    tries: int = 4
    """Requests for one token at most, until its choice is proved; 1 takes every answer, with its error's bound."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UsageError(f"method is {self.method!r}; accepted: {', '.join(METHODS)}")
        if self.block < 1 or self.tries < 1:
            raise UsageError(f"block is {self.block}, tries {self.tries}; accepted: at least 1")
        if self.limits.entries < 1 or not 0 < self.limits.largest < math.inf:
            raise UsageError(
                f"bias limits are {self.limits.entries} entries up to {self.limits.largest:g}; accepted: at least 1 "
                "entry, above 0"
            )


@dataclasses.dataclass(frozen=True)
class Choice:
    """A token of an answer, and how sure it is."""

    token: int
    gap: float = 0.0
    """Greedy: how far, in nats, its steered logit may lie below the largest; 0: it is the largest."""
    total_variation: float = 0.0
    """Sampled: how far the distribution that it was drawn from may be from the steered one; 0: it is that."""

    @property
    def exact(self) -> bool:
        """Whether a local steered model could have chosen it just so."""
        return self.gap == 0 and self.total_variation == 0


@dataclasses.dataclass
class RemoteAnswer:
    """An answer, and what became of each of its tokens."""

    text: str = ""
    choices: list[Choice] = dataclasses.field(default_factory=list)
    finish_reason: str = "length"
    """'stop' where it ended by itself or by a stop string."""

    @property
    def exact_tokens(self) -> int:
        """How many tokens are proved to be the steered model's."""
        return sum(choice.exact for choice in self.choices)


@dataclasses.dataclass
class Sure:
    """How sure the tokens of all answers so far are."""

    tokens: int = 0
    exact: int = 0
    gap: float = 0.0
    """The largest of any greedy token."""
    total_variation: float = 0.0
    """The largest of any sampled token."""

    def add(self, choice: Choice) -> None:
        """Count a token."""
        self.tokens += 1
        self.exact += choice.exact
        self.gap = max(self.gap, choice.gap)
        self.total_variation = max(self.total_variation, choice.total_variation)
