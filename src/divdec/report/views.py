"""From scored results to plots: which results, which axes, which words. It draws nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from divdec.report.groups import Best, Group, first, has, series_of
from divdec.report.measures import ATTACK_NAMES, AXES, CURVES, MEASURES, best_index
from divdec.report.plots.palette import LOOKS, RETRAIN, TARGET, Look
from divdec.report.plots.points import Curves, Dot, Dots, Interval, Plot, Series, shortened
from divdec.report.scores import Row

# Of each sweep what its values are, on an axis and in a heading.
RULES = {
    "linear": ("α", "α of the linear rule", "Along α"),
    "rank": ("k", "k of the rank rule", "Along k"),
    "scal": ("step", "step: parts of the forget set", "Over growing forget sets"),
    "sust": ("step", "step: requests so far", "Over successive requests"),
}


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


def scatter_views(rows: Sequence[Row], suite: str, bests: Sequence[Best | None]) -> list[View]:
    """What is kept over what is still remembered."""
    plots: list[Plot] = []
    absent: set[str] = set()
    ringed: list[Best] = []
    for x_names, y_names, goal in AXES[suite]:
        x, y, best = first(x_names, rows), first(y_names, rows), bests[goal]
        series = []
        for group in series_of(rows):
            found = [row for row in _sorted(rows, group) if has(row, x) and has(row, y)]
            dots = tuple(
                Dot(row.values[x] or 0.0, row.values[y] or 0.0, row.intervals.get(x), row.intervals.get(y),
                    label=_value(row) if group.rule else shortened(row.entry.name, 18),
                    best=best is not None and row is best.row)
                for row in found
            )  # fmt: skip
            if dots:
                series.append(Series(group.name, group.look, dots, joined=group.rule is not None))
        if all(one.look in (TARGET, RETRAIN) for one in series):
            continue
        ringed += [best] if best is not None and any(dot.best for one in series for dot in one.dots) else []
        absent |= {row.entry.name for row in rows if not (has(row, x) and has(row, y))}
        drawn = sum(len(one.dots) for one in series)
        said = f"Scatter of {MEASURES[y].short} over {MEASURES[x].short} for {drawn} results. {_references(rows, x, y)}"
        plots.append(Plot(MEASURES[x].axis, MEASURES[y].axis, tuple(series), said.strip()))
    if not plots:
        return []
    words = ["Each point is a result"]
    words[0] += "; the goal is the retrained model." if any(row.entry.role == "retrain" for row in rows) else "."
    if any(group.rule for group in series_of(rows)):
        words.append(
            "Lines join the settings of a sweep in their order; numbers are α, k or steps, as far as there is room."
        )
    if ringed:
        named = "; ".join(f"{best.row.entry.name}, {best.words}" for best in ringed)
        words.append(f"A ring marks the best on these same items: {named}.")
    if absent:
        words.append(f"{len(absent)} without these figures {'are' if len(absent) > 1 else 'is'} not drawn.")
    return [View("scatter", "The trade-off", " ".join(words), tuple(plots), _key(plots))]


def curve_views(rows: Sequence[Row], suite: str) -> list[View]:
    """Figures along α and along k."""
    views = []
    for rule, (sign, words, heading) in RULES.items():
        groups = [group for group in series_of(rows) if group.rule == rule]
        if not any(len(group.members) > 1 for group in groups):
            continue
        names = {row.entry.name for row in rows} & {name for group in groups for name in group.members}
        members = [row for row in rows if row.entry.name in names]
        plots = []
        for alternatives in CURVES[suite]:
            name = first(alternatives, members)
            series = tuple(
                Series(group.name, group.look, tuple(
                    Dot(row.entry.setting.strength or 0.0, row.values[name] or 0.0, None, row.intervals.get(name))
                    for row in _sorted(rows, group) if row.entry.setting and has(row, name)
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
                Curves(
                    words,
                    "",
                    series,
                    said,
                    f"{MEASURES[name].short} {MEASURES[name].arrow}",
                    levels,
                    log=rule == "rank",
                    whole=sign == "step",
                )
            )
        if plots:
            banded = any(dot.y_interval for plot in plots for one in plot.series for dot in one.dots)
            text = "Bands are the intervals of the tables." if banded else "Without items there are no bands."
            key = dict.fromkeys([*_key(plots), *(pair for plot in plots for pair in _levels(plot))])
            views.append(View("curves", heading, text, tuple(plots), tuple(key)))
    return views


def over_under_view(rows: Sequence[Row], suite: str) -> list[View]:
    """How far each attack's AUC lies from the retrained model's."""
    retrain = next((row for row in rows if row.entry.role == "retrain"), None)
    attacks = [name for name in ATTACK_NAMES if retrain is not None and has(retrain, name)]
    shown = [row for row in rows if row is not retrain and any(has(row, name) for name in attacks)]
    if retrain is None or not any(row.entry.role is None for row in shown):
        return []
    shown = [row for group in series_of(shown) for row in _sorted(shown, group)]
    series = []
    for place, name in enumerate(attacks):
        reference = retrain.values[name] or 0.0
        dots = tuple(
            Dot(value - reference, float(row_place), _moved(row.intervals.get(name), reference))
            for row_place, row in enumerate(shown)
            if (value := row.values.get(name)) is not None
        )
        if dots:
            series.append(Series(ATTACK_NAMES[name], LOOKS[place % len(LOOKS)], dots))
    far = [(sum(abs(dot.x) for dot in dots) / len(dots), row.entry.name) for place, row in enumerate(shown)
           if (dots := [dot for one in series for dot in one.dots if dot.y == place])]  # fmt: skip
    said = f"For {len(shown)} results the AUC of {len(series)} membership attacks less the retrained model’s."
    distances = [distance for distance, _ in far]
    nearest, farthest = best_index(distances, "lower"), best_index(distances, "higher")
    if len(far) > 1 and nearest is not None and farthest is not None:
        (near, near_name), (away, away_name) = far[nearest], far[farthest]
        said += f" On average nearest to 0: {near_name} ({near:.2f}); farthest: {away_name} ({away:.2f})."
    plot = Dots("AUC − the retrained model’s AUC", "", tuple(series), said, rows=tuple(row.entry.name for row in shown))
    text = (
        "An attack tells forget from holdout items; 0 is the AUC that it has on the retrained model. To the right the "
        "forget set is still recognised as trained on, to the left it is less likely than texts never seen should be."
    )
    key = (*_key([plot]), ("retrain", RETRAIN))
    return [View("dots", "Over- and under-unlearning", text, (plot,), key)]


def roc_views(rows: Sequence[Row], suite: str, remark: str = "") -> list[View]:
    """The ROC of each attack, from items.

    Args:
        rows: those that are shown.
        suite: of the results.
        remark: what a reader has to know of their choice.
    """
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
        "A positive is an item taken for trained on: truly one of the forget set, falsely one of the holdout set. "
        "The dotted diagonal is an attack that tells nothing."
    )
    if any(row.entry.role == "retrain" for row in rows):
        text += " The nearer to the retrained model’s curve, the better."
    text = f"{text} {remark}".strip()
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


def _sorted(rows: Sequence[Row], group: Group) -> list[Row]:
    members = [row for row in rows if row.entry.name in group.members]
    return sorted(members, key=lambda row: (row.entry.setting and row.entry.setting.strength) or 0.0)


def _value(row: Row) -> str:
    return f"{row.entry.setting.strength:g}" if row.entry.setting else ""


def _moved(interval: Interval | None, by: float) -> Interval | None:
    return (interval[0] - by, interval[1] - by) if interval else None


def _key(plots: Sequence[Plot]) -> tuple[tuple[str, Look], ...]:
    return tuple(dict.fromkeys((one.name, one.look) for plot in plots for one in plot.series))


def _levels(plot: Curves) -> list[tuple[str, Look]]:
    return [({TARGET: "target", RETRAIN: "retrain"}[look], look) for look, _ in plot.levels]


def _references(rows: Sequence[Row], x: str, y: str) -> str:
    """Where target and retrained model lie, in words."""
    found = [
        f"{row.entry.name}: {row.text(x)}, {row.text(y)}"
        for row in rows
        if row.entry.role and has(row, x) and has(row, y)
    ]
    return f"{'; '.join(found)}." if found else ""


def _course(series: Sequence[Series], name: str, sign: str) -> str:
    """Where each curve begins and ends, and where it is best, in words."""
    measure, told = MEASURES[name], []
    for one in series:
        begin, last = one.dots[0], one.dots[-1]
        ends = f"{one.name}: {measure.text(begin.y)} at {sign} = {begin.x:g}, {measure.text(last.y)} at {last.x:g}"
        if measure.better in ("higher", "lower"):
            peak = best_index([dot.y for dot in one.dots], measure.better, measure.digits)
            if peak is not None:
                extreme = "highest" if measure.better == "higher" else "lowest"
                ends += f", {extreme} {measure.text(one.dots[peak].y)} at {one.dots[peak].x:g}"
        told.append(f"{ends}.")
    return " ".join(told)
