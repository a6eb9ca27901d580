"""The tables of `divdec score`: for a terminal, and for LaTeX. They know rows, not how they were computed."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from divdec.cli.score import Row, Settings

TITLES = {
    "agg": "Agg",
    "agg_without_privacy": "Agg w/o Priv",
    "mem": "Mem",
    "priv": "Priv",
    "utility": "Utility",
    "verbmem_distance": "Verbatim distance %",
    "knowmem_distance": "Knowledge distance %",
}
# 100 % is the target, 0 the retrained model.
LOWER_IS_BETTER = ("verbmem_distance", "knowmem_distance")


def print_table(rows: Sequence[Row], settings: Settings) -> None:
    """Print a table, and below it what is missing from it and why."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(f"{_what(settings)}\n{_how(rows, settings)}"), box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("result", overflow="fold")
    columns = list(rows[0].scores.values)
    for column in columns:
        table.add_column(TITLES[column], justify="right")
    digits = 3 if settings.suite == "tofu" else 1
    for row, name in zip(rows, _names(rows), strict=True):
        table.add_row(Text(name), *(Text(_cell(row, column, digits, "–")) for column in columns))
    # A file or a pipe has no width to keep within.
    Console(width=None if sys.stdout.isatty() else 10_000).print(table)
    for reason, names in _explanations(rows).items():
        print(f"{reason} ({names})")


def print_latex(rows: Sequence[Row], settings: Settings) -> None:
    """Print a `table` environment for booktabs, after comments that say how it was computed."""
    columns = list(rows[0].scores.values)
    arrows = [r"$\downarrow$" if column in LOWER_IS_BETTER else r"$\uparrow$" for column in columns]
    heads = [f"{_escaped(TITLES[column])} {arrow}" for column, arrow in zip(columns, arrows, strict=True)]
    digits = 2 if settings.suite == "tofu" else 1
    body = [
        " & ".join([_escaped(name), *(_cell(row, column, digits, "--") for column in columns)]) + r" \\"
        for row, name in zip(rows, _names(rows), strict=True)
    ]
    notes = [f"% {reason} ({names})" for reason, names in _explanations(rows).items()]
    caption = rf"  \caption{{{_escaped(_what(settings))}. {_escaped(_how(rows, settings))}.}}"
    lines = [
        *notes, r"\begin{table}", r"  \centering", caption, rf"  \begin{{tabular}}{{l{'r' * len(columns)}}}",
        r"\toprule", rf"{' & '.join(['Result', *heads])} \\", r"\midrule", *body, r"\bottomrule", r"  \end{tabular}",
        r"\end{table}",
    ]  # fmt: skip
    print("\n".join(lines))


def _what(settings: Settings) -> str:
    if settings.suite == "tofu":
        return f"TOFU, variant {settings.variant}"
    return "MUSE, distance to the retrained model, the target's = 100 %"


def _how(rows: Sequence[Row], settings: Settings) -> str:
    if not any(row.intervals for row in rows):
        return "point values"
    return (
        f"{100 * settings.level:g} % percentile bootstrap intervals ({settings.draws} draws, seed {settings.seed}), "
        "target and retrain held fixed"
    )


def _names(rows: Sequence[Row]) -> list[str]:
    """The folders' names, or the folders as given where names are not enough to tell them apart."""
    names = [row.name for row in rows]
    return names if len(set(names)) == len(names) else [row.folder for row in rows]


def _cell(row: Row, column: str, digits: int, nothing: str) -> str:
    value = row.scores.values[column]
    if value is None:
        return nothing
    interval = (row.intervals or {}).get(column)
    ends = f" [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]" if interval else ""
    return f"{value:.{digits}f}{ends}"


def _explanations(rows: Sequence[Row]) -> dict[str, str]:
    """What is missing and why, with the names of the rows that it is true of."""
    found: dict[str, list[str]] = {}
    for row, name in zip(rows, _names(rows), strict=True):
        lines = [f"no {TITLES[part]}: {reason}" for part, reason in row.scores.reasons.items()]
        lines += row.scores.notes
        lines += [f"no intervals: {row.why_no_interval}"] if row.why_no_interval else []
        for line in lines:
            found.setdefault(line, []).append(name)
    return {line: ", ".join(names) for line, names in found.items()}


def _escaped(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return re.sub(r"[\\&%$#_{}~^]", lambda match: special.get(match[0], f"\\{match[0]}"), text)
