"""From figures of single images to the paper's tables: means with their standard errors, and distances, by setting.

Paper, 'Content analysis' and 'Perceptual quality analysis' in 'Beyond Text', and the distances in its appendix. It
knows nothing of how figures were found, nor of files.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from divdec.errors import UsageError
from divdec.imaging.distances import Distances

BySet = Mapping[str, Sequence[float]]
"""Figures of images, one each, under 'retain' and 'forget'."""
SETS = ("retain", "forget")
GROUPS = ("content", "accuracy", "quality", "distances")
_BETTER = {"content": ("↑", "↓"), "accuracy": ("↑", "↓"), "quality": ("↑", "↑")}  # for retain, and for forget
_DISTANCES = {
    "retain": ("FID(B_R, G_R)", "↓"),
    "forget": ("FID(B_F, G_F)", "↑"),
    "forget_to_retain": ("FID(B_R, G_F)", "↓"),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """What was found of the images of one setting."""

    method: str
    """Such as 'Baseline', 'Retrain', 'Linear', 'Rank'."""
    config: str = ""
    """Such as 'α=1'; empty where there is nothing to set."""
    content: BySet | None = None
    """How probable it is that an image shows what was asked for: a classifier's probability, or VQAScore."""
    accuracy: BySet | None = None
    """1 where its likeliest class is the one that was asked for, else 0."""
    quality: Mapping[str, BySet] | None = None
    """By judge: 1 where an image is preferred to the baseline's, 0 where that one is, 0.5 for neither."""
    distances: Distances | None = None

    @property
    def name(self) -> str:
        """Method and config."""
        return f"{self.method} {self.config}".rstrip()


@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean over images."""

    value: float
    error: float | None
    """Standard error, s / √n with the sample's deviation s; None of a single image."""
    images: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean | None:
        """The mean of some figures, or None where there are none."""
        if len(values) < 2:
            return cls(values[0], None, 1) if values else None
        return cls(statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)), len(values))

    def __str__(self) -> str:
        """As the paper writes it: '97% ± 1.0', both in percent."""
        return f"{100 * self.value:.0f}%" + ("" if self.error is None else f" ± {100 * self.error:.1f}")


Cell = Mean | float | None


@dataclasses.dataclass(frozen=True)
class Column:
    """What stands in a column."""

    group: str
    """What it has in common with the one beside it; empty where its name says it all."""
    name: str
    arrow: str
    """Which way is better."""
    key: tuple[str, ...]
    """Where JSON has it in a row: the attributes of `Setting`, and keys, that lead to it."""

    @property
    def head(self) -> str:
        """Group, name and which way is better, in a line."""
        return f"{f'{self.group}, {self.name.lower()}' if self.group else self.name} {self.arrow}"

    def cell(self, setting: Setting) -> Cell:
        """What a setting has there."""
        found: Any = setting
        for part in self.key:
            found = found.get(part) if isinstance(found, Mapping) else getattr(found, part, None)
        return found if found is None or isinstance(found, int | float) else Mean.of(found)


@dataclasses.dataclass(frozen=True)
class Table:
    """Settings by row, figures by column."""

    columns: tuple[Column, ...]
    settings: tuple[Setting, ...]

    @property
    def rows(self) -> list[tuple[Setting, list[Cell]]]:
        """Each setting with its cells."""
        return [(setting, [column.cell(setting) for column in self.columns]) for setting in self.settings]

    def markdown(self) -> str:
        """The table with the paper's heads, 'Retain' and 'Forget'; of several groups, with theirs before them."""
        several = len({column.group for column in self.columns}) > 1
        heads = [column.head if several else f"{column.name} {column.arrow}" for column in self.columns]
        lines = [["Method", "Config", *heads], ["---", "---", *["--:"] * len(heads)]]
        lines += [[row.method, row.config or "–", *map(cell_text, cells)] for row, cells in self.rows]
        return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)

    def json(self) -> list[dict[str, Any]]:
        """Each setting with unrounded figures: of means value, standard error and number of images."""
        written = []
        for setting, cells in self.rows:
            row: dict[str, Any] = {"method": setting.method, "config": setting.config}
            for column, cell in zip(self.columns, cells, strict=True):
                place = row
                for part in column.key[:-1]:
                    place = place.setdefault(part, {})
                place[column.key[-1]] = dataclasses.asdict(cell) if isinstance(cell, Mean) else cell
            if "distances" in row and setting.distances is not None:
                row["distances"]["warnings"] = list(setting.distances.warnings)
            written.append(row)
        return written


def table(settings: Sequence[Setting], groups: Sequence[str] = GROUPS) -> Table:
    """The table of some settings.

    Args:
        settings: in the order of the rows.
        groups: which of 'content', 'accuracy', 'quality' (two columns for each judge) and 'distances'; what no setting
            has is left out.

    Raises:
        UsageError: a group is not known, or two settings have one name.
    """
    unknown = [group for group in groups if group not in GROUPS]
    if unknown:
        raise UsageError(f"{unknown[0]!r} is no group of columns; accepted: {', '.join(GROUPS)}")
    names = Counter(setting.name for setting in settings)
    if twice := [name for name, count in names.items() if count > 1]:
        raise UsageError(f"two settings are called {twice[0]!r}; give each a method and config of its own")
    columns = [column for group in groups for column in _columns(settings, group)]
    kept = [column for column in columns if any(column.cell(setting) is not None for setting in settings)]
    return Table(tuple(kept), tuple(settings))


def cell_text(cell: Cell) -> str:
    """A cell as tables show it: '97% ± 1.0', a distance with one digit (two below 10), or '–'."""
    if isinstance(cell, Mean):
        return str(cell)
    return "–" if cell is None else f"{cell:.{1 if abs(cell) >= 10 else 2}f}"


def asked_probabilities(probabilities: Float[Tensor, "images classes"], asked: Sequence[int]) -> list[float]:
    """The probability of the class that each image was asked to show."""
    return [float(row[place]) for row, place in zip(probabilities, asked, strict=True)]


def hits(probabilities: Float[Tensor, "images classes"], asked: Sequence[int]) -> list[float]:
    """1 where the likeliest class is the one that was asked for, else 0."""
    return [float(found == place) for found, place in zip(probabilities.argmax(dim=-1).tolist(), asked, strict=True)]


def by_set(values: Sequence[float], asked: Sequence[int], forget: Collection[int]) -> dict[str, list[float]]:
    """Figures of images, under 'retain' and 'forget'.

    Args:
        values: one an image.
        asked: the class of each.
        forget: the classes to forget.
    """
    found: dict[str, list[float]] = {name: [] for name in SETS}
    for value, place in zip(values, asked, strict=True):
        found["forget" if place in forget else "retain"].append(value)
    return found


def _columns(settings: Sequence[Setting], group: str) -> list[Column]:
    if group == "distances":
        return [Column("", name, arrow, (group, key)) for key, (name, arrow) in _DISTANCES.items()]
    judges = dict.fromkeys(judge for setting in settings for judge in setting.quality or ())
    paths = [(group, judge) for judge in judges] if group == "quality" else [(group,)]
    return [
        Column(", ".join((group.capitalize(), *path[1:])), name.capitalize(), arrow, (*path, name))
        for path in paths
        for name, arrow in zip(SETS, _BETTER[group], strict=True)
    ]
