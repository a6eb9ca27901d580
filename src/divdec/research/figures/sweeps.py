"""Scores along α and along k: the 2×2 of the paper, and over- and under-unlearning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from divdec.evaluation.aggregate import ATTACKS
from divdec.report.measures import ATTACK_NAMES, MEASURES
from divdec.report.plots.palette import LINEAR, LOOKS, PAPER, RANK, RETRAIN, TEXT, Look
from divdec.report.plots.points import ends, log_ticks
from divdec.research.figures.drawn import Asked, Drawn, nothing
from divdec.research.figures.results import OWN, Result, results_of, sources_of, with_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEASURES_OF = {"tofu": ("agg", "agg_without_privacy"), "muse": ("verbmem_distance", "knowmem_distance")}
NAMES = {
    "agg": ("TOFU, aggregate score", "Agg, 0 to 1"),
    "agg_without_privacy": ("TOFU, without privacy", "Agg w/o Priv, 0 to 1"),
    "verbmem_distance": ("MUSE, verbatim memorization", "distance to retrain,\n% of the target's"),
    "knowmem_distance": ("MUSE, knowledge", "distance to retrain,\n% of the target's"),
}
WORDS = {"linear": "α of the linear rule", "rank": "k of the rank rule"}
RULE_LOOKS = {"linear": LINEAR, "rank": RANK}
ORDER = ("muse", "tofu")


def strength(asked: Asked) -> Drawn:
    """Each score over α (lower axis) and over k (upper axis), MUSE at the left, TOFU at the right (paper, hp_2x2).

    A score that no two settings of one rule have is left out.

    Raises:
        UsageError: there is no such score.
    """
    from matplotlib.figure import Figure

    found = {suite: own for suite, own in results_of(asked, "strength").items() if _sweeps(own)}
    if not found:
        raise nothing(asked.runs, "strength", "results of at least two settings of one rule")
    shown = {(suite, name) for suite, own in found.items() for name in MEASURES_OF[suite] if _sweeps(own, name)}
    if not shown:
        steered = [one for own in found.values() for family in _sweeps(own).values() for one in family]
        with_value(steered, MEASURES_OF["tofu" if "tofu" in found else "muse"][0])
        raise nothing(asked.runs, "strength", "scores of at least two settings of one rule")
    suites = [suite for suite in ORDER if suite in dict(shown)]
    figure = Figure(figsize=(4.9 * len(suites) + 0.3, 6.8), layout="constrained")
    apart(figure)
    grid = figure.subplots(2, len(suites), squeeze=False)
    drawn: list[Result] = []
    for column, suite in enumerate(suites):
        for row, name in enumerate(MEASURES_OF[suite]):
            title, label = NAMES[name]
            retrain = next((one.values.get(name) for one in found[suite] if one.method == "retrain"), None)
            level = None if suite == "muse" else retrain  # the distance of the retrained model is the axis' 0
            axes = grid[row][column]
            if (suite, name) not in shown:
                axes.remove()
                continue
            drawn += _twin(axes, _sweeps(found[suite], name), name, level)
            axes.set_title(title, pad=8)
            axes.set_ylabel(f"{label} ({MEASURES[name].better} is better)", fontsize=9.5)
            if suite == "muse":
                axes.set_ylim(bottom=0)
    _key(figure, drawn, level=RETRAIN if "tofu" in suites else None)
    title = "Scores along the strength of steering"
    text = (
        f"Scores of {' and '.join(suites).upper()} along α and k; bands are bootstrap intervals where there are items."
    )
    absent = [NAMES[name][0] for suite in suites for name in MEASURES_OF[suite] if (suite, name) not in shown]
    if absent:
        text += f" Left out, for no two settings have it: {'; '.join(absent)}."
    return Drawn(figure, title, text, sources_of(drawn))


def over_under(asked: Asked) -> Drawn:
    """How far membership attacks tell the forget set otherwise than on the retrained model (paper, figure privacy).

    Upward is over-unlearned in every panel: MUSE's PrivLeak as it is, of TOFU's attacks the retrained model's AUC less
    the AUC.

    Raises:
        UsageError: there are no two settings of one rule with such figures.
    """
    from matplotlib.figure import Figure

    found = results_of(asked, "over-under")
    lines: dict[str, dict[str, Callable[[Result], float | None]]] = {}
    if any(one.values.get("privleak") is not None and one.rule for one in found.get("muse", [])):
        lines["muse"] = {"PrivLeak": lambda one: one.values.get("privleak")}
    retrain = next((one for one in found.get("tofu", []) if one.method == "retrain"), None)
    if retrain is not None and any(one.rule and one.values.get(ATTACKS[0]) is not None for one in found["tofu"]):
        lines["tofu"] = {ATTACK_NAMES[name]: _less(retrain, name) for name in ATTACKS}

    def families_of(suite: str, name: str, rule: str) -> dict[str, list[Result]]:
        return _families([one for one in found[suite] if lines[suite][name](one) is not None], rule)

    measured = {(suite, rule) for suite, own in lines.items() for rule in WORDS
                if any(families_of(suite, name, rule) for name in own)}  # fmt: skip
    if not measured:
        needs = "settings of one rule with MUSE's PrivLeak, or with TOFU's attacks and those on the retrained model"
        raise nothing(asked.runs, "over-under", needs)
    suites = [suite for suite in ORDER if any((suite, rule) in measured for rule in WORDS)]
    rules = [rule for rule in WORDS if any((suite, rule) in measured for suite in suites)]
    figure = Figure(figsize=(4.9 * len(suites) + 0.3, 3.3 * len(rules) + 0.6), layout="constrained")
    apart(figure)
    grid = figure.subplots(len(rules), len(suites), squeeze=False, sharey="col")
    drawn: list[Result] = []
    labels = {
        "muse": ("MUSE", "PrivLeak, % (0 is best)"),
        "tofu": ("TOFU", "AUC on the retrained model − AUC\n(0 is best)"),
    }
    for column, suite in enumerate(suites):
        for row, rule in enumerate(rules):
            axes, families = grid[row][column], dict[str, list[Result]]()
            if (suite, rule) not in measured:
                axes.remove()
                continue
            axes.axhline(0, color=RETRAIN.colour, linestyle=RETRAIN.dash, linewidth=1.6)
            for place, (name, value) in enumerate(lines[suite].items()):
                own = families_of(suite, name, rule)
                families |= own
                for number, family in enumerate(own.values()):
                    look, xs = LOOKS[place], [one.strength or 0.0 for one in family]
                    axes.plot(
                        xs, [value(one) or 0.0 for one in family], color=look.colour, marker=look.marker, markersize=5,
                        linestyle=look.dash, markeredgecolor=PAPER, markeredgewidth=0.5,
                        alpha=1 if not number else 0.45, label=name if not number else None,
                    )  # fmt: skip
                    drawn += family
            axes.set_xlabel(WORDS[rule], fontsize=9.5)
            strengths = sorted({one.strength or 0.0 for family in families.values() for one in family})
            if rule == "rank":
                log_ticks(axes, strengths)
            name, label = labels[suite]
            family_names = "; pale: ".join(filter(None, families))
            axes.set_title(f"{name}{f' ({family_names})' if family_names else ''}")
            axes.set_ylabel(label, fontsize=9.5)
            axes.grid(True)
            axes.margins(y=0.16)
            for y, words, side in ((0.985, "↑ over-unlearned", "top"), (0.015, "↓ under-unlearned", "bottom")):
                axes.annotate(
                    words, (0.99, y), xycoords="axes fraction", ha="right", va=side, fontsize=8.5, color=TEXT,
                    bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.5, "alpha": 0.8},
                )  # fmt: skip
    for column, suite in enumerate(suites):
        row = next(row for row, rule in enumerate(rules) if (suite, rule) in measured)
        if len(lines[suite]) > 1:
            grid[row][column].legend(title="attack", fontsize=8.5, title_fontsize=8.5, loc="upper left")
    title = "Over- and under-unlearning"
    text = "Membership attacks along α and k, relative to the retrained model, which is the line at 0."
    return Drawn(figure, title, text, sources_of(drawn))


def apart(figure: Figure) -> None:
    """Room between panels, for an axis' label belongs to the panel at its right."""
    engine: Any = figure.get_layout_engine()
    engine.set(wspace=0.06, hspace=0.05)


def _twin(axes: Axes, sweeps: dict[str, list[Result]], name: str, level: float | None) -> list[Result]:
    """One score along α below and along k above, each axis in the colour of its line."""
    rules = [rule for rule in WORDS if any(own[0].rule == rule for own in sweeps.values())]
    both, drawn = len(rules) > 1, []
    if level is not None:
        axes.axhline(level, color=RETRAIN.colour, linestyle=RETRAIN.dash, linewidth=1.6)
    for rule in rules:
        above = both and rule == "rank"
        own_axes = axes.twiny() if above else axes
        strengths: set[float] = set()
        families = [family for family in sweeps.values() if family[0].rule == rule]
        for number, family in enumerate(families):
            look = _look(rule, number)
            rows = [(one, value) for one in family if (value := one.values.get(name)) is not None]
            for one, value in rows:
                own_axes.errorbar(
                    one.strength or 0.0, value, yerr=ends(value, one.intervals.get(name)), fmt="none",
                    ecolor=look.colour, elinewidth=1.2,
                )  # fmt: skip
            own_axes.plot(
                [one.strength or 0.0 for one, _ in rows], [value for _, value in rows], color=look.colour,
                marker=look.marker, markersize=5, linestyle=look.dash, markeredgecolor=PAPER, markeredgewidth=0.5,
                linewidth=1.6,
            )  # fmt: skip
            strengths |= {one.strength or 0.0 for one, _ in rows}
            drawn += [one for one, _ in rows]
        if rule == "rank" and strengths:
            log_ticks(own_axes, sorted(strengths))
        colour = RULE_LOOKS[rule].colour
        own_axes.set_xlabel(WORDS[rule], color=colour, fontsize=9.5)
        own_axes.tick_params(axis="x", colors=colour)
        if above:
            own_axes.spines["top"].set_visible(True)
            own_axes.spines["top"].set_color(colour)
            own_axes.spines["bottom"].set_visible(False)
        elif both:
            own_axes.spines["bottom"].set_color(colour)
    axes.grid(True, axis="y")
    axes.margins(y=0.1)
    return drawn


def _key(figure: Figure, drawn: Sequence[Result], level: Look | None) -> None:
    """A legend below: each look once, with the families that it stands for."""
    from matplotlib.lines import Line2D

    families: dict[tuple[str, int], dict[str, None]] = {}
    seen: dict[tuple[str | None, str], int] = {}
    for family, rule, suite in dict.fromkeys((one.family, one.rule, one.suite) for one in drawn):
        if rule is None:
            continue
        number = seen[suite, rule] = seen.get((suite, rule), -1) + 1
        families.setdefault((rule, number), {})[family] = None
    handles = []
    for (rule, number), names in families.items():
        look, told = _look(rule, number), ", ".join(filter(None, names))
        label = f"{OWN[rule]} ({told})" if told else OWN[rule]
        handles.append(
            Line2D([], [], color=look.colour, marker=look.marker, markersize=5, linestyle=look.dash, label=label)
        )
    if level is not None:
        handles.append(Line2D([], [], color=level.colour, linestyle=level.dash, linewidth=1.6, label="Retrain"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9)


def _look(rule: str, number: int) -> Look:
    """Of a rule's families the first has the rule's look, others its colour near enough to belong to it."""
    further = {"linear": LOOKS[4], "rank": LOOKS[3]}
    return RULE_LOOKS[rule] if not number else further[rule]


def _less(retrain: Result, name: str) -> Callable[[Result], float | None]:
    def value(one: Result) -> float | None:
        of, reference = one.values.get(name), retrain.values.get(name)
        return None if of is None or reference is None else reference - of

    return value


def _families(results: Sequence[Result], rule: str) -> dict[str, list[Result]]:
    """The sweeps of a rule with more than one setting, by family, each in the order of its strength."""
    found: dict[str, list[Result]] = {}
    for one in results:
        if one.rule == rule:
            found.setdefault(one.family, []).append(one)
    return {
        family: sorted(own, key=lambda one: one.strength or 0.0) for family, own in found.items() if len(own) > 1
    }  # fmt: skip


def _sweeps(results: Sequence[Result], name: str | None = None) -> dict[str, list[Result]]:
    """Those of both rules, by title; only of results that have a value of this name."""
    own = [one for one in results if name is None or one.values.get(name) is not None]
    return {family[0].title: family for rule in WORDS for family in _families(own, rule).values()}
