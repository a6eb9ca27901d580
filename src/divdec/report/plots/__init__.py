"""Every plot of divdec: one palette, one style, SVG for pages and files, PNG for files. They know points and labels."""

from divdec.report.plots.canvas import open_frame, style, svg_text, write_figure
from divdec.report.plots.palette import COLOURS, LOOKS, RETRAIN, TARGET, TEXT, Look
from divdec.report.plots.panels import Band, Point, band_panels, trade_off

__all__ = [
    "COLOURS",
    "LOOKS",
    "RETRAIN",
    "TARGET",
    "TEXT",
    "Band",
    "Look",
    "Point",
    "band_panels",
    "open_frame",
    "style",
    "svg_text",
    "trade_off",
    "write_figure",
]
