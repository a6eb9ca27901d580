"""Charts of figures: scatter, bands, bars, leaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from divdec_research.baselines.table import Kind as MethodKind
from divdec_research.report.style import FAINT, LINEAR, MUTED, PAPER, RETRAIN, TARGET, TEXT, SeriesStyle

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Interval = tuple[float, float]
LABEL_OFFSETS = (  # in points
    (0, 6), (0, -13), (7, -3), (-7, -3), (6, 4), (-6, 4), (6, -10), (-6, -10),
    (0, 13), (0, -20), (13, -3), (-13, -3), (12, 9), (-12, 9), (12, -15), (-12, -15),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Dot:
    """A data point with its intervals."""

    x: float
    y: float
    x_interval: Interval | None = None
    y_interval: Interval | None = None
    label: str = ""


@dataclasses.dataclass(frozen=True)
class Series:
    """Data points with the same style."""

    name: str
    style: SeriesStyle
    dots: tuple[Dot, ...]
    joined: bool = True
    """Whether a line joins them in a scatter."""


@dataclasses.dataclass(frozen=True)
class Bar:
    """A method's score."""

    label: str
    value: float
    kind: MethodKind
    interval: Interval | None = None


@dataclasses.dataclass(frozen=True)
class LeakCurve:
    """The share of questions that leak, by number of attack prompts."""

    label: str
    style: SeriesStyle | None
    """None for a grey line with its name at its end."""
    shares: Mapping[int, float]
    intervals: Mapping[int, Interval] = dataclasses.field(default_factory=dict)


def scatter(axes: Axes, series: Sequence[Series]) -> None:
    """Draw points with error bars; `write_labels` adds labels after the layout is final."""
    for data in series:
        series_style = data.style
        for dot in data.dots:
            axes.errorbar(
                dot.x, dot.y, xerr=error_bars(dot.x, dot.x_interval), yerr=error_bars(dot.y, dot.y_interval),
                fmt="none", ecolor=series_style.colour, elinewidth=1, alpha=0.55, zorder=2,
            )  # fmt: skip
        draw_line(
            axes, [dot.x for dot in data.dots], [dot.y for dot in data.dots], series_style, label=data.name,
            markersize=series_style.size, edge=0.7, linewidth=1,
            linestyle=series_style.dash if data.joined else "none",
            zorder=3 if series_style in (TARGET, RETRAIN) else 4,
        )  # fmt: skip
    axes.margins(0.1)
    axes.locator_params(nbins=6)
    axes.grid(True)


def write_labels(axes: Axes, series: Sequence[Series]) -> None:
    """Write each point's label where it covers no point and no other label; omit it if there is no such position."""
    from matplotlib.transforms import Bbox

    frame = axes.get_window_extent()
    labelled = [(dot, data.style.colour) for data in series for dot in data.dots if dot.label]
    points = axes.transData.transform([(dot.x, dot.y) for data in series for dot in data.dots])
    occupied = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in points]
    for dot, colour in labelled:
        for right, up in LABEL_OFFSETS:
            text = axes.annotate(
                dot.label, (dot.x, dot.y), xytext=(right, up), textcoords="offset points", fontsize=8.5, color=colour,
                ha=("center", "left", "right")[(right > 0) - (right < 0)], in_layout=False, zorder=6,
            )  # fmt: skip
            box = text.get_window_extent()
            if frame.containsx(box.x0) and frame.containsx(box.x1) and not box.count_overlaps(occupied):
                occupied.append(box)
                break
            text.remove()


def band_panels(figure: Figure, panels: Mapping[str, Sequence[Series]], x_label: str) -> list[Axes]:
    """Draw lines over integers, with bands of their intervals, into panels side by side with a common y axis."""
    from matplotlib.ticker import MaxNLocator

    result = list(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0])
    for axes, (title, lines) in zip(result, panels.items(), strict=True):
        for line in lines:
            draw_band(axes, [(dot.x, *dot.y_interval) for dot in line.dots if dot.y_interval], line.style, alpha=0.2)
            xs, ys = [dot.x for dot in line.dots], [dot.y for dot in line.dots]
            draw_line(axes, xs, ys, line.style, edge=0, label=line.name)
        axes.set_title(title)
        axes.set_xlabel(x_label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(True)
    return result


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
    """Draw Leak@k over k. Methods without a colour are grey, with labels at the ends of their lines."""
    ticks = sorted({k for curve in curves for k in curve.shares})
    unnamed = []
    for curve in curves:
        ks = sorted(curve.shares)
        shares = [curve.shares[k] for k in ks]
        if curve.style is None:
            axes.plot(ks, shares, color=FAINT, linewidth=1, alpha=0.7, zorder=1)
            unnamed.append((shares[-1], ks[-1], curve.label))
            continue
        ends = [(k, *curve.intervals[k]) for k in ks if k in curve.intervals]
        draw_band(axes, ends, curve.style, alpha=0.15, zorder=1)
        size = min(curve.style.size, 12)
        draw_line(axes, ks, shares, curve.style, 0.5, label=curve.label, markersize=size, linewidth=1.8, zorder=3)
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
        previous = min(share, previous - 0.034)  # move overlapping labels down
        axes.annotate(
            label, (k, share), xytext=(1.015, previous), textcoords=axes.get_yaxis_transform(), fontsize=7.5,
            color=MUTED, va="center", annotation_clip=False,
        )  # fmt: skip


def draw_line(
    axes: Axes, xs: Sequence[float], ys: Sequence[float], series_style: SeriesStyle, edge: float = 0.6, **options: Any
) -> None:
    """Draw points, with an edge of a width in points, and the line that joins them; `options` are matplotlib's."""
    styled = {
        "color": series_style.colour, "marker": series_style.marker, "markersize": 5, "linestyle": series_style.dash,
    }  # fmt: skip
    if edge:
        styled |= {"markeredgecolor": PAPER, "markeredgewidth": edge}
    axes.plot(xs, ys, **{**styled, **options})


def draw_band(
    axes: Axes, ends: Sequence[tuple[float, float, float]], series_style: SeriesStyle, **options: Any
) -> None:
    """Draw a band from x and the ends of the interval at each point; `options` are matplotlib's."""
    if ends:
        xs, low, high = zip(*ends, strict=True)
        axes.fill_between(xs, low, high, color=series_style.colour, linewidth=0, **options)


def error_bars(value: float, interval: Interval | None) -> list[list[float]] | None:
    """Convert an interval to error bars, which are not negative where the value lies outside of it."""
    return [[max(value - interval[0], 0.0)], [max(interval[1] - value, 0.0)]] if interval else None


def log_ticks(axes: Axes, values: Sequence[float]) -> None:
    """Make the x axis logarithmic, with a tick at each value that has room for its number."""
    from matplotlib.ticker import NullFormatter, NullLocator

    if values[0] <= 0:
        return
    axes.set_xscale("log")
    ticks: list[float] = []
    ratio = (values[-1] / values[0]) ** 0.08
    for value in values:
        if not ticks or value >= ticks[-1] * ratio:
            ticks.append(value)
    axes.set_xticks(ticks, [f"{value:g}" for value in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
