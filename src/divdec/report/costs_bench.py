"""Measured costs as plots and tables: compute increase against 1 + 2n/N, and latency over vocabulary and target.

It knows the rows of `divdec bench`, nothing of how they were measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divdec.costs.model_size import format_quantity as short
from divdec.report.plots import LOOKS, TEXT, style, write_figure
from divdec.runs import write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

Row = Mapping[str, Any]
PARTS = {"prefill": "prompt (prefill)", "decode": "one token (decode)"}
COMPUTE, LATENCY, TABLE = "compute.svg", "latency.svg", "table.md"
WAYS = {
    "plain": "steered, one after the other",
    "speculative": "steered, by blocks",
    "beside": "steered, auxiliaries beside the target",
}


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """How far measured compute lies from 1 + 2n/N, by part: median and largest, embeddings counted and not.

    Returns:
        {} without rows.
    """
    if not rows:
        return {}
    found: dict[str, Any] = {"combinations": len(rows)}
    for part in PARTS:
        for theory in ("theory", "theory_without_embeddings"):
            deviations = [row["ratio"][part] / row[theory] - 1 for row in rows]
            found[f"{part}_against_{theory}"] = {
                "median": statistics.median(deviations),
                "median_size": statistics.median(map(abs, deviations)),
                "largest_size": max(map(abs, deviations)),
            }
    return found


def compute_figure(rows: Sequence[Row]) -> Figure:
    """Two panels, prefill and decoding: the measured ratio over 1 + 2n/N, a look a vocabulary.

    Must be called under `style`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.4), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    highest = 1.03 * max(max(row["theory"], *row["ratio"].values()) for row in rows)
    vocabularies = sorted({row["vocabulary"] for row in rows})
    for axes, (part, title) in zip(panels, PARTS.items(), strict=True):
        axes.plot([1, highest], [1, highest], color=TEXT, linewidth=0.9, label="as many FLOPs, as much time")
        for place, vocabulary in enumerate(vocabularies):
            look = LOOKS[place % len(LOOKS)]
            own = [row for row in rows if row["vocabulary"] == vocabulary]
            axes.plot(
                [row["theory"] for row in own], [row["ratio"][part] for row in own], look.marker,
                color=look.colour, markersize=5, linestyle="none", label=f"vocabulary {vocabulary:,}",
            )  # fmt: skip
        axes.set_title(title)
        axes.set_xlabel("1 + 2n/N (embeddings counted)")
        axes.grid(True)
    panels[0].set_ylabel("(t_P + t_p + t_q) / t_P, measured")
    panels[0].legend(fontsize=8, loc="upper left")
    return figure


def compute_cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the table of deviations."""
    header = ["target", "auxiliaries", "vocabulary", "N", "n", "1 + 2n/N", "without embeddings"]
    header += [f"{part}{what}" for part in PARTS for what in ("", ", deviation")]
    lines = [
        [
            row["target"], row["auxiliary"], f"{row['vocabulary']}", short(row["N"]), short(row["n"]),
            f"{row['theory']:.3f}", f"{row['theory_without_embeddings']:.3f}",
            *(text for part in PARTS for text in (f"{row['ratio'][part]:.3f}", f"{row['deviation'][part]:+.1%}")),
        ]
        for row in rows
    ]  # fmt: skip
    return header, lines


def write_compute(folder: Path, rows: Sequence[Row], device: str) -> None:
    """Write table.md and compute.svg into a folder."""
    write_text(folder / TABLE, markdown(*compute_cells(rows)))
    with style("divdec-bench-compute"):
        write_figure(
            folder / COMPUTE, compute_figure(rows), title="Compute increase, measured",
            description=f"(t_P + t_p + t_q)/t_P against 1 + 2n/N on {device}", sources=["results.jsonl"],
        )  # fmt: skip


def latency_figure(rows: Sequence[Row]) -> Figure:
    """One panel a way of steering: t_Q/t_P over the vocabulary, a line a target. Must be called under `style`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    ways = [way for way in WAYS if any(way in row["ratio"] for row in rows)]
    figure = Figure(figsize=(4.8 * len(ways), 4.2), layout="constrained")
    panels = figure.subplots(1, len(ways), squeeze=False)[0]
    pairs = list(dict.fromkeys((row["target"], row["auxiliary"]) for row in rows))
    ticks = sorted({row["vocabulary"] for row in rows})
    for axes, way in zip(panels, ways, strict=True):
        for place, pair in enumerate(pairs):
            look = LOOKS[place % len(LOOKS)]
            own = [row for row in rows if (row["target"], row["auxiliary"]) == pair and way in row["ratio"]]
            own.sort(key=lambda row: row["vocabulary"])
            axes.plot(
                [row["vocabulary"] for row in own], [row["ratio"][way] for row in own], marker=look.marker,
                color=look.colour, linestyle=look.dash, markersize=5, label=f"{pair[0]} with two {pair[1]}",
            )  # fmt: skip
        axes.axhline(1, color=TEXT, linewidth=0.9)
        axes.set_title(WAYS[way])
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("vocabulary (tokens)")
        axes.grid(True)
    panels[0].set_ylabel("t_Q / t_P, measured")
    panels[0].legend(fontsize=8)
    return figure


def latency_cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and lines: milliseconds per token as measured and as predicted, and the ratio to the target's."""
    ways = ["target", *(way for way in WAYS if any(way in row["ratio"] for row in rows))]
    header = ["target", "auxiliaries", "vocabulary", "acceptance"]
    header += [title for way in ways for title in (f"{way}, ms", "predicted / measured")]
    header += [f"t_Q/t_P, {way}" for way in ways[1:]]
    lines = []
    for row in rows:
        line = [row["target"], row["auxiliary"], f"{row['vocabulary']}", f"{row['acceptance']:.2f}"]
        for way in ways:
            known = row["predicted_over_measured"].get(way)
            line.append(f"{1e3 * row['seconds_per_token'][way]:.1f}" if way in row["seconds_per_token"] else "")
            line.append("" if known is None else f"{known:.2f}")
        line += [f"{row['ratio'][way]:.3f}" if way in row["ratio"] else "" for way in ways[1:]]
        lines.append(line)
    return header, lines


def write_latency(folder: Path, rows: Sequence[Row], device: str) -> None:
    """Write table.md and latency.svg into a folder."""
    write_text(folder / TABLE, markdown(*latency_cells(rows)))
    with style("divdec-bench-latency"):
        write_figure(
            folder / LATENCY, latency_figure(rows), title="Latency increase, measured",
            description=f"t_Q/t_P over the vocabulary on {device}", sources=["results.jsonl"],
        )  # fmt: skip


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table as Markdown."""
    rows = [header, ["---"] * len(header), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def as_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    """The same for a terminal."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for place, title in enumerate(header):
        table.add_column(title, justify="left" if place < 2 else "right")
    for line in lines:
        table.add_row(*line)
    return table
