"""The page of `divdec results report`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from divdec.errors import UsageError
from divdec.report.page import write_page
from divdec.report.style import RETRAIN, TARGET
from divdec_research.report.charts import inline
from divdec_research.report.scores import (
    ATTACK_NAMES,
    MEASURES,
    RESAMPLED,
    SCORES,
    Best,
    Entry,
    ScoredResult,
    Scorer,
    best_results,
    group_remarks,
)
from divdec_research.report.sections import (
    EXAMPLE_SETS,
    AnswerExample,
    Section,
    curve_sections,
    group_results,
    over_under_sections,
    roc_sections,
    scatter_sections,
    select_examples,
)
from divdec_research.suites.aggregate import CLOSER_TO_1, CORRECT, FLUENCY, PROB_MEAN, UTILITY, Bootstrap

MAX_SIDE_BY_SIDE = 4  # results whose ROC and answers are shown, besides target and retrained model
MAX_NAMES = 4
SELECTION = "Of many results the best of each sweep are shown."
# Columns of the tables of figures, by caption; columns without any value are omitted.
TABLES = {
    "tofu": {
        "What is remembered, and what is kept": (
            "extraction_strength", "exact_memorization", CORRECT, PROB_MEAN, CLOSER_TO_1, "forget_Q_A_ROUGE", UTILITY,
            FLUENCY,
        ),
        "Membership attacks and likeness to the retrained model": (*ATTACK_NAMES, "privleak", "forget_quality"),
    },
    "muse": {
        "Figures": (*RESAMPLED["muse"][:3], "extraction_strength", "exact_memorization", "mia_min_k", "privleak"),
    },
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Report:
    """Content of the report's page."""

    suite: str
    variant: str
    rows: tuple[ScoredResult, ...]
    """Target, retrained model, results."""
    bests: tuple[Best, ...]
    """The best result by each of the suite's goals."""
    without_best: tuple[str, ...]
    """Why there is no best result by the other goals."""
    tables: dict[str, tuple[str, ...]]
    """Names of the measures in each table, by caption."""
    sections: tuple[Section, ...]
    side_by_side: tuple[ScoredResult, ...]
    """Results whose ROC and answers are shown."""
    examples: tuple[AnswerExample, ...]
    notes: dict[str, str]
    """Remarks on the tables, with the names of the results."""
    left_out: tuple[str, ...]
    """Omissions of the page, with reasons."""


def build_report(entries: Sequence[Entry], variant: str, bootstrap: Bootstrap, examples: int = 8) -> Report:
    """Score results from `collect`, and choose what the page shows, with the answers to some example questions.

    Raises:
        UsageError: the number of examples is negative, the variant does not exist, or an item lacks a field.
    """
    if examples < 0:
        raise UsageError(f"examples is {examples}; accepted: 0 or more")
    suite = entries[0].results.suite
    references = {entry.role: entry.results for entry in entries if entry.role}
    scorer = Scorer(references.get("target"), references.get("retrain"), variant, bootstrap)
    rows = tuple(map(scorer.score, entries))
    bests = best_results(rows, suite)
    chosen = _side_by_side(rows)
    sections = (
        *scatter_sections(rows, suite, bests),
        *curve_sections(rows, suite),
        *over_under_sections(rows),
        *roc_sections(chosen, SELECTION if len(chosen) < len(rows) else ""),
    )
    selected = tuple(select_examples([row.entry for row in chosen], examples)) if examples else ()
    caption = (
        f"TOFU’s aggregates, variant “{variant}”; higher is better"
        if suite == "tofu"
        else "Distance to the retrained model, the target’s = 100 %; lower is better"
    )
    captions = {f"{caption}. {_interval_note(rows, scorer)}": SCORES[suite], **TABLES[suite]}
    shown = {
        text: tuple(name for name in names if any(row.has(name) for row in rows)) for text, names in captions.items()
    }
    return Report(
        suite,
        variant,
        rows,
        bests=tuple(best for best in bests if isinstance(best, Best)),
        without_best=tuple(best for best in bests if isinstance(best, str) and best),
        tables={text: columns for text, columns in shown.items() if columns},
        sections=sections,
        side_by_side=chosen,
        examples=selected,
        notes={
            line[:1].upper() + line[1:]: _list_names(names, len(rows)) for line, names in group_remarks(rows).items()
        },
        left_out=tuple(_left_out(rows, scorer, {section.kind for section in sections}, bool(selected or not examples))),
    )


def write_report(path: Path, report: Report) -> None:
    """Draw the plots and write the page atomically."""
    results = [row for row in report.rows if row.entry.role is None]
    names = {"target": "the target", "retrain": "the model retrained without the forget set"}
    beside = " and ".join(names[row.entry.role] for row in report.rows if row.entry.role)
    splits = sorted({row.entry.results.split for row in report.rows if row.entry.results.split})
    lead = f"{' '.join([report.suite.upper(), *splits])}: {len(results)} result{'s' if len(results) > 1 else ''}"
    write_page(
        path,
        "evaluation.html",
        package="divdec_research.report",
        title=f"Unlearning on {report.suite.upper()}",
        lead=f"{lead}{f' beside {beside}' if beside else ''}.",
        report=report,
        measures=MEASURES,
        draw=inline,
        selection=SELECTION,
        best_names={best.row.entry.name for best in report.bests},
        styles={"target": TARGET, "retrain": RETRAIN},
        styles_side_by_side=[group.style for group in group_results(report.side_by_side, separate=True)],
    )


def _side_by_side(rows: Sequence[ScoredResult]) -> tuple[ScoredResult, ...]:
    """Target, results, retrained model; of many results the best of each group, or the first if none is best."""
    target, retrain = ([row for row in rows if row.entry.role == role] for role in ("target", "retrain"))
    results = [row for row in rows if row.entry.role is None]
    if len(results) > MAX_SIDE_BY_SIDE:
        heads = []
        for group in group_results(results):
            best = best_results(group.rows, results[0].entry.results.suite)[0]
            heads.append(best.row if isinstance(best, Best) else group.rows[0])
        results = heads[:MAX_SIDE_BY_SIDE]
    return (*target, *results, *retrain)


def _interval_note(rows: Sequence[ScoredResult], scorer: Scorer) -> str:
    if not any(row.intervals for row in rows):
        return "Point values."
    bootstrap, references = scorer.bootstrap, {"target": scorer.target, "retrained model": scorer.retrain}
    fixed = " and ".join(name for name, results in references.items() if results is not None)
    return (
        f"In brackets {100 * bootstrap.level:g} % percentile bootstrap intervals ({bootstrap.draws} draws, seed "
        f"{bootstrap.seed}{f', {fixed} held fixed as the reference' if fixed else ''})."
    )


def _list_names(names: Sequence[str], total: int) -> str:
    if len(names) == total:
        return "all"
    more = len(names) - MAX_NAMES
    return ", ".join(names) if more <= 1 else f"{', '.join(names[:MAX_NAMES])} and {more} more"


def _left_out(rows: Sequence[ScoredResult], scorer: Scorer, kinds: set[str], has_examples: bool) -> list[str]:
    tofu, lines = rows[0].entry.results.suite == "tofu", []
    if scorer.target is None:
        needs = "Utility" if tofu else "The distances"
        lines.append(f"The target: none was given (--target). {needs} and everything relative to it need it.")
    if scorer.retrain is None:
        needs = "Priv and over- and under-unlearning need" if tofu else "The distances need"
        lines.append(f"The retrained model: none was given (--retrain). {needs} it.")
    if "scatter" not in kinds:
        lines.append("The trade-off: no result has both figures of its axes.")
    if "curves" not in kinds:
        lines.append("Curves along α or k: the results include no two settings of one sweep.")
    if "dots" not in kinds and scorer.retrain is not None:
        lines.append("Over- and under-unlearning: there are no AUCs of membership attacks to compare.")
    if "roc" not in kinds:
        lines.append("ROC of the membership attacks: no result holds items of one.")
    if not has_examples:
        metrics = EXAMPLE_SETS[rows[0].entry.results.suite]
        without = [row.entry.name for row in rows if not any(row.entry.results.items.get(name) for name in metrics)]
        reason = f"there are none of {_list_names(without, len(rows))}" if without else "no question is in all results"
        lines.append(f"Answers side by side: {'no result holds any' if len(without) == len(rows) else reason}.")
    return lines
