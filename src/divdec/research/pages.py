"""Pages of experiments: the comparison of methods, and steered image generation."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from divdec.report.page import write_page
from divdec.report.scores import MEASURES
from divdec.report.style import GRID, LOOKS, PAGE_WIDTH, RETRAIN, TARGET, style, svg_text
from divdec.research.charts import Bar, LeakCurve, bars, leak_curves

if TYPE_CHECKING:
    from divdec.imaging.codecs import Images
    from divdec.imaging.results import ImageTable, Mean, SettingResult

SHOWN = ("agg", "mem", "priv", "utility")
REFERENCES = ("Baseline", "Retrain")
"""Settings of an image page that are not steered."""
SET_LOOKS = {"retain": LOOKS[0], "forget": LOOKS[1]}
SMALL, LARGE = 48, 128  # smallest and largest displayed size of a sample in pixels
IMAGE_MEASURES = {"content": "probability of the class asked for", "accuracy": "images that show the class asked for"}


@dataclasses.dataclass(frozen=True)
class MethodRow:
    """A row of the tables of a comparison."""

    title: str
    """Name of the method in tables."""
    setting: str
    values: Mapping[str, float | None]
    intervals: Mapping[str, tuple[float, float]]
    seconds: float | None
    """Training time."""
    extra_bytes: float | None
    """Memory of weights beyond the target's."""
    time_ratio: float | None
    """Time per token relative to the target's."""
    failed: str | None
    ours: bool
    """Divergence Decoding rather than another method."""
    reference: bool

    def cell(self, name: str) -> str:
        """Format a value with its interval."""
        text = MEASURES[name].text(self.values.get(name))
        if name not in self.intervals:
            return text
        return f"{text} [{', '.join(map(MEASURES[name].text, self.intervals[name]))}]"

    @property
    def costs(self) -> tuple[str, str, str]:
        """Training time, memory and time per token as text."""
        return (
            "–" if self.seconds is None else f"{self.seconds:.0f} s",
            "–" if self.extra_bytes is None else f"{self.extra_bytes / 2**20:+.1f} MiB",
            "–" if self.time_ratio is None else f"{self.time_ratio:.2f}×",
        )


def write_comparison(
    path: Path,
    *,
    title: str,
    lead: str,
    best: Sequence[MethodRow],
    grid: Sequence[MethodRow],
    leaks: Mapping[str, Mapping[int, float]],
    notes: Sequence[str],
) -> None:
    """Write the page of a comparison atomically.

    Args:
        path: the HTML file.
        title: heading.
        lead: first paragraph.
        best: the best setting of each method, references first.
        grid: all settings.
        leaks: Leak@k by method's title and k.
        notes: remarks.
    """
    write_page(
        path,
        "methods.html",
        title=title,
        lead=lead,
        best=best,
        grid=grid,
        shown=SHOWN,
        measures=MEASURES,
        notes=notes,
        bars_svg=_bars(best),
        leaks_svg=_leaks(leaks, {row.title: row for row in best}) if leaks else "",
    )


@dataclasses.dataclass(frozen=True)
class SampleRow:
    """Samples of one class."""

    name: str
    forget: bool
    """Whether the class is to be forgotten."""
    images: Images

    @property
    def url(self) -> str:
        """Data URL of the samples side by side."""
        from divdec.imaging.files import data_url, grid, png

        return data_url(png(grid([self.images], gap=max(1, self.images.shape[3] // 32))))

    @property
    def width(self) -> int:
        """Displayed width in pixels."""
        return len(self.images) * min(max(self.images.shape[3], SMALL), LARGE)

    @property
    def tiny(self) -> bool:
        """Whether pixels are displayed as squares."""
        return self.images.shape[3] < SMALL


@dataclasses.dataclass(frozen=True)
class Samples:
    """Samples of one setting or of the real images: a row for each class, the forget classes first."""

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
        """Take the first images of each class that has any.

        Args:
            title: the setting.
            images: all of its images.
            asked: class of each image, as an index of `classes`.
            classes: names of the classes.
            forget: classes to forget.
            each: number of images for each class.
        """
        order = sorted(set(asked), key=lambda index: (index not in forget, index))
        chosen = {index: [row for row, of in enumerate(asked) if of == index][:each] for index in order}
        return cls(title, tuple(SampleRow(classes[index], index in forget, images[chosen[index]]) for index in order))


def write_images(
    path: Path,
    *,
    title: str,
    lead: str,
    tables: Mapping[str, ImageTable],
    samples: Sequence[Samples],
    notes: Sequence[str] = (),
) -> None:
    """Write the page of an image experiment atomically.

    Args:
        path: the HTML file.
        title: heading.
        lead: first paragraph.
        tables: tables by caption; content or accuracy is plotted too.
        samples: samples by setting, in the order of the page.
        notes: remarks; warnings of distances are added.
    """
    from divdec.imaging.results import cell_text

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
        groups=_column_groups,
        looks=SET_LOOKS,
        shown_svg=content_plot(list(settings.values())),
    )


def content_plot(settings: Sequence[SettingResult]) -> str:
    """Plot how often retain and forget classes are still shown, a row for each setting, with standard errors.

    Returns:
        An `<svg>` element of content, or of accuracy if no setting has content; empty without both.
    """
    for measure, label in IMAGE_MEASURES.items():
        rows = [(setting.name, means) for setting in settings if any(means := _means(setting, measure))]
        if rows:
            return _draw_content(rows, label)
    return ""


def _bars(rows: Sequence[MethodRow]) -> str:
    """Agg of each method's best setting with its interval, the highest at the top."""
    from matplotlib.figure import Figure

    entries = [
        Bar(
            f"{row.title}  {row.setting}".strip(),
            agg,
            "reference" if row.reference else "ours" if row.ours else "other",
            row.intervals.get("agg"),
        )
        for row in rows
        if (agg := row.values.get("agg")) is not None
    ]
    with style("methods-bars"):
        figure = Figure(figsize=(PAGE_WIDTH, 0.8 + 0.3 * len(entries)), layout="constrained")
        bars(figure.subplots(), sorted(entries, key=lambda bar: bar.value), MEASURES["agg"].axis)
        return svg_text(figure)


def _leaks(leaks: Mapping[str, Mapping[int, float]], rows: Mapping[str, MethodRow]) -> str:
    """Leak@k of references and Divergence Decoding in colour, of other methods in grey."""
    from matplotlib.figure import Figure

    looks, curves = iter(LOOKS), []
    for title, shares in leaks.items():
        row = rows.get(title)
        if row is not None and row.reference:
            look = TARGET if title == "Target" else RETRAIN
        else:
            look = next(looks) if row is not None and row.ours else None
        curves.append(LeakCurve(title, look, shares))
    with style("methods-leaks"):
        figure = Figure(figsize=(PAGE_WIDTH, 3.9), layout="constrained")
        leak_curves(figure.subplots(), curves)
        return svg_text(figure)


def _draw_content(rows: Sequence[tuple[str, Sequence[Mean | None]]], label: str) -> str:
    from matplotlib.figure import Figure

    with style("images-shown"):
        figure = Figure(figsize=(PAGE_WIDTH, 1.1 + 0.3 * len(rows)), layout="constrained")
        axes = figure.subplots()
        for index, (_, means) in enumerate(rows):
            values = [100 * mean.value for mean in means if mean is not None]
            axes.plot((min(values), max(values)), (index, index), color=GRID, linewidth=2, zorder=1)
            for mean, look in zip(means, SET_LOOKS.values(), strict=True):
                if mean is not None:
                    axes.errorbar(
                        100 * mean.value, index, xerr=100 * (mean.error or 0), fmt=look.marker, color=look.colour,
                        markersize=6, elinewidth=1.4, zorder=3,
                    )  # fmt: skip
        axes.set_yticks(range(len(rows)), [name for name, _ in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(-2, 102)
        axes.set_xlabel(f"{label}, %")
        axes.tick_params(axis="y", length=0)
        axes.grid(True, axis="x")
        return svg_text(figure)


def _column_groups(table: ImageTable) -> list[tuple[str, int]]:
    """The groups of a table's columns with their widths."""
    groups = itertools.groupby(table.columns, lambda column: column.group)
    return [(group, len(list(columns))) for group, columns in groups]


def _means(setting: SettingResult, measure: str) -> list[Mean | None]:
    from divdec.imaging.results import Mean

    values = getattr(setting, measure) or {}
    return [Mean.of(values.get(name, ())) for name in SET_LOOKS]
