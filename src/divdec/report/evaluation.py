"""The page of an evaluation: what it shows of results, what it leaves out, and why.

It puts together tables, plots and examples from scored results; it draws nothing itself and reads no files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from divdec.errors import UsageError
from divdec.evaluation.aggregate import Bootstrap
from divdec.report.collect import Entry
from divdec.report.examples import SETS, Example, examples
from divdec.report.groups import Best, best_of, series_of, without_best
from divdec.report.measures import FIGURES, MEASURES, SCORES
from divdec.report.page import write_page
from divdec.report.plots import inline
from divdec.report.plots.palette import RETRAIN, TARGET
from divdec.report.plots.points import Plot
from divdec.report.scores import Row, Scorer
from divdec.report.views import View, curve_views, over_under_view, roc_views, scatter_views
from divdec.runs import versions

MOST_SIDE_BY_SIDE = 4  # results beside target and retrained model whose ROC and answers are shown
MOST_NAMES = 4
OF_MANY = "Of many results the best of each sweep are shown."


@dataclasses.dataclass(frozen=True)
class Table:
    """Figures of all results under a caption."""

    caption: str
    columns: tuple[str, ...]
    """Names of measures."""


@dataclasses.dataclass(frozen=True)
class Content:
    """What the page shows."""

    suite: str
    variant: str
    rows: tuple[Row, ...]
    """Target, retrained model, results."""
    bests: tuple[Best, ...]
    """By each of the suite's goals."""
    without_best: tuple[str, ...]
    """By which goals no result is the best, in words."""
    tables: tuple[Table, ...]
    views: tuple[View, ...]
    """The plots, by section."""
    side_by_side: tuple[Row, ...]
    """Those whose ROC and answers are shown."""
    examples: tuple[Example, ...]
    notes: dict[str, str]
    """What is to be known of the tables, and of which results."""
    left_out: tuple[str, ...]
    """What is not on the page, and why."""


def content_of(entries: Sequence[Entry], variant: str, bootstrap: Bootstrap, count: int = 8) -> Content:
    """Score results and choose what is shown of them.

    Args:
        entries: what `collect` found.
        variant: of TOFU's aggregates.
        bootstrap: how intervals are drawn.
        count: how many examples.

    Raises:
        UsageError: the count is negative, the variant is not known, or items do not hold what they must.
    """
    if count < 0:
        raise UsageError(f"examples is {count}; accepted: 0 or more")
    suite = entries[0].results.suite
    by_role = {entry.role: entry.results for entry in entries if entry.role}
    scorer = Scorer(by_role.get("target"), by_role.get("retrain"), variant, bootstrap)
    rows = tuple(scorer.row(entry) for entry in entries)
    bests = best_of(rows, suite)
    chosen = _side_by_side(rows)
    views = [
        *scatter_views(rows, suite, bests),
        *curve_views(rows, suite),
        *over_under_view(rows, suite),
        *roc_views(chosen, suite, OF_MANY if len(chosen) < len(rows) else ""),
    ]
    shown = tuple(examples([row.entry for row in chosen], count)) if count else ()
    captions = {_aggregates(suite, variant): SCORES[suite], **FIGURES[suite]}
    tables = [
        Table(caption, present)
        for caption, columns in captions.items()
        if (present := tuple(name for name in columns if any(row.values.get(name) is not None for row in rows)))
    ]
    if tables:
        how = _how(rows, bootstrap, scorer)
        tables[0] = dataclasses.replace(tables[0], caption=f"{tables[0].caption}. {how}")
    return Content(
        suite,
        variant,
        rows,
        bests=tuple(best for best in bests if best),
        without_best=tuple(without_best(rows, suite)),
        tables=tuple(tables),
        views=tuple(views),
        side_by_side=chosen,
        examples=shown,
        notes=_notes(rows),
        left_out=tuple(_left_out(rows, scorer, views, shown, count)),
    )


def write_report(path: Path, content: Content) -> None:
    """Draw the plots and write the page, whole or not at all."""
    write_page(
        path,
        "evaluation.html",
        title=f"Unlearning on {content.suite.upper()}",
        lead=_lead(content),
        content=content,
        measures=MEASURES,
        draw=_draw,
        columns=_columns,
        of_many=OF_MANY,
        best_names={best.row.entry.name for best in content.bests},
        looks={"target": TARGET, "retrain": RETRAIN},
        looks_side_by_side=[series.look for series in series_of(content.side_by_side, apart=True)],
        footer=", ".join(f"{name} {version}" for name, version in versions().items() if version),
    )


def _draw(plot: Plot, kind: str) -> Any:
    drawing: dict[str, Callable[[Any], Any]] = {
        "scatter": inline.scatter, "curves": inline.curves, "dots": inline.dots, "roc": inline.roc,
    }  # fmt: skip
    return drawing[kind](plot)


def _columns(view: View) -> int:
    """How many plots stand side by side where there is room."""
    return 1 if len(view.plots) == 1 else 3 if view.kind == "roc" and len(view.plots) not in (2, 4) else 2


def _side_by_side(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Target, results, retrained model; of many results the best of each series, or the first where none is best."""
    target, retrain = ([row for row in rows if row.entry.role == role] for role in ("target", "retrain"))
    own = [row for row in rows if row.entry.role is None]
    if len(own) > MOST_SIDE_BY_SIDE:
        heads = []
        for series in series_of(own):
            members = [row for row in own if row.entry.name in series.members]
            best = best_of(members, own[0].entry.results.suite)[0]
            heads.append(best.row if best else members[0])
        own = heads[:MOST_SIDE_BY_SIDE]
    return (*target, *own, *retrain)


def _lead(content: Content) -> str:
    own = [row for row in content.rows if row.entry.role is None]
    results = f"{len(own)} result{'s' if len(own) > 1 else ''}"
    beside = [
        text
        for role, text in (("target", "the target"), ("retrain", "the model retrained without the forget set"))
        if any(row.entry.role == role for row in content.rows)
    ]
    splits = sorted({row.entry.results.split for row in content.rows if row.entry.results.split})
    suite = " ".join([content.suite.upper(), *splits])
    return f"{suite}: {results}{' beside ' + ' and '.join(beside) if beside else ''}."


def _aggregates(suite: str, variant: str) -> str:
    if suite == "tofu":
        return f"TOFU’s aggregates, variant “{variant}”; higher is better"
    return "Distance to the retrained model, the target’s = 100 %; lower is better"


def _how(rows: Sequence[Row], bootstrap: Bootstrap, scorer: Scorer) -> str:
    """How the intervals were computed."""
    if not any(row.intervals for row in rows):
        return "Point values."
    references = (("target", scorer.target), ("retrained model", scorer.retrain))
    fixed = " and ".join(name for name, of in references if of is not None)
    held = f", {fixed} held fixed as the reference" if fixed else ""
    return (
        f"In brackets {100 * bootstrap.level:g} % percentile bootstrap intervals "
        f"({bootstrap.draws} draws, seed {bootstrap.seed}{held})."
    )


def _notes(rows: Sequence[Row]) -> dict[str, str]:
    """What is missing from the tables or to be known of them, with the results that it is true of."""
    found: dict[str, list[str]] = {}
    for row in rows:
        lines = [f"No {MEASURES[name].short}: {reason}" for name, reason in row.reasons.items()]
        for line in (*lines, *(note[:1].upper() + note[1:] for note in row.notes)):
            found.setdefault(line, []).append(row.entry.name)
    return {line: _listed(names, len(rows)) for line, names in found.items()}


def _listed(names: Sequence[str], whole: int) -> str:
    if len(names) == whole:
        return "all"
    more = len(names) - MOST_NAMES
    return ", ".join(names) if more <= 1 else f"{', '.join(names[:MOST_NAMES])} and {more} more"


def _left_out(
    rows: Sequence[Row], scorer: Scorer, views: Sequence[View], shown: Sequence[Example], count: int
) -> list[str]:
    suite, found = rows[0].entry.results.suite, []
    if scorer.target is None:
        score = "Utility" if suite == "tofu" else "The distances"
        found.append(f"The target: none was given (--target). {score} and all that is relative to it need it.")
    if scorer.retrain is None:
        score = "Priv and over- and under-unlearning need" if suite == "tofu" else "The distances need"
        found.append(f"The retrained model: none was given (--retrain). {score} it.")
    kinds = {view.kind for view in views}
    if "scatter" not in kinds:
        found.append("The trade-off: no result has both figures that it is drawn from.")
    if "curves" not in kinds:
        found.append("Curves along α or k: there are no two settings of one sweep among the results.")
    if "dots" not in kinds and scorer.retrain is not None:
        found.append("Over- and under-unlearning: there are no AUCs of membership attacks to compare.")
    if "roc" not in kinds:
        found.append("ROC of the membership attacks: no result holds items of one.")
    if not shown and count:
        found.append(f"Answers side by side: {_no_answers(rows)}")
    return found


def _no_answers(rows: Sequence[Row]) -> str:
    lacking = [
        row.entry.name
        for row in rows
        if not any(row.entry.results.items.get(metric) for metric in SETS[row.entry.results.suite])
    ]
    if len(lacking) == len(rows):
        return "no result holds any."
    if lacking:
        return f"there are none of {_listed(lacking, len(rows))}."
    return "the results have no question in common."
