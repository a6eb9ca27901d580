"""Table and plot of the rows that `divdec bench compute` measures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from divdec.costs.model_size import format_quantity
from divdec.runs import write_text
from divdec_research.report.style import SERIES_STYLES, TEXT, style, write_figure
from divdec_research.report.tables import markdown_table

BenchRow = Mapping[str, Any]
PASSES = {"prefill": "prompt (prefill)", "decode": "one token (decode)"}


def compute_deviation(rows: Sequence[BenchRow]) -> dict[str, dict[str, float]]:
    """Summarise the deviation of measured compute from 1 + 2n/N by pass; empty without rows."""
    result = {}
    for name in PASSES if rows else ():
        deviations = [row["deviation"][name] for row in rows]
        sizes = [abs(deviation) for deviation in deviations]
        median = statistics.median(deviations)
        result[name] = {"median": median, "median_size": statistics.median(sizes), "largest_size": max(sizes)}
    return result


def compute_figure(rows: Sequence[BenchRow]) -> Figure:
    """Draw the measured ratio over 1 + 2n/N for prefill and decoding, a style for each vocabulary."""
    figure = Figure(figsize=(9.6, 4.4), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    highest = 1.03 * max(max(row["theory"], *row["ratio"].values()) for row in rows)
    for axes, (name, title) in zip(panels, PASSES.items(), strict=True):
        axes.plot([1, highest], [1, highest], color=TEXT, linewidth=0.9, label="as many FLOPs, as much time")
        for index, vocabulary in enumerate(sorted({row["vocabulary"] for row in rows})):
            series_style = SERIES_STYLES[index % len(SERIES_STYLES)]
            points = [(row["theory"], row["ratio"][name]) for row in rows if row["vocabulary"] == vocabulary]
            axes.plot(
                *zip(*points, strict=True),
                series_style.marker,
                color=series_style.colour,
                markersize=5,
                linestyle="none",
                label=f"vocabulary {vocabulary:,}",
            )
        axes.set_title(title)
        axes.set_xlabel("1 + 2n/N (embeddings counted)")
        axes.grid(True)
    panels[0].set_ylabel("(t_P + t_p + t_q) / t_P, measured")
    panels[0].legend(fontsize=8, loc="upper left")
    return figure


def compute_table(rows: Sequence[BenchRow]) -> str:
    """Tabulate ratios and their deviations from 1 + 2n/N in Markdown."""
    table = []
    for row in rows:
        cells = {"target": row["target"], "auxiliaries": row["auxiliary"], "vocabulary": str(row["vocabulary"])}
        cells |= {"N": format_quantity(row["N"]), "n": format_quantity(row["n"]), "1 + 2n/N": f"{row['theory']:.3f}"}
        for name in PASSES:
            cells |= {name: f"{row['ratio'][name]:.3f}", f"{name}, deviation": f"{row['deviation'][name]:+.1%}"}
        table.append(cells)
    return markdown_table(list(table[0]), [list(cells.values()) for cells in table])


def write_compute(folder: Path, rows: Sequence[BenchRow], device: str) -> None:
    """Write table.md and compute.svg into a folder."""
    write_text(folder / "table.md", compute_table(rows))
    with style("divdec-bench-compute"):
        figure = compute_figure(rows)
        write_figure(
            folder / "compute.svg", figure, title="Compute increase, measured",
            description=f"(t_P + t_p + t_q)/t_P against 1 + 2n/N on {device}", sources=["results.jsonl"],
        )  # fmt: skip
