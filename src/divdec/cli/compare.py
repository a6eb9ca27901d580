"""Compare every unlearning method on the same models and data: the paper's main table, with costs and leaks."""

from __future__ import annotations

import dataclasses
import sys

from divdec.research.methods.settings import CompareSettings

POSITIONAL = ()
EXAMPLE = "divdec compare --data demo --methods all --grid small --seeds 3 --jobs 2 --output runs/compare"


@dataclasses.dataclass(frozen=True)
class Settings(CompareSettings):
    """Options of `divdec compare`."""

    json: bool = False
    """Print the content of comparison.json, and everything else to standard error."""


def run(settings: Settings) -> None:
    """Compare, write, print."""
    from pathlib import Path

    from rich.console import Console

    from divdec.cli.loading import quiet
    from divdec.research.methods.present import JSON, PAGE, show, write
    from divdec.research.methods.run import compare_methods, work_of

    quiet()
    given = CompareSettings(
        **{field.name: getattr(settings, field.name) for field in dataclasses.fields(CompareSettings)}
    )
    found = compare_methods(given, report=lambda line: print(line, file=sys.stderr))
    write(found, given, work_of(given))
    output = Path(settings.output).expanduser()
    if settings.json:
        print((output / JSON).read_text(encoding="utf-8"))
        return
    show(found, given, Console(width=max(Console().width, 150)))
    print(f"{found.seconds:.0f} s. Report: {output / PAGE}")
