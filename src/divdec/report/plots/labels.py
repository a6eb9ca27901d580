"""Where a scatter's labels are written, so that they hide nothing. It knows points, lines and the space they take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Text

    from divdec.report.plots.points import Series

Box = tuple[float, float, float, float]


def write_labels(axes: Axes, series: Sequence[Series]) -> None:
    """Write each point's label beside it, where it hides no point and no other label; without room it is left out.

    Args:
        axes: whose scales and size are settled: nothing may be drawn beside them afterwards.
        series: what is drawn there.
    """
    figure: Any = axes.get_figure(root=True)
    figure.draw_without_rendering()
    unit = figure.dpi / 72

    def place_of(x: float, y: float) -> tuple[float, float]:
        across, up = axes.transData.transform((x, y))
        return float(across), float(up)

    taken: list[Box] = []
    for one in series:
        for dot in one.dots:
            size = 10 if dot.best else one.look.size / 2 + 1
            taken += _boxes(place_of(dot.x, dot.y), place_of(dot.x, dot.y), size * unit)
            if dot.x_interval:
                low, high = dot.x_interval
                taken += _boxes(place_of(low, dot.y), place_of(high, dot.y), unit)
            if dot.y_interval:
                low, high = dot.y_interval
                taken += _boxes(place_of(dot.x, low), place_of(dot.x, high), unit)
        for start, end in one.path:
            taken += _boxes(place_of(start.x, start.y), place_of(end.x, end.y), unit)
    frame = axes.get_window_extent()
    near = [(0, 6), (0, -13), (7, -3), (-7, -3), (6, 4), (-6, 4), (6, -10), (-6, -10)]
    far = [(0, 13), (0, -20), (13, -3), (-13, -3), (12, 9), (-12, 9), (12, -15), (-12, -15)]
    wanted = [(not dot.best, one, dot) for one in series for dot in one.dots if dot.label]
    for _, one, dot in sorted(wanted, key=lambda entry: entry[0]):
        text: Text = axes.annotate(
            dot.label, (dot.x, dot.y), xytext=(0, 0), textcoords="offset points", fontsize=8.5,
            color=one.look.colour, ha="center", in_layout=False, zorder=6,
        )  # fmt: skip
        # Where it would stand is computed, for laying words out anew at each place takes most of a plot's time.
        box = text.get_window_extent()
        half = (box.x1 - box.x0) / 2
        for right, up in (*near, *far):
            across = right * unit + (half if right > 0 else -half if right < 0 else 0.0)
            x0, x1, y0, y1 = box.x0 + across, box.x1 + across, box.y0 + up * unit, box.y1 + up * unit
            inside = frame.x0 <= x0 and x1 <= frame.x1 and frame.y0 <= y0 and y1 <= frame.y1
            if inside and not any(x0 < u1 and u0 < x1 and y0 < v1 and v0 < y1 for u0, v0, u1, v1 in taken):
                taken.append((x0, y0, x1, y1))
                text.set_position((right, up))
                text.set_horizontalalignment("center" if not right else "left" if right > 0 else "right")
                break
        else:
            text.remove()


def _boxes(start: tuple[float, float], end: tuple[float, float], half: float) -> list[Box]:
    """Small boxes along a line, which together cover it."""
    length = max(abs(end[0] - start[0]), abs(end[1] - start[1]))
    steps = int(length / (2 * half)) + 1
    centres = [[start[axis] + (end[axis] - start[axis]) * step / steps for axis in (0, 1)] for step in range(steps + 1)]
    return [(x - half, y - half, x + half, y + half) for x, y in centres]
