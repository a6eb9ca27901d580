"""What every plot is drawn under and written with: one style, SVG or PNG, the same bytes for the same points."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divdec.errors import UsageError
from divdec.report.plots.palette import GRID, PAPER, TEXT
from divdec.runs import write_durably, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".svg", ".png")
PAGE = 5.6
"""Width of a page's plot in inches: its words can be read at a phone's width too."""
DPI = 200
"""Of a PNG."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    # Verdana is as wide as DejaVu, for which the places of words are computed.
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "font.size": 10,
    "text.parse_math": False,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": TEXT,
    "axes.facecolor": PAPER,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": PAPER,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "savefig.facecolor": PAPER,
}


@contextlib.contextmanager
def style(salt: str = "divdec") -> Iterator[None]:
    """Text stays text, names stay as they are, and the same points give the same SVG.

    Args:
        salt: two plots on a page need two, or their elements would share ids.
    """
    import matplotlib

    with matplotlib.rc_context({**STYLE, "svg.hashsalt": salt}):
        yield


def svg_text(figure: Figure) -> str:
    """The figure as an `<svg>` element, drawn under `style`."""
    # Only the element: a page is no place for an XML declaration.
    return re.sub(r"^.*?(?=<svg)", "", _svg(figure, {}), flags=re.DOTALL)


def open_frame(axes: Axes) -> None:
    """Leave the frame's upper and right side out."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def check_format(path: Path) -> None:
    """Refuse a name whose end is not a format.

    Raises:
        UsageError: it ends in neither .svg nor .png.
    """
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"output {path} ends in {path.suffix or 'nothing'}; accepted: {' and '.join(FORMATS)}")


def write_figure(path: Path, figure: Figure, *, title: str, description: str, sources: Sequence[str]) -> None:
    """Write a figure, whole or not at all, with what it shows and is drawn from in its metadata.

    Args:
        path: ends in .svg or .png.
        figure: drawn under `style`, which must still be in force.
        title: what it is called.
        description: what it shows.
        sources: names of the files that its figures come from.

    Raises:
        UsageError: the name ends in neither .svg nor .png.
    """
    check_format(path)
    about = {"Title": title, "Description": description, "Source": "; ".join(sources)}
    if path.suffix.lower() == ".svg":
        write_text(path, _svg(figure, {**about, "Creator": "divdec"}))
        return
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={**about, "Software": "divdec"})
    write_durably(path, buffer.getvalue())


def _svg(figure: Figure, metadata: dict[str, str]) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={**metadata, "Date": None})
    return re.sub(r"[ \t]+$", "", buffer.getvalue(), flags=re.MULTILINE)
