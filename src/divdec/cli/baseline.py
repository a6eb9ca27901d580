"""Apply another unlearning method to the same target and data, for comparison."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from divdec.cli.parsing import Options
from divdec.errors import UsageError
from divdec.research.baselines.methods import find, methods
from divdec.research.baselines.registry import Method
from divdec.research.baselines.settings import joined, only, run_on

POSITIONAL = ()
EXAMPLE = (
    "divdec baseline --list\n"
    "  divdec baseline npo --target models/target --forget forget.jsonl --retain retain.jsonl --output runs/npo\n"
    "  divdec baseline npo --help"
)
WITHOUT_METHOD = ("--list", "--json", "--help", "-h", "--print-config")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of `divdec baseline` where no method is named."""

    list: bool = False
    """Show the methods: name, kind, source and what they do."""
    json: bool = False
    """Print JSON, and everything else to standard error."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Printing:
    """How the result of a method is told."""

    json: bool = False
    """Print the content of run.json, and everything else to standard error."""


def choose(arguments: Sequence[str]) -> tuple[Options, str, Sequence[str]]:
    """The options of the method that is named first; see `parse`.

    Raises:
        UsageError: there is no such method, or another argument stands before it.
    """
    first = arguments[0] if arguments else "--help"
    if not first.startswith("-"):
        method = find(first)
        return _options(method), f"baseline {method.name}", arguments[1:]
    if first.partition("=")[0].replace("_", "-") not in WITHOUT_METHOD:
        raise UsageError(f"{first} stands where the method's name should; there are: {', '.join(methods())}")
    width = max(map(len, methods()))
    lines = "\n".join(f"  {method.name:<{width}}  {method.summary}" for method in methods().values())
    summary = f"{(__doc__ or '').strip()}\n\nmethods, each with options of its own:\n{lines}"
    return Options(Settings, summary, EXAMPLE), "baseline", arguments


def run(settings: Any) -> None:
    """List the methods, or apply the one that was named."""
    if isinstance(settings, Settings):
        _list(settings)
        return
    from accelerate import PartialState

    from divdec.cli.loading import quiet
    from divdec.research.baselines.job import run_baseline

    quiet()
    method = find(settings.method)
    content = run_baseline(
        method,
        only(run_on(method), settings),
        only(method.settings, settings),
        report=lambda line: print(line, file=sys.stderr),
    )
    if not PartialState().is_main_process:
        return
    if settings.json:
        print(json.dumps(content))
        return
    print(f"model: {content['model']} ({content['seconds']:.0f} s)")
    for note in content["notes"]:
        print(f"note: {note}")
    print("measure it beside the target: divdec eval tofu … (see divdec eval --help)")


def _options(method: Method) -> Options:
    example = (
        f"divdec baseline {method.name} --target models/target --forget forget.jsonl --retain retain.jsonl "
        f"--output runs/{method.name}"
    )
    summary = f"{method.title}: {method.summary}.\nSource: {method.source}."
    return Options(joined(method, Printing), summary, example)


def _list(settings: Settings) -> None:
    if not settings.list:
        raise UsageError(f"a method is required; there are: {', '.join(methods())}")
    known = methods().values()
    if settings.json:
        fields = ("name", "title", "kind", "source", "summary")
        print(json.dumps([{field: getattr(method, field) for field in fields} for method in known]))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table("method", "kind", "what it does", "source", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for method in known:
        table.add_row(method.name, method.kind, method.summary, method.source)
    Console(width=max(Console().width, 120)).print(table)
