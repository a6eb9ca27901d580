"""Results of a comparison: aggregates with intervals, the best setting of each method, tables and the page."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from divdec.evaluation.aggregate import AGGREGATES, FLUENCY, Bootstrap, Resampler, aggregate, needed, tofu_figures
from divdec.evaluation.results import Results
from divdec.evaluation.tofu import compute_figures
from divdec.report.page import write_page
from divdec.report.scores import MEASURES, best_index
from divdec.report.style import PAGE_WIDTH, RETRAIN, SERIES_STYLES, TARGET, style, svg_text
from divdec.research.baselines.methods import DIVDEC, REFERENCES, TITLES, Kind, kind_of
from divdec.research.charts import Bar, LeakCurve, bars, leak_curves, markdown_table, terminal_table
from divdec.research.compare.settings import CompareSettings
from divdec.runs import write_json, write_text

SHOWN = ("agg", "mem", "priv", "utility")
FIGURES = ("forget_Q_A_Prob", "forget_Q_A_ROUGE", "retain_Q_A_Prob", "retain_Q_A_ROUGE", "model_utility")
COSTS = ("Training", "Memory", "Time a token")
VALIDATION, TEST = 0, 1  # halves of the questions: those with even numbers choose a setting, the others report it
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
    """Seeds with the same number have the same questions; their items are resampled together."""


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
    """Reason for missing values or a missing seed."""
    notes: tuple[str, ...] = ()

    @property
    def score(self) -> float:
        """Agg, by which a method's best setting is chosen; −1 for a failed trial."""
        value = self.values.get("agg")
        if value is None:
            value = self.values.get("agg_without_privacy")
        return -1.0 if value is None or self.failed else value

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
        return self.failed is not None and self.values.get("mem") is None

    def interval_text(self, name: str) -> str:
        """Format the interval of a value; empty if there is none."""
        return f"[{', '.join(map(MEASURES[name].text, self.intervals[name]))}]" if name in self.intervals else ""

    def costs(self, time_ratio: float | None) -> tuple[str, str, str]:
        """Format training time, memory and time per token relative to the target's."""
        return (
            "–" if self.seconds is None else f"{self.seconds:.0f} s",
            "–" if self.extra_bytes is None else f"{self.extra_bytes / 2**20:+.1f} MiB",
            "–" if time_ratio is None else f"{time_ratio:.2f}×",
        )


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
    held_out: dict[str, TrialSummary] = dataclasses.field(default_factory=dict)
    """By method, the setting that was chosen on one half of the questions, measured on the other half."""

    def tried(self, method: str) -> int:
        """Number of settings of a method."""
        return sum(trial.method == method for trial in self.trials)


def half_of(results: Results, half: int) -> Results:
    """Results on one half of each set's questions: those with even (0) or odd (1) numbers."""
    part = dataclasses.replace(results, figures={}, items={})
    for metric, items in results.items.items():
        if chosen := {str(int(index) // 2): fields for index, fields in items.items() if int(index) % 2 == half}:
            part.items[metric] = chosen
    compute_figures(part)
    return part


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
        "held_out": [dataclasses.asdict(trial) for trial in results.held_out.values()],
        "without_best": sorted(without_best(results.trials)),
        "grid": [dataclasses.asdict(trial) for trial in results.trials],
        "leaks": {method: {str(k): value for k, value in own.items()} for method, own in results.leaks.items()},
        "time_ratio": results.times,
        "variant": settings.variant,
    }
    write_json(output / JSON, content)
    best = _marked_best(results)
    write_page(
        output / PAGE,
        "methods.html",
        title=f"Unlearning methods on {settings.data}",
        lead=_lead(results, settings),
        best=best,
        grid=results.trials,
        times=results.times,
        held_out=results.held_out,
        tried=results.tried,
        shown=SHOWN,
        measures=MEASURES,
        notes=_notes(results),
        bars_svg=_bars(best),
        leaks_svg=_leak_curves(results) if results.leaks else "",
    )


def show(results: BenchmarkResults, settings: CompareSettings, console: Console) -> None:
    """Print the best settings without intervals, training times and memory (80 columns), and the notes."""
    console.print(_lead(results, settings), highlight=False)
    heads = ["Method", "Setting", "Tried", *(MEASURES[name].short for name in SHOWN), "Held out", "Time"]
    rows = []
    for trial in _marked_best(results):
        values = (
            ["failed", "", "", ""]
            if trial.has_failed
            else [MEASURES[name].text(trial.values.get(name)) for name in SHOWN]
        )
        setting = trial.setting.replace("learning_rate", "lr")
        *_, time_ratio = trial.costs(results.times.get(trial.method))
        tried, (_, held_out) = str(results.tried(trial.method)), _held_out(results, trial.method, interval=False)
        rows.append(dict(zip(heads, (trial.title, setting, tried, *values, held_out, time_ratio), strict=True)))
    console.print(terminal_table(rows, left=2))
    for note in _notes(results):
        console.print(note, highlight=False)


def markdown(results: BenchmarkResults, settings: CompareSettings) -> str:
    """Format the best settings, their leaks, the whole grid and the notes in Markdown."""
    text = f"{_lead(results, settings)}\n\n{_table(_marked_best(results), results)}"
    if results.leaks:
        ks = list(next(iter(results.leaks.values())))
        rows = [[TITLES[method], *(f"{own[k]:.3f}" for k in ks)] for method, own in results.leaks.items()]
        text += f"\nLeak@k, the best settings:\n\n{markdown_table(['Method', *(f'k = {k}' for k in ks)], rows)}"
    text += f"\nThe whole grid:\n\n{_table(results.trials)}"
    return text + "".join(f"\n{note}\n" for note in _notes(results))


def _table(trials: Sequence[TrialSummary], results: BenchmarkResults | None = None) -> str:
    """Format settings in Markdown. With the results, what the choice of the setting rests on, and the costs."""
    heads = ["Method", "Setting", *(MEASURES[name].short for name in SHOWN)]
    if results is not None:
        heads += ["Settings tried", "Chosen on one half", "Agg on the other half", *COSTS]
    rows = []
    for trial in trials:
        cells = [f"{MEASURES[name].text(trial.values.get(name))} {trial.interval_text(name)}".strip() for name in SHOWN]
        if results is not None:
            cells += [str(results.tried(trial.method)), *_held_out(results, trial.method)]
            cells += trial.costs(results.times.get(trial.method))
        if trial.has_failed:
            cells = [str(trial.failed).replace("|", "\\|"), *[""] * (len(cells) - 1)]
        rows.append([trial.title, trial.setting, *cells])
    return markdown_table(heads, rows)


def _held_out(results: BenchmarkResults, method: str, *, interval: bool = True) -> tuple[str, str]:
    """The setting chosen on one half of the questions, and Agg on the other half."""
    if (trial := results.held_out.get(method)) is None:
        return "–", "–"
    text = MEASURES["agg"].text(trial.values.get("agg"))
    return trial.setting, f"{text} {trial.interval_text('agg')}".strip() if interval else text


def _marked_best(results: BenchmarkResults) -> list[TrialSummary]:
    """The best setting of each method. If several are best, the first one, with a mark."""
    ties = without_best(results.trials) - set(REFERENCES)
    return [
        dataclasses.replace(trial, setting=f"{trial.setting} (no setting is best)".strip()) if method in ties else trial
        for method, trial in results.best.items()
    ]


def _bars(trials: Sequence[TrialSummary]) -> str:
    """Agg of each method's best setting with its interval, the highest at the top."""
    entries = [
        Bar(f"{trial.title}  {trial.setting}".strip(), agg, trial.kind, trial.intervals.get("agg"))
        for trial in trials
        if (agg := trial.values.get("agg")) is not None
    ]
    with style("methods-bars"):
        figure = Figure(figsize=(PAGE_WIDTH, 0.8 + 0.3 * len(entries)), layout="constrained")
        bars(figure.subplots(), sorted(entries, key=lambda bar: bar.value), MEASURES["agg"].axis)
        return svg_text(figure)


def _leak_curves(results: BenchmarkResults) -> str:
    """Leak@k of references and Divergence Decoding in colour, of other methods in grey."""
    fixed, free = {"target": TARGET, "retrain": RETRAIN}, iter(SERIES_STYLES)
    curves = []
    for method, shares in results.leaks.items():
        series_style = fixed.get(method) or (next(free, None) if method in DIVDEC else None)
        curves.append(LeakCurve(TITLES[method], series_style, shares))
    with style("methods-leaks"):
        figure = Figure(figsize=(PAGE_WIDTH, 3.9), layout="constrained")
        leak_curves(figure.subplots(), curves)
        return svg_text(figure)


def _lead(results: BenchmarkResults, settings: CompareSettings) -> str:
    number = len(results.trials[0].seeds)
    seeds, drawn = ("1 seed", "items") if number == 1 else (f"{number} seeds", "seeds and items")
    searched = settings.search_seeds or number
    first = "first seed, the only one" if searched == 1 else f"first {searched} seeds, the only ones"
    asked = "these very questions, as in the paper" if searched >= number else f"the {first} for the grid's others"
    return (
        f"{settings.data}, {settings.grid} grid, {seeds}, aggregates of the variant {settings.variant}; the best "
        f"setting of each method by Agg on {asked}; held out: the setting with the highest Agg on the questions with "
        f"even numbers, and its Agg on the others; 99 % bootstrap intervals over {drawn}, target and retrained model "
        "held fixed"
    )


def _notes(results: BenchmarkResults) -> list[str]:
    notes: dict[str, list[str]] = {}
    for trial in results.trials:
        for note in (*trial.notes, *([trial.failed] if trial.failed else ())):
            notes.setdefault(note, []).append(f"{trial.title} {trial.setting}".strip())
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
    names = [name for names in needed(variant, fluency=fluency).values() for name in names]
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
