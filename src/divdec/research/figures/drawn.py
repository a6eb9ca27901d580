"""What a figure is asked for with, and what comes of it. It knows no figure."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from divdec.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class Asked:
    """Which runs a figure is drawn from, and how their scores are computed."""

    runs: tuple[str, ...]
    """Folders, or files."""
    target: str | None = None
    """Results of the target, where no folder of the runs is called so."""
    retrain: str | None = None
    """Results of the retrained model, likewise."""
    variant: str = "paper"
    """Of TOFU's aggregates."""
    level: float = 0.99
    """Of the bootstrap intervals."""
    draws: int = 1000
    """How often the items are resampled."""
    seed: int = 0
    """Of the resampling."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A figure and what is said of it."""

    figure: Figure
    title: str
    description: str
    sources: tuple[str, ...]
    """Names of the files that its values come from, without the folders above a run."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A file of a run."""

    path: Path
    run: Path

    @property
    def name(self) -> str:
        """The file as metadata names it: from the run's own folder on, so that no machine's folders are told."""
        run, path = self.run.absolute(), self.path.absolute()
        return f"{run.name}/{path.relative_to(run).as_posix()}" if path != run else path.name


def place_of(given: str) -> Path:
    """A run as a path.

    Raises:
        UsageError: it is not there.
    """
    place = Path(given).expanduser()
    if not place.exists():
        raise UsageError(f"run {given} does not exist; give a folder that divdec, or the paper's code, wrote")
    return place


def files_called(runs: tuple[str, ...], *names: str) -> list[Source]:
    """The files of these names in runs, wherever they lie in them, each once and in the order of their paths.

    A file that was given itself is taken whatever it is called, if it ends as one of the names does.

    Raises:
        UsageError: a run does not exist.
    """
    found: dict[Path, Source] = {}
    for given in runs:
        place = place_of(given)
        if place.is_file():
            paths = [place] if place.suffix in {Path(name).suffix for name in names} else []
        else:
            paths = sorted({path for name in names for path in place.rglob(name) if path.is_file()})
        for path in paths:
            found.setdefault(path.resolve(), Source(path, place))
    return list(found.values())


def nothing(runs: tuple[str, ...], figure: str, looked_for: str) -> UsageError:
    """That runs hold nothing that a figure is drawn from."""
    empty = [given for given in runs if (place := place_of(given)).is_dir() and not any(place.iterdir())]
    if empty:
        return UsageError(f"run {empty[0]} is an empty folder; the figure {figure} is drawn from {looked_for}")
    return UsageError(f"{', '.join(runs)}: nothing there that the figure {figure} is drawn from; it needs {looked_for}")
