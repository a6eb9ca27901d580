"""The registry of figures, what a figure is drawn from, and the files of runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from divdec.errors import UsageError
from divdec_research.suites.settings import Scoring

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class FigureRequest:
    """Runs that a figure is drawn from, and the computation of their scores."""

    runs: tuple[str, ...]
    """Folders or files."""
    target: str | None = None
    """Results of the target, if no folder of the runs is named so."""
    retrain: str | None = None
    """Results of the retrained model, if no folder of the runs is named so."""
    scoring: Scoring = dataclasses.field(default_factory=Scoring)


@dataclasses.dataclass(frozen=True)
class FigureResult:
    """A figure with its title, description and sources."""

    figure: Figure
    title: str
    description: str
    sources: tuple[str, ...]
    """Names of the files that the values come from, relative to the run's parent folder."""


Draw = Callable[[FigureRequest], FigureResult]


@dataclasses.dataclass(frozen=True)
class FigureSpec:
    """A figure that can be requested."""

    shows: str
    """One-line description."""
    needs: str
    """Runs that it is drawn from."""
    draw: Draw
    """Draws the figure under `report.style.style`; a `UsageError` if the runs do not hold what it needs."""


FIGURES: dict[str, FigureSpec] = {}


def register(name: str, *, shows: str, needs: str) -> Callable[[Draw], Draw]:
    """Return a decorator that adds a function to `FIGURES` under a name."""

    def add(function: Draw) -> Draw:
        FIGURES[name] = FigureSpec(shows, needs, function)
        return function

    return add


@dataclasses.dataclass(frozen=True)
class Source:
    """A file of a run."""

    path: Path
    run: Path

    @property
    def name(self) -> str:
        """The path from the run's own folder on, for metadata without folders of the machine."""
        run, path = self.run.absolute(), self.path.absolute()
        return f"{run.name}/{path.relative_to(run).as_posix()}" if path != run else path.name


def run_path(run: str) -> Path:
    """Return the path of a run.

    Raises:
        UsageError: it does not exist.
    """
    path = Path(run).expanduser()
    if not path.exists():
        raise UsageError(f"run {run} does not exist; give a folder that divdec, or the paper's code, wrote")
    return path


def find_files(runs: tuple[str, ...], *names: str) -> list[Source]:
    """Find the files of these names in and below runs, each once and in the order of their paths.

    A run that is a file itself is taken under any name, if one of the names has its suffix.

    Raises:
        UsageError: a run does not exist.
    """
    sources: dict[Path, Source] = {}
    for run in map(run_path, runs):
        if run.is_file():
            paths = [run] if run.suffix in {Path(name).suffix for name in names} else []
        else:
            paths = sorted({path for name in names for path in run.rglob(name) if path.is_file()})
        for path in paths:
            sources.setdefault(path.resolve(), Source(path, run))
    return list(sources.values())


def missing_data(runs: tuple[str, ...], figure: str, needs: str) -> UsageError:
    """Make the error that runs hold nothing that a figure is drawn from."""
    for run in runs:
        if run_path(run).is_dir() and not any(run_path(run).iterdir()):
            return UsageError(f"run {run} is an empty folder; the figure {figure} is drawn from {needs}")
    return UsageError(f"{', '.join(runs)}: nothing there that the figure {figure} is drawn from; it needs {needs}")
