"""The look of plots: series that differ in colour, marker and dash; SVG and PNG output."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divdec.errors import UsageError
from divdec.report.palette import GROUND, SERIES
from divdec.runs import write_bytes, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEXT, PAPER, GRID, MUTED, FAINT = (light for light, _ in GROUND.values())


@dataclasses.dataclass(frozen=True)
class SeriesStyle:
    """Colour, marker and dash of a series."""

    colour: str
    marker: str
    size: int = 6
    """Size of the marker in points."""
    dash: Any = "-"
    """Line style in matplotlib's notation."""


TARGET = SeriesStyle(SERIES["target"][0], "X", 11, (0, (5, 2)))
RETRAIN = SeriesStyle(SERIES["retrain"][0], "*", 19, (0, (6, 2, 1, 2)))
SERIES_STYLES = tuple(
    SeriesStyle(SERIES[name][0], marker, dash=dash)
    for name, marker, dash in zip(
        ("blue", "vermillion", "purple", "brown", "sky", "grey"),
        "osD^vP",
        ("-", (0, (4, 1)), (0, (1, 1)), (0, (7, 1, 1, 1)), (0, (3, 1, 1, 1)), (0, (8, 2))),
        strict=True,
    )
)
LINEAR, RANK = SERIES_STYLES[:2]
OTHERS = SeriesStyle(MUTED, "h")
"""Methods other than Divergence Decoding, in plots with more methods than styles."""
BY_NAME = {"linear": LINEAR, "rank": RANK, "target": TARGET, "retrain": RETRAIN}

FORMATS = (".svg", ".png")
DPI = 200
"""Resolution of PNG files."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    # Text is laid out with the widths of DejaVu; Verdana has the same.
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
    """Apply the style of all plots; the same data gives the same SVG.

    `salt` is the seed of the SVG's element ids; two plots on one page need different ones.
    """
    import matplotlib

    with matplotlib.rc_context({**STYLE, "svg.hashsalt": salt}):
        yield


def check_format(path: Path) -> None:
    """Refuse a picture whose file name ends in neither .svg nor .png."""
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"output {path} ends in {path.suffix or 'nothing'}; accepted: {' and '.join(FORMATS)}")


def write_figure(path: Path, figure: Figure, *, title: str, description: str, sources: Sequence[str]) -> None:
    """Write a figure atomically as SVG or PNG, with title, description and names of source files in its metadata.

    The figure was drawn under `style`, which must still be in force.

    Raises:
        UsageError: the file name ends in neither .svg nor .png.
    """
    check_format(path)
    about = {"Title": title, "Description": description, "Source": "; ".join(sources)}
    if path.suffix.lower() == ".svg":
        write_text(path, _svg(figure, {**about, "Creator": "divdec"}))
        return
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={**about, "Software": "divdec"})
    write_bytes(path, buffer.getvalue())


def _svg(figure: Figure, metadata: dict[str, str]) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={**metadata, "Date": None})
    return re.sub(r"[ \t]+$", "", buffer.getvalue(), flags=re.MULTILINE)
