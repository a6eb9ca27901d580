"""Measure an experiment's models, print the table and a few answers, and write the report and the bundle."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm

from divdec.data.formatting import Format
from divdec.data.records import single_turn
from divdec.model.bundle import write_bundle
from divdec.model.checkpoint import load_tokenizer
from divdec.report.charts import Point, trade_off
from divdec.report.page import write_page
from divdec.research.measure import (
    GAP_AIM,
    RETAIN_AIM,
    Bench,
    Questions,
    Row,
    gap_closed,
    recommend,
    retain_kept,
)
from divdec.research.stages import Trained
from divdec.runs import versions, write_json
from divdec.steering import Steering

MAIN_SETS = ("forget", "retain", "holdout")


@dataclasses.dataclass(frozen=True)
class Presentation:
    """How an experiment is told."""

    title: str
    lead: str
    accuracy_note: str
    """What accuracy means here."""
    examples: dict[str, int]
    """How many answers of each set are shown side by side."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All rows of an experiment's table."""

    target: Row
    retrain: Row
    steered: list[Row]
    recommended: Row

    @property
    def gap(self) -> float:
        """Share of the way from target to retrain that the recommended setting goes on the forget set."""
        return gap_closed(self.recommended, self.target, self.retrain)

    @property
    def kept(self) -> float:
        """Share of the target's retain accuracy that the recommended setting keeps."""
        return retain_kept(self.recommended, self.target)

    @property
    def reached(self) -> bool:
        """Whether the recommended setting forgets and keeps as much as it must."""
        return self.gap >= GAP_AIM and self.kept >= RETAIN_AIM

    @property
    def verdict(self) -> str:
        """What the recommended setting does, in words; that none does enough, where it does not."""
        setting = self.recommended.setting
        if not self.reached:
            return (
                f"No setting closes {GAP_AIM:.0%} of the gap between target and retrained model on the forget set\n"
                f"and keeps {RETAIN_AIM:.0%} of the target's accuracy on the retain set. The bundle holds {setting},\n"
                f"which closes {self.gap:.0%} and keeps {self.kept:.0%}."
            )
        return (
            f"{setting} closes {self.gap:.0%} of the gap between target and retrained model on the forget set\n"
            f"and keeps {self.kept:.0%} of the target's accuracy on the retain set."
        )

    def best(self, rule: str) -> Row:
        """The setting of one rule that would be recommended if there were only this rule."""
        return recommend([row for row in self.steered if row.model == rule], self.target)


def compare(
    trained: Trained,
    sets: Sequence[Questions],
    settings: Sequence[Steering],
    *,
    form: Format,
    max_new_tokens: int,
) -> Comparison:
    """Measure target, retrain reference and every setting.

    Args:
        trained: where the models lie.
        sets: what is asked; 'forget', 'retain' and 'holdout' must be among them.
        settings: what to steer with: the linear rule before the rank rule, mild before strong.
        form: how questions are laid out.
        max_new_tokens: longest answer.
    """
    from transformers import AutoModelForCausalLM

    from divdec.model.modeling import DivergenceForCausalLM

    bench = Bench(load_tokenizer(trained.target), sets, form, max_new_tokens)
    target, retrain, retain, forget = (
        AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
        for folder in (trained.target, trained.retrain, trained.retain_auxiliary, trained.forget_auxiliary)
    )
    with tqdm(total=2 + len(settings), desc=f"{'measuring':<17}", unit="setting", dynamic_ncols=True) as bar:
        target_row = bench.plain("target", target)
        bar.update()
        retrain_row = bench.plain("retrain", retrain)
        bar.update()
        model = DivergenceForCausalLM.from_parts(target, retain, forget)
        rows = bench.steered(model, settings, lambda _: bar.update())
    return Comparison(target_row, retrain_row, rows, recommend(rows, target_row))


def present(
    comparison: Comparison,
    trained: Trained,
    sets: Sequence[Questions],
    presentation: Presentation,
    output: Path,
    *,
    started: float,
    forget_set: str,
    console: Console,
) -> dict[str, Any]:
    """Print the tables, write report, bundle and results into `output`, and return the results.

    Args:
        comparison: what was measured.
        trained: where the models lie.
        sets: what was asked.
        presentation: how it is told.
        output: folder for `report.html`, `bundle` and `result.json`.
        started: `time.perf_counter()` when the experiment began.
        forget_set: name and hash of the forget set, for the bundle's card.
        console: where to print.
    """
    output.mkdir(parents=True, exist_ok=True)
    examples = _examples(comparison, sets, presentation)
    assert comparison.recommended.setting is not None
    bundle = write_bundle(
        output / "bundle",
        target=str(trained.target),
        retain_auxiliary=str(trained.retain_auxiliary),
        forget_auxiliary=str(trained.forget_auxiliary),
        steering=comparison.recommended.setting,
        overwrite=True,
        forget_set=forget_set,
        single_turn=all(single_turn(questions.records) for questions in sets),
    )
    report = output / "report.html"
    write_page(
        report,
        "experiment.html",
        title=presentation.title,
        lead=presentation.lead,
        accuracy_note=presentation.accuracy_note,
        set_names=[questions.name for questions in sets],
        rows=[comparison.target, comparison.retrain, *comparison.steered],
        recommended=comparison.recommended,
        reached=comparison.reached,
        gap=comparison.gap,
        kept=comparison.kept,
        examples=examples,
        plot_svg=_plot(comparison),
        footer=", ".join(f"{name} {version}" for name, version in versions().items() if version),
    )
    _print(comparison, examples, presentation, console)
    result = {
        "target": comparison.target.to_dict(),
        "retrain": comparison.retrain.to_dict(),
        "linear": comparison.best("linear").to_dict(),
        "rank": comparison.best("rank").to_dict(),
        "recommended": {
            "rule": comparison.recommended.model,
            "gap_closed": round(comparison.gap, 4),
            "retain_kept": round(comparison.kept, 4),
            "reached": comparison.reached,
            **comparison.recommended.to_dict(),
        },
        "sweep": [row.to_dict() for row in comparison.steered],
        "seconds": round(time.perf_counter() - started, 1),
        "training_seconds": trained.seconds,
        "report": str(report),
        "bundle": str(bundle),
    }
    write_json(output / "result.json", result)
    return result


def _plot(comparison: Comparison) -> str:
    rows = [comparison.target, comparison.retrain, *comparison.steered]
    points = [
        Point(
            row.model,
            row.setting or row.model,
            row.figures["forget"].probability,
            row.figures["retain"].accuracy,
            comparison.reached and row is comparison.recommended,
        )
        for row in rows
    ]
    return trade_off(points, "probability of the true answers of the forget set", "accuracy on the retain set")


def _examples(comparison: Comparison, sets: Sequence[Questions], presentation: Presentation) -> list[dict[str, Any]]:
    """Questions with the answers of target, steered model and retrained model; those the target knows come first."""
    shown = []
    for questions in sets:
        known = comparison.target.generated[questions.name]
        truths = questions.facts or tuple(record.answer for record in questions.records)
        # Spread over the set, so that not all are about the first author.
        order = sorted(range(len(truths)), key=lambda place: (truths[place] not in known[place], place * 7 % 13))
        for place in order[: presentation.examples.get(questions.name, 0)]:
            rows = (comparison.target, comparison.recommended, comparison.retrain)
            texts = [row.generated[questions.name][place] for row in rows]
            shown.append(
                {
                    "set": questions.name,
                    "question": questions.records[place].messages[-1].content,
                    "answers": [{"text": text, "told": truths[place] in text} for text in texts],
                }
            )
    return shown


def _print(
    comparison: Comparison, examples: Sequence[dict[str, Any]], presentation: Presentation, console: Console
) -> None:
    table = Table(box=box.SIMPLE_HEAD, title=presentation.title, title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for name in MAIN_SETS:
        for title in (f"{name}\naccuracy", "\nprob.", "\nROUGE-L"):
            table.add_column(title, justify="right", no_wrap=True)
    for row in (comparison.target, comparison.retrain, *comparison.steered):
        chosen = comparison.reached and row is comparison.recommended
        cells = [
            f"{100 * value:.1f}"
            for name in MAIN_SETS
            for value in (row.figures[name].accuracy, row.figures[name].probability, row.figures[name].rouge)
        ]
        table.add_row(f"{'→ ' if chosen else '  '}{row.setting or row.model}", *cells, style="bold" if chosen else None)
    console.print(table)
    console.print(presentation.accuracy_note, highlight=False)
    answers = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("question", "target", f"steered ({comparison.recommended.setting})", "retrained"):
        answers.add_column(title, overflow="fold", ratio=1)
    for item in examples:
        answers.add_row(
            f"[{item['set']}] {item['question']}".replace("[", "\\["), *(a["text"] for a in item["answers"])
        )
    console.print(answers)
    console.print(comparison.verdict, highlight=False)


def console_for(quiet: bool) -> Console:
    """Where an experiment prints: standard output, or standard error when that must hold JSON alone."""
    return Console(stderr=quiet, width=max(Console().width, 100))


def teller(console: Console) -> Callable[[str], None]:
    """A reporter of one-line notes."""
    return lambda line: console.print(line, style="dim", highlight=False)
