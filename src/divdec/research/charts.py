"""Charts and tables of experiments: methods, leaks, heat maps, sequential requests."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from divdec.report.charts import Band, Interval, band_panels
from divdec.report.style import FAINT, LINEAR, LOOKS, MUTED, OTHERS, PAPER, TEXT, Look, style, svg_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

Kind = Literal["ours", "other", "reference"]
METHODS = {"steered": LOOKS[0], "distilled": LOOKS[2]}


@dataclasses.dataclass(frozen=True)
class Bar:
    """A method's score."""

    label: str
    value: float
    kind: Kind
    interval: Interval | None = None


@dataclasses.dataclass(frozen=True)
class LeakCurve:
    """The share of questions that leak, by number of attack prompts."""

    label: str
    look: Look | None
    """None for a grey line with its name at its end."""
    shares: Mapping[int, float]
    intervals: Mapping[int, Interval] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Tile:
    """A cell of a heat map."""

    x: float
    y: float
    value: float
    marked: bool = False


@dataclasses.dataclass(frozen=True)
class Step:
    """Scores of a method after a number of requests."""

    protocol: str
    """'sustainability' or 'scaling'."""
    method: str
    """'steered' or 'distilled'."""
    step: int
    """Number of requests so far, from 1."""
    scores: Mapping[str, Sequence[float]]
    """Score of each item, from 0 to 1, by the name of the set."""
    distance: float
    """Distance from the method's own first step, in points of 100."""
    low: float
    """Lower end of its interval."""
    high: float
    to_retrained: float
    """Distance from the retrained model, in points of 100."""

    @property
    def means(self) -> dict[str, float]:
        """Mean score by the name of the set."""
        return {name: statistics.fmean(scores) for name, scores in self.scores.items()}

    def to_dict(self) -> dict[str, Any]:
        """The figures without the items, as JSON values."""
        return {
            "protocol": self.protocol,
            "method": self.method,
            "step": self.step,
            "scores": self.means,
            "distance": self.distance,
            "distance_interval": [self.low, self.high],
            "distance_to_retrained": self.to_retrained,
        }


def bars(axes: Axes, rows: Sequence[Bar], x_label: str) -> None:
    """Draw a bar and its interval for each method, from the bottom up."""
    colours = {"ours": LINEAR.colour, "other": FAINT, "reference": TEXT}
    for index, row in enumerate(rows):
        axes.barh(
            index, row.value, color=colours[row.kind], alpha=0.85, height=0.7, edgecolor=PAPER,
            hatch="///" if row.kind == "ours" else None,  # visible in grey too
        )  # fmt: skip
        if row.interval is not None:
            # Dark on light, so that it is visible on the bar and beside it.
            for colour, width in ((PAPER, 3.4), (TEXT, 1.4)):
                axes.plot(row.interval, (index, index), color=colour, linewidth=width, solid_capstyle="butt")
        axes.annotate(
            f"{row.value:.2f}", (max(row.value, *(row.interval or (0.0,))), index), xytext=(5, 0),
            textcoords="offset points", va="center", fontsize=8.5, color=MUTED,
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlim(0, 1.1 * max((max((row.value, *(row.interval or ()))) for row in rows), default=1.0) or 1.0)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(x_label, loc="right")  # long names leave it little room
    axes.grid(True, axis="x")


def leak_curves(axes: Axes, curves: Sequence[LeakCurve], x_label: str = "k, attack prompts a question") -> None:
    """Draw Leak@k over k; methods without a look in grey, with their names at the ends of their lines."""
    ticks = sorted({k for curve in curves for k in curve.shares})
    unnamed = []
    for curve in curves:
        ks = sorted(curve.shares)
        shares = [curve.shares[k] for k in ks]
        if curve.look is None:
            axes.plot(ks, shares, color=FAINT, linewidth=1, alpha=0.7, zorder=1)
            unnamed.append((shares[-1], ks[-1], curve.label))
            continue
        if band := [(k, *curve.intervals[k]) for k in ks if k in curve.intervals]:
            xs, low, high = zip(*band, strict=True)
            axes.fill_between(xs, low, high, color=curve.look.colour, alpha=0.15, linewidth=0, zorder=1)
        axes.plot(
            ks, shares, color=curve.look.colour, linestyle=curve.look.dash, marker=curve.look.marker,
            markersize=min(curve.look.size, 12), markeredgecolor=PAPER, markeredgewidth=0.5, linewidth=1.8,
            label=curve.label, zorder=3,
        )  # fmt: skip
    if len(ticks) > 1:
        axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{k:g}" for k in ticks])
    axes.minorticks_off()
    axes.set_xlabel(x_label)
    axes.set_ylabel("share of questions that leak (lower is better)")
    axes.set_ylim(-0.02, 1.02)
    axes.grid(True)
    axes.legend(loc="best", fontsize=9)
    previous = 2.0
    for share, k, label in sorted(unnamed, reverse=True):
        previous = min(share, previous - 0.034)  # names that would overlap move down
        axes.annotate(
            label, (k, share), xytext=(1.015, previous), textcoords=axes.get_yaxis_transform(), fontsize=7.5,
            color=MUTED, va="center", annotation_clip=False,
        )  # fmt: skip


def heat_map(axes: Axes, tiles: Sequence[Tile], *, x_label: str, y_label: str, reverse: bool = False) -> Any:
    """Draw a grid of values with two decimals in its cells; marked cells have a frame.

    Args:
        axes: drawn into, under `style`.
        tiles: at most one for each pair of x and y.
        x_label: label of the columns, in the order of their numbers.
        y_label: label of the rows, from the bottom up.
        reverse: use light colours for low values, where these are better.

    Returns:
        The mesh, for a colour bar.
    """
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    xs, ys = (sorted({getattr(tile, name) for tile in tiles}) for name in "xy")
    grid = np.full((len(ys), len(xs)), np.nan)
    for tile in tiles:
        grid[ys.index(tile.y), xs.index(tile.x)] = tile.value
    low, high = float(np.nanmin(grid)), float(np.nanmax(grid))
    colours = colormaps["cividis_r" if reverse else "cividis"]
    mesh = axes.pcolormesh(
        np.arange(len(xs) + 1) - 0.5, np.arange(len(ys) + 1) - 0.5, np.ma.masked_invalid(grid), cmap=colours,
        vmin=low, vmax=high if high > low else low + 1, edgecolors=PAPER, linewidth=1,
    )  # fmt: skip
    for tile in tiles:
        x, y = xs.index(tile.x), ys.index(tile.y)
        red, green, blue, _ = colours((tile.value - low) / (high - low or 1.0))
        # Cells keep their colours on a dark page, so that their text is not in colours of the palette.
        ink = "#010101" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "#fefefe"
        axes.annotate(f"{tile.value:.2f}", (x, y), ha="center", va="center", color=ink, fontsize=9.5)
        if tile.marked:
            axes.add_patch(Rectangle((x - 0.44, y - 0.42), 0.88, 0.84, fill=False, edgecolor=ink, linewidth=1.5))
    axes.set_xticks(range(len(xs)), [f"{value:g}" for value in xs])
    axes.set_yticks(range(len(ys)), [f"{value:g}" for value in ys])
    axes.tick_params(length=0)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.spines[:].set_visible(False)
    return mesh


def distance_plot(steps: Sequence[Step], score: str, level: float) -> str:
    """Draw `distance_figure` as an `<svg>` element."""
    with style("divdec-sequential"):
        return svg_text(distance_figure(steps, score, level))


def distance_figure(steps: Sequence[Step], score: str, level: float | None) -> Figure:
    """Draw the distance over the steps, one panel for each protocol, one line for each method.

    Args:
        steps: all steps.
        score: what an item's score is, for the label.
        level: level of the intervals; None without intervals.
    """
    from matplotlib.figure import Figure

    groups: dict[str, dict[str, list[Step]]] = {}
    for step in steps:
        groups.setdefault(step.protocol, {}).setdefault(step.method, []).append(step)
    panels = {
        protocol: [
            Band(
                method, METHODS.get(method, OTHERS), x=[row.step for row in rows], y=[row.distance for row in rows],
                low=[row.low for row in rows], high=[row.high for row in rows],
            )
            for method, rows in methods.items()
        ]
        for protocol, methods in groups.items()
    }  # fmt: skip
    figure = Figure(figsize=(9.0, 4.1), layout="constrained")
    grid = band_panels(figure, panels, "requests so far")
    for axes in grid:
        axes.set_ylim(bottom=0)
    grid[0].set_ylabel(f"distance from the first step, points of {score}\n(retain and request 1; lower is better)")
    grid[-1].legend(title=None if level is None else f"{100 * level:g} % interval")
    return figure


def sequential_table(
    title: str, score: str, references: Mapping[str, Mapping[str, float]], steps: Sequence[Step]
) -> str:
    """Format mean scores in percent as Markdown; scores of requests that come later are in brackets.

    Args:
        title: title of the experiment.
        score: what an item's score is.
        references: mean scores of target and retrained model, by name.
        steps: all steps.
    """
    sets = list(steps[0].scores)
    rows = [[name, "", *(f"{100 * means[part]:.1f}" for part in sets), "", ""] for name, means in references.items()]
    for step in steps:
        cells = []
        for name, value in step.means.items():
            first, _, rest = name.partition(" ")
            later = first == "request" and int(rest.split(",")[0]) > step.step
            cells.append(f"({100 * value:.1f})" if later else f"{100 * value:.1f}")
        away = f"{step.distance:.1f} [{step.low:.1f}, {step.high:.1f}]" if step.step > 1 else "0"
        rows.append([f"{step.protocol}, {step.method}", str(step.step), *cells, away, f"{step.to_retrained:.1f}"])
    header = ["", "step", *sets, "distance from step 1", "distance from retrained"]
    return f"{title}. {score} in percent.\n\n{markdown_table(header, rows, align_right=True)}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, align_right: bool = False) -> str:
    """Format a table as Markdown, with all columns but the first aligned right if asked."""
    rule = ["---", *["---:" if align_right else "---"] * (len(header) - 1)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, rule, *rows))


def terminal_table(rows: Sequence[Mapping[str, str]]) -> Table:
    """Format cells by their heads for a terminal; the first column is aligned left."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, head in enumerate(rows[0]):
        table.add_column(head, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row.values())
    return table
