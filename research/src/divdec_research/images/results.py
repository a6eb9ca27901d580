"""Results of image experiments as the paper's tables: means with standard errors, and distances, by setting.

Paper, 'Content analysis' and 'Perceptual quality analysis' in 'Beyond Text', and the distances in its appendix.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

BySet = Mapping[str, Sequence[float]]
"""One figure for each image, under 'retain' and 'forget'."""
SETS = ("retain", "forget")
GROUPS = ("content", "accuracy", "quality", "distances")
_BETTER = {"content": ("↑", "↓"), "accuracy": ("↑", "↓"), "quality": ("↑", "↑")}  # for retain, and for forget
_DISTANCES = {
    "retain": ("FID(B_R, G_R)", "↓"),
    "forget": ("FID(B_F, G_F)", "↑"),
    "forget_to_retain": ("FID(B_R, G_F)", "↓"),
}


@dataclasses.dataclass(frozen=True)
class Distances:
    """Fréchet distances between real (B) and generated (G) images of retain (R) and forget (F) classes."""

    retain: float
    """FID(B_R, G_R); lower is better: retain classes keep their quality."""
    forget: float
    """FID(B_F, G_F); higher is better: images of forget classes differ from real ones."""
    forget_to_retain: float
    """FID(B_R, G_F); lower is better: images of forget classes resemble retain classes."""
    warnings: tuple[str, ...] = ()
    """Sets that are too small for reliable figures."""


@dataclasses.dataclass(frozen=True)
class SettingResult:
    """Figures of the images of one setting."""

    method: str
    """Such as 'Baseline', 'Retrain', 'Linear', 'Rank'."""
    config: str
    """Such as 'α=1'; empty for methods without parameters."""
    content: BySet
    """Probability that an image shows its class: a classifier's probability, or VQAScore."""
    accuracy: BySet
    """1 if the classifier predicts the image's class, else 0."""
    distances: Mapping[str, Distances]
    """By network for the features."""
    quality: Mapping[str, BySet] = dataclasses.field(default_factory=dict)
    """By judge: 1 if an image is preferred to the baseline's, 0 if the latter is, 0.5 for neither; empty for the
    baseline."""

    @property
    def name(self) -> str:
        """Method and config."""
        return f"{self.method} {self.config}".rstrip()


@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean over images."""

    value: float
    error: float | None
    """Standard error, s / √n with the sample's deviation s; None for a single image."""
    images: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """Compute the mean of figures, at least one."""
        if len(values) == 1:
            return cls(values[0], None, 1)
        return cls(statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)), len(values))

    def __str__(self) -> str:
        """Format as in the paper: '97% ± 1.0', both in percent."""
        return f"{100 * self.value:.0f}%" + ("" if self.error is None else f" ± {100 * self.error:.1f}")


Cell = Mean | float | None


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table."""

    group: str
    """Heading over several columns."""
    name: str
    arrow: str
    """Direction of better values."""
    key: tuple[str, ...]
    """Path of attributes and keys in `SettingResult`, and of keys in JSON."""

    def cell(self, setting: SettingResult) -> Cell:
        """Return the setting's cell."""
        value: Any = setting
        for part in self.key:
            value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
        return value if value is None or isinstance(value, int | float) else Mean.of(value)


@dataclasses.dataclass(frozen=True)
class ImageTable:
    """Settings by row, figures by column."""

    columns: tuple[Column, ...]
    settings: tuple[SettingResult, ...]

    @property
    def rows(self) -> list[tuple[SettingResult, list[Cell]]]:
        """Each setting with its cells."""
        return [(setting, [column.cell(setting) for column in self.columns]) for setting in self.settings]

    @property
    def by_group(self) -> dict[str, ImageTable]:
        """A table of each group of columns."""
        groups = dict.fromkeys(column.group for column in self.columns)
        return {
            group: ImageTable(tuple(column for column in self.columns if column.group == group), self.settings)
            for group in groups
        }

    @property
    def heads(self) -> list[str]:
        """The paper's headings of the columns, preceded by their group if there are several groups."""
        several = len({column.group for column in self.columns}) > 1
        return [f"{f'{column.group}, ' if several else ''}{column.name} {column.arrow}" for column in self.columns]

    def markdown(self) -> str:
        """Format as Markdown."""
        lines = [["Method", "Config", *self.heads], ["---", "---", *["--:"] * len(self.columns)]]
        lines += [[row.method, row.config or "–", *map(cell_text, cells)] for row, cells in self.rows]
        return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)

    def json(self) -> list[dict[str, Any]]:
        """Each setting with unrounded figures; means have value, standard error and number of images."""
        result = []
        for setting, cells in self.rows:
            row: dict[str, Any] = {"method": setting.method, "config": setting.config}
            for column, cell in zip(self.columns, cells, strict=True):
                parent = row
                for part in column.key[:-1]:
                    parent = parent.setdefault(part, {})
                parent[column.key[-1]] = dataclasses.asdict(cell) if isinstance(cell, Mean) else cell
            for network, distances in setting.distances.items():
                row["distances"][network]["warnings"] = list(distances.warnings)
            result.append(row)
        return result


def tabulate(settings: Sequence[SettingResult], groups: Sequence[str] = GROUPS) -> ImageTable:
    """Create the table of some settings, with the columns of these groups."""
    return ImageTable(tuple(column for group in groups for column in _columns(settings, group)), tuple(settings))


def cell_text(cell: Cell) -> str:
    """Format a cell: '97% ± 1.0', a distance with one decimal (two below 10), or '–'."""
    if isinstance(cell, Mean):
        return str(cell)
    return "–" if cell is None else f"{cell:.{1 if abs(cell) >= 10 else 2}f}"


def by_set(values: Sequence[float], labels: Sequence[int], forget: Collection[int]) -> dict[str, list[float]]:
    """Group figures of images under 'retain' and 'forget', by the classes of the images."""
    result: dict[str, list[float]] = {name: [] for name in SETS}
    for value, label in zip(values, labels, strict=True):
        result["forget" if label in forget else "retain"].append(value)
    return result


def _columns(settings: Sequence[SettingResult], group: str) -> list[Column]:
    if group == "distances":
        networks = dict.fromkeys(network for setting in settings for network in setting.distances)
        return [
            Column(network, name, arrow, (group, network, key))
            for network in networks
            for key, (name, arrow) in _DISTANCES.items()
        ]
    judges = dict.fromkeys(judge for setting in settings for judge in setting.quality)
    paths = [(group, judge) for judge in judges] if group == "quality" else [(group,)]
    return [
        Column(", ".join((group.capitalize(), *path[1:])), name.capitalize(), arrow, (*path, name))
        for path in paths
        for name, arrow in zip(SETS, _BETTER[group], strict=True)
    ]
