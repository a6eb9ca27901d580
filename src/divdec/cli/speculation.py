"""What --speculative asks for, and what --statistics says."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from divdec.cli.settings import ChatSettings, GenerateSettings

if TYPE_CHECKING:
    from divdec.decoding.speculative import Speculation


def speculation(settings: GenerateSettings | ChatSettings) -> Speculation | None:
    """How to speculate; None for plain decoding."""
    from divdec.decoding.speculative import Speculation
    from divdec.decoding.statistics import SpeculationStatistics

    if settings.speculative is None:
        return None
    gamma = None if settings.speculative == "auto" else int(settings.speculative)
    return Speculation(gamma, statistics=SpeculationStatistics() if settings.statistics else None)


def report(given: Speculation | None) -> None:
    """Say on standard error what speculation did, where statistics were asked for."""
    if given is None or (found := given.statistics) is None or not found.passes:
        return
    positions = ", ".join(f"{share:.0%}" for share in found.acceptance)
    seconds = ", ".join(f"{name} {value:.2f} s" for name, value in found.seconds.items())
    print(
        f"drafter {found.drafter}: {found.tokens_per_pass:.2f} tokens a target pass, {found.acceptance_rate:.0%} of "
        f"the drafted tokens accepted (by position {positions or 'none'}); {seconds}",
        file=sys.stderr,
    )
