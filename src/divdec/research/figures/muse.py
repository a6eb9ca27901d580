"""MUSE as a scatter: what is known of the retain set over what is remembered of the forget set."""

from __future__ import annotations

from divdec.evaluation.aggregate import FORGET_KNOWMEM, RETAIN_KNOWMEM, VERBMEM
from divdec.report.measures import MEASURES
from divdec.report.plots import points
from divdec.report.plots.points import Plot
from divdec.research.figures.drawn import Asked, Drawn, nothing
from divdec.research.figures.results import best, results_of, sources_of, with_value
from divdec.research.figures.tofu import legend, series

PANELS = (
    (VERBMEM, "verbmem_distance", "Verbatim memorization"),
    (FORGET_KNOWMEM, "knowmem_distance", "Knowledge"),
)


def scatter(asked: Asked) -> Drawn:
    """Two panels; the goal is the retrained model (paper, figure MUSE Results).

    Of methods other than Divergence Decoding the setting is shown that lies nearest to the retrained model, or, where
    target or retrained model are absent, every setting.

    Raises:
        UsageError: no result has what an axis shows.
    """
    from matplotlib.figure import Figure

    found = results_of(asked, "muse-scatter").get("muse", [])
    if not found:
        raise nothing(asked.runs, "muse-scatter", "results of MUSE")
    panels = []
    for x, distance, title in PANELS:
        there = [one for one in found if one.values.get(x) is not None and one.values.get(RETAIN_KNOWMEM) is not None]
        others = [one for one in there if one.kind == "other"]
        nearest = best(others, distance) or others
        if there:
            panels.append((x, title, [one for one in there if one.kind != "other"] + nearest))
    if not panels:
        with_value(found, VERBMEM, RETAIN_KNOWMEM)
    figure = Figure(figsize=(4.9 * len(panels) + 0.6, 5.2), layout="constrained")
    axes = list(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0])
    title = "MUSE: the nearer to the retrained model, the better"
    figure.suptitle(title, fontsize=11.5)
    plots = [
        Plot(
            MEASURES[x].axis,
            MEASURES[RETAIN_KNOWMEM].axis if place == 0 else "",
            series(results, x, RETAIN_KNOWMEM),
            "",
            name,
        )
        for place, (x, name, results) in enumerate(panels)
    ]
    legend_of = [one for plot in plots for one in plot.series]
    for own, plot in zip(axes, plots, strict=True):
        points.scatter(own, plot)
    legend(axes[0], Plot("", "", tuple(legend_of), ""))
    shown = [one for *_, results in panels for one in results]
    text = f"Retain knowmem over {' and '.join(name.lower() for _, name, _ in panels)} of {len(set(map(id, shown)))} "
    return Drawn(figure, title, f"{text}results; numbers beside points are α and k.", sources_of(shown))
