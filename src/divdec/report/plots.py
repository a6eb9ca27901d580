"""Plots as SVG text, to be put into a page. They know only points and labels."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"linear": "#1f6feb", "rank": "#d9822b", "target": "#b3261e", "retrain": "#1a7f37"}


@dataclasses.dataclass(frozen=True)
class Point:
    """A model in the plane of forgetting and keeping."""

    series: str
    label: str
    forget: float
    retain: float
    recommended: bool = False


@contextlib.contextmanager
def style(salt: str = "divdec") -> Iterator[None]:
    """Text stays text, names stay as they are, and the same points give the same SVG.

    Args:
        salt: two plots on a page need two, or their elements would share ids.
    """
    import matplotlib

    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 10, "text.parse_math": False}
    ):
        yield


def svg_text(figure: Figure) -> str:
    """The figure as an `<svg>` element, drawn under `style`."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    # Only the element: a page is no place for an XML declaration.
    return re.sub(r"^.*?(?=<svg)", "", buffer.getvalue(), flags=re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Band:
    """A line over whole numbers with its interval."""

    label: str
    colour: str
    marker: str
    x: Sequence[int]
    y: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


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
            axes.fill_between(band.x, band.low, band.high, color=band.colour, alpha=0.2, linewidth=0)
            axes.plot(band.x, band.y, marker=band.marker, markersize=5, color=band.colour, label=band.label)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(x_label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(True, color="#d8dee4", linewidth=0.6)
        open_frame(axes)
    return drawn


def open_frame(axes: Axes) -> None:
    """Leave the frame's upper and right side out."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def trade_off(points: Sequence[Point], forget_label: str, retain_label: str) -> str:
    """Retain accuracy over forget accuracy: up and to the left is better, the retrain reference is the goal.

    Returns:
        An `<svg>` element.
    """
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(7.2, 4.6), layout="constrained")
        axes = figure.subplots()
        for series in dict.fromkeys(point.series for point in points):
            members = [point for point in points if point.series == series]
            single = series in ("target", "retrain")
            axes.plot(
                [point.forget for point in members],
                [point.retain for point in members],
                marker="*" if single else "o",
                markersize=15 if single else 6,
                linestyle="none" if single else "-",
                linewidth=1,
                alpha=0.95,
                color=COLOURS.get(series, "#57606a"),
                label=series,
                zorder=4 if single else 3,
            )
        for point in points:
            if point.recommended:
                axes.plot(
                    point.forget, point.retain, "o", markersize=15, markerfacecolor="none",
                    markeredgecolor="#24292f", label=f"recommended ({point.label})", zorder=5,
                )  # fmt: skip
        axes.set_xlabel(forget_label)
        axes.set_ylabel(retain_label)
        axes.set_xlim(-0.04, 1.04)
        axes.set_ylim(-0.04, 1.08)
        axes.grid(True, color="#d0d7de", linewidth=0.6)
        axes.legend(frameon=False, loc="lower center", ncols=3)
        open_frame(axes)
        return svg_text(figure)
