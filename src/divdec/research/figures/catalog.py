"""All figures: importing the modules below registers them."""

from divdec.research.figures import benchmarks, runs  # noqa: F401
from divdec.research.figures.registry import FIGURES, FigureRequest

__all__ = ["FIGURES", "FigureRequest"]
