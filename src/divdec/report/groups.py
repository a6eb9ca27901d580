"""Which results belong together on a page, how each group looks, and which result is the best. It draws nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from divdec.report.measures import GOALS, MEASURES, best_index, no_best
from divdec.report.plots.palette import LOOKS, RETRAIN, TARGET, Look
from divdec.report.scores import Row

MOST_LONE = 5  # results beside sweeps that get a look of their own


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
            families.setdefault((entry.setting.rule or "", entry.setting.family), []).append(entry.name)
    several = {rule: sum(of == rule for of, _ in families) > 1 for rule, _ in families}
    parts: list[tuple[str, tuple[str, ...], str | None]] = [
        (f"{rule}, {family}" if several[rule] else rule, tuple(names), rule)
        for (rule, family), names in families.items()
    ]
    if len(lone) > MOST_LONE:
        parts.append(("other results", tuple(lone), None))
    else:
        parts += [(name, (name,), None) for name in lone]
    groups += [Group(name, LOOKS[place % len(LOOKS)], names, rule) for place, (name, names, rule) in enumerate(parts)]
    return groups


@dataclasses.dataclass(frozen=True)
class Best:
    """The best of the results by one figure."""

    row: Row
    by: str

    @property
    def words(self) -> str:
        """What it is, without its name."""
        how = "highest" if MEASURES[self.by].better == "higher" else "lowest"
        return f"{how} {MEASURES[self.by].short}"


def best_of(rows: Sequence[Row], suite: str) -> list[Best | None]:
    """For each goal of a suite the best of the results; None where none is, see `measures.best_index`."""
    own = [row for row in rows if row.entry.role is None]
    found: list[Best | None] = []
    for name, values in _goals(own, suite):
        best = best_index(values, MEASURES[name].better, MEASURES[name].digits)
        found.append(None if best is None else Best(own[best], name))
    return found


def without_best(rows: Sequence[Row], suite: str) -> list[str]:
    """The goals that results have figures of, but no best result, in words."""
    own = [row for row in rows if row.entry.role is None]
    return [
        no_best(values, name, "result")
        for (name, values), best in zip(_goals(own, suite), best_of(rows, suite), strict=True)
        if best is None and any(value is not None for value in values)
    ]


def _goals(own: Sequence[Row], suite: str) -> list[tuple[str, list[float | None]]]:
    names = [first(alternatives, own) for alternatives in GOALS[suite]]
    return [(name, [row.values.get(name) for row in own]) for name in names]


def first(names: Sequence[str], rows: Sequence[Row]) -> str:
    """The first of these figures that at least half of the rows have, or else the one that most have."""
    counts = {name: sum(has(row, name) for row in rows) for name in names}
    return next((name for name in names if 2 * counts[name] >= len(rows)), max(names, key=lambda name: counts[name]))


def has(row: Row, name: str) -> bool:
    """Whether the row has a value of this name."""
    return row.values.get(name) is not None
