"""The best score of each rule by the size of the auxiliaries (paper, figure model scaling)."""

from __future__ import annotations

import re

from divdec.report.measures import MEASURES
from divdec.report.plots.palette import PAPER
from divdec.report.plots.points import ends
from divdec.research.figures.drawn import Asked, Drawn, nothing
from divdec.research.figures.results import Result, best_one, results_of, sources_of
from divdec.research.figures.sweeps import MEASURES_OF, NAMES, ORDER, RULE_LOOKS, apart

SIZE = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)([bm])(?![a-z])", re.IGNORECASE)
NGRAMS = re.compile(r"n-?gram|bigram|trigram", re.IGNORECASE)


def sizes(asked: Asked) -> Drawn:
    """A panel for each score, a line for each rule; n-grams stand at 0.

    Sizes are read from the names of the folders: `1B-alpha-1.5`, `pair-350M/linear-2`, `dd_trigram/topk-1`.

    Raises:
        UsageError: no folder of steered results is called after a size.
    """
    from matplotlib.figure import Figure

    found = results_of(asked, "sizes")
    panels: list[tuple[str, dict[str, list[tuple[float, Result]]]]] = []
    for suite in ORDER:
        for name in MEASURES_OF[suite]:
            lines = {rule: _best_by_size(found.get(suite, []), rule, name) for rule in RULE_LOOKS}
            if any(lines.values()):
                panels.append((name, lines))
    if not panels:
        needs = "steered results in folders called after the auxiliaries' size, such as 1B-alpha-1.5 or trigram"
        raise nothing(asked.runs, "sizes", needs)
    figure = Figure(
        figsize=(4.7 * min(len(panels), 2) + 0.3, 3.4 * ((len(panels) + 1) // 2) + 0.4), layout="constrained"
    )
    apart(figure)
    grid = figure.subplots((len(panels) + 1) // 2, min(len(panels), 2), squeeze=False).flatten()
    drawn: list[Result] = []
    for axes, (name, lines) in zip(grid, panels, strict=False):
        for rule, rows in lines.items():
            if not rows:
                continue
            look = RULE_LOOKS[rule]
            values = [one.values[name] or 0.0 for _, one in rows]
            axes.plot(
                [size for size, _ in rows], values, color=look.colour, marker=look.marker, linestyle=look.dash,
                markersize=6.5, markeredgecolor=PAPER, markeredgewidth=0.6, label=f"{rule} rule",
            )  # fmt: skip
            for (size, one), value in zip(rows, values, strict=True):
                axes.errorbar(size, value, yerr=ends(value, one.intervals.get(name)), fmt="none", ecolor=look.colour)
                drawn.append(one)
        _write_settings(axes, lines, name)
        title, label = NAMES[name]
        axes.set_title(title)
        axes.set_ylabel(f"{label} ({MEASURES[name].better} is better)", fontsize=9.5)
        axes.set_xlabel("parameters of each auxiliary, 10⁹ (0: n-grams)", fontsize=9.5)
        there = sorted({size for rows in lines.values() for size, _ in rows})
        axes.set_xticks(there, [f"{size:g}" for size in there])
        axes.grid(True)
        axes.margins(0.18, 0.22)
        axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))
        axes.legend(fontsize=8.5, loc="best")
    for axes in grid[len(panels) :]:
        axes.remove()
    title = "The best setting by the auxiliaries' size"
    text = "Of each rule and size of the auxiliaries the best setting, which is named at its point."
    return Drawn(figure, title, text, sources_of(drawn))


def size_of(family: str) -> float | None:
    """Parameters in 10⁹ that a name tells, 0 of n-grams; None where it tells none."""
    if NGRAMS.search(family):
        return 0.0
    told = SIZE.search(family)
    return None if told is None else float(told[1]) / (1000 if told[2] in "mM" else 1)


def _best_by_size(results: list[Result], rule: str, name: str) -> list[tuple[float, Result]]:
    by_size: dict[float, list[Result]] = {}
    for one in results:
        size = size_of(one.family)
        if one.rule == rule and one.values.get(name) is not None and size is not None:
            by_size.setdefault(size, []).append(one)
    return [(size, best_one(own, name)) for size, own in sorted(by_size.items())]


def _write_settings(axes: object, lines: dict[str, list[tuple[float, Result]]], name: str) -> None:
    """The best setting at each point, above the higher of two points and below the lower."""
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    for rule, rows in lines.items():
        other = {size: one.values[name] or 0.0 for key, own in lines.items() if key != rule for size, one in own}
        for size, one in rows:
            value = one.values[name] or 0.0
            above = value >= other.get(size, -1.0)
            axes.annotate(
                one.setting, (size, value), xytext=(0, 8 if above else -8), textcoords="offset points", ha="center",
                va="bottom" if above else "top", fontsize=8.5, color=RULE_LOOKS[rule].colour,
                bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.8, "alpha": 0.8},
            )  # fmt: skip
