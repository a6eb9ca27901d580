"""The page of steered image generation: tables by setting, what is shown of forget and retain classes, and samples.

It knows tables and images, not the models that made them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from divdec.imaging.codecs import Images
from divdec.imaging.files import data_url, grid, png
from divdec.imaging.results import ImageTable, Mean, SettingResult, cell_text
from divdec.report.page import write_page
from divdec.report.plots.canvas import PAGE, style, svg_text
from divdec.report.plots.palette import GRID, LOOKS
from divdec.runs import versions

REFERENCES = ("Baseline", "Retrain")
"""Methods that steer nothing."""
LOOKS_OF_SETS = {"retain": LOOKS[0], "forget": LOOKS[1]}
SMALL, LARGE = 48, 128  # pixels that a sample is shown with, at least and at most
_AXES = {"content": "probability of the class asked for", "accuracy": "images that show the class asked for"}


@dataclasses.dataclass(frozen=True)
class SampleRow:
    """Samples of one class."""

    name: str
    forget: bool
    """Whether the class is to be forgotten."""
    images: Images

    @property
    def url(self) -> str:
        """The samples side by side, as an address that holds them."""
        return data_url(png(grid([self.images], gap=max(1, self.images.shape[3] // 32))))

    @property
    def width(self) -> int:
        """Pixels that they are shown with side by side."""
        return len(self.images) * min(max(self.images.shape[3], SMALL), LARGE)

    @property
    def tiny(self) -> bool:
        """Whether their pixels shall be seen as squares."""
        return self.images.shape[3] < SMALL


@dataclasses.dataclass(frozen=True)
class Samples:
    """Samples of one setting, or of the real images: a row for each class, the forget classes first."""

    title: str
    rows: tuple[SampleRow, ...]

    @classmethod
    def of(
        cls,
        title: str,
        images: Images,
        asked: Sequence[int],
        classes: Sequence[str],
        forget: Collection[int],
        each: int = 8,
    ) -> Samples:
        """The first images of each class that has any.

        Args:
            title: the setting.
            images: all of its images.
            asked: the class of each, as a place among the classes.
            classes: their names.
            forget: the classes to forget.
            each: how many of a class.
        """
        order = sorted(set(asked), key=lambda place: (place not in forget, place))
        places = {place: [index for index, of in enumerate(asked) if of == place][:each] for place in order}
        return cls(title, tuple(SampleRow(classes[place], place in forget, images[places[place]]) for place in order))


def write_images(
    path: Path,
    *,
    title: str,
    lead: str,
    tables: Mapping[str, ImageTable],
    samples: Sequence[Samples],
    notes: Sequence[str] = (),
) -> None:
    """Write the page, whole or not at all.

    Args:
        path: the HTML file.
        title: its heading.
        lead: one paragraph on what was generated.
        tables: by caption; content or accuracy is drawn too.
        samples: one of each setting, shown in their order.
        notes: what a reader has to know; warnings of distances come by themselves.
    """
    settings = {setting.name: setting for table in tables.values() for setting in table.settings}
    warnings = [
        f"{name}: {warning}"
        for name, setting in settings.items()
        if setting.distances is not None
        for warning in setting.distances.warnings
    ]
    write_page(
        path,
        "images.html",
        title=title,
        lead=lead,
        tables=tables,
        samples=samples,
        references=REFERENCES,
        notes=[*notes, *warnings],
        cell_text=cell_text,
        groups=_groups,
        looks=LOOKS_OF_SETS,
        shown_svg=shown(list(settings.values())),
        footer=", ".join(f"{name} {version}" for name, version in versions().items() if version),
    )


def shown(settings: Sequence[SettingResult]) -> str:
    """How much retain and forget classes still show, a row for each setting, with standard errors.

    Returns:
        An `<svg>` element of content, or of accuracy where no setting has content; empty without both.
    """
    for measure, words in _AXES.items():
        rows = [(setting, means) for setting in settings if any(means := _means(setting, measure))]
        if rows:
            return _drawn(rows, words)
    return ""


def _drawn(rows: Sequence[tuple[SettingResult, Sequence[Mean | None]]], words: str) -> str:
    from matplotlib.figure import Figure

    with style("images-shown"):
        figure = Figure(figsize=(PAGE, 1.1 + 0.3 * len(rows)), layout="constrained")
        axes = figure.subplots()
        for row, (_, means) in enumerate(rows):
            ends = [100 * mean.value for mean in means if mean is not None]
            axes.plot((min(ends), max(ends)), (row, row), color=GRID, linewidth=2, zorder=1)
            for mean, look in zip(means, LOOKS_OF_SETS.values(), strict=True):
                if mean is not None:
                    axes.errorbar(
                        100 * mean.value, row, xerr=100 * (mean.error or 0), fmt=look.marker, color=look.colour,
                        markersize=6, elinewidth=1.4, zorder=3,
                    )  # fmt: skip
        axes.set_yticks(range(len(rows)), [setting.name for setting, _ in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(-2, 102)
        axes.set_xlabel(f"{words}, %")
        axes.tick_params(axis="y", length=0)
        axes.grid(True, axis="x")
        return svg_text(figure)


def _groups(table: ImageTable) -> list[tuple[str, int]]:
    """The groups of a table's columns, each with how many it has."""
    return [(group, len(list(columns))) for group, columns in itertools.groupby(table.columns, lambda one: one.group)]


def _means(setting: SettingResult, measure: str) -> list[Mean | None]:
    values = getattr(setting, measure) or {}
    return [Mean.of(values.get(name, ())) for name in LOOKS_OF_SETS]
