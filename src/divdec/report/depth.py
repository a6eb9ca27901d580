"""Gradient depth as a plot, a table and JSON: L2 norm over layer, attention and MLP apart, forget and retain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divdec.report.measures import best_index
from divdec.report.plots import Band, band_panels, style, svg_text
from divdec.report.plots.palette import LOOKS, OTHERS
from divdec.runs import write_json, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

    from divdec.training.gradient_depth import LayerDepth

RESULT, PLOT = "depth.json", "depth.svg"
SETS = {"forget": LOOKS[1], "retain": LOOKS[0]}
TITLES = {"attention": "attention", "mlp": "MLP"}


def write_depth(folder: Path, found: Sequence[LayerDepth], about: dict[str, Any], level: float) -> dict[str, Any]:
    """Write depth.json and depth.svg into an existing folder.

    Args:
        folder: where to.
        found: what was measured.
        about: what else a reader of the JSON has to know.
        level: of the intervals.

    Returns:
        The content of depth.json: `about`, and `rows` with set, part, layer, mean, low, high, n and norms.
    """
    content = {**about, "rows": [row.to_dict() for row in found]}
    write_json(folder / RESULT, content)
    write_text(folder / PLOT, depth_plot(found, level))
    return content


def depth_plot(found: Sequence[LayerDepth], level: float) -> str:
    """See `depth_figure`.

    Returns:
        An `<svg>` element.
    """
    with style("divdec-depth"):
        return svg_text(depth_figure(found, level))


def depth_figure(found: Sequence[LayerDepth], level: float) -> Figure:
    """One panel a part of the layer, one band a set; the panels share their scale, so that they can be compared.

    The scale is logarithmic, for forget and retain may lie far apart, unless a norm is 0.

    Args:
        found: what was measured.
        level: of the intervals, for the label.

    Returns:
        The figure, drawn under the style that is in force.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    panels: dict[str, list[Band]] = {}
    for part in dict.fromkeys(row.part for row in found):
        for name in dict.fromkeys(row.set for row in found):
            rows = [row for row in found if (row.part, row.set) == (part, name)]
            panels.setdefault(TITLES.get(part, part), []).append(
                Band(
                    name,
                    SETS.get(name, OTHERS),
                    x=[row.layer for row in rows],
                    y=[row.mean for row in rows],
                    low=[row.low for row in rows],
                    high=[row.high for row in rows],
                )
            )
    figure = Figure(figsize=(9.0, 3.8), layout="constrained")
    drawn = band_panels(figure, panels, "layer (0: next to the embeddings)")
    for axes in drawn:
        if all(row.low > 0 for row in found):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
        else:
            axes.set_ylim(bottom=0)
    drawn[0].set_ylabel("L2 norm of the gradient\n(nats per token, per unit of weight)")
    drawn[-1].legend(title=f"mean, {100 * level:g} % interval")
    return figure


def peaks(found: Sequence[LayerDepth]) -> list[LayerDepth]:
    """For each set and part the layer with the largest mean; parts of which no layer has it are left out."""
    best = [(rows, best_index([row.mean for row in rows], "higher")) for rows in _parts(found).values()]
    return [rows[index] for rows, index in best if index is not None]


def _parts(found: Sequence[LayerDepth]) -> dict[tuple[str, str], list[LayerDepth]]:
    parts: dict[tuple[str, str], list[LayerDepth]] = {}
    for row in found:
        parts.setdefault((row.set, row.part), []).append(row)
    return parts


def depth_table(found: Sequence[LayerDepth]) -> Table:
    """Means with their intervals, one line a layer; the largest of each column is bold."""
    from rich import box
    from rich.table import Table

    by_place = {(row.set, row.part, row.layer): row for row in found}
    largest, parts = peaks(found), list(_parts(found))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("layer", justify="right")
    for name, part in parts:
        table.add_column(f"{name}, {TITLES.get(part, part)}", justify="right", no_wrap=True)
    for layer in sorted({row.layer for row in found}):
        cells = []
        for part in parts:
            row = by_place[*part, layer]
            text = f"{row.mean:.3g} \\[{row.low:.3g}, {row.high:.3g}]"
            cells.append(f"[bold]{text}[/bold]" if row in largest else text)
        table.add_row(str(layer), *cells)
    return table
