"""The page of a comparison of methods: a bar and its interval for each, leaks over attack prompts, and the whole grid.

It knows numbers and names, not how they came about.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from divdec.report.evaluation_plots import LOOKS, RETRAIN, TARGET, TEXT
from divdec.report.measures import MEASURES
from divdec.report.page import write_page
from divdec.report.plots import open_frame, style, svg_text
from divdec.runs import versions

SHOWN = ("agg", "mem", "priv", "utility")
OURS, OTHERS = "#0072B2", "#8c959f"


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
    with style("methods-bars"):
        figure = Figure(figsize=(7.2, 0.8 + 0.3 * len(scored)), layout="constrained")
        axes = figure.subplots()
        for place, entry in enumerate(scored):
            value = entry.values["agg"] or 0.0
            colour = TEXT if entry.reference else OURS if entry.ours else OTHERS
            hatch = "///" if entry.ours else None  # told apart in grey too
            axes.barh(place, value, color=colour, alpha=0.85, hatch=hatch, edgecolor="white", height=0.7)
            if (ends := entry.intervals.get("agg")) is not None:
                axes.plot(ends, (place, place), color=TEXT, linewidth=1.4, solid_capstyle="butt")
        labels = [f"{entry.title}  {entry.setting}".strip() for entry in scored]
        axes.set_yticks(range(len(scored)), labels)
        axes.set_xlim(0, 1.02)
        axes.set_xlabel(MEASURES["agg"].axis)
        axes.grid(True, axis="x", color="#d0d7de", linewidth=0.6)
        axes.set_axisbelow(True)
        open_frame(axes)
        return svg_text(figure)


def leak_curves(leaks: Mapping[str, Mapping[int, float]], entries: Mapping[str, Entry]) -> str:
    """Leak@k over k for the references and Divergence Decoding, the other methods in grey with their names.

    Returns:
        An `<svg>` element.
    """
    from matplotlib.figure import Figure

    with style("methods-leaks"):
        figure = Figure(figsize=(7.2, 4.4), layout="constrained")
        axes = figure.subplots()
        looks = iter(LOOKS)
        for title, values in leaks.items():
            entry = entries.get(title)
            reference, ours = entry is not None and entry.reference, entry is not None and entry.ours
            look = (TARGET if title == "Target" else RETRAIN) if reference else next(looks) if ours else None
            ks = sorted(values)
            shares = [values[k] for k in ks]
            if look is None:
                axes.plot(ks, shares, color="#afb8c1", linewidth=1, zorder=1)
                axes.annotate(
                    title, (ks[-1], shares[-1]), xytext=(4, 0), textcoords="offset points", fontsize=7.5,
                    color="#57606a", va="center",
                )  # fmt: skip
            else:
                axes.plot(
                    ks, shares, color=look.colour, linestyle=look.dash, marker=look.marker, markersize=6, linewidth=1.8,
                    label=title, zorder=3,
                )  # fmt: skip
        axes.set_xscale("log")
        ticks = sorted({k for values in leaks.values() for k in values})
        axes.set_xticks(ticks, [str(k) for k in ticks])
        axes.minorticks_off()
        axes.set_xlabel("k, attack prompts a question")
        axes.set_ylabel("share of questions that leak (lower is better)")
        axes.set_ylim(-0.02, 1.02)
        axes.grid(True, color="#d0d7de", linewidth=0.6)
        axes.legend(frameon=False, loc="upper left")
        open_frame(axes)
        return svg_text(figure)
