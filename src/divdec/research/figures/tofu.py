"""TOFU in two figures: the best setting of each method as bars, and what is kept over what is forgotten."""

from __future__ import annotations

from divdec.report.measures import MEASURES
from divdec.report.plots import panels, points
from divdec.report.plots.palette import LINEAR, OTHERS, RANK, RETRAIN, TARGET, Look
from divdec.report.plots.panels import Bar
from divdec.report.plots.points import Dot, Plot, Series
from divdec.research.figures.drawn import Asked, Drawn, nothing
from divdec.research.figures.results import Result, best, results_of, sources_of, with_value

LOOKS: dict[str, Look] = {"target": TARGET, "retrain": RETRAIN, "linear": LINEAR, "rank": RANK}


def bars(asked: Asked) -> Drawn:
    """Agg of the best setting of each method, with its interval where there are items (paper, figure 1).

    Raises:
        UsageError: no result has an Agg.
    """
    from matplotlib.figure import Figure

    found = best(with_value(_results(asked, "tofu-bars"), "agg"), "agg")
    found.sort(key=lambda result: result.values["agg"] or 0.0)
    rows = [Bar(one.label, one.values["agg"] or 0.0, one.kind, one.intervals.get("agg")) for one in found]
    figure = Figure(figsize=(7.2, 1.0 + 0.29 * len(rows)), layout="constrained")
    axes = figure.subplots()
    panels.bars(axes, rows, f"Agg: harmonic mean of Mem, Priv and Utility, 0 to 1 ({MEASURES['agg'].better} is better)")
    title = "TOFU: the best setting of each method"
    axes.set_title(title)
    listed = ", ".join(f"{row.label} {row.value:.2f}" for row in reversed(rows))
    return Drawn(figure, title, f"Agg of each method's best setting by Agg: {listed}.", sources_of(found))


def scatter(asked: Asked) -> Drawn:
    """Utility over Mem: sweeps of Divergence Decoding as lines, of every other method its best setting.

    Raises:
        UsageError: no result has Mem and Utility.
    """
    from matplotlib.figure import Figure

    found = with_value(_results(asked, "tofu-scatter"), "mem", "utility")
    by = "agg" if any(one.values.get("agg") is not None for one in found) else "utility"
    shown = [one for one in found if one.rule is not None]
    shown += best([one for one in found if one.rule is None], by)
    figure = Figure(figsize=(7.2, 4.8), layout="constrained")
    axes = figure.subplots()
    title = "TOFU: what is kept over what is forgotten"
    plot = Plot(
        MEASURES["mem"].axis,
        MEASURES["utility"].axis,
        series(shown, "mem", "utility"),
        f"Utility over Mem of {len(shown)} results; numbers beside points are α and k.",
        title,
    )
    points.scatter(axes, plot)
    legend(axes, plot)
    return Drawn(figure, title, plot.description, sources_of(shown))


def series(results: list[Result], x: str, y: str) -> tuple[Series, ...]:
    """What a scatter is drawn from: other methods first, so that their names find room before a sweep's numbers."""
    groups: dict[tuple[str, Look], list[Result]] = {}
    ranks = {"other": 0, "reference": 1, "ours": 2}
    for one in sorted(results, key=lambda one: (ranks[one.kind], one.title, one.strength or 0.0)):
        look = LOOKS.get(one.method, OTHERS)
        name = one.title if one.kind != "other" else "other methods, the best setting of each"
        groups.setdefault((name, look), []).append(one)
    sweeps = [name for (name, look) in groups if look in (LINEAR, RANK)]
    looks = dict(zip(sweeps, _looks(sweeps), strict=True))
    return tuple(
        Series(
            name,
            looks.get(name, look),
            tuple(
                Dot(
                    one.values[x] or 0.0, one.values[y] or 0.0, one.intervals.get(x), one.intervals.get(y),
                    f"{one.strength:g}" if one.strength is not None else one.title if one.kind != "reference" else "",
                )
                for one in members
            ),
            joined=members[0].strength is not None,
        )
        for (name, look), members in groups.items()
    )  # fmt: skip


def legend(axes: object, plot: Plot) -> None:
    """A legend of a scatter below its axes, where it hides no point."""
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    handles, labels = axes.get_legend_handles_labels()
    figure = axes.get_figure(root=True)
    assert figure is not None
    seen = dict(zip(labels, handles, strict=True))
    figure.legend(list(seen.values()), list(seen), loc="outside lower center", ncols=3, fontsize=9, markerscale=0.7)


def _looks(names: list[str]) -> list[Look]:
    """Linear and rank sweeps in their own looks; further families in the others."""
    from divdec.report.plots.palette import LOOKS as ALL

    first = {"Linear DD": LINEAR, "Rank DD": RANK}
    free = [look for look in ALL if look not in (LINEAR, RANK)]
    taken: set[str] = set()
    looks = []
    for name in names:
        rule = name.partition(" (")[0]
        if rule in first and rule not in taken:
            taken.add(rule)
            looks.append(first[rule])
        else:
            looks.append(free[len(looks) % len(free)])
    return looks


def _results(asked: Asked, figure: str) -> list[Result]:
    found = results_of(asked, figure).get("tofu", [])
    if not found:
        raise nothing(asked.runs, figure, "results of TOFU")
    return found
