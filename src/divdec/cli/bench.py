"""Measure what steering costs on this machine: compute against 1 + 2n/N, and latency against vocabulary and size."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from divdec.cli.parsing import Options
from divdec.errors import UsageError
from divdec.research.bench.settings import ComputeSettings, LatencySettings

POSITIONAL = ()
EXAMPLE = (
    "divdec bench compute --output runs/bench-compute\n"
    "  divdec bench latency --output runs/bench-latency --targets chinchilla-306M --auxiliaries chinchilla-44M\n"
    "  divdec bench compute --help"
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of `divdec bench` where no action is named."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compute(ComputeSettings):
    """Options of `divdec bench compute`."""

    json: bool = False
    """Print the content of what was measured, and everything else to standard error."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latency(LatencySettings):
    """Options of `divdec bench latency`."""

    json: bool = False
    """Print the content of what was measured, and everything else to standard error."""


ACTIONS: dict[str, tuple[type, str]] = {
    "compute": (Compute, "(t_P + t_p + t_q)/t_P of random models against 1 + 2n/N, prefill and decoding apart"),
    "latency": (Latency, "t_Q/t_P of whole answers, plain, by blocks and beside, with the roofline's prediction"),
}


def choose(arguments: Sequence[str]) -> tuple[Options, str, Sequence[str]]:
    """The options of the action that is named first; see `divdec.cli.parsing.parse`.

    Raises:
        UsageError: no action is named, or there is no such action.
    """
    if not arguments:
        raise UsageError(f"an action is required; there are: {', '.join(ACTIONS)}")
    first = arguments[0]
    if first in ACTIONS:
        settings, summary = ACTIONS[first]
        example = next(line.strip() for line in EXAMPLE.splitlines() if f"divdec bench {first} --output" in line)
        return Options(settings, summary, example), f"bench {first}", arguments[1:]
    if first not in ("--help", "-h"):
        raise UsageError(f"action {first!r} is not known; there are: {', '.join(ACTIONS)}")
    lines = "\n".join(f"  {name:<8} {summary}" for name, (_, summary) in ACTIONS.items())
    summary = f"{(__doc__ or '').strip()}\n\nactions, each with options of its own:\n{lines}"
    return Options(Settings, summary, EXAMPLE), "bench", arguments


def run(settings: Any) -> None:
    """Measure, write, print."""
    from rich.console import Console

    from divdec.cli.loading import quiet
    from divdec.report.costs_bench import as_table, compute_cells, latency_cells

    quiet()

    def report(line: str) -> None:
        print(line, file=sys.stderr)

    if isinstance(settings, Compute):
        from divdec.research.bench.run import bench_compute

        found = bench_compute(_asked(settings, ComputeSettings), report)
        cells = compute_cells
    else:
        from divdec.research.bench.run import bench_latency

        found = bench_latency(_asked(settings, LatencySettings), report)
        cells = latency_cells
    if settings.json:
        print(json.dumps(found))
        return
    console = Console(width=max(Console().width, 160))
    if found["rows"]:
        console.print(as_table(*cells(found["rows"])))
    for name, numbers in found.get("summary", {}).items():
        if isinstance(numbers, dict):
            console.print(
                f"{name.replace('_', ' ')}: off by {numbers['median_size']:.1%} in the median, at most "
                f"{numbers['largest_size']:.1%}",
                highlight=False,
            )
    if not found["complete"]:
        console.print("not all is measured; the same command goes on")
    print(f"results: {Path(settings.output).expanduser()}")


def _asked(settings: Any, kind: type) -> Any:
    return kind(**{field.name: getattr(settings, field.name) for field in dataclasses.fields(kind)})
