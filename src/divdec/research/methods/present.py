"""A comparison as files and as a table in the terminal: `comparison.json`, `table.md`, `report.html`, `run.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from divdec.report.scores import MEASURES
from divdec.research.methods.cells import REFERENCES
from divdec.research.methods.grids import OWN, titles
from divdec.research.methods.run import Comparison
from divdec.research.methods.settings import CompareSettings
from divdec.research.methods.table import Line, without_best
from divdec.research.pages import SHOWN, MethodRow, write_comparison
from divdec.runs import RECORD, record, write_json, write_text

HEADS = ("Method", "Setting", *(MEASURES[name].short for name in SHOWN), "Training", "Memory", "Time a token")
TABLE, JSON, PAGE = "table.md", "comparison.json", "report.html"


def write(found: Comparison, settings: CompareSettings, work: dict[str, Any]) -> None:
    """Write all files of a comparison.

    Args:
        found: the comparison.
        settings: what was asked for.
        work: what decides whether another call goes on in the folder.
    """
    output = Path(settings.output).expanduser()
    best, grid = _best_entries(found), _entries(found, found.lines)
    write_text(output / TABLE, markdown(found, settings))
    content = {
        "best": [line.to_dict() for line in found.best.values()],
        "without_best": sorted(without_best(found.lines)),
        "grid": [line.to_dict() for line in found.lines],
        "leaks": {method: {str(k): value for k, value in own.items()} for method, own in found.leaks.items()},
        "time_ratio": found.times,
        "variant": settings.variant,
    }
    write_json(output / JSON, content)
    name = titles()
    write_comparison(
        output / PAGE,
        title=f"Unlearning methods on {settings.data}",
        lead=_lead(found, settings),
        best=best,
        grid=grid,
        leaks={name[method]: values for method, values in found.leaks.items()},
        notes=_notes(found),
    )
    figures = {line.method: {part: line.values.get(part) for part in SHOWN} for line in found.best.values()}
    content = record("compare", settings, work=work, seconds=round(found.seconds, 1), figures=figures)
    write_json(output / RECORD, content)


def show(found: Comparison, settings: CompareSettings, console: Console) -> None:
    """Print the table of best settings and what is to be known of it."""
    table = Table(box=box.SIMPLE_HEAD, title=_lead(found, settings), title_justify="left", padding=(0, 1, 0, 0))
    for place, head in enumerate(HEADS):
        table.add_column(head, justify="left" if place < 2 else "right", overflow="fold")
    for entry in _best_entries(found):
        table.add_row(*_cells(entry), style="bold" if entry.ours else None)
    console.print(table)
    for note in _notes(found):
        console.print(note, highlight=False)


def markdown(found: Comparison, settings: CompareSettings) -> str:
    """The table of best settings and the whole grid in Markdown."""
    lines = [f"{_lead(found, settings)}\n", *_markdown_table(_best_entries(found))]
    if found.leaks:
        ks = list(next(iter(found.leaks.values())))
        lines += ["\nLeak@k, the best settings:\n", "| Method | " + " | ".join(f"k = {k}" for k in ks) + " |"]
        lines += ["|---|" + "---|" * len(ks)]
        for method, values in found.leaks.items():
            lines.append(f"| {titles()[method]} | " + " | ".join(f"{values[k]:.3f}" for k in ks) + " |")
    lines += ["\nThe whole grid:\n", *_markdown_table(_entries(found, found.lines), costs=False)]
    return "\n".join([*lines, *(f"\n{note}" for note in _notes(found))]) + "\n"


def _markdown_table(entries: Sequence[MethodRow], costs: bool = True) -> list[str]:
    number = len(HEADS) if costs else len(HEADS) - 3
    rows = ["| " + " | ".join(HEADS[:number]) + " |", "|---" * number + "|"]
    return rows + [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in _cells(entry)[:number]) + " |" for entry in entries
    ]


def _cells(entry: MethodRow) -> list[str]:
    if entry.failed and entry.values.get("mem") is None:
        return [entry.title, entry.setting, entry.failed, *[""] * (len(HEADS) - 3)]
    return [entry.title, entry.setting, *(entry.cell(name) for name in SHOWN), *entry.costs]


def _best_entries(found: Comparison) -> list[MethodRow]:
    """The best setting of each method; of a method that has none the first, marked so."""
    ties = {titles()[method] for method in without_best(found.lines)}
    return [
        dataclasses.replace(entry, setting=f"{entry.setting} (no setting is best)".strip())
        if entry.title in ties and not entry.reference
        else entry
        for entry in _entries(found, list(found.best.values()))
    ]


def _entries(found: Comparison, lines: Sequence[Line]) -> list[MethodRow]:
    name = titles()
    best = {(line.method, line.setting) for line in found.best.values()}
    return [
        MethodRow(
            name[line.method],
            line.setting,
            line.values,
            line.intervals,
            line.seconds,
            line.extra_bytes,
            found.times.get(line.method) if (line.method, line.setting) in best else None,
            line.failed,
            line.method in OWN,
            line.method in REFERENCES,
        )
        for line in lines
    ]


def _lead(found: Comparison, settings: CompareSettings) -> str:
    number = len(found.lines[0].seeds)
    seeds, drawn = ("1 seed", "items") if number == 1 else (f"{number} seeds", "seeds and items")
    searched = settings.search_seeds or number
    first = "first seed, the only one" if searched == 1 else f"first {searched} seeds, the only ones"
    asked = "these very questions, as in the paper" if searched >= number else f"the {first} for the grid's others"
    return (
        f"{settings.data}, {settings.grid} grid, {seeds}, aggregates of the variant {settings.variant}; the best "
        f"setting of each method by Agg on {asked}; 99 % bootstrap intervals over {drawn}, target and retrained model "
        "held fixed"
    )


def _notes(found: Comparison) -> list[str]:
    name = titles()
    notes: dict[str, list[str]] = {}
    for line in found.lines:
        for note in (*line.notes, *([line.failed] if line.failed else ())):
            notes.setdefault(note, []).append(f"{name[line.method]} {line.setting}".strip())
    fluency = "Utility is the model utility alone, relative to the target's: no fluency classifier was asked."
    return [fluency, *(f"{', '.join(dict.fromkeys(of))}: {note}" for note, of in notes.items())]
