"""Figures of single runs: leaks, distillation; and of sequential requests, for research/studies/sequential.py."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from divdec.errors import UsageError
from divdec.evaluation.results import SUMMARY
from divdec.runs import read_json
from divdec_research.baselines.table import DIVDEC, REFERENCES, TITLES
from divdec_research.figures.registry import FigureRequest, FigureResult, Source, find_files, missing_data, register
from divdec_research.figures.results import COMPARISON, load_results
from divdec_research.report.charts import Dot, LeakCurve, Series, band_panels, leak_curves
from divdec_research.report.scores import MEASURES
from divdec_research.report.style import BY_NAME, OTHERS, PAPER, SERIES_STYLES
from divdec_research.suites.aggregate import DISTANCES
from divdec_research.suites.results import read_results

PUBLISHED_LEAKS = "rebel_cache.json"
SEQUENCE_STYLES = {
    "steered": SERIES_STYLES[0],
    "steered, forget-retain": SERIES_STYLES[4],
    "distilled": SERIES_STYLES[2],
    "grad-diff": SERIES_STYLES[1],
    "npo": SERIES_STYLES[3],
}
LEAK = re.compile(r"leak@(\d+)-(attack|sample)")
PUBLISHED_STUDENT = re.compile(r"lr-(?P<lr>.+)-epoch-(?P<epochs>[\d.]+)-temp-(?P<temperature>[\d.]+)$")
OPTION = re.compile(r"(\w+) (-?[\d.]+(?:e[-+]?\d+)?)")
LR, TEMPERATURE = "lr", "temperature"
OPTION_LABELS = {TEMPERATURE: "temperature T", "rehearse": "rehearsed examples of the retain set"}


@dataclasses.dataclass(frozen=True)
class Student:
    """A distilled model: its options and its scores."""

    options: dict[str, float]
    values: dict[str, float]
    source: Source


@dataclasses.dataclass(frozen=True)
class Tile:
    """A cell of a heat map."""

    x: float
    y: float
    value: float
    marked: bool = False


@register(
    "distillation",
    shows="heat map of distillation over learning rate and temperature",
    needs="divdec compare with the method distill, or the paper's summaries",
)
def distillation(request: FigureRequest) -> FigureResult:
    """Draw Agg of each student, or on MUSE the distances from the retrained model (paper, figure distill_tofu).

    Students with a higher Agg than every other method in the data have a frame.
    """
    students, other_method = _students(request)
    if not students:
        needs = (
            f"a {COMPARISON} with the method distill, or the paper's folders with target and retrained model "
            "(--target, --retrain)"
        )
        raise missing_data(request.runs, "distillation", needs)
    names = {name: MEASURES[name].axis for name in students[0].values}
    option = _second_option(students)
    label = OPTION_LABELS.get(option, option.replace("_", " "))
    figure = Figure(figsize=(5.0 * len(names) + 0.4, 4.2), layout="constrained")
    for axes, (name, panel_title) in zip(figure.subplots(1, len(names), squeeze=False)[0], names.items(), strict=True):
        tiles = [
            Tile(
                student.options[LR], student.options.get(option, 0.0), student.values[name],
                marked=other_method is not None and student.values[name] > other_method,
            )
            for student in students
            if name in student.values
        ]  # fmt: skip
        if len({(tile.x, tile.y) for tile in tiles}) < len(tiles):
            both = f"{LR} and {option}" if option else LR
            raise UsageError(f"several students have one {both}; give runs that differ in these alone")
        mesh = heat_map(axes, tiles, x_label="learning rate", y_label=label, reverse=name != "agg")
        if not option:
            axes.set_yticks([])
        figure.colorbar(mesh, ax=axes, shrink=0.9).outline.set_visible(False)  # pyright: ignore[reportCallIssue]
        axes.set_title(panel_title)
    if other_method is not None:
        figure.supxlabel(f"framed: above the best other method there, {other_method:.2f}", fontsize=9)
    title = "Distillation by learning rate"
    figure.suptitle(f"{title} and {label.partition(' ')[0]}" if option else title, fontsize=11.5)
    sources = tuple(dict.fromkeys(student.source.name for student in students))
    return FigureResult(figure, title, f"{len(students)} students; {', '.join(names.values())}.", sources)


@register(
    "leak",
    shows="Leak@k over attack prompts",
    needs="divdec eval leak, divdec compare, or the paper's rebel_cache.json",
)
def leak(request: FigureRequest) -> FigureResult:
    """Draw Leak@k of all methods in the runs; many other methods are grey."""
    by_label: dict[str, LeakCurve] = {}
    kinds: set[str] = set()
    sources = []
    files = find_files(request.runs, PUBLISHED_LEAKS, COMPARISON, SUMMARY)
    compared = {source.path.parent for source in files if source.path.name == COMPARISON}
    for source in files:
        if source.path.name == SUMMARY and not compared.isdisjoint(source.path.parents):
            continue  # one of the seeds that the comparison summarises
        curves, kind = _evaluated_leaks(source, request) if source.path.name == SUMMARY else _listed_leaks(source)
        if curves:
            sources.append(source.name)
            kinds.add(kind)
        for curve in curves:
            name = f"{curve.label} ({source.path.parent.name})" if curve.label in by_label else curve.label
            by_label[name] = dataclasses.replace(curve, label=name)
    if not by_label:
        needs = f"results of `divdec eval leak`, a {COMPARISON} with leaks, or {PUBLISHED_LEAKS}"
        raise missing_data(request.runs, "leak", needs)
    if len(kinds) > 1:
        raise UsageError("these runs hold leaks under attack and of samples; give runs of one kind")
    methods = {title: method for method, title in {**DIVDEC, **REFERENCES}.items()}
    styles, many = iter(SERIES_STYLES), len(by_label) > len(SERIES_STYLES) + len(REFERENCES)
    curves = []
    for curve in by_label.values():
        method = methods.get(curve.label, "")
        series_style = BY_NAME[method] if method in REFERENCES else None
        if series_style is None and (method in DIVDEC or not many):
            series_style = next(styles, None)
        curves.append(dataclasses.replace(curve, style=series_style))
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.subplots()
    attack = kinds == {"attack"}
    leak_curves(axes, curves, f"k, {'attack prompts' if attack else 'samples'} a question")
    title = "Leak@k" if attack else "Leak@k over samples"
    axes.set_title(title)
    largest = max(k for curve in curves for k in curve.shares)
    shares = ", ".join(f"{curve.label} {curve.shares[largest]:.3f}" for curve in curves if largest in curve.shares)
    return FigureResult(
        figure, title, f"Share of questions that leak; at k = {largest}: {shares}.", tuple(sources)
    )  # fmt: skip


def heat_map(axes: Axes, tiles: Sequence[Tile], *, x_label: str, y_label: str, reverse: bool = False) -> Any:
    """Draw a grid of values with three digits in its cells; marked cells have a frame.

    Returns:
        The mesh, for a colour bar.
    """
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    xs, ys = (sorted({getattr(tile, name) for tile in tiles}) for name in "xy")
    grid = np.full((len(ys), len(xs)), np.nan)
    for tile in tiles:
        grid[ys.index(tile.y), xs.index(tile.x)] = tile.value
    low, high = float(np.nanmin(grid)), float(np.nanmax(grid))
    decimals = 2 if high < 10 else 0
    colours = colormaps["cividis_r" if reverse else "cividis"]
    mesh = axes.pcolormesh(
        np.arange(len(xs) + 1) - 0.5, np.arange(len(ys) + 1) - 0.5, np.ma.masked_invalid(grid), cmap=colours,
        vmin=low, vmax=high if high > low else low + 1, edgecolors=PAPER, linewidth=1,
    )  # fmt: skip
    for tile in tiles:
        x, y = xs.index(tile.x), ys.index(tile.y)
        red, green, blue, _ = colours((tile.value - low) / (high - low or 1.0))
        # Cells keep their colours on a dark page, so that their text is not in colours of the palette.
        ink = "#010101" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "#fefefe"
        axes.annotate(f"{tile.value:.{decimals}f}", (x, y), ha="center", va="center", color=ink, fontsize=9.5)
        if tile.marked:
            axes.add_patch(Rectangle((x - 0.44, y - 0.42), 0.88, 0.84, fill=False, edgecolor=ink, linewidth=1.5))
    axes.set_xticks(range(len(xs)), [f"{value:g}" for value in xs], rotation=0 if len(xs) < 8 else 45)
    axes.set_yticks(range(len(ys)), [f"{value:g}" for value in ys])
    axes.tick_params(length=0)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.spines[:].set_visible(False)
    return mesh


def distance_figure(steps: Sequence[Mapping[str, Any]], score: str, level: float | None) -> Figure:
    """Draw the distance over the steps, one panel for each protocol, one line for each method."""
    groups: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for step in steps:
        groups.setdefault(step["protocol"], {}).setdefault(step["method"], []).append(step)
    panels = {
        protocol: [
            Series(
                method,
                SEQUENCE_STYLES.get(method, OTHERS),
                tuple(Dot(row["step"], row["distance"], y_interval=row["distance_interval"]) for row in rows),
            )
            for method, rows in methods.items()
        ]
        for protocol, methods in groups.items()
    }
    figure = Figure(figsize=(9.0, 4.1), layout="constrained")
    grid = band_panels(figure, panels, "requests so far")
    for axes in grid:
        axes.set_ylim(bottom=0)
    grid[0].set_ylabel(f"distance from the first step, points of {score}\n(retain and request 1; lower is better)")
    grid[-1].legend(title=None if level is None else f"{100 * level:g} % interval")
    return figure


def _students(request: FigureRequest) -> tuple[list[Student], float | None]:
    """The students in the runs, and the best Agg of the other methods."""
    students, others = [], []
    for results in load_results(request, "distillation").values():
        for result in results:
            named, agg = PUBLISHED_STUDENT.search(result.source.path.parent.name), result.values.get("agg")
            text = named.groupdict() if named else dict(OPTION.findall(result.setting))
            values = {"agg": agg} if agg is not None else {name: result.values.get(name) for name in DISTANCES}
            known = {name: value for name, value in values.items() if value is not None}
            if LR in text and (named or result.method == "distill") and len(known) == len(values):
                options = {name: float(value) for name, value in text.items()}
                students.append(Student(options, known, result.source))
            elif agg is not None and result.method not in (*DIVDEC, *REFERENCES):
                others.append(agg)
    return students, max(others, default=None)


def _second_option(students: Sequence[Student]) -> str:
    """The option that varies besides the learning rate, preferably the temperature; empty if there is none."""
    values: dict[str, set[float]] = {}
    for student in students:
        for name, value in student.options.items():
            if name != LR:
                values.setdefault(name, set()).add(value)
    varied = [name for name, seen in values.items() if len(seen) > 1]
    if TEMPERATURE in varied or (not varied and TEMPERATURE in values):
        return TEMPERATURE
    return next(iter(varied), "")


def _listed_leaks(source: Source) -> tuple[list[LeakCurve], str]:
    """The curves of a comparison or of the paper's published file."""
    content = read_json(source.path)
    if not isinstance(content, Mapping):
        return [], ""
    if isinstance(table := content.get("table_data"), list):
        titles = [str(row["Method"]).replace("_", " ").replace("Offset", "δ-Unlearning") for row in table]
        shares = [{name[5:]: row[name] for name in row if name.startswith("Leak@")} for row in table]
    else:
        leaks = content.get("leaks")
        leaks = leaks if isinstance(leaks, Mapping) else {}
        titles, shares = [TITLES.get(name, str(name)) for name in leaks], list(leaks.values())
    return [
        LeakCurve(title, None, {int(k): float(share) for k, share in method_shares.items()})
        for title, method_shares in zip(titles, shares, strict=True)
    ], "attack"


def _evaluated_leaks(source: Source, request: FigureRequest) -> tuple[list[LeakCurve], str]:
    """The curve of `divdec eval leak` with its intervals, and whether it is of attacks or of samples."""
    content = read_json(source.path)
    if not isinstance(content, Mapping) or content.get("suite") != "leak":
        return [], ""
    results = read_results(source.path.parent)
    names = {(match[2], int(match[1])): name for name in results.figures if (match := LEAK.fullmatch(name))}
    kind = "attack" if any(kind == "attack" for kind, _ in names) else "sample"
    bootstrap = request.scoring.bootstrap()
    shares: dict[int, float] = {}
    intervals: dict[int, tuple[float, float]] = {}
    for (of, k), name in sorted(names.items()):
        value = results.figures[name]
        if of != kind or value is None:
            continue
        shares[k] = value
        if results.items.get(name):
            scores = np.asarray(results.scores(name, "score"), dtype=float)
            intervals[k] = bootstrap.interval(bootstrap.counts(len(scores), "leak") @ scores / len(scores))
    label = REFERENCES.get(str(results.about.get("method") or results.name), results.name)
    return ([LeakCurve(label, None, shares, intervals)] if shares else []), kind
