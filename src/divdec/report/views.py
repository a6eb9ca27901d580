"""From scored results to plots: which results, which axes, which words. It draws nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from divdec.report.evaluation_plots import (
    LOOKS,
    RETRAIN,
    TARGET,
    Curves,
    Dot,
    Dots,
    Interval,
    Look,
    Plot,
    Series,
    shortened,
)
from divdec.report.measures import ATTACK_NAMES, AXES, CURVES, MEASURES
from divdec.report.scores import Row

RULES = {"linear": ("α", "α of the linear rule"), "rank": ("k", "k of the rank rule")}
# By what the best result is told, the first that the results have.
GOALS = {"tofu": ("agg", "agg_without_privacy"), "muse": ("verbmem_distance", "knowmem_distance")}
MOST_LONE = 5  # results beside sweeps that get a look of their own


@dataclasses.dataclass(frozen=True)
class View:
    """A section of plots of one kind."""

    kind: str
    """'scatter', 'curves', 'dots' or 'roc'."""
    title: str
    text: str
    plots: tuple[Plot, ...]
    key: tuple[tuple[str, Look], ...]
    """What each look stands for."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Results that are drawn alike."""

    name: str
    look: Look
    members: tuple[str, ...]
    rule: str | None = None
    """Of a sweep."""


def series_of(rows: Sequence[Row], *, apart: bool = False) -> list[Group]:
    """Target, retrained model, each sweep, and the other results, every one with its look.

    Args:
        rows: of a page.
        apart: gives every result its own look, whether it is of a sweep or not.
    """
    groups = [
        Group(role, look, (row.entry.name,))
        for role, look in (("target", TARGET), ("retrain", RETRAIN))
        for row in rows
        if row.entry.role == role
    ]
    own = [row.entry for row in rows if row.entry.role is None]
    if apart:
        found = [Group(entry.name, LOOKS[place % len(LOOKS)], (entry.name,)) for place, entry in enumerate(own)]
        by_name = {group.members[0]: group for group in [*groups, *found]}
        return [by_name[row.entry.name] for row in rows]
    families: dict[tuple[str, str], list[str]] = {}
    lone: list[str] = []
    for entry in own:
        if entry.setting is None:
            lone.append(entry.name)
        else:
            families.setdefault((entry.setting.rule, entry.setting.family), []).append(entry.name)
    several = {rule: sum(of == rule for of, _ in families) > 1 for rule, _ in families}
    parts: list[tuple[str, tuple[str, ...], str | None]] = [
        (f"{rule}, {family}" if several[rule] else rule, tuple(names), rule)
        for (rule, family), names in families.items()
    ]
    if len(lone) > MOST_LONE:
        parts.append(("other results", tuple(lone), None))
    else:
        parts += [(name, (name,), None) for name in lone]
    groups += [
        Group(name, LOOKS[place % len(LOOKS)], names, rule) for place, (name, names, rule) in enumerate(parts)
    ]
    return groups


def best_of(rows: Sequence[Row], suite: str) -> tuple[Row | None, str]:
    """The best of the results, and the figure by which it is the best; None where no result has such a figure."""
    own = [row for row in rows if row.entry.role is None]
    name = _first(GOALS[suite], own)
    sign = 1 if MEASURES[name].better == "higher" else -1
    scored = [(sign * value, row) for row in own if (value := row.values.get(name)) is not None]
    return (max(scored, key=lambda pair: pair[0])[1] if scored else None), name


def scatter_views(rows: Sequence[Row], suite: str, best: Row | None, best_by: str) -> list[View]:
    """What is kept over what is still remembered."""
    plots: list[Plot] = []
    absent: set[str] = set()
    for axes in AXES[suite]:
        x, y = (_first(names, rows) for names in axes)
        series = []
        for group in series_of(rows):
            found = [row for row in _sorted(rows, group) if _has(row, x) and _has(row, y)]
            dots = tuple(
                Dot(*(row.values[name] or 0.0 for name in (x, y)), row.intervals.get(x), row.intervals.get(y),
                    _value(row) if group.rule else shortened(row.entry.name, 18), best=row is best)
                for row in found
            )  # fmt: skip
            if dots:
                series.append(Series(group.name, group.look, dots))
        if any(one.look not in (TARGET, RETRAIN) for one in series):
            drawn = sum(len(one.dots) for one in series)
            absent |= {row.entry.name for row in rows if not (_has(row, x) and _has(row, y))}
            said = f"Scatter of {MEASURES[y].short} over {MEASURES[x].short} for {drawn} results. {_extremes(rows, x, y)}"
            plots.append(Plot(MEASURES[x].axis, MEASURES[y].axis, tuple(series), said))
    if not plots:
        return []
    words = ["Each point is a result; the goal is the retrained model."]
    if any(group.rule for group in series_of(rows)):
        words.append("Lines join the settings of a sweep in their order; numbers are α or k, as far as there is room.")
    if best is not None:
        words.append(f"The ring marks {best.entry.name}, the best by {MEASURES[best_by].short} on these same items.")
    if absent:
        words.append(f"{len(absent)} without these figures {'are' if len(absent) > 1 else 'is'} not drawn.")
    return [View("scatter", "The trade-off", " ".join(words), tuple(plots), _key(plots))]


def curve_views(rows: Sequence[Row], suite: str) -> list[View]:
    """Figures along α and along k."""
    views = []
    for rule, (sign, words) in RULES.items():
        groups = [group for group in series_of(rows) if group.rule == rule]
        if not any(len(group.members) > 1 for group in groups):
            continue
        names = {row.entry.name for row in rows} & {name for group in groups for name in group.members}
        members = [row for row in rows if row.entry.name in names]
        plots = []
        for alternatives in CURVES[suite]:
            name = _first(alternatives, members)
            series = tuple(
                Series(group.name, group.look, tuple(
                    Dot(row.entry.setting.value, row.values[name] or 0.0, None, row.intervals.get(name))
                    for row in _sorted(rows, group) if row.entry.setting and _has(row, name)
                ))
                for group in groups
            )  # fmt: skip
            series = tuple(one for one in series if one.dots)
            if max((len(one.dots) for one in series), default=0) < 2:
                continue
            levels = tuple(
                (look, value)
                for role, look in (("target", TARGET), ("retrain", RETRAIN))
                for row in rows
                if row.entry.role == role and (value := row.values.get(name)) is not None
            )
            said = f"{MEASURES[name].short} over {sign}. {_course(series, name, sign)}"
            plots.append(
                Curves(words, "", series, said, f"{MEASURES[name].short} {MEASURES[name].arrow}", levels, rule == "rank")
            )
        if plots:
            banded = any(dot.y_interval for plot in plots for one in plot.series for dot in one.dots)
            text = "Bands are the intervals of the tables." if banded else "Without items there are no bands."
            key = dict.fromkeys([*_key(plots), *(pair for plot in plots for pair in _levels(plot))])
            views.append(View("curves", f"Along {sign}", text, tuple(plots), tuple(key)))
    return views


def over_under_view(rows: Sequence[Row], suite: str) -> list[View]:
    """How far each attack's AUC lies from the retrained model's."""
    retrain = next((row for row in rows if row.entry.role == "retrain"), None)
    attacks = [name for name in ATTACK_NAMES if retrain is not None and _has(retrain, name)]
    shown = [row for row in rows if row is not retrain and any(_has(row, name) for name in attacks)]
    if retrain is None or not any(row.entry.role is None for row in shown):
        return []
    shown = [row for group in series_of(shown) for row in _sorted(shown, group)]
    series = []
    for place, name in enumerate(attacks):
        reference = retrain.values[name] or 0.0
        dots = tuple(
            Dot(value - reference, row_place, _moved(row.intervals.get(name), reference))
            for row_place, row in enumerate(shown)
            if (value := row.values.get(name)) is not None
        )
        if dots:
            series.append(Series(ATTACK_NAMES[name], LOOKS[place % len(LOOKS)], dots))
    far = [(sum(abs(dot.x) for dot in dots) / len(dots), row.entry.name) for place, row in enumerate(shown)
           if (dots := [dot for one in series for dot in one.dots if dot.y == place])]  # fmt: skip
    said = (
        f"For {len(shown)} results the AUC of {len(series)} membership attacks less the retrained model’s. On average "
        f"nearest to 0: {min(far)[1]} ({min(far)[0]:.2f}); farthest: {max(far)[1]} ({max(far)[0]:.2f})."
    )
    plot = Dots("AUC − the retrained model’s AUC", "", tuple(series), said, rows=tuple(row.entry.name for row in shown))
    text = (
        "An attack tells forget from holdout items; 0 is the AUC that it has on the retrained model. To the right the "
        "forget set is still recognised as trained on, to the left it is less likely than texts never seen should be."
    )
    key = (*_key([plot]), ("retrain", RETRAIN))
    return [View("dots", "Over- and under-unlearning", text, (plot,), key)]


def roc_views(rows: Sequence[Row], suite: str) -> list[View]:
    """The ROC of each attack, from items."""
    plots = []
    groups = {group.members[0]: group for group in series_of(rows, apart=True)}
    for attack, title in ATTACK_NAMES.items():
        series, told = [], []
        for row in rows:
            scores = [_scores(row, f"{attack}.{name}") for name in ("forget", "holdout")]
            if scores[0].size and scores[1].size:
                group = groups[row.entry.name]
                series.append(Series(group.name, group.look, tuple(Dot(x, y) for x, y in roc_points(*scores))))
                told.append(f"{group.name} {row.text(attack)}")
        if any(one.look not in (TARGET, RETRAIN) for one in series):
            said = f"ROC of the attack {title}; AUC: {', '.join(told)}."
            plots.append(Plot("false positive rate", "true positive rate", tuple(series), said, title))
    if not plots:
        return []
    text = (
        "A positive is an item taken for trained on: truly one of the forget set, falsely one of the holdout set. The "
        "nearer to the retrained model’s curve, the better; the dotted diagonal is an attack that tells nothing."
    )
    return [View("roc", "ROC of the membership attacks", text, tuple(plots), _key(plots))]


def roc_points(forget: np.ndarray, holdout: np.ndarray) -> list[tuple[float, float]]:
    """False and true positive rate at every threshold, an item being taken for trained on where its score is low.

    Args:
        forget: scores of the forget items, high for what was not trained on.
        holdout: of the holdout items.

    Returns:
        Points from (0, 0) to (1, 1); the area under them is `attack_auc`.
    """
    thresholds = np.unique(np.concatenate([forget, holdout]))
    rates = [
        np.concatenate([[0.0], np.searchsorted(np.sort(scores), thresholds, side="right") / len(scores)])
        for scores in (holdout, forget)
    ]
    return [(float(x), float(y)) for x, y in zip(*rates, strict=True)]


def _scores(row: Row, metric: str) -> np.ndarray:
    items = row.entry.results.items.get(metric) or {}
    values = [fields.get("score") for fields in items.values() if isinstance(fields, dict)]
    found = np.array([value for value in values if isinstance(value, int | float)], dtype=float)
    return found[np.isfinite(found)] if len(found) == len(items) else np.empty(0)


def _first(names: Sequence[str], rows: Sequence[Row]) -> str:
    """The first of these figures that at least half of the rows have, or else the one that most have."""
    counts = {name: sum(_has(row, name) for row in rows) for name in names}
    return next((name for name in names if 2 * counts[name] >= len(rows)), max(names, key=lambda name: counts[name]))


def _has(row: Row, name: str) -> bool:
    return row.values.get(name) is not None


def _sorted(rows: Sequence[Row], group: Group) -> list[Row]:
    members = [row for row in rows if row.entry.name in group.members]
    return sorted(members, key=lambda row: row.entry.setting.value if row.entry.setting else 0.0)


def _value(row: Row) -> str:
    return f"{row.entry.setting.value:g}" if row.entry.setting else ""


def _moved(interval: Interval | None, by: float) -> Interval | None:
    return (interval[0] - by, interval[1] - by) if interval else None


def _key(plots: Sequence[Plot]) -> tuple[tuple[str, Look], ...]:
    return tuple(dict.fromkeys((one.name, one.look) for plot in plots for one in plot.series))


def _levels(plot: Curves) -> list[tuple[str, Look]]:
    return [({TARGET: "target", RETRAIN: "retrain"}[look], look) for look, _ in plot.levels]


def _extremes(rows: Sequence[Row], x: str, y: str) -> str:
    """The references and the number of the others, in words."""
    found = [
        f"{row.entry.name}: {row.text(x)}, {row.text(y)}"
        for row in rows
        if row.entry.role and _has(row, x) and _has(row, y)
    ]
    return f"{'; '.join(found)}." if found else ""


def _course(series: Sequence[Series], name: str, sign: str) -> str:
    """Where each curve begins and ends, and where it is best, in words."""
    measure, told = MEASURES[name], []
    for one in series:
        first, last = one.dots[0], one.dots[-1]
        ends = f"{one.name}: {measure.text(first.y)} at {sign} = {first.x:g}, {measure.text(last.y)} at {last.x:g}"
        if measure.better in ("higher", "lower"):
            pick = max if measure.better == "higher" else min
            peak = pick(one.dots, key=lambda dot: dot.y)
            ends += f", {'highest' if pick is max else 'lowest'} {measure.text(peak.y)} at {peak.x:g}"
        told.append(f"{ends}.")
    return " ".join(told)
