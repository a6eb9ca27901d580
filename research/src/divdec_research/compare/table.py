"""Results of a comparison: aggregates with intervals, the best setting of each method, and tables."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from divdec.evaluation.results import Results
from divdec.runs import write_json, write_text
from divdec_research.baselines.table import TITLES, Kind, kind_of
from divdec_research.compare.settings import CompareSettings
from divdec_research.compare.suite import ComparisonSuite
from divdec_research.report.scores import MEASURES, Measure
from divdec_research.report.tables import markdown_table
from divdec_research.suites.aggregate import Bootstrap

VALIDATION, TEST = 0, 1  # halves of the questions: those with even numbers choose a setting, the others report it
TABLE, JSON = "table.md", "comparison.json"


@dataclasses.dataclass(frozen=True)
class SeedResult:
    """A method under one setting on the models of one seed."""

    results: Results
    seconds: float | None
    """Training time."""
    draw: int = 0
    """Seeds with the same number have the same questions; their items are resampled together."""


@dataclasses.dataclass(frozen=True)
class TrialSummary:
    """A method under one setting: means over the seeds."""

    method: str
    setting: str
    values: dict[str, float | None]
    """Scores and figures by name."""
    intervals: dict[str, tuple[float, float]]
    """Intervals of the scores."""
    seeds: dict[int, dict[str, float | None]]
    """The values of each seed."""
    seconds: float | None
    """Training time."""
    failed: str | None = None
    """Reason for missing values or a missing seed."""
    notes: tuple[str, ...] = ()
    goal: str = "agg"
    """Name of the score by which a method's best setting is chosen."""

    def rank(self, goal: str | None = None) -> float:
        """How good the setting is by a score, `goal` by default: a higher number is better; −∞ for a failed trial."""
        value = self.values.get(goal := goal or self.goal)
        if value is None or self.failed:
            return -math.inf
        return value if MEASURES[goal].better == "higher" else -value

    @property
    def title(self) -> str:
        """Name of the method in tables."""
        return TITLES[self.method]

    @property
    def kind(self) -> Kind:
        """Whether it is a reference, Divergence Decoding or another method."""
        return kind_of(self.method)

    @property
    def has_failed(self) -> bool:
        """Whether there are no values at all."""
        return self.failed is not None and all(value is None for value in self.values.values())

    def text(self, name: str) -> str:
        """Format a value with its interval, if there is one."""
        text = MEASURES[name].text
        ends = f" [{', '.join(map(text, self.intervals[name]))}]" if name in self.intervals else ""
        return f"{text(self.values.get(name))}{ends}"


@dataclasses.dataclass(frozen=True)
class BenchmarkResults:
    """Results of a comparison."""

    trials: list[TrialSummary]
    """The whole grid, references first."""
    best: dict[str, TrialSummary]
    """By method."""
    leaks: dict[str, dict[int, float]]
    """Leak@k of the best settings by method and k, mean over seeds."""
    seconds: float
    suite: ComparisonSuite
    held_out: dict[str, TrialSummary] = dataclasses.field(default_factory=dict)
    """By method, the setting that was chosen on one half of the questions, measured on the other half."""

    @property
    def goal(self) -> Measure:
        """The score by which settings are chosen."""
        return MEASURES[self.trials[0].goal]

    @property
    def best_by(self) -> dict[str, dict[str, TrialSummary]]:
        """Best settings by further scores of the suite, then by method, without references."""
        others = [trial for trial in self.trials if trial.kind != "reference"]
        return {name: best_of(others, name) for name in self.suite.further_goals}

    def tried(self, method: str) -> int:
        """Number of settings of a method."""
        return sum(trial.method == method for trial in self.trials)


def summarize(
    method: str,
    setting: str,
    results: Mapping[int, SeedResult],
    references: Mapping[int, tuple[Results, Results]],
    suite: ComparisonSuite,
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
        suite: computes the scores.
        bootstrap: resamples seeds, then items within each.
        failures: why a seed has no results, by seed.
        notes: remarks for readers.
    """
    seeds = {seed: suite.values(result.results, *references[seed]) for seed, result in sorted(results.items())}
    names = (*suite.scores, *suite.figures)
    values = {name: _mean([seed_values.get(name) for seed_values in seeds.values()]) for name in names} if seeds else {}
    draws = [
        suite.draws(
            result.results, *references[seed], dataclasses.replace(bootstrap, seed=bootstrap.seed + result.draw)
        )
        for seed, result in sorted(results.items())
    ]
    intervals = {}
    for name in suite.scores:
        seed_draws = [drawn[name] for drawn in draws if name in drawn]
        if values.get(name) is not None and len(seed_draws) == len(draws):
            intervals[name] = bootstrap.interval(_over_seeds(seed_draws, bootstrap))
    failed = "; ".join(dict.fromkeys(failures.values())) or None
    if failed and results:
        failed = f"without seed {', '.join(map(str, sorted(failures)))}: {failed}"
    return TrialSummary(
        method,
        setting,
        values,
        intervals,
        seeds,
        _mean([result.seconds for result in results.values()]),
        failed,
        tuple(notes),
        next((name for name in suite.goals if values.get(name) is not None), suite.goals[0]),
    )


def best_of(trials: Sequence[TrialSummary], goal: str | None = None) -> dict[str, TrialSummary]:
    """Choose each method's setting with the best score, on the reported questions as in the paper; ties: the first."""
    best: dict[str, TrialSummary] = {}
    for trial in trials:
        if trial.method not in best or trial.rank(goal) > best[trial.method].rank(goal):
            best[trial.method] = trial
    return best


def write_files(results: BenchmarkResults, settings: CompareSettings) -> None:
    """Write `comparison.json` and `table.md`."""
    output = Path(settings.output).expanduser()
    write_text(output / TABLE, markdown(results, settings))
    content = {
        "best": [dataclasses.asdict(trial) for trial in results.best.values()],
        "held_out": [dataclasses.asdict(trial) for trial in results.held_out.values()],
        "grid": [dataclasses.asdict(trial) for trial in results.trials],
        "leaks": {method: {str(k): value for k, value in shares.items()} for method, shares in results.leaks.items()},
        "best_by": {goal: [dataclasses.asdict(trial) for trial in of.values()] for goal, of in results.best_by.items()},
        **results.suite.about,
    }
    write_json(output / JSON, content)


def summary(results: BenchmarkResults, settings: CompareSettings) -> str:
    """Format the best settings, their leaks and the notes in Markdown: the head of `table.md`."""
    text = f"{_lead(results, settings)}\n\n{_table(list(results.best.values()), results, costs=True)}"
    if results.best_by:
        shorts = [MEASURES[name].short for name in results.best_by]
        heads = ["Method", *(head for short in shorts for head in ("Setting", short))]
        rows = [
            [TITLES[method], *(cell for name, of in results.best_by.items() for cell in _cells_by(of[method], name))]
            for method in next(iter(results.best_by.values()))
        ]
        text += f"\nThe best setting by each of these distances, as the paper chooses:\n\n{markdown_table(heads, rows)}"
    if results.leaks:
        ks = list(next(iter(results.leaks.values())))
        rows = [[TITLES[method], *(f"{shares[k]:.3f}" for k in ks)] for method, shares in results.leaks.items()]
        text += f"\nLeak@k, the best settings:\n\n{markdown_table(['Method', *(f'k = {k}' for k in ks)], rows)}"
    return text + "".join(f"\n{note}\n" for note in _notes(results))


def markdown(results: BenchmarkResults, settings: CompareSettings) -> str:
    """Format the summary and the whole grid in Markdown."""
    return f"{summary(results, settings)}\nThe whole grid:\n\n{_table(results.trials, results)}"


def _cells_by(trial: TrialSummary, name: str) -> tuple[str, str]:
    """Setting and score."""
    return (trial.setting, trial.text(name)) if trial.values.get(name) is not None else ("–", "failed")


def _table(trials: Sequence[TrialSummary], results: BenchmarkResults, *, costs: bool = False) -> str:
    """Format settings in Markdown. With costs, also what the choice of the setting rests on."""
    shown = results.suite.shown
    heads = ["Method", "Setting", *(MEASURES[name].short for name in shown)]
    if costs:
        heads += ["Settings tried", "Chosen on one half", f"{results.goal.short} on the other half", "Training"]
    rows = []
    for trial in trials:
        cells = [trial.text(name) for name in shown]
        if costs:
            cells += [str(results.tried(trial.method)), *_held_out(results, trial.method)]
            cells.append("–" if trial.seconds is None else f"{trial.seconds:.0f} s")
        if trial.has_failed:
            cells = [str(trial.failed).replace("|", "\\|"), *[""] * (len(cells) - 1)]
        rows.append([trial.title, trial.setting, *cells])
    return markdown_table(heads, rows)


def _held_out(results: BenchmarkResults, method: str) -> tuple[str, str]:
    """The setting chosen on one half of the questions, and its score on the other half."""
    if (trial := results.held_out.get(method)) is None:
        return "–", "–"
    return trial.setting, trial.text(trial.goal)


def _lead(results: BenchmarkResults, settings: CompareSettings) -> str:
    number = len(results.trials[0].seeds)
    seeds, drawn = ("1 seed", "items") if number == 1 else (f"{number} seeds", "seeds and items")
    searched = settings.search_seeds or number
    first = "first seed, the only one" if searched == 1 else f"first {searched} seeds, the only ones"
    asked = "these very questions, as in the paper" if searched >= number else f"the {first} for the grid's others"
    variant = results.suite.about.get("variant")
    computed = f", aggregates of the variant {variant}" if variant else ""
    goal = results.goal
    extreme = "highest" if goal.better == "higher" else "lowest"
    return (
        f"{settings.data}, {settings.grid} grid, {seeds}{computed}; the best setting of each method by {goal.short} on "
        f"{asked}; held out: the setting with the {extreme} {goal.short} on the questions with even numbers, and its "
        f"{goal.short} on the others; 99 % bootstrap intervals over {drawn}, target and retrained model held fixed"
    )


def _notes(results: BenchmarkResults) -> list[str]:
    notes: dict[str, list[str]] = {}
    for trial in results.trials:
        for note in (*trial.notes, *([trial.failed] if trial.failed else ())):
            notes.setdefault(note, []).append(f"{trial.title} {trial.setting}".strip())
    return [results.suite.note, *(f"{', '.join(dict.fromkeys(of))}: {note}" for note, of in notes.items())]


def _over_seeds(draws: Sequence[np.ndarray], bootstrap: Bootstrap) -> np.ndarray:
    """In each draw, resample the seeds with replacement and average their values in that draw."""
    stacked = np.stack(draws)
    seeds, number = stacked.shape
    chosen = np.random.default_rng(bootstrap.seed).integers(seeds, size=(seeds, number))
    return stacked[chosen, np.arange(number)].mean(axis=0)


def _mean(values: Sequence[float | int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) and known else None
