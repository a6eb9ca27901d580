"""Compare every unlearning method on the same models and data: the paper's main table, with costs and leaks."""

from __future__ import annotations

import dataclasses
import sys

from divdec.research.compare.settings import CompareSettings

POSITIONAL = ()
EXAMPLE = "divdec compare --data demo --methods all --grid small --seeds 3 --jobs 2 --output runs/compare"


@dataclasses.dataclass(frozen=True)
class Settings(CompareSettings):
    """Options of `divdec compare`."""

    json: bool = False
    """Print the content of comparison.json, and everything else to standard error."""


def run(settings: Settings) -> None:
    """Compare and print."""
    from pathlib import Path

    from rich.console import Console

    from divdec.cli.loading import quiet
    from divdec.research.compare.run import compare_methods
    from divdec.research.compare.table import JSON, PAGE, show

    quiet()
    given = CompareSettings(
        **{field.name: getattr(settings, field.name) for field in dataclasses.fields(CompareSettings)}
    )
    results = compare_methods(given, report=lambda line: print(line, file=sys.stderr))
    output = Path(settings.output).expanduser()
    if settings.json:
        print((output / JSON).read_text(encoding="utf-8"))
        return
    show(results, given, Console(width=max(Console().width, 150)))
    print(f"{results.seconds:.0f} s. Report: {output / PAGE}")
