"""Sections of the report: charts with their axes and captions, and answers side by side."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from divdec.report.style import BY_NAME, RETRAIN, SERIES_STYLES, TARGET, SeriesStyle
from divdec_research.report.charts import Dot, Kind, Plot, Series, shortened
from divdec_research.report.scores import ATTACK_NAMES, MEASURES, Best, Entry, ScoredResult, first_measured
from divdec_research.suites.aggregate import DISTANCES, FORGET_KNOWMEM, RETAIN_KNOWMEM, UTILITY, VERBMEM

MAX_SINGLE_RESULTS = 5  # maximum number of results outside of sweeps with individual styles
# Axes of the scatters: x, y (of alternatives, the first that the results have), and the goal whose best is marked.
AXES = {
    "tofu": ((("mem", "exact_memorization"), ("utility", UTILITY), 0),),
    "muse": (((VERBMEM,), (RETAIN_KNOWMEM,), 0), ((FORGET_KNOWMEM,), (RETAIN_KNOWMEM,), 1)),
}
CURVES = {
    "tofu": (
        ("agg", "agg_without_privacy"),
        ("mem", "exact_memorization"),
        ("priv", "mia_min_k"),
        ("utility", UTILITY),
    ),
    "muse": (*((name,) for name in DISTANCES), (VERBMEM,), (FORGET_KNOWMEM,), (RETAIN_KNOWMEM,), ("privleak",)),
}  # fmt: skip
# The x axis of each kind of sweep: symbol, label and heading.
SWEEPS = {
    "linear": ("α", "α of the linear rule", "Along α"),
    "rank": ("k", "k of the rank rule", "Along k"),
    "scal": ("step", "step: parts of the forget set", "Over growing forget sets"),
    "sust": ("step", "step: requests so far", "Over successive requests"),
}
# Sets whose answers are shown: title, share of the examples, score.
EXAMPLE_SETS = {
    "tofu": {
        "forget_Q_A_ROUGE": ("forget set", 0.75, "rougeL_recall"),
        "retain_Q_A_ROUGE": ("retain set", 0.25, "rougeL_recall"),
    },
    "muse": {
        "forget_verbmem_ROUGE": ("forget set, verbatim", 0.375, "rougeL_f1"),
        "forget_knowmem_ROUGE": ("forget set, knowledge", 0.375, "rougeL_f1"),
        "retain_knowmem_ROUGE": ("retain set, knowledge", 0.25, "rougeL_f1"),
    },
}
# The last user turn of a chat template, and OpenUnlearning's plain layout.
CHAT = re.compile(r".*user\n+(?P<question>.+?)\n*assistant(?:\s*<think>\s*</think>)?", flags=re.DOTALL)
PLAIN = re.compile(r"(?:.*\n)?Question: (?P<question>.+?)\n+Answer:", flags=re.DOTALL)
LONGEST_PROMPT = 400  # characters


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of charts of one kind."""

    kind: Kind
    title: str
    text: str
    plots: tuple[Plot, ...]

    @property
    def legend(self) -> tuple[tuple[str, SeriesStyle], ...]:
        """Name and style of each series and reference."""
        references = {TARGET: "target", RETRAIN: "retrain"}
        series = [(line.name, line.style) for plot in self.plots for line in plot.series]
        levels = [(references[style], style) for plot in self.plots for style, _ in plot.levels]
        return tuple(dict.fromkeys([*series, *levels]))


@dataclasses.dataclass(frozen=True)
class Group:
    """Results with the same style, ordered by strength."""

    name: str
    style: SeriesStyle
    rows: tuple[ScoredResult, ...]
    rule: str | None = None
    """Kind of sweep, a key of `SWEEPS`."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """A model's answer to a question."""

    name: str
    text: str
    rouge: float
    """ROUGE-L against the true answer."""


@dataclasses.dataclass(frozen=True)
class AnswerExample:
    """A question, its true answer, and the models' answers."""

    set: str
    index: str
    question: str
    truth: str
    answers: tuple[Answer, ...]


def group_results(rows: Sequence[ScoredResult], *, separate: bool = False) -> list[Group]:
    """Group results by style: target, retrained model, each sweep, and the other results.

    With `separate`, every result is a separate group, in the order of the rows.
    """
    results = [row for row in rows if row.entry.role is None]
    references = [Group(row.entry.role, BY_NAME[row.entry.role], (row,)) for row in rows if row.entry.role]
    if separate:
        groups = [
            Group(row.entry.name, SERIES_STYLES[index % len(SERIES_STYLES)], (row,))
            for index, row in enumerate(results)
        ]
        by_row = {id(group.rows[0]): group for group in (*references, *groups)}
        return [by_row[id(row)] for row in rows]
    sweeps: dict[tuple[str, str], list[ScoredResult]] = {}
    singles: list[ScoredResult] = []
    for row in results:
        setting = row.entry.setting
        members = singles if setting is None else sweeps.setdefault((setting.rule or "", setting.family), [])
        members.append(row)
    rules = [rule for rule, _ in sweeps]
    named: list[tuple[str, list[ScoredResult], str | None]] = [
        (f"{rule}, {family}" if rules.count(rule) > 1 else rule, sorted(members, key=_strength), rule)
        for (rule, family), members in sweeps.items()
    ]
    if len(singles) > MAX_SINGLE_RESULTS:
        named.append(("other results", singles, None))
    else:
        named += [(row.entry.name, [row], None) for row in singles]
    references.sort(key=lambda group: group.name != "target")
    return references + [
        Group(name, SERIES_STYLES[index % len(SERIES_STYLES)], tuple(members), rule)
        for index, (name, members, rule) in enumerate(named)
    ]


def scatter_sections(rows: Sequence[ScoredResult], suite: str, bests: Sequence[Best | str]) -> list[Section]:
    """Chart retained utility over remaining memorisation."""
    plots: list[Plot] = []
    absent: set[str] = set()
    ringed: list[Best] = []
    groups = group_results(rows)
    for x_names, y_names, goal in AXES[suite]:
        x, y, best = first_measured(x_names, rows), first_measured(y_names, rows), bests[goal]
        drawn = [row for row in rows if row.has(x) and row.has(y)]
        if all(row.entry.role for row in drawn):
            continue
        series = []
        for group in groups:
            dots = tuple(
                Dot(
                    row.values[x] or 0.0, row.values[y] or 0.0, row.intervals.get(x), row.intervals.get(y),
                    label=f"{_strength(row):g}" if group.rule else shortened(row.entry.name, 18),
                    best=isinstance(best, Best) and row is best.row,
                )
                for row in group.rows
                if row in drawn
            )  # fmt: skip
            if dots:
                series.append(Series(group.name, group.style, dots, joined=group.rule is not None))
        if isinstance(best, Best) and best.row in drawn:
            ringed.append(best)
        absent |= {row.entry.name for row in rows if row not in drawn}
        references = [f"{row.entry.name}: {row.text(x)}, {row.text(y)}" for row in drawn if row.entry.role]
        text = f"Scatter of {MEASURES[y].short} over {MEASURES[x].short} for {len(drawn)} results."
        text += f" {'; '.join(references)}." if references else ""
        plots.append(Plot(MEASURES[x].axis, MEASURES[y].axis, tuple(series), text))
    if not plots:
        return []
    retrained = any(row.entry.role == "retrain" for row in rows)
    text = f"Each point is a result{'; the goal is the retrained model' if retrained else ''}."
    if any(group.rule for group in groups):
        text += " Lines join the settings of a sweep; numbers are α, k or steps, where there is room."
    if ringed:
        names = "; ".join(f"{best.row.entry.name}, {best.text}" for best in ringed)
        text += f" A ring marks the best on these same items: {names}."
    if absent:
        text += f" {len(absent)} without these figures {'are' if len(absent) > 1 else 'is'} not drawn."
    return [Section("scatter", "The trade-off", text, tuple(plots))]


def curve_sections(rows: Sequence[ScoredResult], suite: str) -> list[Section]:
    """Chart figures along α, along k, and along the steps of a sequence."""
    sections = []
    for rule, (symbol, label, heading) in SWEEPS.items():
        groups = [group for group in group_results(rows) if group.rule == rule]
        plots = []
        for alternatives in CURVES[suite] if groups else ():
            name = first_measured(alternatives, [row for group in groups for row in group.rows])
            measure, series = MEASURES[name], []
            for group in groups:
                dots = tuple(
                    Dot(_strength(row), row.values[name] or 0.0, y_interval=row.intervals.get(name))
                    for row in group.rows
                    if row.has(name)
                )
                if dots:
                    series.append(Series(group.name, group.style, dots))
            if max((len(line.dots) for line in series), default=0) < 2:
                continue
            levels = tuple(
                (group.style, group.rows[0].values[name] or 0.0)
                for group in group_results([row for row in rows if row.entry.role])
                if group.rows[0].has(name)
            )
            ends = "; ".join(
                f"{line.name} "
                + ", ".join(f"{measure.text(dot.y)} at {dot.x:g}" for dot in (line.dots[0], line.dots[-1]))
                for line in series
            )
            plots.append(
                Plot(
                    label, "", tuple(series), f"{measure.short} over {symbol}: {ends}.",
                    f"{measure.short} {measure.arrow}", levels, log=rule == "rank", integer=symbol == "step",
                )
            )  # fmt: skip
        if plots:
            bands = any(dot.y_interval for plot in plots for line in plot.series for dot in line.dots)
            text = "Bands are the intervals of the tables." if bands else "Without items there are no bands."
            sections.append(Section("curves", heading, text, tuple(plots)))
    return sections


def over_under_sections(rows: Sequence[ScoredResult]) -> list[Section]:
    """Chart the distance of each attack's AUC from the retrained model's."""
    retrain = next((row for row in rows if row.entry.role == "retrain"), None)
    attacks = [name for name in ATTACK_NAMES if retrain is not None and retrain.has(name)]
    shown = [row for row in rows if row is not retrain and any(row.has(name) for name in attacks)]
    if retrain is None or not any(row.entry.role is None for row in shown):
        return []
    shown = [row for group in group_results(shown) for row in group.rows]
    series = []
    for index, name in enumerate(attacks):
        reference = retrain.values[name] or 0.0
        dots = []
        for position, row in enumerate(shown):
            if row.has(name):
                low, high = row.intervals.get(name, (None, None))
                interval = None if low is None or high is None else (low - reference, high - reference)
                dots.append(Dot((row.values[name] or 0.0) - reference, float(position), interval))
        if dots:
            series.append(Series(ATTACK_NAMES[name], SERIES_STYLES[index % len(SERIES_STYLES)], tuple(dots)))
    description = f"For {len(shown)} results the AUC of {len(series)} membership attacks less the retrained model’s."
    names = tuple(row.entry.name for row in shown)
    plot = Plot("AUC − the retrained model’s AUC", "", tuple(series), description, levels=((RETRAIN, 0.0),), rows=names)
    text = (
        "An attack separates forget from holdout items; 0 is its AUC on the retrained model. To the right the model "
        "still recognises the forget set as training data; to the left the forget set is less likely than unseen texts."
    )
    return [Section("dots", "Over- and under-unlearning", text, (plot,))]


def roc_sections(rows: Sequence[ScoredResult], remark: str = "") -> list[Section]:
    """Chart the ROC curve of each attack, from items; `remark` says how the results were chosen."""
    plots = []
    for attack, title in ATTACK_NAMES.items():
        series, aucs = [], []
        for group in group_results(rows, separate=True):
            forget, holdout = (_item_scores(group.rows[0], f"{attack}.{name}") for name in ("forget", "holdout"))
            if forget.size and holdout.size:
                series.append(Series(group.name, group.style, tuple(Dot(x, y) for x, y in roc_points(forget, holdout))))
                aucs.append(f"{group.name} {group.rows[0].text(attack)}")
        if any(line.style not in (TARGET, RETRAIN) for line in series):
            text = f"ROC of the attack {title}; AUC: {', '.join(aucs)}."
            plots.append(Plot("false positive rate", "true positive rate", tuple(series), text, title))
    if not plots:
        return []
    text = (
        "A positive is an item that the attack takes for training data: a true positive is in the forget set, a false "
        "positive in the holdout set. The dotted diagonal is a random attack."
    )
    if any(row.entry.role == "retrain" for row in rows):
        text += " Nearer to the retrained model’s curve is better."
    return [Section("roc", "ROC of the membership attacks", f"{text} {remark}".strip(), tuple(plots))]


def roc_points(forget: np.ndarray, holdout: np.ndarray) -> list[tuple[float, float]]:
    """Compute false and true positive rate at every threshold, from (0, 0) to (1, 1).

    A low score means training data. The area under the points is `attack_auc`.
    """
    from sklearn.metrics import roc_curve

    in_forget_set = [True] * len(forget) + [False] * len(holdout)
    rates = roc_curve(in_forget_set, -np.concatenate([forget, holdout]), drop_intermediate=False)
    return list(zip(rates[0].tolist(), rates[1].tolist(), strict=True))


def select_examples(entries: Sequence[Entry], count: int) -> list[AnswerExample]:
    """Select `count` questions in total that all models answered.

    With a target, questions that it answers best come first, because forgetting can change them most. Without a target,
    questions are spread evenly over the set.
    """
    sets = EXAMPLE_SETS[entries[0].results.suite]
    shared = {metric: indices for metric in sets if (indices := _shared_indices(entries, metric))}
    weight = sum(sets[metric][1] for metric in shared)
    target = next((entry for entry in entries if entry.role == "target"), None)
    examples: list[AnswerExample] = []
    for metric, indices in shared.items():
        title, share, field = sets[metric]
        number = count - len(examples) if metric == list(shared)[-1] else round(count * share / weight)
        number = min(number, len(indices))
        if target is not None:
            items = target.results.items[metric]
            chosen = sorted(indices, key=lambda index, items=items, field=field: -_rouge(items[index], field))[:number]
        else:
            chosen = [indices[step * len(indices) // number] for step in range(number)]
        for index in chosen:
            models = [(entry.name, entry.results.items[metric][index]) for entry in entries]
            answers = tuple(Answer(name, item["generation"].strip(), _rouge(item, field)) for name, item in models)
            prompt, truth = (str(models[0][1].get(name) or "") for name in ("input", "ground_truth"))
            examples.append(AnswerExample(title, index, question_of(prompt), truth, answers))
    return examples


def question_of(prompt: str) -> str:
    """Extract the question from a prompt with chat turns or few-shot examples; otherwise return the prompt's end."""
    text = prompt.strip()
    for pattern in (CHAT, PLAIN):
        if match := pattern.fullmatch(text):
            text = match["question"].strip()
            break
    return text if len(text) <= LONGEST_PROMPT else f"… {text[-LONGEST_PROMPT:]}"


def _shared_indices(entries: Sequence[Entry], metric: str) -> list[str]:
    """The indices of items that every model has with the same true answer, in order."""
    models = [entry.results.items.get(metric) or {} for entry in entries]
    truths = {index: {_truth(items.get(index)) for items in models} for index in models[0]}
    shared = [index for index, values in truths.items() if len(values) == 1 and all(values)]
    return sorted(shared, key=lambda index: (len(index), index))


def _truth(item: Any) -> str | None:
    """An item's true answer without white space, which differs between tokenizers; None if the item has no texts."""
    if not isinstance(item, dict) or not all(
        isinstance(item.get(name), str) for name in ("ground_truth", "generation")
    ):
        return None
    return re.sub(r"\s", "", item["ground_truth"])


def _rouge(item: dict[str, Any], field: str) -> float:
    value = item.get(field)
    return float(value) if isinstance(value, int | float) else 0.0


def _item_scores(row: ScoredResult, metric: str) -> np.ndarray:
    """The scores of all items of a metric; empty if an item has none."""
    items = row.entry.results.items.get(metric) or {}
    values = [fields.get("score") for fields in items.values() if isinstance(fields, dict)]
    scores = np.array([value for value in values if isinstance(value, int | float)], dtype=float)
    return scores[np.isfinite(scores)] if len(scores) == len(items) else np.empty(0)


def _strength(row: ScoredResult) -> float:
    return (row.entry.setting and row.entry.setting.strength) or 0.0
