"""Figures of TOFU and MUSE: the best settings, distances, scores along α and k, sizes of the auxiliaries."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from divdec_research.baselines.table import DIVDEC
from divdec_research.figures.registry import FigureRequest, FigureResult, missing_data, register
from divdec_research.figures.results import (
    MethodResult,
    best_setting,
    best_settings,
    load_results,
    source_names,
    with_values,
)
from divdec_research.report.charts import (
    Bar,
    Dot,
    Series,
    bars,
    draw_line,
    error_bars,
    log_ticks,
    scatter,
    write_labels,
)
from divdec_research.report.scores import ATTACK_NAMES, MEASURES
from divdec_research.report.style import BY_NAME, LINEAR, OTHERS, PAPER, RANK, RETRAIN, SERIES_STYLES, TEXT, SeriesStyle
from divdec_research.suites.aggregate import ATTACKS, FORGET_KNOWMEM, RETAIN_KNOWMEM, VERBMEM

TOFU = "divdec eval tofu, divdec compare, or the paper's TOFU_SUMMARY.json"
MUSE = "divdec eval muse, or the paper's MUSE_SUMMARY.json"
RULES = {"linear": "α of the linear rule", "rank": "k of the rank rule"}
FURTHER = {"linear": SERIES_STYLES[4], "rank": SERIES_STYLES[3]}  # styles of a rule's further families
SUITES = ("muse", "tofu")
PANELS = {
    "muse": {
        "verbmem_distance": ("MUSE, verbatim memorization", "distance to retrain,\n% of the target's"),
        "knowmem_distance": ("MUSE, knowledge", "distance to retrain,\n% of the target's"),
    },
    "tofu": {
        "agg": ("TOFU, aggregate score", "Agg, 0 to 1"),
        "agg_without_privacy": ("TOFU, without privacy", "Agg w/o Priv, 0 to 1"),
    },
}


@register("tofu-bars", shows="TOFU: Agg of each method's best setting", needs=TOFU)
def tofu_bars(request: FigureRequest) -> FigureResult:
    """Draw Agg of each method's best setting, with its interval if there are items (paper, figure 1)."""
    best = best_settings(with_values(_load_suite(request, "tofu-bars", "tofu"), "agg"), "agg")
    best.sort(key=lambda result: result.values["agg"] or 0.0)
    rows = [Bar(result.label, result.values["agg"] or 0.0, result.kind, result.intervals.get("agg")) for result in best]
    figure = Figure(figsize=(7.2, 1.0 + 0.29 * len(rows)), layout="constrained")
    axes = figure.subplots()
    bars(axes, rows, f"Agg: harmonic mean of Mem, Priv and Utility, 0 to 1 ({MEASURES['agg'].better} is better)")
    title = "TOFU: the best setting of each method"
    axes.set_title(title)
    listed = ", ".join(f"{row.label} {row.value:.2f}" for row in reversed(rows))
    return FigureResult(figure, title, f"Agg of each method's best setting by Agg: {listed}.", source_names(best))


@register("muse-scatter", shows="MUSE: what is known of the retain set over what is remembered", needs=MUSE)
def muse_scatter(request: FigureRequest) -> FigureResult:
    """Draw two scatters whose goal is the retrained model (paper, figure MUSE Results).

    Of methods other than the two rules the setting nearest to the retrained model is shown, or every setting without
    target or retrained model.
    """
    results = _load_suite(request, "muse-scatter", "muse")
    panels: dict[str, tuple[str, list[MethodResult]]] = {}
    for x, distance, name in (
        (VERBMEM, "verbmem_distance", "Verbatim memorization"),
        (FORGET_KNOWMEM, "knowmem_distance", "Knowledge"),
    ):
        measured = [
            result for result in results if None not in (result.values.get(x), result.values.get(RETAIN_KNOWMEM))
        ]
        swept = [result for result in measured if result.rule or result.kind == "reference"]
        others = [result for result in measured if result not in swept]
        if measured:
            panels[name] = x, swept + (best_settings(others, distance) or others)
    if not panels:
        with_values(results, VERBMEM, RETAIN_KNOWMEM)
    title = "MUSE: the nearer to the retrained model, the better"
    figure = Figure(figsize=(4.9 * len(panels) + 0.6, 5.2), layout="constrained")
    figure.suptitle(title, fontsize=11.5)
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    handles: dict[str, Artist] = {}
    series: list[tuple[Series, ...]] = []
    for axes, (name, (x, shown)) in zip(grid, panels.items(), strict=True):
        series.append(_scatter_series(shown, x, RETAIN_KNOWMEM))
        scatter(axes, series[-1])
        axes.set_title(name)
        axes.set_xlabel(MEASURES[x].axis, fontsize=9.5)
        handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True)) | handles
    grid[0].set_ylabel(MEASURES[RETAIN_KNOWMEM].axis, fontsize=9.5)
    figure.legend(
        handles.values(), list(handles), loc="outside lower center", ncols=3, fontsize=9, markerscale=0.7
    )  # fmt: skip
    figure.draw_without_rendering()  # fixes the layout
    for axes, shown_series in zip(grid, series, strict=True):
        write_labels(axes, shown_series)
    drawn = [result for _, shown in panels.values() for result in shown]
    text = (
        f"Retain knowmem over {' and '.join(panels).lower()} of {len(set(map(id, drawn)))} results; numbers beside "
        "points are the ends of α and k."
    )
    return FigureResult(figure, title, text, source_names(drawn))


@register("strength", shows="scores along α and k, 2×2 for TOFU and MUSE", needs=f"{TOFU}; {MUSE}")
def strength(request: FigureRequest) -> FigureResult:
    """Draw each score over α (lower axis) and k (upper axis) (paper, figure hp_2x2).

    A score that no two settings of one rule have is omitted.
    """
    results = {suite: rows for suite, rows in load_results(request, "strength").items() if _sweeps(rows)}
    if not results:
        raise missing_data(request.runs, "strength", "results of at least two settings of one rule")
    names = {suite: [name for name in PANELS[suite] if _sweeps(rows, name)] for suite, rows in results.items()}
    suites = [suite for suite in SUITES if names.get(suite)]
    if not suites:
        steered = [result for rows in results.values() for sweep in _sweeps(rows) for result in sweep]
        with_values(steered, next(iter(PANELS["tofu" if "tofu" in results else "muse"])))
        raise missing_data(request.runs, "strength", "scores of at least two settings of one rule")
    figure = _figure(4.9 * len(suites) + 0.3, 6.8)
    grid = figure.subplots(2, len(suites), squeeze=False)
    drawn: list[MethodResult] = []
    absent = []
    for column, suite in enumerate(suites):
        for row, (name, (title, label)) in enumerate(PANELS[suite].items()):
            axes = grid[row][column]
            if name not in names[suite]:
                axes.remove()
                absent.append(title)
                continue
            if suite == "tofu":  # the distance of MUSE's retrained model is 0
                _draw_level(
                    axes,
                    next((result.values.get(name) for result in results[suite] if result.method == "retrain"), None),
                )
            drawn += _draw_sweeps(axes, _sweeps(results[suite], name), name)
            axes.set_title(title, pad=8)
            axes.set_ylabel(f"{label} ({MEASURES[name].better} is better)", fontsize=9.5)
            if suite == "muse":
                axes.set_ylim(bottom=0)
    _sweep_legend(figure, drawn, retrain="tofu" in suites)
    text = (
        f"Scores of {' and '.join(suites).upper()} along α and k; bands are bootstrap intervals where there are items."
    )
    if absent:
        text += f" Left out, for no two settings have it: {'; '.join(absent)}."
    return FigureResult(figure, "Scores along the strength of steering", text, source_names(drawn))


@register("sizes", shows="the best score by the auxiliaries' size", needs=f"{TOFU}; {MUSE}")
def sizes(request: FigureRequest) -> FigureResult:
    """Draw the best score by the size of the auxiliaries; n-grams are at 0 (paper, figure model scaling).

    `run.json` states the size; of published files the folder's name does: `1B-alpha-1.5`, `dd_trigram/topk-1`.
    """
    results = load_results(request, "sizes")
    panels: list[tuple[str, str, str, dict[str, list[MethodResult]]]] = []
    for suite in SUITES:
        for name, (title, label) in PANELS[suite].items():
            lines = {rule: _best_by_size(results.get(suite, []), rule, name) for rule in RULES}
            if any(lines.values()):
                panels.append((name, title, label, lines))
    if not panels:
        needs = (
            "steered results whose run.json, or folder such as 1B-alpha-1.5 or trigram, states the auxiliaries' size"
        )
        raise missing_data(request.runs, "sizes", needs)
    columns, rows = min(len(panels), 2), (len(panels) + 1) // 2
    figure = _figure(4.7 * columns + 0.3, 3.4 * rows + 0.4)
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, (name, title, label, lines) in zip(grid, panels, strict=False):
        for rule, points_of_rule in lines.items():
            series_style = BY_NAME[rule]
            points = [(result.size or 0.0, result.values[name] or 0.0) for result in points_of_rule]
            if points:
                sizes_of, values = zip(*points, strict=True)
                draw_line(axes, sizes_of, values, series_style, markersize=6.5, label=f"{rule} rule")
            others = {result.size: result.values[name] or 0.0 for key in lines if key != rule for result in lines[key]}
            for result, (size, value) in zip(points_of_rule, points, strict=True):
                bars_of = error_bars(value, result.intervals.get(name))
                axes.errorbar(size, value, yerr=bars_of, fmt="none", ecolor=series_style.colour)
                above = value >= others.get(size, -1.0)  # the higher of two points has its setting above
                axes.annotate(
                    result.setting, (size, value), xytext=(0, 8 if above else -8), textcoords="offset points",
                    ha="center", va="bottom" if above else "top", fontsize=8.5, color=series_style.colour,
                    bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.8, "alpha": 0.8},
                )  # fmt: skip
        axes.set_title(title)
        axes.set_ylabel(f"{label} ({MEASURES[name].better} is better)", fontsize=9.5)
        axes.set_xlabel("parameters of each auxiliary, 10⁹ (0: n-grams)", fontsize=9.5)
        ticks = sorted({result.size or 0.0 for points_of_rule in lines.values() for result in points_of_rule})
        axes.set_xticks(ticks, [f"{size:g}" for size in ticks])
        axes.grid(True)
        axes.margins(0.18, 0.22)
        axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))
        axes.legend(fontsize=8.5, loc="best")
    for axes in grid[len(panels) :]:
        axes.remove()
    title = "The best setting by the auxiliaries' size"
    text = "Of each rule and size of the auxiliaries the best setting, which is named at its point."
    drawn = [result for *_, lines in panels for points_of_rule in lines.values() for result in points_of_rule]
    return FigureResult(figure, title, text, source_names(drawn))


@register("over-under", shows="over- and under-unlearning along α and k", needs=f"{TOFU}; {MUSE}")
def over_under(request: FigureRequest) -> FigureResult:
    """Draw membership attacks relative to the retrained model along α and k (paper, figure privacy).

    Upward is over-unlearned in every panel: MUSE's PrivLeak, and for TOFU the retrained model's AUC less the AUC.
    """
    results = load_results(request, "over-under")
    retrain = next((result for result in results.get("tofu", []) if result.method == "retrain"), None)
    # By suite, label of the y axis, and by attack the sweeps with a value and that value.
    labels = {"muse": "PrivLeak, % (0 is best)", "tofu": "AUC on the retrained model − AUC\n(0 is best)"}
    lines: dict[str, dict[str, list[list[tuple[MethodResult, float]]]]] = {"muse": {}, "tofu": {}}
    for suite, attack, name in (
        ("muse", "privleak", "PrivLeak"),
        *(("tofu", key, ATTACK_NAMES[key]) for key in ATTACKS),
    ):
        reference = retrain.values.get(attack) if retrain is not None else None
        if suite == "tofu" and reference is None:
            continue
        measured = [result for result in results.get(suite, []) if result.values.get(attack) is not None]
        lines[suite][name] = [
            [(result, value if suite == "muse" else (reference or 0.0) - value) for result in sweep
             if (value := result.values[attack]) is not None]
            for sweep in _sweeps(measured)
        ]  # fmt: skip
    panels = {
        (suite, result.rule) for suite in lines for sweeps in lines[suite].values() for ((result, _), *_) in sweeps
    }
    if not panels:
        needs = "settings of one rule with MUSE's PrivLeak, or with TOFU's attacks and those on the retrained model"
        raise missing_data(request.runs, "over-under", needs)
    suites = [suite for suite in SUITES if any(suite == panel_suite for panel_suite, _ in panels)]
    rules = [rule for rule in RULES if any(rule == panel_rule for _, panel_rule in panels)]
    figure = _figure(4.9 * len(suites) + 0.3, 3.3 * len(rules) + 0.6)
    grid = figure.subplots(len(rules), len(suites), squeeze=False, sharey="col")
    drawn: list[MethodResult] = []
    for column, suite in enumerate(suites):
        for row, rule in enumerate(rules):
            axes = grid[row][column]
            if (suite, rule) not in panels:
                axes.remove()
                continue
            _draw_level(axes, 0.0)
            families: dict[str, None] = {}
            for series_style, (name, sweeps) in zip(SERIES_STYLES, lines[suite].items(), strict=False):
                for number, sweep in enumerate(sweep for sweep in sweeps if sweep[0][0].rule == rule):
                    draw_line(
                        axes, [result.strength or 0.0 for result, _ in sweep], [value for _, value in sweep],
                        series_style, alpha=0.45 if number else 1, label=None if number else name,
                    )  # fmt: skip
                    families[sweep[0][0].family] = None
                    drawn += [result for result, _ in sweep]
            if rule == "rank":
                log_ticks(
                    axes,
                    sorted(
                        {result.strength or 0.0 for result in drawn if (result.suite, result.rule) == (suite, rule)}
                    ),
                )
            axes.set_xlabel(RULES[rule], fontsize=9.5)
            names = "; pale: ".join(filter(None, families))
            axes.set_title(f"{suite.upper()}{f' ({names})' if names else ''}")
            axes.set_ylabel(labels[suite], fontsize=9.5)
            axes.grid(True)
            axes.margins(y=0.16)
            for y, words, side in ((0.985, "↑ over-unlearned", "top"), (0.015, "↓ under-unlearned", "bottom")):
                axes.annotate(
                    words, (0.99, y), xycoords="axes fraction", ha="right", va=side, fontsize=8.5, color=TEXT,
                    bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.5, "alpha": 0.8},
                )  # fmt: skip
        if len(lines[suite]) > 1:
            row = next(row for row, rule in enumerate(rules) if (suite, rule) in panels)
            grid[row][column].legend(title="attack", fontsize=8.5, title_fontsize=8.5, loc="upper left")
    text = "Membership attacks along α and k, relative to the retrained model, which is the line at 0."
    return FigureResult(figure, "Over- and under-unlearning", text, source_names(drawn))


def _load_suite(request: FigureRequest, figure: str, suite: str) -> list[MethodResult]:
    results = load_results(request, figure).get(suite, [])
    if not results:
        raise missing_data(request.runs, figure, f"results of {suite.upper()}")
    return results


def _figure(width: float, height: float) -> Figure:
    """A figure with room between panels, so that an axis label is nearer to its own panel."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(wspace=0.06, hspace=0.05))


def _scatter_series(results: Sequence[MethodResult], x: str, y: str) -> tuple[Series, ...]:
    """Series of a scatter; of a sweep the weakest and the strongest setting have a label."""
    order = ("other", "reference", "ours")
    groups: dict[str, list[MethodResult]] = {}
    for result in sorted(results, key=lambda result: (order.index(result.kind), result.title, result.strength or 0.0)):
        has_series = result.rule or result.method in BY_NAME
        groups.setdefault(result.title if has_series else "other methods, the best setting of each", []).append(result)
    free, used = [style for style in SERIES_STYLES if style not in (LINEAR, RANK)], set()
    series = []
    for name, members in groups.items():
        method = members[0].method
        if method in ("linear", "rank") and method in used:
            series_style = free[len(used) % len(free)]
        else:
            series_style = BY_NAME.get(method, OTHERS)
        if method in ("linear", "rank"):
            used.add(method if method not in used else name)
        dots = tuple(
            Dot(
                result.values[x] or 0.0, result.values[y] or 0.0, result.intervals.get(x), result.intervals.get(y),
                "" if result.kind == "reference" or (result.rule and 0 < index < len(members) - 1)
                else result.title if result.strength is None else f"{result.strength:g}",
            )
            for index, result in enumerate(members)
        )  # fmt: skip
        series.append(Series(name, series_style, dots, joined=members[0].strength is not None))
    return tuple(series)


def _sweeps(results: Sequence[MethodResult], name: str | None = None) -> list[list[MethodResult]]:
    """The sweeps with several settings by rule and family, in the order of strength; of results with this value."""
    sweeps: dict[tuple[str, str], list[MethodResult]] = {}
    for rule in RULES:
        for result in results:
            if result.rule == rule and (name is None or result.values.get(name) is not None):
                sweeps.setdefault((rule, result.family), []).append(result)
    return [sorted(sweep, key=lambda result: result.strength or 0.0) for sweep in sweeps.values() if len(sweep) > 1]


def _best_by_size(results: Sequence[MethodResult], rule: str, name: str) -> list[MethodResult]:
    by_size: dict[float, list[MethodResult]] = {}
    for result in results:
        if result.rule == rule and result.size is not None and result.values.get(name) is not None:
            by_size.setdefault(result.size, []).append(result)
    return [best_setting(size_results, name) for _, size_results in sorted(by_size.items())]


def _draw_level(axes: Axes, value: float | None) -> None:
    if value is not None:
        axes.axhline(value, color=RETRAIN.colour, linestyle=RETRAIN.dash, linewidth=1.6)


def _draw_sweeps(axes: Axes, sweeps: Sequence[list[MethodResult]], name: str) -> list[MethodResult]:
    """Draw one score along α below and along k above, each axis in the colour of its rule."""
    rules = [rule for rule in RULES if any(sweep[0].rule == rule for sweep in sweeps)]
    for rule in rules:
        above = len(rules) > 1 and rule == "rank"
        own_axes = axes.twiny() if above else axes
        families = [sweep for sweep in sweeps if sweep[0].rule == rule]
        for number, sweep in enumerate(families):
            series_style = _rule_style(rule, number)
            points = [(result.strength or 0.0, result.values[name] or 0.0) for result in sweep]
            for result, (x, value) in zip(sweep, points, strict=True):
                own_axes.errorbar(
                    x, value, yerr=error_bars(value, result.intervals.get(name)), fmt="none",
                    ecolor=series_style.colour, elinewidth=1.2,
                )  # fmt: skip
            strengths, values = zip(*points, strict=True)
            draw_line(own_axes, strengths, values, series_style, linewidth=1.6)
        if rule == "rank":
            log_ticks(own_axes, sorted({result.strength or 0.0 for sweep in families for result in sweep}))
        colour = BY_NAME[rule].colour
        own_axes.set_xlabel(RULES[rule], color=colour, fontsize=9.5)
        own_axes.tick_params(axis="x", colors=colour)
        if len(rules) > 1:
            own_axes.spines["bottom"].set_visible(not above)
            own_axes.spines["top"].set_visible(above)
            own_axes.spines["top" if above else "bottom"].set_color(colour)
    axes.grid(True, axis="y")
    axes.margins(y=0.1)
    return [result for sweep in sweeps for result in sweep]


def _sweep_legend(figure: Figure, drawn: Sequence[MethodResult], *, retrain: bool) -> None:
    """Add a legend below: each style once, with the families that have it."""
    from matplotlib.lines import Line2D

    families: dict[tuple[str, int], dict[str, None]] = {}
    numbers: dict[tuple[str, str], int] = {}
    for suite, rule, family in dict.fromkeys((result.suite, result.rule or "", result.family) for result in drawn):
        number = numbers[suite, rule] = numbers.get((suite, rule), -1) + 1
        families.setdefault((rule, number), {})[family] = None
    handles = []
    for (rule, number), names in families.items():
        series_style, listed = _rule_style(rule, number), ", ".join(filter(None, names))
        label = f"{DIVDEC[rule]} ({listed})" if listed else DIVDEC[rule]
        handles.append(
            Line2D(
                [], [], color=series_style.colour, marker=series_style.marker, markersize=5,
                linestyle=series_style.dash, label=label,
            )
        )  # fmt: skip
    if retrain:
        handles.append(Line2D([], [], color=RETRAIN.colour, linestyle=RETRAIN.dash, linewidth=1.6, label="Retrain"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9)


def _rule_style(rule: str, number: int) -> SeriesStyle:
    return FURTHER[rule] if number else BY_NAME[rule]
