"""The page of a comparison of methods: a bar and its interval for each, leaks over attack prompts, and the whole grid.

It knows numbers and names, not how they came about.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from divdec.report.measures import MEASURES
from divdec.report.page import write_page
from divdec.report.plots import panels
from divdec.report.plots.canvas import PAGE, style, svg_text
from divdec.report.plots.palette import LOOKS, RETRAIN, TARGET
from divdec.report.plots.panels import Bar, Leaks
from divdec.runs import versions

SHOWN = ("agg", "mem", "priv", "utility")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of the page's tables."""

    title: str
    """The method, as the table calls it."""
    setting: str
    values: Mapping[str, float | None]
    intervals: Mapping[str, tuple[float, float]]
    seconds: float | None
    """Of training."""
    extra_bytes: float | None
    """Weights in memory beyond the target's."""
    time_ratio: float | None
    """Time per token relative to the target's."""
    failed: str | None
    ours: bool
    """Divergence Decoding rather than another method."""
    reference: bool

    def cell(self, name: str) -> str:
        """A value with its interval, as tables show it."""
        text = MEASURES[name].text(self.values.get(name))
        if name not in self.intervals:
            return text
        return f"{text} [{', '.join(map(MEASURES[name].text, self.intervals[name]))}]"

    @property
    def costs(self) -> tuple[str, str, str]:
        """Training, memory and time as tables show them."""
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
    best: Sequence[Entry],
    grid: Sequence[Entry],
    leaks: Mapping[str, Mapping[int, float]],
    notes: Sequence[str],
) -> None:
    """Write the page, whole or not at all.

    Args:
        path: the HTML file.
        title: its heading.
        lead: one paragraph on what was compared.
        best: the best setting of each method, references first.
        grid: every setting.
        leaks: Leak@k by method's title and k.
        notes: what a reader has to know.
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
        bars_svg=bars(best),
        leaks_svg=leak_curves(leaks, {entry.title: entry for entry in best}) if leaks else "",
        footer=", ".join(f"{name} {version}" for name, version in versions().items() if version),
    )


def bars(entries: Sequence[Entry]) -> str:
    """Agg of each method's best setting with its interval, the highest first.

    Returns:
        An `<svg>` element.
    """
    from matplotlib.figure import Figure

    scored = [entry for entry in entries if entry.values.get("agg") is not None]
    scored.sort(key=lambda entry: entry.values["agg"] or 0.0)
    rows = [
        Bar(
            f"{entry.title}  {entry.setting}".strip(),
            entry.values["agg"] or 0.0,
            "reference" if entry.reference else "ours" if entry.ours else "other",
            entry.intervals.get("agg"),
        )
        for entry in scored
    ]
    with style("methods-bars"):
        figure = Figure(figsize=(PAGE, 0.8 + 0.3 * len(rows)), layout="constrained")
        axes = figure.subplots()
        panels.bars(axes, rows, MEASURES["agg"].axis)
        return svg_text(figure)


def leak_curves(leaks: Mapping[str, Mapping[int, float]], entries: Mapping[str, Entry]) -> str:
    """Leak@k over k for the references and Divergence Decoding, the other methods in grey with their names.

    Returns:
        An `<svg>` element.
    """
    from matplotlib.figure import Figure

    looks, lines = iter(LOOKS), []
    for title, values in leaks.items():
        entry = entries.get(title)
        if entry is not None and entry.reference:
            look = TARGET if title == "Target" else RETRAIN
        else:
            look = next(looks) if entry is not None and entry.ours else None
        lines.append(Leaks(title, look, values))
    with style("methods-leaks"):
        figure = Figure(figsize=(PAGE, 3.9), layout="constrained")
        panels.leak_curves(figure.subplots(), lines)
        return svg_text(figure)
