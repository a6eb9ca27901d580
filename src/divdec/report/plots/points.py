"""Points, curves, rows of dots and ROC, drawn into axes. They know only values and labels."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from divdec.report.plots.labels import write_labels
from divdec.report.plots.palette import FAINT, PAPER, RETRAIN, STRIPE, TARGET, TEXT, Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Dot:
    """A point with its intervals."""

    x: float
    y: float
    x_interval: Interval | None = None
    y_interval: Interval | None = None
    label: str = ""
    best: bool = False


@dataclasses.dataclass(frozen=True)
class Series:
    """Points that are drawn alike."""

    name: str
    look: Look
    dots: tuple[Dot, ...]
    joined: bool = True
    """Whether a line joins them in a scatter."""

    @property
    def path(self) -> list[tuple[Dot, Dot]]:
        """Where that line goes."""
        return list(itertools.pairwise(self.dots)) if self.joined else []


@dataclasses.dataclass(frozen=True)
class Plot:
    """What a plot shows, before it is drawn."""

    x_label: str
    y_label: str
    series: tuple[Series, ...]
    description: str
    """For those who do not see it."""
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Curves(Plot):
    """A figure along a sweep."""

    levels: tuple[tuple[Look, float], ...] = ()
    """Values that do not change along it, such as the target's."""
    log: bool = False
    whole: bool = False
    """Whether there is nothing between whole numbers."""


@dataclasses.dataclass(frozen=True)
class Dots(Plot):
    """Differences from a reference: a row for each name, a point for each series."""

    rows: tuple[str, ...] = ()


def scatter(axes: Axes, plot: Plot) -> None:
    """Points in the plane, with error bars, and labels where there is room for them."""
    for series in plot.series:
        look, reference = series.look, series.look in (TARGET, RETRAIN)
        for dot in series.dots:
            axes.errorbar(
                dot.x, dot.y, xerr=ends(dot.x, dot.x_interval), yerr=ends(dot.y, dot.y_interval), fmt="none",
                ecolor=look.colour, elinewidth=1, alpha=0.55, zorder=2,
            )  # fmt: skip
        axes.plot(
            [dot.x for dot in series.dots],
            [dot.y for dot in series.dots],
            marker=look.marker, markersize=look.size, color=look.colour, linewidth=1, label=series.name,
            linestyle=look.dash if series.path else "none", markeredgecolor=PAPER, markeredgewidth=0.7,
            zorder=3 if reference else 4,
        )  # fmt: skip
        for dot in series.dots:
            if dot.best:
                axes.plot(
                    dot.x, dot.y, "o", markersize=20, markerfacecolor="none", markeredgecolor=TEXT,
                    markeredgewidth=1.3, zorder=5,
                )  # fmt: skip
    named(axes, plot)
    axes.margins(0.1)
    axes.locator_params(nbins=6)
    axes.grid(True)
    write_labels(axes, plot.series)


def curves(axes: Axes, plot: Curves) -> None:
    """Lines along a sweep with bands around them, over the levels of the references."""
    for look, value in plot.levels:
        axes.axhline(value, color=look.colour, linestyle=look.dash, linewidth=1.6, zorder=2)
    for series in plot.series:
        look = series.look
        xs, ys = [dot.x for dot in series.dots], [dot.y for dot in series.dots]
        banded = [(dot.x, *dot.y_interval) for dot in series.dots if dot.y_interval]
        if banded:
            where, low, high = zip(*banded, strict=True)
            axes.fill_between(where, low, high, color=look.colour, alpha=0.18, linewidth=0, zorder=1)
        if len(banded) == 1:
            axes.vlines(*banded[0], color=look.colour, alpha=0.6)
        axes.plot(
            xs, ys, marker=look.marker, markersize=5, color=look.colour, linewidth=1.6, linestyle=look.dash,
            label=series.name, markeredgecolor=PAPER, markeredgewidth=0.5, zorder=3,
        )  # fmt: skip
    named(axes, plot)
    axes.margins(x=0.04, y=0.08)
    axes.grid(True)
    if plot.whole:
        axes.locator_params(axis="x", integer=True)
    if plot.log:
        log_ticks(axes, sorted({dot.x for series in plot.series for dot in series.dots}))


def dots(axes: Axes, plot: Dots) -> None:
    """A row for each name, a dot with its interval for each series; 0 is the reference."""
    step = 0.62 / max(len(plot.series) - 1, 1) if len(plot.series) > 1 else 0.0
    for place, series in enumerate(plot.series):
        look, shift = series.look, (place - (len(plot.series) - 1) / 2) * step
        for dot in series.dots:
            axes.errorbar(
                dot.x, dot.y + shift, xerr=ends(dot.x, dot.x_interval), fmt=look.marker, color=look.colour,
                markersize=5, elinewidth=1.2, markeredgecolor=PAPER, markeredgewidth=0.4, zorder=3,
            )  # fmt: skip
    for row in range(0, len(plot.rows), 2):
        axes.axhspan(row - 0.5, row + 0.5, color=STRIPE, linewidth=0, zorder=0)
    named(axes, plot)
    axes.axvline(0, color=RETRAIN.colour, linestyle=RETRAIN.dash, linewidth=1.6, zorder=2)
    axes.set_yticks(range(len(plot.rows)), [shortened(name) for name in plot.rows])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(plot.rows) - 0.5, -0.5)
    reach = max(map(abs, axes.get_xlim()))
    low, high = axes.get_xlim()
    # Room for the words on both sides, but no wide empty half where all points lie on one.
    axes.set_xlim(min(low, -0.25 * reach), max(high, 0.25 * reach))
    axes.grid(True, axis="x")
    for x, text, side in ((0.0, "← over-unlearned", "left"), (1.0, "under-unlearned →", "right")):
        axes.annotate(text, (x, 1), xytext=(0, 5), xycoords="axes fraction", textcoords="offset points",
                      ha=side, fontsize=9.5, color=TEXT)  # fmt: skip


def roc(axes: Axes, plot: Plot) -> None:
    """True over false positive rates, over the diagonal of an attack that tells nothing."""
    axes.plot([0, 1], [0, 1], color=FAINT, linewidth=0.8, linestyle=":")
    for series in plot.series:
        look = series.look
        lone = look is RETRAIN  # what lies on it must not hide it
        axes.plot(
            [dot.x for dot in series.dots], [dot.y for dot in series.dots], color=look.colour,
            linewidth=4 if lone else 1.6, alpha=0.5 if lone else 1, linestyle="-" if lone else look.dash,
            zorder=2 if lone else 3, solid_joinstyle="miter",
        )  # fmt: skip
    named(axes, plot)
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    axes.set_aspect("equal")
    axes.grid(True)


def named(axes: Axes, plot: Plot) -> None:
    """Write title and axes' labels."""
    axes.set_xlabel(plot.x_label, fontsize=9.5)
    axes.set_ylabel(plot.y_label, fontsize=9.5)
    axes.set_title(plot.title)


def shortened(name: str, longest: int = 24) -> str:
    """A name cut in its middle, so that what tells it apart at either end stays."""
    half = (longest - 1) // 2
    return name if len(name) <= longest else f"{name[:half]}…{name[-half:]}"


def ends(value: float, interval: Interval | None) -> list[list[float]] | None:
    """An interval as error bars; an end that lies beyond the value is drawn at it."""
    return [[max(value - interval[0], 0.0)], [max(interval[1] - value, 0.0)]] if interval else None


def log_ticks(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic axis with a tick at each value of a sweep that has room for its number."""
    from matplotlib.ticker import NullFormatter, NullLocator

    if values[0] <= 0:
        return
    axes.set_xscale("log")
    ticks: list[float] = []
    least = (values[-1] / values[0]) ** 0.08
    for value in values:
        if not ticks or value >= ticks[-1] * least:
            ticks.append(value)
    axes.set_xticks(ticks, [f"{value:g}" for value in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
