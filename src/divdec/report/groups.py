"""Which results belong together on a page, how each group looks, and which result is the best. It draws nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from divdec.report.measures import GOALS, MEASURES
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
    """For each goal of a suite the result that comes nearest; None where no result has such a figure."""
    own = [row for row in rows if row.entry.role is None]
    found: list[Best | None] = []
    for alternatives in GOALS[suite]:
        name = first(alternatives, own)
        sign = 1 if MEASURES[name].better == "higher" else -1
        scored = [(sign * value, row) for row in own if (value := row.values.get(name)) is not None]
        found.append(Best(max(scored, key=lambda pair: pair[0])[1], name) if scored else None)
    return found


def first(names: Sequence[str], rows: Sequence[Row]) -> str:
    """The first of these figures that at least half of the rows have, or else the one that most have."""
    counts = {name: sum(has(row, name) for row in rows) for name in names}
    return next((name for name in names if 2 * counts[name] >= len(rows)), max(names, key=lambda name: counts[name]))


def has(row: Row, name: str) -> bool:
    """Whether the row has a value of this name."""
    return row.values.get(name) is not None
