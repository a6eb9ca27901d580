"""Plot, table and lines of `divdec cost`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from rich import box
from rich.table import Table

from divdec.costs.estimate import CostEstimate
from divdec.costs.model_size import format_bytes, format_quantity
from divdec.report.style import SERIES_STYLES, TARGET, TEXT, style, write_figure

OPTIONS = {
    "target": "target alone, unsteered",
    "steer": "steer",
    "speculate": "steer, speculative",
    "distil": "distil",
    "n-gram": "steer with n-grams",
}


def write_volume_figure(path: Path, estimate: CostEstimate) -> None:
    """Write the plot of an estimate as SVG or PNG."""
    N, n = format_quantity(estimate.N), format_quantity(estimate.n)
    with style("divdec-cost"):
        write_figure(
            path,
            volume_figure(estimate),
            title="Cost of a deployment by volume",
            description=f"target N = {N}, auxiliaries n = {n} each",
            sources=[estimate.target.name, estimate.auxiliary.name],
        )


def volume_figure(estimate: CostEstimate) -> Figure:
    """Plot all FLOPs, and the FLOPs beyond the target's own, over the volume; call it under `style`."""
    styles = {
        "target": TARGET,
        "steer": SERIES_STYLES[0],
        "speculate": SERIES_STYLES[4],
        "distil": SERIES_STYLES[1],
        "n-gram": SERIES_STYLES[2],
    }
    # One panel above the other, so that the text stays readable on a phone.
    figure = Figure(figsize=(5.6, 7.2), layout="constrained")
    panels = figure.subplots(2, 1)
    marks = {"break-even": estimate.break_even["paper"]} | ({"volume": estimate.volume} if estimate.volume else {})
    limits = [marks["break-even"] / 100, *marks.values(), marks["break-even"] * 100]
    volumes = np.geomspace(min(limits), max(limits) * 1.2, 200)
    target = estimate.options["target"]
    for name, cost in estimate.options.items():
        line = {"color": styles[name].colour, "linestyle": styles[name].dash, "label": OPTIONS[name]}
        panels[0].plot(volumes, [cost.at(volume) for volume in volumes], **line)
        if name not in ("target", "n-gram"):  # 0 has no position on a logarithmic axis
            panels[1].plot(volumes, [cost.at(volume) - target.at(volume) for volume in volumes], **line)
    for axes, title in zip(panels, ("All FLOPs", "FLOPs beyond the target's own inference"), strict=True):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(title)
        axes.set_ylabel("FLOPs")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_quantity(value)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}".replace("+", "")))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(True)
        for text, volume in marks.items():
            axes.axvline(volume, color=TEXT, linewidth=0.9)
            axes.annotate(
                f"{text} {format_quantity(volume)}", (volume, 1.0), xycoords=("data", "axes fraction"), xytext=(3, -2),
                textcoords="offset points", rotation=90, va="top",
            )  # fmt: skip
    panels[1].set_xlabel("volume (tokens read and written)")
    panels[0].legend(loc="upper left")
    return figure


def cost_table(estimate: CostEstimate) -> Table:
    """One row per option: FLOPs once, per token, and for the volume."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("option", no_wrap=True)
    heads = ["FLOPs once", "per token", "vs target"]
    heads += [] if estimate.volume is None else [f"for {format_quantity(estimate.volume)} tokens"]
    for title in heads:
        table.add_column(title, justify="right", no_wrap=True)
    target = estimate.options["target"].per_token
    for name, cost in estimate.options.items():
        cells = [OPTIONS[name], f"{cost.once:.3g}", f"{cost.per_token:.3g}", f"{cost.per_token / target - 1:+.1%}"]
        cells += [] if estimate.volume is None else [f"{cost.at(estimate.volume):.3g}"]
        table.add_row(*cells, style="bold" if name == estimate.choice else None)
    return table


def cost_lines(estimate: CostEstimate) -> list[str]:
    """The rest of the estimate as lines of text."""
    edges, memory = estimate.break_even, estimate.memory

    def memory_of(kind: str) -> str:
        return f"{format_bytes(memory[f'target_{kind}'])} + {format_bytes(memory[f'auxiliary_{kind}'])}"

    lines = [
        f"target N = {format_quantity(estimate.N)}, auxiliaries n = {format_quantity(estimate.n)} each: "
        f"compute increase 2n/N {estimate.increase:.1%}",
        f"training both auxiliaries: {estimate.training:.3g} FLOPs",
        f"distillation: {estimate.distillation['paper']:.3g} FLOPs more; {estimate.distillation['live']:.3g} with the "
        "target's own pass, which the paper leaves out",
        f"break-even volume {format_quantity(edges['paper'])} tokens; {format_quantity(edges['live'])} with that pass, "
        f"{format_quantity(edges['cached'])} with a cached teacher",
        f"memory, target + both auxiliaries: weights {memory_of('weights')}, cache per request "
        f"{memory_of('cache_per_request')}, per token {memory_of('cache_per_token')}",
    ]
    if estimate.tokens_per_block is not None:
        lines.append(
            f"speculation: {estimate.tokens_per_block:.3g} tokens per target pass at this acceptance rate; its time is "
            "not predicted, measure it with `divdec bench latency`"
        )
    guessed = [size.name for size in (estimate.target, estimate.auxiliary) if size.guessed]
    if guessed:
        lines.append(f"layers and caches of {' and '.join(guessed)} assume the proportions of Llama 3.1 8B")
    return lines
