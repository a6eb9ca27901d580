"""How many tokens to draft: what has given most tokens a second so far.

The choice changes how fast an answer is made, never the answer, so that it may follow the clock.
"""

from __future__ import annotations

import math

FORGETTING = 0.9  # weight of what was known before, at each new measurement
TRIALS = 2  # measurements before a time is believed
HOPE = 0.5  # of the average time of a drafted token, what one more is hoped to take
PRIOR = (8.0, 10.0)  # accepted of offered, before anything is known


class Pace:
    """Chooses the number of drafted tokens from the measured acceptance and the measured time of each choice.

    The time of a number that was not tried yet is a hopeful guess from those below: where that would pay it is tried,
    and judged by what it took.
    """

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self._seconds: dict[int, tuple[float, int]] = {}
        self._accepted, self._offered = PRIOR

    @property
    def acceptance(self) -> float:
        """The share of drafted tokens that is accepted, as it was lately."""
        return min(self._accepted / self._offered, 0.999)

    def choose(self) -> int:
        """The number of tokens to draft, from 0."""
        for few in range(min(2, self.largest + 1)):
            if self._trials(few) < TRIALS:
                return few
        return max(range(self.largest + 1), key=self._rate)

    def _rate(self, drafted: int) -> float:
        """Expected tokens a second (Leviathan et al. 2023, eq. 1, over the time of a pass)."""
        return (1 - self.acceptance ** (drafted + 1)) / (1 - self.acceptance) / self._time(drafted)

    def _time(self, drafted: int) -> float:
        measured, trials = self._seconds.get(drafted, (math.inf, 0))
        if trials >= TRIALS:
            return measured
        tried = max(number for number in range(drafted) if self._trials(number))
        known, least = self._seconds[tried][0], self._seconds[0][0]
        slope = max(known - least, 0.0) / tried if tried else 0.0
        return min(measured, known + HOPE * slope * (drafted - tried))

    def _trials(self, drafted: int) -> int:
        return self._seconds.get(drafted, (0.0, 0))[1]

    def tell(self, drafted: int, accepted: int, offered: int, seconds: float) -> None:
        """Learn from one pass.

        Args:
            drafted: how many tokens were drafted.
            accepted: how many drafted tokens were accepted, over all sequences.
            offered: how many came to be judged.
            seconds: what the pass took with all that belongs to it.
        """
        self._accepted = FORGETTING * self._accepted + accepted
        self._offered = FORGETTING * self._offered + offered
        known, trials = self._seconds.get(drafted, (seconds, 0))
        # A machine with other work makes single measurements long, never short.
        weight = FORGETTING if seconds > known else 0.5
        self._seconds[drafted] = (weight * known + (1 - weight) * seconds, trials + 1)
