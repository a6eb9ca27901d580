"""Which rule a viewer may choose: never one that steers nothing. It knows nothing of models or of Gradio."""

from __future__ import annotations

import dataclasses
from typing import Any

from divdec.errors import UsageError
from divdec.steering import LARGEST_ALPHA, Steering

WEAKEST = 0.1  # the strength below which a viewer would as good as see the target
STRONGEST = 4.0
LARGEST_K = 200


def is_number(value: Any) -> bool:
    """Whether a page's client has sent a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True)
class Choice:
    """What the controls offer."""

    own: Steering
    """The bundle's rule, whose eligible vocabulary and fill every choice keeps."""
    eligible: int
    """How many tokens the rank rule may suppress at most, and one more."""
    rank: bool = True
    """Whether the rank rule can be chosen: not where nothing but takedown requests steers."""

    def __post_init__(self) -> None:
        """Refuse a bundle whose own rule answers as the target would, or worse.

        Raises:
            UsageError: it is linear with a strength of 0 or below.
        """
        if self.own.rule == "linear" and not self.own.alpha > 0:
            raise UsageError(
                f"steering is {self.own}: the playground shows steered answers only; accepted: a strength above 0 "
                "(--steering linear:1)"
            )

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of the rules that can be chosen."""
        return ("linear", "rank") if self.rank else ("linear",)

    @property
    def alphas(self) -> tuple[float, float]:
        """Weakest and strongest α."""
        if self.own.rule != "linear":
            return WEAKEST, STRONGEST
        return min(WEAKEST, self.own.alpha), min(max(STRONGEST, 2 * self.own.alpha), LARGEST_ALPHA)

    @property
    def ks(self) -> tuple[int, int]:
        """Smallest and largest k."""
        most = self.eligible - 1
        return 1, min(max(LARGEST_K, 2 * self.own.k if self.own.rule == "rank" else 1), most)

    def steering(self, rule: Any, alpha: Any, k: Any) -> Steering:
        """The rule that a viewer has chosen; a page's client may send anything.

        Args:
            rule: 'linear' or 'rank'.
            alpha: strength of the linear rule.
            k: how many tokens the rank rule suppresses.

        Raises:
            UsageError: a page or its client has sent what the controls do not offer, such as a strength of 0.
        """
        if rule not in self.rules:
            raise UsageError(f"rule is {rule!r}; accepted here: {', '.join(self.rules)}")
        if rule == "linear":
            low, high = self.alphas
            if not is_number(alpha) or not low <= alpha <= high:
                raise UsageError(f"strength is {alpha!r}; accepted: {low:g} to {high:g} (0 would steer nothing)")
            return dataclasses.replace(self.own, rule="linear", alpha=float(alpha))
        smallest, largest = self.ks
        if not is_number(k) or not smallest <= k <= largest or k != int(k):
            raise UsageError(f"k is {k!r}; accepted: a whole number from {smallest} to {largest}")
        return dataclasses.replace(self.own, rule="rank", k=int(k))
