"""What a deployment costs as a plot over its volume and as a table. It knows a finished plan, nothing of models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from divdec.costs.quantities import bytes_text, short
from divdec.report.plots import LOOKS, TARGET, TEXT, style, write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

    from divdec.costs.plan import Plan

LOOK = {"target": TARGET, "steer": LOOKS[0], "speculate": LOOKS[4], "distil": LOOKS[1], "n-gram": LOOKS[2]}
LABELS = {
    "target": "target alone, unsteered",
    "steer": "steer",
    "speculate": "steer by blocks (speculate)",
    "distil": "distil",
    "n-gram": "steer with n-grams",
}
SPREAD = 100.0  # volumes are drawn from the break-even point over it to the break-even point times it
POINTS = 200


def volume_figure(plan: Plan) -> Figure:
    """Two panels over the volume: all FLOPs, and those beyond the target's own; both axes logarithmic.

    Must be called under `style`.
    """
    import numpy as np
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    figure = Figure(figsize=(9.6, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    edge = plan.break_even["paper"]
    places = [edge / SPREAD, edge * SPREAD, *([plan.volume] if plan.volume else [])]
    volumes = np.geomspace(min(places), max(places) * 1.2, POINTS)
    own = plan.lines["target"]
    for way, line in plan.lines.items():
        how = {"color": LOOK[way].colour, "linestyle": LOOK[way].dash, "label": LABELS[way]}
        left.plot(volumes, [line.at(volume) for volume in volumes], **how)
        if way not in ("target", "n-gram"):  # nothing beyond the target's own: no place on a logarithmic axis
            right.plot(volumes, [line.at(volume) - own.at(volume) for volume in volumes], **how)
    for axes, title in ((left, "all of it"), (right, "beyond the target's own inference")):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(title)
        axes.set_xlabel("volume (tokens read and written)")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}".replace("+", "")))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(True)
        _mark(axes, edge, f"break-even {short(edge)}")
        if plan.volume:
            _mark(axes, plan.volume, f"volume {short(plan.volume)}")
    left.set_ylabel("cost (FLOPs)")
    left.legend(fontsize=8, loc="upper left")
    return figure


def write_volume_plot(path: Path, plan: Plan) -> None:
    """Write the plot, SVG or PNG by the name's end, whole or not at all.

    Raises:
        UsageError: the name ends otherwise.
    """
    with style("divdec-cost"):
        write_figure(
            path,
            volume_figure(plan),
            title="What a deployment costs over its volume",
            description=f"FLOPs by way; target N = {short(plan.N)}, auxiliaries n = {short(plan.n)} each",
            sources=[plan.target.name, plan.auxiliary.name],
        )


def ways_table(plan: Plan) -> Table:
    """One line a way: what is paid once, for each token, and for the volume."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("way", no_wrap=True)
    for title in ("FLOPs once", "FLOPs a token", "beside the target"):
        table.add_column(title, justify="right", no_wrap=True)
    if plan.volume is not None:
        table.add_column(f"FLOPs for {short(plan.volume)} tokens", justify="right", no_wrap=True)
    own = plan.lines["target"].per_token
    for way, line in plan.lines.items():
        cells = [LABELS[way], _flops(line.once), _flops(line.per_token), f"{line.per_token / own - 1:+.1%}"]
        cells += [] if plan.volume is None else [_flops(line.at(plan.volume))]
        table.add_row(*(f"[bold]{cell}[/bold]" if way == plan.choice else cell for cell in cells))
    return table


def notes(plan: Plan) -> list[str]:
    """All else that `divdec cost` says, a line each."""
    hours = plan.device.flops * 3600
    live, paper = plan.distillation["live"], plan.distillation["paper"]
    seconds = plan.latency
    apart = "" if seconds.apart is None else f", apart {_ms(seconds.apart)}"

    def both(what: str) -> str:
        return f"{bytes_text(plan.memory[f'target_{what}'])} + {bytes_text(plan.memory[f'auxiliary_{what}'])}"

    guessed = [size.name for size in (plan.target, plan.auxiliary) if size.guessed]
    lines = [
        f"target N = {short(plan.N)}, auxiliaries n = {short(plan.n)} each: compute increase 2n/N {plan.increase:.1%}",
        f"training both auxiliaries {_flops(plan.training)} FLOPs, at least {plan.training / hours:.3g} hours of one "
        f"{plan.device.name} at its peak",
        f"distilling {_flops(paper)} FLOPs more; {_flops(live)} with the target's own pass, which the paper leaves out",
        f"break-even volume {short(plan.break_even['paper'])} tokens; {short(plan.break_even['live'])} with that pass, "
        f"{short(plan.break_even['cached'])} with a teacher that is asked once",
        f"memory, target + both auxiliaries: weights {both('weights')}, cache of a request "
        f"{both('cache_per_request')}, of a token {both('cache_per_token')}",
        f"predicted time a token on {plan.device.name} (limited by {seconds.bound}): target {_ms(seconds.target)}, "
        f"steered {_ms(seconds.plain)}, by blocks {_ms(seconds.speculative)}{apart}",
    ]
    if guessed:
        lines.append(f"layers and caches of {' and '.join(guessed)} are guessed in the proportions of Llama 3.1 8B")
    return lines


def _mark(axes: Axes, volume: float, text: str) -> None:
    axes.axvline(volume, color=TEXT, linewidth=0.9)
    axes.annotate(
        text, (volume, 1.0), xycoords=("data", "axes fraction"), xytext=(3, -2), textcoords="offset points",
        rotation=90, va="top", fontsize=8,
    )  # fmt: skip


def _flops(value: float) -> str:
    return f"{value:.3g}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
