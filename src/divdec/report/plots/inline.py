"""Plots as elements of a page, each with words for those who do not see it. It draws with `points`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from divdec.report.plots import points
from divdec.report.plots.canvas import style, svg_text
from divdec.report.plots.palette import themed
from divdec.report.plots.points import Curves, Dots, Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDE, PANEL = 5.2, 4.0  # inches; a page scales them to its columns


def scatter(plot: Plot) -> Markup:
    """See `points.scatter`."""
    return _drawn(plot, (WIDE, 4.0), points.scatter)


def curves(plot: Curves) -> Markup:
    """See `points.curves`."""
    return _drawn(plot, (PANEL, 2.9), points.curves)


def dots(plot: Dots) -> Markup:
    """See `points.dots`."""
    return _drawn(plot, (WIDE, 0.95 + 0.32 * len(plot.rows)), points.dots)


def roc(plot: Plot) -> Markup:
    """See `points.roc`."""
    return _drawn(plot, (3.7, 3.8), points.roc)


def _drawn(plot: Plot, size: tuple[float, float], draw: Callable[[Axes, Any], None]) -> Markup:
    from matplotlib.figure import Figure

    with style(f"divdec {plot.description}"):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots(), plot)
        text = themed(svg_text(figure))
    # Groups carry ids that every plot of a page would repeat, and the metadata names addresses that nothing fetches.
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)
    label = Markup('<svg role="img" aria-label="{}" ').format(plot.description)
    return Markup(text.replace("<svg ", label, 1))
