"""Results of a comparison: aggregates with intervals, the best setting of each method, tables and files."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from divdec.evaluation.aggregate import AGGREGATES, FLUENCY, Bootstrap, Resampler, aggregate, needed, tofu_figures
from divdec.evaluation.results import Results
from divdec.report.scores import MEASURES, best_index
from divdec.research.compare.settings import CompareSettings
from divdec.research.compare.trials import DIVDEC, REFERENCES, titles
from divdec.research.pages import SHOWN, MethodRow, write_comparison
from divdec.runs import write_json, write_text

FIGURES = ("forget_Q_A_Prob", "forget_Q_A_ROUGE", "retain_Q_A_Prob", "retain_Q_A_ROUGE", "model_utility")
HEADS = ("Method", "Setting", *(MEASURES[name].short for name in SHOWN), "Training", "Memory", "Time a token")
TABLE, JSON, PAGE = "table.md", "comparison.json", "report.html"


@dataclasses.dataclass(frozen=True)
class SeedResult:
    """A method under one setting on the models of one seed."""

    results: Results
    seconds: float | None
    """Training time."""
    extra_bytes: int | None
    """Memory of weights beyond the target's."""
    draw: int = 0
    """Items are resampled together for seeds with the same number, which have the same questions."""


@dataclasses.dataclass(frozen=True)
class TrialSummary:
    """A method under one setting: means over the seeds."""

    method: str
    setting: str
    values: dict[str, float | None]
    """Aggregates and figures by name."""
    intervals: dict[str, tuple[float, float]]
    """Intervals of the aggregates."""
    seeds: dict[int, dict[str, float | None]]
    """The values of each seed."""
    seconds: float | None
    extra_bytes: float | None
    failed: str | None = None
    """Why there are no values, or why a seed is missing."""
    notes: tuple[str, ...] = ()

    @property
    def score(self) -> float:
        """Agg, by which a method's best setting is chosen; −1 for a failed trial."""
        value = self.values.get("agg")
        if value is None:
            value = self.values.get("agg_without_privacy")
        return -1.0 if value is None or self.failed else value


@dataclasses.dataclass(frozen=True)
class BenchmarkResults:
    """Results of a comparison."""

    trials: list[TrialSummary]
    """The whole grid, references first."""
    best: dict[str, TrialSummary]
    """By method."""
    leaks: dict[str, dict[int, float]]
    """Leak@k of the best settings by method and k, mean over seeds."""
    times: dict[str, float]
    """Time per token relative to the target's, by method; on the first seed."""
    seconds: float


def summarize(
    method: str,
    setting: str,
    results: Mapping[int, SeedResult],
    references: Mapping[int, tuple[Results, Results]],
    variant: str,
    bootstrap: Bootstrap,
    failures: Mapping[int, str],
    notes: Sequence[str] = (),
) -> TrialSummary:
    """Summarize the seeds of one setting.

    Args:
        method: its name.
        setting: the setting as tables show it.
        results: results by seed.
        references: results of target and retrained model by seed; they are held fixed.
        variant: variant of the aggregates.
        bootstrap: resamples seeds, then items within each.
        failures: why a seed has no results, by seed.
        notes: remarks for readers.
    """
    seeds = {seed: _values(one.results, *references[seed], variant) for seed, one in sorted(results.items())}
    names = (*AGGREGATES, *FIGURES)
    values = {name: _mean([own.get(name) for own in seeds.values()]) for name in names} if seeds else {}
    draws = [
        _draws(one.results, *references[seed], variant, dataclasses.replace(bootstrap, seed=bootstrap.seed + one.draw))
        for seed, one in sorted(results.items())
    ]
    intervals = {}
    for name in AGGREGATES:
        own = [drawn[name] for drawn in draws if name in drawn]
        if values.get(name) is not None and len(own) == len(draws):
            intervals[name] = bootstrap.interval(_over_seeds(own, bootstrap))
    failed = "; ".join(dict.fromkeys(failures.values())) or None
    if failed and results:
        failed = f"without seed {', '.join(map(str, sorted(failures)))}: {failed}"
    return TrialSummary(
        method,
        setting,
        values,
        intervals,
        seeds,
        _mean([one.seconds for one in results.values()]),
        _mean([one.extra_bytes for one in results.values()]),
        failed,
        tuple(notes),
    )


def best_of(trials: Sequence[TrialSummary]) -> dict[str, TrialSummary]:
    """Choose each method's setting with the highest Agg, on the reported questions as in the paper; ties: the first."""
    best: dict[str, TrialSummary] = {}
    for trial in trials:
        if trial.method not in best or trial.score > best[trial.method].score:
            best[trial.method] = trial
    return best


def without_best(trials: Sequence[TrialSummary]) -> set[str]:
    """Methods with no single best setting: several share the highest Agg, or none is above 0."""
    ties = set()
    for method, best in best_of(trials).items():
        scores = [trial.score for trial in trials if trial.method == method]
        if not best.failed and best_index(scores, "higher", MEASURES["agg"].digits) is None:
            ties.add(method)
    return ties


def write_files(results: BenchmarkResults, settings: CompareSettings) -> None:
    """Write `comparison.json`, `table.md` and `report.html`."""
    output = Path(settings.output).expanduser()
    write_text(output / TABLE, markdown(results, settings))
    content = {
        "best": [dataclasses.asdict(trial) for trial in results.best.values()],
        "without_best": sorted(without_best(results.trials)),
        "grid": [dataclasses.asdict(trial) for trial in results.trials],
        "leaks": {method: {str(k): value for k, value in own.items()} for method, own in results.leaks.items()},
        "time_ratio": results.times,
        "variant": settings.variant,
    }
    write_json(output / JSON, content)
    name = titles()
    write_comparison(
        output / PAGE,
        title=f"Unlearning methods on {settings.data}",
        lead=_lead(results, settings),
        best=_best_entries(results),
        grid=_entries(results, results.trials),
        leaks={name[method]: values for method, values in results.leaks.items()},
        notes=_notes(results),
    )


def show(results: BenchmarkResults, settings: CompareSettings, console: Console) -> None:
    """Print the table of best settings and the notes."""
    table = Table(box=box.SIMPLE_HEAD, title=_lead(results, settings), title_justify="left", padding=(0, 1, 0, 0))
    for index, head in enumerate(HEADS):
        table.add_column(head, justify="left" if index < 2 else "right", overflow="fold")
    for entry in _best_entries(results):
        table.add_row(*_cells(entry), style="bold" if entry.ours else None)
    console.print(table)
    for note in _notes(results):
        console.print(note, highlight=False)


def markdown(results: BenchmarkResults, settings: CompareSettings) -> str:
    """The table of best settings and the whole grid in Markdown."""
    lines = [f"{_lead(results, settings)}\n", *_markdown_table(_best_entries(results))]
    if results.leaks:
        ks = list(next(iter(results.leaks.values())))
        lines += ["\nLeak@k, the best settings:\n", "| Method | " + " | ".join(f"k = {k}" for k in ks) + " |"]
        lines += ["|---|" + "---|" * len(ks)]
        for method, values in results.leaks.items():
            lines.append(f"| {titles()[method]} | " + " | ".join(f"{values[k]:.3f}" for k in ks) + " |")
    lines += ["\nThe whole grid:\n", *_markdown_table(_entries(results, results.trials), costs=False)]
    return "\n".join([*lines, *(f"\n{note}" for note in _notes(results))]) + "\n"


def _markdown_table(entries: Sequence[MethodRow], costs: bool = True) -> list[str]:
    number = len(HEADS) if costs else len(HEADS) - 3
    rows = ["| " + " | ".join(HEADS[:number]) + " |", "|---" * number + "|"]
    return rows + [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in _cells(entry)[:number]) + " |" for entry in entries
    ]


def _cells(entry: MethodRow) -> list[str]:
    if entry.failed and entry.values.get("mem") is None:
        return [entry.title, entry.setting, entry.failed, *[""] * (len(HEADS) - 3)]
    return [entry.title, entry.setting, *(entry.cell(name) for name in SHOWN), *entry.costs]


def _best_entries(results: BenchmarkResults) -> list[MethodRow]:
    """The best setting of each method; where there is no single best one the first, marked as such."""
    ties = {titles()[method] for method in without_best(results.trials)}
    return [
        dataclasses.replace(entry, setting=f"{entry.setting} (no setting is best)".strip())
        if entry.title in ties and not entry.reference
        else entry
        for entry in _entries(results, list(results.best.values()))
    ]


def _entries(results: BenchmarkResults, trials: Sequence[TrialSummary]) -> list[MethodRow]:
    name = titles()
    best = {(trial.method, trial.setting) for trial in results.best.values()}
    return [
        MethodRow(
            name[trial.method],
            trial.setting,
            trial.values,
            trial.intervals,
            trial.seconds,
            trial.extra_bytes,
            results.times.get(trial.method) if (trial.method, trial.setting) in best else None,
            trial.failed,
            trial.method in DIVDEC,
            trial.method in REFERENCES,
        )
        for trial in trials
    ]


def _lead(results: BenchmarkResults, settings: CompareSettings) -> str:
    number = len(results.trials[0].seeds)
    seeds, drawn = ("1 seed", "items") if number == 1 else (f"{number} seeds", "seeds and items")
    searched = settings.search_seeds or number
    first = "first seed, the only one" if searched == 1 else f"first {searched} seeds, the only ones"
    asked = "these very questions, as in the paper" if searched >= number else f"the {first} for the grid's others"
    return (
        f"{settings.data}, {settings.grid} grid, {seeds}, aggregates of the variant {settings.variant}; the best "
        f"setting of each method by Agg on {asked}; 99 % bootstrap intervals over {drawn}, target and retrained model "
        "held fixed"
    )


def _notes(results: BenchmarkResults) -> list[str]:
    name = titles()
    notes: dict[str, list[str]] = {}
    for trial in results.trials:
        for note in (*trial.notes, *([trial.failed] if trial.failed else ())):
            notes.setdefault(note, []).append(f"{name[trial.method]} {trial.setting}".strip())
    fluency = "Utility is the model utility relative to the target's; no fluency classifier is used."
    return [fluency, *(f"{', '.join(dict.fromkeys(of))}: {note}" for note, of in notes.items())]


def _values(results: Results, target: Results, retrain: Results, variant: str) -> dict[str, float | None]:
    figures = tofu_figures(results)
    scores = aggregate(figures, target.figures, retrain.figures, variant)
    values: dict[str, Any] = {**{name: figures.get(name) for name in FIGURES}, **scores.values}
    return {name: None if value is None else float(value) for name, value in values.items()}


def _draws(
    results: Results, target: Results, retrain: Results, variant: str, bootstrap: Bootstrap
) -> dict[str, np.ndarray]:
    fluency = all(of.figures.get(FLUENCY) is not None for of in (results, target))
    names = [name for part in needed(variant, fluency=fluency).values() for name in part]
    figures, _ = Resampler(results, bootstrap).figures(names)
    scores = aggregate(figures, target.figures, retrain.figures, variant, fluency=fluency)
    return {name: np.asarray(value) for name, value in scores.values.items() if value is not None}


def _over_seeds(draws: Sequence[np.ndarray], bootstrap: Bootstrap) -> np.ndarray:
    """In each draw, resample the seeds with replacement and average their values in that draw."""
    stacked = np.stack(draws)
    seeds, number = stacked.shape
    chosen = np.random.default_rng(bootstrap.seed).integers(seeds, size=(seeds, number))
    return stacked[chosen, np.arange(number)].mean(axis=0)


def _mean(values: Sequence[float | int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) and known else None
