"""Whole plots of one kind: bands over whole numbers, a trade-off, bars of methods, leaks over prompts, a heat map.

They know points and labels, not where these come from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from divdec.report.plots.canvas import PAGE, style, svg_text
from divdec.report.plots.palette import BY_NAME, COLOURS, FAINT, MUTED, OTHERS, PAPER, TEXT, Look
from divdec.report.plots.points import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Kind = Literal["ours", "other", "reference"]


@dataclasses.dataclass(frozen=True)
class Point:
    """A model in the plane of forgetting and keeping."""

    series: str
    label: str
    forget: float
    retain: float
    recommended: bool = False


@dataclasses.dataclass(frozen=True)
class Band:
    """A line over whole numbers with its interval."""

    label: str
    look: Look
    x: Sequence[int]
    y: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclasses.dataclass(frozen=True)
class Bar:
    """A method's score."""

    label: str
    value: float
    kind: Kind
    interval: Interval | None = None


@dataclasses.dataclass(frozen=True)
class Leaks:
    """The share of questions that leak, by number of attack prompts."""

    label: str
    look: Look | None
    """None for a method in the background, which is named at the end of its line."""
    shares: Mapping[int, float]
    intervals: Mapping[int, Interval] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Tile:
    """One cell of a heat map."""

    x: float
    y: float
    value: float
    marked: bool = False


def band_panels(figure: Figure, panels: Mapping[str, Sequence[Band]], x_label: str) -> list[Axes]:
    """Panels side by side that share their scale, each with its bands.

    Args:
        figure: drawn into, under `style`.
        panels: bands by title.
        x_label: of every panel.
    """
    from matplotlib.ticker import MaxNLocator

    drawn = list(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0])
    for axes, (title, bands) in zip(drawn, panels.items(), strict=True):
        for band in bands:
            axes.fill_between(band.x, band.low, band.high, color=band.look.colour, alpha=0.2, linewidth=0)
            axes.plot(
                band.x, band.y, marker=band.look.marker, markersize=5, color=band.look.colour,
                linestyle=band.look.dash, label=band.label,
            )  # fmt: skip
        axes.set_title(title)
        axes.set_xlabel(x_label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(True)
    return drawn


def trade_off(points: Sequence[Point], forget_label: str, retain_label: str) -> str:
    """Retain accuracy over forget accuracy: up and to the left is better, the retrain reference is the goal.

    Returns:
        An `<svg>` element.
    """
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(PAGE, 4.4), layout="constrained")
        axes = figure.subplots()
        for series in dict.fromkeys(point.series for point in points):
            members = [point for point in points if point.series == series]
            look, single = BY_NAME.get(series, OTHERS), series in ("target", "retrain")
            axes.plot(
                [point.forget for point in members],
                [point.retain for point in members],
                marker=look.marker, markersize=look.size, linestyle="none" if single else look.dash, linewidth=1,
                alpha=0.95, color=look.colour, markeredgecolor=PAPER, markeredgewidth=0.7, label=series,
                zorder=4 if single else 3,
            )  # fmt: skip
        for point in points:
            if point.recommended:
                axes.plot(
                    point.forget, point.retain, "o", markersize=15, markerfacecolor="none",
                    markeredgecolor=TEXT, label=f"recommended ({point.label})", zorder=5, linestyle="none",
                )  # fmt: skip
        axes.set_xlabel(forget_label)
        axes.set_ylabel(retain_label)
        axes.set_xlim(-0.04, 1.04)
        axes.set_ylim(-0.04, 1.08)
        axes.grid(True)
        figure.legend(loc="outside lower center", ncols=3, fontsize=9, markerscale=0.8)
        return svg_text(figure)


def bars(axes: Axes, rows: Sequence[Bar], x_label: str) -> None:
    """A bar and its interval for each method, from the bottom up in the order given.

    Args:
        axes: drawn into, under `style`.
        rows: the methods.
        x_label: what is scored, and which way is better.
    """
    colours = {"ours": COLOURS["linear"], "other": FAINT, "reference": TEXT}
    for place, row in enumerate(rows):
        axes.barh(
            place, row.value, color=colours[row.kind], alpha=0.85, height=0.7, edgecolor=PAPER,
            hatch="///" if row.kind == "ours" else None,  # told apart in grey too
        )  # fmt: skip
        if row.interval is not None:
            # Light around dark, so that it is seen on the bar and beside it.
            for colour, width in ((PAPER, 3.4), (TEXT, 1.4)):
                axes.plot(row.interval, (place, place), color=colour, linewidth=width, solid_capstyle="butt")
        end = max(row.value, row.interval[1] if row.interval else 0.0)
        axes.annotate(
            f"{row.value:.2f}", (end, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8.5,
            color=MUTED,
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlim(0, 1.1 * max((max((row.value, *(row.interval or ()))) for row in rows), default=1.0) or 1.0)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(x_label, loc="right")  # long names leave it little room
    axes.grid(True, axis="x")


def leak_curves(axes: Axes, lines: Sequence[Leaks], x_label: str = "k, attack prompts a question") -> None:
    """Leak@k over k, methods in the background in grey with their names at the end of their lines.

    Args:
        axes: drawn into, under `style`.
        lines: the methods.
        x_label: what k counts.
    """
    ticks = sorted({k for line in lines for k in line.shares})
    behind = []
    for line in lines:
        shares = [line.shares[k] for k in sorted(line.shares)]
        ks = sorted(line.shares)
        if line.look is None:
            axes.plot(ks, shares, color=FAINT, linewidth=1, alpha=0.7, zorder=1)
            behind.append((shares[-1], ks[-1], line.label))
            continue
        banded = [(k, *line.intervals[k]) for k in ks if k in line.intervals]
        if banded:
            where, low, high = zip(*banded, strict=True)
            axes.fill_between(where, low, high, color=line.look.colour, alpha=0.15, linewidth=0, zorder=1)
        axes.plot(
            ks, shares, color=line.look.colour, linestyle=line.look.dash, marker=line.look.marker,
            markersize=min(line.look.size, 12), markeredgecolor=PAPER, markeredgewidth=0.5, linewidth=1.8,
            label=line.label, zorder=3,
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
    _name_ends(axes, behind)


def heat(axes: Axes, tiles: Sequence[Tile], *, x_label: str, y_label: str, text: Any, reverse: bool = False) -> Any:
    """A grid of values, each written into its cell; marked cells have a frame.

    Args:
        axes: drawn into, under `style`.
        tiles: at most one for each pair of x and y.
        x_label: of the columns, which stand in the order of their numbers.
        y_label: of the rows, likewise, from the bottom up.
        text: a value as it is written.
        reverse: light where values are low, where these are the better ones.

    Returns:
        What a colour bar is made from.
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
        # The cells keep their colours on a dark page, so the words on them are no colours of the palette.
        ink = "#010101" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "#fefefe"
        axes.annotate(text(tile.value), (x, y), ha="center", va="center", color=ink, fontsize=9.5)
        if tile.marked:
            axes.add_patch(Rectangle((x - 0.44, y - 0.42), 0.88, 0.84, fill=False, edgecolor=ink, linewidth=1.5))
    axes.set_xticks(range(len(xs)), [f"{value:g}" for value in xs])
    axes.set_yticks(range(len(ys)), [f"{value:g}" for value in ys])
    axes.tick_params(length=0)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.spines[:].set_visible(False)
    return mesh


def _name_ends(axes: Axes, behind: Sequence[tuple[float, int, str]]) -> None:
    """Write names at the ends of lines, the lower ones moved down as far as they would lie on those above."""
    least, previous = 0.034, 2.0
    for share, k, label in sorted(behind, reverse=True):
        height = min(share, previous - least)
        previous = height
        axes.annotate(
            label, (k, share), xytext=(1.015, height), textcoords=axes.get_yaxis_transform(), fontsize=7.5, color=MUTED,
            va="center", annotation_clip=False,
        )  # fmt: skip
