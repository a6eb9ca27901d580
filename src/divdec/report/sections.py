"""Sections of the report: which results each chart shows, with which axes and words, and answers side by side."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from divdec.evaluation.aggregate import DISTANCES, FORGET_KNOWMEM, RETAIN_KNOWMEM, UTILITY, VERBMEM
from divdec.report.charts import Dot, Kind, Plot, Series, shortened
from divdec.report.scores import ATTACK_NAMES, MEASURES, Best, Entry, Row, best_index, first_measured
from divdec.report.style import BY_NAME, LOOKS, RETRAIN, TARGET, Look

MAX_SINGLE_RESULTS = 5  # results outside of sweeps with a look for each
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
LONGEST_PROMPT, LONGEST_ANSWER, SHOWN = 400, 360, 300  # characters


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of charts of one kind."""

    kind: Kind
    title: str
    text: str
    plots: tuple[Plot, ...]
    legend: tuple[tuple[str, Look], ...]


@dataclasses.dataclass(frozen=True)
class Group:
    """Results with the same look, in the order of their strength."""

    name: str
    look: Look
    rows: tuple[Row, ...]
    rule: str | None = None
    """Kind of sweep, a key of `SWEEPS`."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """A model's answer to a question."""

    name: str
    text: str
    rouge: float
    """ROUGE-L against the true answer."""

    @property
    def parts(self) -> tuple[str, str]:
        """The beginning of the text, and the rest of a long one. The cut is at a space if there is one near."""
        if len(self.text) <= LONGEST_ANSWER:
            return self.text, ""
        cut = max(self.text.rfind(" ", 0, SHOWN), SHOWN - 40)
        return self.text[:cut], self.text[cut:]


@dataclasses.dataclass(frozen=True)
class Example:
    """A question, its true answer, and the models' answers."""

    set: str
    index: str
    question: str
    truth: str
    answers: tuple[Answer, ...]


def group_results(rows: Sequence[Row], *, separate: bool = False) -> list[Group]:
    """Group results by look: target, retrained model, each sweep, and the other results.

    Args:
        rows: rows of the report.
        separate: put every result into a group of its own, in the order of the rows.
    """
    own = [row for row in rows if row.entry.role is None]
    references = [Group(row.entry.role, BY_NAME[row.entry.role], (row,)) for row in rows if row.entry.role]
    if separate:
        groups = [Group(row.entry.name, LOOKS[index % len(LOOKS)], (row,)) for index, row in enumerate(own)]
        by_row = {id(group.rows[0]): group for group in (*references, *groups)}
        return [by_row[id(row)] for row in rows]
    sweeps: dict[tuple[str, str], list[Row]] = {}
    singles = [row for row in own if row.entry.setting is None]
    for row in own:
        if row.entry.setting is not None:
            sweeps.setdefault((row.entry.setting.rule or "", row.entry.setting.family), []).append(row)
    rules = [rule for rule, _ in sweeps]
    named: list[tuple[str, list[Row], str | None]] = [
        (f"{rule}, {family}" if rules.count(rule) > 1 else rule, sorted(members, key=_strength), rule)
        for (rule, family), members in sweeps.items()
    ]
    if len(singles) > MAX_SINGLE_RESULTS:
        named.append(("other results", singles, None))
    else:
        named += [(row.entry.name, [row], None) for row in singles]
    references.sort(key=lambda group: group.name != "target")
    return references + [
        Group(name, LOOKS[index % len(LOOKS)], tuple(members), rule)
        for index, (name, members, rule) in enumerate(named)
    ]


def scatter_sections(rows: Sequence[Row], suite: str, bests: Sequence[Best | str]) -> list[Section]:
    """Chart what is kept over what is still remembered."""
    plots: list[Plot] = []
    absent: set[str] = set()
    ringed: list[Best] = []
    groups = group_results(rows)
    for x_names, y_names, goal in AXES[suite]:
        x, y, best = first_measured(x_names, rows), first_measured(y_names, rows), bests[goal]
        series = []
        for group in groups:
            dots = tuple(
                Dot(
                    row.values[x] or 0.0, row.values[y] or 0.0, row.intervals.get(x), row.intervals.get(y),
                    label=f"{_strength(row):g}" if group.rule else shortened(row.entry.name, 18),
                    best=isinstance(best, Best) and row is best.row,
                )
                for row in group.rows
                if row.has(x) and row.has(y)
            )  # fmt: skip
            if dots:
                series.append(Series(group.name, group.look, dots, joined=group.rule is not None))
        if all(one.look in (TARGET, RETRAIN) for one in series):
            continue
        drawn = [dot for one in series for dot in one.dots]
        ringed += [best] if isinstance(best, Best) and any(dot.best for dot in drawn) else []
        absent |= {row.entry.name for row in rows if not (row.has(x) and row.has(y))}
        references = [
            f"{row.entry.name}: {row.text(x)}, {row.text(y)}"
            for row in rows
            if row.entry.role and row.has(x) and row.has(y)
        ]
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
    return [Section("scatter", "The trade-off", text, tuple(plots), _legend(plots))]


def curve_sections(rows: Sequence[Row], suite: str) -> list[Section]:
    """Chart figures along α, along k, and along the steps of a sequence."""
    sections = []
    for rule, (symbol, label, heading) in SWEEPS.items():
        groups = [group for group in group_results(rows) if group.rule == rule]
        if not any(len(group.rows) > 1 for group in groups):
            continue
        plots = []
        for alternatives in CURVES[suite]:
            name = first_measured(alternatives, [row for group in groups for row in group.rows])
            measure = MEASURES[name]
            series = tuple(
                Series(group.name, group.look, dots)
                for group in groups
                if (
                    dots := tuple(
                        Dot(_strength(row), row.values[name] or 0.0, y_interval=row.intervals.get(name))
                        for row in group.rows
                        if row.has(name)
                    )
                )
            )
            if max((len(one.dots) for one in series), default=0) < 2:
                continue
            levels = tuple(
                (BY_NAME[role], value)
                for role in ("target", "retrain")
                for row in rows
                if row.entry.role == role and (value := row.values.get(name)) is not None
            )
            plots.append(
                Plot(
                    label, "", series,
                    f"{measure.short} over {symbol}. {_describe_curves(series, name, symbol)}",
                    f"{measure.short} {measure.arrow}", levels, log=rule == "rank", integer=symbol == "step",
                )
            )  # fmt: skip
        if plots:
            bands = any(dot.y_interval for plot in plots for one in plot.series for dot in one.dots)
            text = "Bands are the intervals of the tables." if bands else "Without items there are no bands."
            names = {TARGET: "target", RETRAIN: "retrain"}
            levels = [(names[look], look) for plot in plots for look, _ in plot.levels]
            legend = tuple(dict.fromkeys([*_legend(plots), *levels]))
            sections.append(Section("curves", heading, text, tuple(plots), legend))
    return sections


def over_under_sections(rows: Sequence[Row]) -> list[Section]:
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
        dots = tuple(
            Dot((row.values[name] or 0.0) - reference, float(position),
                (row.intervals[name][0] - reference, row.intervals[name][1] - reference)
                if name in row.intervals else None)
            for position, row in enumerate(shown)
            if row.has(name)
        )  # fmt: skip
        if dots:
            series.append(Series(ATTACK_NAMES[name], LOOKS[index % len(LOOKS)], dots))
    text = f"For {len(shown)} results the AUC of {len(series)} membership attacks less the retrained model’s."
    distances = [
        float(np.mean([abs(dot.x) for one in series for dot in one.dots if dot.y == position]))
        for position in range(len(shown))
    ]
    nearest, farthest = best_index(distances, "lower"), best_index(distances, "higher")
    if len(shown) > 1 and nearest is not None and farthest is not None:
        near, far = (f"{shown[index].entry.name} ({distances[index]:.2f})" for index in (nearest, farthest))
        text += f" On average nearest to 0: {near}; farthest: {far}."
    names = tuple(row.entry.name for row in shown)
    plot = Plot("AUC − the retrained model’s AUC", "", tuple(series), text, rows=names)
    explanation = (
        "An attack separates forget from holdout items; 0 is its AUC on the retrained model. To the right the model "
        "still recognises the forget set as training data; to the left the forget set is less likely than unseen texts."
    )
    legend = (*_legend([plot]), ("retrain", RETRAIN))
    return [Section("dots", "Over- and under-unlearning", explanation, (plot,), legend)]


def roc_sections(rows: Sequence[Row], remark: str = "") -> list[Section]:
    """Chart the ROC curve of each attack, from items.

    Args:
        rows: results to show.
        remark: how they were chosen.
    """
    plots = []
    for attack, title in ATTACK_NAMES.items():
        series, aucs = [], []
        for group in group_results(rows, separate=True):
            forget, holdout = (_item_scores(group.rows[0], f"{attack}.{name}") for name in ("forget", "holdout"))
            if forget.size and holdout.size:
                series.append(Series(group.name, group.look, tuple(Dot(x, y) for x, y in roc_points(forget, holdout))))
                aucs.append(f"{group.name} {group.rows[0].text(attack)}")
        if any(one.look not in (TARGET, RETRAIN) for one in series):
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
    text = f"{text} {remark}".strip()
    return [Section("roc", "ROC of the membership attacks", text, tuple(plots), _legend(plots))]


def roc_points(forget: np.ndarray, holdout: np.ndarray) -> list[tuple[float, float]]:
    """Compute false and true positive rate at every threshold; a low score means training data.

    Args:
        forget: scores of the forget items.
        holdout: scores of the holdout items.

    Returns:
        Points from (0, 0) to (1, 1); the area under them is `attack_auc`.
    """
    thresholds = np.unique(np.concatenate([forget, holdout]))
    rates = [
        np.concatenate([[0.0], np.searchsorted(np.sort(scores), thresholds, side="right") / len(scores)])
        for scores in (holdout, forget)
    ]
    return [(float(x), float(y)) for x, y in zip(*rates, strict=True)]


def select_examples(entries: Sequence[Entry], count: int) -> list[Example]:
    """Select questions that all models answered.

    With a target, those that it answers best come first, because forgetting can change them most. Without one they
    are spread evenly over the set.

    Args:
        entries: target, results, retrained model, in the order in which they are shown.
        count: number of questions in all sets together.
    """
    sets = EXAMPLE_SETS[entries[0].results.suite]
    shared = {metric: indices for metric in sets if (indices := _shared_indices(entries, metric))}
    weight = sum(sets[metric][1] for metric in shared)
    target = next((entry for entry in entries if entry.role == "target"), None)
    found: list[Example] = []
    for metric, indices in shared.items():
        title, share, field = sets[metric]
        number = count - len(found) if metric == list(shared)[-1] else round(count * share / weight)
        number = min(number, len(indices))
        if target is not None:
            items = target.results.items[metric]
            chosen = sorted(indices, key=lambda index, items=items, field=field: -_rouge(items[index], field))[:number]
        else:
            chosen = [indices[step * len(indices) // number] for step in range(number)]
        found += [_example(entries, metric, index, title, field) for index in chosen]
    return found


def question_of(prompt: str) -> str:
    """Extract the question from a prompt with chat turns or few-shot examples; otherwise return the prompt's end."""
    text = prompt.strip()
    for pattern in (CHAT, PLAIN):
        if match := pattern.fullmatch(text):
            text = match["question"].strip()
            break
    return text if len(text) <= LONGEST_PROMPT else f"… {text[-LONGEST_PROMPT:]}"


def _example(entries: Sequence[Entry], metric: str, index: str, title: str, field: str) -> Example:
    items = [entry.results.items[metric][index] for entry in entries]
    answers = tuple(
        Answer(entry.name, item["generation"].strip(), _rouge(item, field))
        for entry, item in zip(entries, items, strict=True)
    )
    prompt, truth = (str(items[0].get(name) or "") for name in ("input", "ground_truth"))
    return Example(title, index, question_of(prompt), truth, answers)


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


def _item_scores(row: Row, metric: str) -> np.ndarray:
    """The scores of all items of a metric; empty if an item has none."""
    items = row.entry.results.items.get(metric) or {}
    values = [fields.get("score") for fields in items.values() if isinstance(fields, dict)]
    scores = np.array([value for value in values if isinstance(value, int | float)], dtype=float)
    return scores[np.isfinite(scores)] if len(scores) == len(items) else np.empty(0)


def _strength(row: Row) -> float:
    return (row.entry.setting and row.entry.setting.strength) or 0.0


def _legend(plots: Sequence[Plot]) -> tuple[tuple[str, Look], ...]:
    return tuple(dict.fromkeys((one.name, one.look) for plot in plots for one in plot.series))


def _describe_curves(series: Sequence[Series], name: str, symbol: str) -> str:
    """Say where each curve begins and ends, and where it is best."""
    measure, sentences = MEASURES[name], []
    for one in series:
        first, last = one.dots[0], one.dots[-1]
        text = f"{one.name}: {measure.text(first.y)} at {symbol} = {first.x:g}, {measure.text(last.y)} at {last.x:g}"
        if measure.better in ("higher", "lower"):
            peak = best_index([dot.y for dot in one.dots], measure.better, measure.digits)
            if peak is not None:
                extreme = "highest" if measure.better == "higher" else "lowest"
                text += f", {extreme} {measure.text(one.dots[peak].y)} at {one.dots[peak].x:g}"
        sentences.append(f"{text}.")
    return " ".join(sentences)
