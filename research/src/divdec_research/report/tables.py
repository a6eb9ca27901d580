"""Tables of results: scores for a terminal and as JSON, and plain tables in Markdown."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from divdec_research.report.scores import MEASURES, NO_ITEMS, ScoredResult
from divdec_research.suites.settings import Scoring


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, align_right: bool = False) -> str:
    """Format a table as Markdown, with all columns but the first aligned right if asked."""
    rule = ["---", *["---:" if align_right else "---"] * (len(header) - 1)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, rule, *rows))


def score_json(row: ScoredResult, scoring: Scoring) -> dict[str, Any]:
    """Return the aggregates of a result with their intervals, and why some are missing."""
    results, scores = row.entry.results, row.aggregates
    intervals = {name: row.intervals.get(name) for name in scores.values}
    reasons = dict(scores.reasons)
    if not results.items:
        reasons["ci"] = NO_ITEMS
    elif any(row.has(name) and interval is None for name, interval in intervals.items()):
        reasons["ci"] = "; ".join(dict.fromkeys(row.missing_intervals.values()))
    return {
        "name": row.entry.name,
        "folder": str(row.entry.folder),
        **({"variant": scoring.variant} if results.suite == "tofu" else {}),
        **scores.values,
        "ci": intervals if any(intervals.values()) else None,
        "level": scoring.level,
        "reason": reasons,
        "notes": list(scores.notes),
    }


def print_scores(rows: Sequence[ScoredResult], suite: str, scoring: Scoring) -> None:
    """Print a table, and below it what is missing from it and why."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    title = Text(score_title(suite, scoring, any(row.intervals for row in rows)))
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("result", overflow="fold")
    columns = list(rows[0].aggregates.values)
    for column in columns:
        table.add_column(MEASURES[column].short, justify="right")
    digits = 3 if suite == "tofu" else 1
    for row in rows:
        table.add_row(Text(row.entry.name), *(Text(_cell(row, column, digits)) for column in columns))
    # A file or a pipe has no width to fit.
    Console(width=None if sys.stdout.isatty() else 10_000).print(table)
    for line in dict.fromkeys(line for row in rows for line in row.remarks):
        print(f"{line} ({', '.join(row.entry.name for row in rows if line in row.remarks)})")


def score_title(suite: str, scoring: Scoring, has_intervals: bool) -> str:
    """Return what a table of scores shows, and on a second line how it was computed."""
    subject = f"TOFU, variant {scoring.variant}"
    if suite == "muse":
        subject = "MUSE, distance to the retrained model, the target's = 100 %"
    if not has_intervals:
        return f"{subject}\npoint values"
    return (
        f"{subject}\n{100 * scoring.level:g} % percentile bootstrap intervals ({scoring.draws} draws, seed "
        f"{scoring.seed}), target and retrain held fixed"
    )


def _cell(row: ScoredResult, column: str, digits: int) -> str:
    value, interval = row.values[column], row.intervals.get(column)
    if value is None:
        return "–"
    ends = f" [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]" if interval else ""
    return f"{value:.{digits}f}{ends}"
