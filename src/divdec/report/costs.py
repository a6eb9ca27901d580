"""Table, text and plot of a cost estimate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from divdec.costs.model_size import format_bytes, format_quantity
from divdec.report.style import LOOKS, TARGET, TEXT, style, write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

    from divdec.costs.estimate import CostEstimate

LOOK = {"target": TARGET, "steer": LOOKS[0], "speculate": LOOKS[4], "distil": LOOKS[1], "n-gram": LOOKS[2]}
LABELS = {
    "target": "target alone, unsteered",
    "steer": "steer",
    "speculate": "steer, speculative",
    "distil": "distil",
    "n-gram": "steer with n-grams",
}
SPREAD = 100.0  # the plot covers the break-even volume divided and multiplied by this
POINTS = 200


def volume_figure(estimate: CostEstimate) -> Figure:
    """Plot all FLOPs, and the FLOPs beyond the target's own, over the volume; call it under `style`."""
    import numpy as np
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    # One panel above the other, so that the text stays readable on a phone.
    figure = Figure(figsize=(5.6, 7.2), layout="constrained")
    panels = figure.subplots(2, 1)
    break_even = estimate.break_even["paper"]
    limits = [break_even / SPREAD, break_even * SPREAD, *([estimate.volume] if estimate.volume else [])]
    volumes = np.geomspace(min(limits), max(limits) * 1.2, POINTS)
    target = estimate.options["target"]
    for name, cost in estimate.options.items():
        look = {"color": LOOK[name].colour, "linestyle": LOOK[name].dash, "label": LABELS[name]}
        panels[0].plot(volumes, [cost.at(volume) for volume in volumes], **look)
        if name not in ("target", "n-gram"):  # 0 has no position on a logarithmic axis
            panels[1].plot(volumes, [cost.at(volume) - target.at(volume) for volume in volumes], **look)
    for axes, title in zip(panels, ("All FLOPs", "FLOPs beyond the target's own inference"), strict=True):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(title)
        axes.set_ylabel("FLOPs")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_quantity(value)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}".replace("+", "")))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(True)
        _mark_volume(axes, break_even, f"break-even {format_quantity(break_even)}")
        if estimate.volume:
            _mark_volume(axes, estimate.volume, f"volume {format_quantity(estimate.volume)}")
    panels[1].set_xlabel("volume (tokens read and written)")
    panels[0].legend(loc="upper left")
    return figure


def write_volume_plot(path: Path, estimate: CostEstimate) -> None:
    """Write the plot as SVG or PNG, by the file name's suffix.

    Raises:
        UsageError: another suffix.
    """
    with style("divdec-cost"):
        write_figure(
            path,
            volume_figure(estimate),
            title="Cost of a deployment by volume",
            description=f"target N = {format_quantity(estimate.N)}, auxiliaries n = {format_quantity(estimate.n)} each",
            sources=[estimate.target.name, estimate.auxiliary.name],
        )


def cost_table(estimate: CostEstimate) -> Table:
    """One row per option: FLOPs once, per token, and for the volume."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("option", no_wrap=True)
    for title in ("FLOPs once", "per token", "vs target"):
        table.add_column(title, justify="right", no_wrap=True)
    if estimate.volume is not None:
        table.add_column(f"for {format_quantity(estimate.volume)} tokens", justify="right", no_wrap=True)
    target = estimate.options["target"].per_token
    for name, cost in estimate.options.items():
        cells = [LABELS[name], f"{cost.once:.3g}", f"{cost.per_token:.3g}", f"{cost.per_token / target - 1:+.1%}"]
        cells += [] if estimate.volume is None else [f"{cost.at(estimate.volume):.3g}"]
        table.add_row(*(f"[bold]{cell}[/bold]" if name == estimate.choice else cell for cell in cells))
    return table


def cost_lines(estimate: CostEstimate) -> list[str]:
    """The rest of the estimate as lines of text."""
    hours = estimate.device.flops * 3600
    latency, edges, memory = estimate.latency, estimate.break_even, estimate.memory
    parallel = ""
    if latency.parallel is not None:
        parallel = f", {_milliseconds(latency.parallel)} with each auxiliary on a device of its own"

    def memory_of(kind: str) -> str:
        return f"{format_bytes(memory[f'target_{kind}'])} + {format_bytes(memory[f'auxiliary_{kind}'])}"

    lines = [
        f"target N = {format_quantity(estimate.N)}, auxiliaries n = {format_quantity(estimate.n)} each: "
        f"compute increase 2n/N {estimate.increase:.1%}",
        f"training both auxiliaries: {estimate.training:.3g} FLOPs, at least {estimate.training / hours:.3g} hours on "
        f"one {estimate.device.name} at its peak",
        f"distillation: {estimate.distillation['paper']:.3g} FLOPs more; {estimate.distillation['live']:.3g} with the "
        "target's own pass, which the paper leaves out",
        f"break-even volume {format_quantity(edges['paper'])} tokens; {format_quantity(edges['live'])} with that pass, "
        f"{format_quantity(edges['cached'])} with a cached teacher",
        f"memory, target + both auxiliaries: weights {memory_of('weights')}, cache per request "
        f"{memory_of('cache_per_request')}, per token {memory_of('cache_per_token')}",
        f"predicted time per token on {estimate.device.name} (limited by {latency.bound}): target "
        f"{_milliseconds(latency.target)}, steered {_milliseconds(latency.plain)}{parallel}",
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


def _mark_volume(axes: Axes, volume: float, text: str) -> None:
    axes.axvline(volume, color=TEXT, linewidth=0.9)
    axes.annotate(
        text, (volume, 1.0), xycoords=("data", "axes fraction"), xytext=(3, -2), textcoords="offset points",
        rotation=90, va="top",
    )  # fmt: skip


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
