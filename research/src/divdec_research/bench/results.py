"""Tables and plots of the rows that `divdec bench` measures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from divdec.costs.model_size import format_quantity
from divdec.runs import write_text
from divdec_research.report.style import SERIES_STYLES, TEXT, style, write_figure
from divdec_research.report.tables import markdown_table

BenchRow = Mapping[str, Any]
PASSES = {"prefill": "prompt (prefill)", "decode": "one token (decode)"}
DECODING = {
    "plain": "steered, one after the other",
    "speculative": "steered, by blocks",
}


def compute_deviation(rows: Sequence[BenchRow]) -> dict[str, Any]:
    """Summarise the deviation of measured compute from 1 + 2n/N, with and without embeddings; empty without rows."""
    if not rows:
        return {}
    result: dict[str, Any] = {"combinations": len(rows)}
    for name in PASSES:
        for theory in ("theory", "theory_without_embeddings"):
            deviations = [row["ratio"][name] / row[theory] - 1 for row in rows]
            result[f"{name}_against_{theory}"] = {
                "median": statistics.median(deviations),
                "median_size": statistics.median(map(abs, deviations)),
                "largest_size": max(map(abs, deviations)),
            }
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


def latency_figure(rows: Sequence[BenchRow]) -> Figure:
    """Draw t_Q/t_P over the vocabulary, a panel for each kind of decoding, a line for each target."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    kinds = [kind for kind in DECODING if any(kind in row["ratio"] for row in rows)]
    figure = Figure(figsize=(4.8 * len(kinds), 4.2), layout="constrained")
    panels = figure.subplots(1, len(kinds), squeeze=False)[0]
    pairs = list(dict.fromkeys((row["target"], row["auxiliary"]) for row in rows))
    for axes, kind in zip(panels, kinds, strict=True):
        for index, pair in enumerate(pairs):
            series_style = SERIES_STYLES[index % len(SERIES_STYLES)]
            points = sorted(
                (row["vocabulary"], row["ratio"][kind])
                for row in rows
                if (row["target"], row["auxiliary"]) == pair and kind in row["ratio"]
            )
            axes.plot(
                [x for x, _ in points], [y for _, y in points], marker=series_style.marker, color=series_style.colour,
                linestyle=series_style.dash, markersize=5, label=f"{pair[0]} with two {pair[1]}",
            )  # fmt: skip
        axes.axhline(1, color=TEXT, linewidth=0.9)
        axes.set_title(DECODING[kind])
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({row["vocabulary"] for row in rows}))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("vocabulary (tokens)")
        axes.grid(True)
    panels[0].set_ylabel("t_Q / t_P, measured")
    panels[0].legend(fontsize=8)
    return figure


def compute_table(rows: Sequence[BenchRow]) -> str:
    """Tabulate ratios and their deviations from 1 + 2n/N in Markdown."""
    table = []
    for row in rows:
        cells = _combination(row) | {"N": format_quantity(row["N"]), "n": format_quantity(row["n"])}
        cells |= {"1 + 2n/N": f"{row['theory']:.3f}", "without embeddings": f"{row['theory_without_embeddings']:.3f}"}
        for name in PASSES:
            cells |= {name: f"{row['ratio'][name]:.3f}", f"{name}, deviation": f"{row['deviation'][name]:+.1%}"}
        table.append(cells)
    return _markdown(table)


def latency_table(rows: Sequence[BenchRow]) -> str:
    """Tabulate milliseconds per token, and t_Q/t_P, in Markdown."""
    kinds = [kind for kind in DECODING if any(kind in row["ratio"] for row in rows)]
    table = []
    for row in rows:
        cells, seconds = _combination(row) | {"acceptance": f"{row['acceptance']:.2f}"}, row["seconds_per_token"]
        for kind in ("target", *kinds):
            cells[f"{kind}, ms"] = f"{1e3 * seconds[kind]:.1f}" if kind in seconds else ""
        for kind in kinds:
            cells[f"t_Q/t_P, {kind}"] = f"{row['ratio'][kind]:.3f}" if kind in row["ratio"] else ""
        table.append(cells)
    return _markdown(table)


def _combination(row: BenchRow) -> dict[str, str]:
    return {"target": row["target"], "auxiliaries": row["auxiliary"], "vocabulary": str(row["vocabulary"])}


def _markdown(table: Sequence[Mapping[str, str]]) -> str:
    return markdown_table(list(table[0]), [list(cells.values()) for cells in table])


def write_compute(folder: Path, rows: Sequence[BenchRow], device: str) -> None:
    """Write table.md and compute.svg into a folder."""
    description = f"(t_P + t_p + t_q)/t_P against 1 + 2n/N on {device}"
    _write(folder, "compute", compute_table(rows), compute_figure, rows, "Compute increase, measured", description)


def write_latency(folder: Path, rows: Sequence[BenchRow], device: str) -> None:
    """Write table.md and latency.svg into a folder."""
    description = f"t_Q/t_P over the vocabulary on {device}"
    _write(folder, "latency", latency_table(rows), latency_figure, rows, "Latency increase, measured", description)


def _write(
    folder: Path,
    name: str,
    table: str,
    draw: Callable[[Sequence[BenchRow]], Figure],
    rows: Sequence[BenchRow],
    title: str,
    description: str,
) -> None:
    write_text(folder / "table.md", table)
    with style(f"divdec-bench-{name}"):
        figure = draw(rows)
        write_figure(folder / f"{name}.svg", figure, title=title, description=description, sources=["results.jsonl"])
