"""The paper's figures from result folders. Importing the modules below registers their figures."""

from divdec.research.figures import benchmarks, runs  # noqa: F401
from divdec.research.figures.registry import FIGURES, FigureRequest

__all__ = ["FIGURES", "FigureRequest"]
