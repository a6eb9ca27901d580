"""The figures of `divdec bench`, drawn anew from its rows: compute increase and latency (paper, appendix Runtime)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from divdec.errors import UsageError
from divdec.report import costs_bench
from divdec.research.figures.drawn import Asked, Drawn, Source, files_called, nothing
from divdec.runs import read_record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = "results.jsonl"


def compute(asked: Asked) -> Drawn:
    """(t_P + t_p + t_q)/t_P over 1 + 2n/N, prompt and decoding apart.

    Raises:
        UsageError: the runs hold no rows of `divdec bench compute`.
    """
    return _drawn(asked, "compute", costs_bench.compute_figure, "Compute increase, measured")


def latency(asked: Asked) -> Drawn:
    """t_Q/t_P over the vocabulary, a line for each target.

    Raises:
        UsageError: the runs hold no rows of `divdec bench latency`.
    """
    return _drawn(asked, "latency", costs_bench.latency_figure, "Latency increase, measured")


def _drawn(asked: Asked, name: str, draw: Callable[[list[dict[str, Any]]], Figure], title: str) -> Drawn:
    verb, rows, sources, devices = f"bench {name}", [], [], []
    for source in files_called(asked.runs, ROWS):
        record = read_record(source.path.parent) or {}
        if record.get("verb") == verb:
            rows += _rows(source)
            sources.append(source.name)
            devices.append(str(record.get("device") or "a device that is not named"))
    if not rows:
        raise nothing(asked.runs, name, f"the {ROWS} and run.json of `divdec {verb}`")
    figure = draw(rows)
    figure.suptitle(title, fontsize=11.5)
    first = figure.axes[0]
    if "better" not in first.get_ylabel():
        first.set_ylabel(f"{first.get_ylabel()} (lower is better)")
    on = ", ".join(dict.fromkeys(devices))
    return Drawn(figure, title, f"{len(rows)} combinations of models on {on}.", tuple(sources))


def _rows(source: Source) -> list[dict[str, Any]]:
    """The rows of a benchmark; a last line that was not written to its end is left out."""
    lines = source.path.read_text(encoding="utf-8").splitlines()
    rows = []
    for place, line in enumerate(lines):
        try:
            row = json.loads(line)
        except ValueError:
            if place < len(lines) - 1:
                raise UsageError(f"{source.path}, line {place + 1} is no row of a benchmark") from None
            continue
        rows.append(row)
    return rows
