"""The paper's figures from result folders, by name: what each shows, what it is drawn from, and where it is drawn.

The list itself knows nothing of matplotlib or torch, so that it is printed at once.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable

from divdec.errors import UsageError, first_line
from divdec.research.figures.drawn import Asked, Drawn

_HERE = "divdec.research.figures"


@dataclasses.dataclass(frozen=True)
class Known:
    """A figure that can be asked for."""

    shows: str
    """In a few words."""
    needs: str
    """Which runs it is drawn from."""
    place: str
    """Module of this folder and function in it."""

    def draw(self, asked: Asked) -> Drawn:
        """Draw it, under `divdec.report.plots.style`.

        Raises:
            UsageError: the runs do not hold what it is drawn from.
        """
        module, name = self.place.split(":")
        function: Callable[[Asked], Drawn] = getattr(importlib.import_module(f"{_HERE}.{module}"), name)
        try:
            return function(asked)
        except KeyError as error:
            runs = ", ".join(asked.runs)
            raise UsageError(f"a file in {runs} lacks {error}; was it written by another version of divdec?") from error
        except UsageError:
            raise
        except (TypeError, ValueError, AttributeError, IndexError) as error:
            runs = ", ".join(asked.runs)
            raise UsageError(
                f"a file in {runs} does not hold what the figure is drawn from ({first_line(error)}); it needs "
                f"{self.needs}"
            ) from error


TOFU = "divdec eval tofu, divdec compare, or the paper's TOFU_SUMMARY.json"
MUSE = "divdec eval muse, or the paper's MUSE_SUMMARY.json"
KNOWN = {
    "tofu-bars": Known("TOFU: Agg of each method's best setting", TOFU, "tofu:bars"),
    "tofu-scatter": Known("TOFU: what is kept over what is forgotten", TOFU, "tofu:scatter"),
    "muse-scatter": Known("MUSE: what is known of the retain set over what is remembered", MUSE, "muse:scatter"),
    "strength": Known("scores along α and k, 2×2 for TOFU and MUSE", f"{TOFU}; {MUSE}", "sweeps:strength"),
    "sizes": Known("the best score by the auxiliaries' size", f"{TOFU}; {MUSE}", "sizes:sizes"),
    "over-under": Known("over- and under-unlearning along α and k", f"{TOFU}; {MUSE}", "sweeps:over_under"),
    "depth": Known("gradient of distillation, layer by layer", "divdec gradient-depth", "courses:depth"),
    "distillation": Known(
        "heat map of distillation over learning rate and temperature",
        "divdec compare with the method distill, or several runs of divdec distill",
        "distillation:heat_map",
    ),
    "sequential": Known(
        "sustainability and scaling: distance from the first step",
        "benchmarks/sequential.py, or divdec eval muse of scal and sust",
        "courses:sequential",
    ),
    "compute": Known("compute increase, measured over 2n/N", "divdec bench compute", "bench:compute"),
    "latency": Known("increase of runtime by model and vocabulary size", "divdec bench latency", "bench:latency"),
    "leak": Known(
        "Leak@k over attack prompts",
        "divdec eval leak, divdec compare, or the paper's rebel_cache.json",
        "leaks:leaks",
    ),
}


def known(name: str) -> Known:
    """A figure by its name.

    Raises:
        UsageError: there is none; the known are listed.
    """
    if name not in KNOWN:
        raise UsageError(f"figure {name!r} is not known; there are: {', '.join(KNOWN)}")
    return KNOWN[name]
