"""Result folders of evaluations: writing, reading, and the method and setting of each.

A folder holds `summary.json` (figures), `items.jsonl` (items) and `run.json` (method, setting, family, size), or the
files of OpenUnlearning. Metrics have OpenUnlearning's names.
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from divdec.errors import UsageError
from divdec.runs import read_json, read_record, write_json, write_text

SUITES = ("tofu", "muse", "leak")
SUMMARY, ITEMS = "summary.json", "items.jsonl"
FILES = (SUMMARY, "TOFU_EVAL.json", "TOFU_SUMMARY.json", "MUSE_EVAL.json", "MUSE_SUMMARY.json")
DEPTH = 3  # a run, a model in it, a setting of that
# The two sets of a membership attack; each is a metric beside the attack's AUC.
GROUPS = ("forget", "holdout")
HEADLINES = {
    "tofu": {
        "forget_quality": "↑", "forget_truth_ratio": "↑", "forget_Q_A_Prob": "↓", "forget_Q_A_ROUGE": "↓",
        "extraction_strength": "↓", "privleak": "→ 0", "model_utility": "↑",
    },
    "muse": {
        "forget_verbmem_ROUGE": "↓", "forget_knowmem_ROUGE": "↓", "retain_knowmem_ROUGE": "↑", "privleak": "→ 0",
        "extraction_strength": "↓",
    },
}  # fmt: skip

Items = dict[str, dict[str, Any]]


@dataclasses.dataclass
class Results:
    """Figures and items of one model on one suite."""

    name: str
    suite: str
    figures: dict[str, float | None] = dataclasses.field(default_factory=dict)
    """The value of each metric; None if it could not be computed, with the reason in `reasons`."""
    items: dict[str, Items] = dataclasses.field(default_factory=dict)
    """By metric, by index (a string), the item's fields, such as `prob` and `avg_loss`. The two sets of a membership
    attack are 'mia_loss.forget' and 'mia_loss.holdout'."""
    reasons: dict[str, str] = dataclasses.field(default_factory=dict)
    split: str | None = None
    about: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The model, its steering and method, and further facts for readers."""

    def scores(self, metric: str, field: str) -> list[Any]:
        """Return one field of a metric's items, in the order of their indices: numbers, lists of them, or texts.

        Raises:
            UsageError: there are no items, or they lack the field.
        """
        if not self.items.get(metric):
            raise UsageError(f"{self.name}: there are no items of {metric}; a summary alone does not hold them")
        ordered = sorted(self.items[metric].items(), key=lambda item: int(item[0]))
        if lacking := next((index for index, fields in ordered if field not in fields), None):
            raise UsageError(f"{self.name}: item {lacking} of {metric} has no {field}")
        return [fields[field] for _, fields in ordered]

    def mean(self, metric: str, field: str) -> float:
        """Mean of a field over the items, without NaN; several answers to a question count as one item."""
        values = [statistics.fmean(value) if isinstance(value, list) else value for value in self.scores(metric, field)]
        return statistics.fmean(value for value in values if value == value)

    def add_item(self, metric: str, index: str, **fields: Any) -> None:
        """Add an item of a metric."""
        self.items.setdefault(metric, {})[index] = fields


def numbered(values: Iterable[Any], field: str = "score") -> Items:
    """Make items from values in the order of their indices."""
    return {str(index): {field: value} for index, value in enumerate(values)}


def headlines(results: Results) -> dict[str, str]:
    """List a suite's most important metrics, each with the direction in which it is better: ↑, ↓ or → 0.

    The leak suite has leak@k for its smallest and largest k.
    """
    if results.suite in HEADLINES:
        return HEADLINES[results.suite]
    chosen = {}
    for kind in ("attack", "sample"):
        metrics = [metric for metric in results.figures if metric.startswith("leak@") and metric.endswith(f"-{kind}")]
        chosen |= dict.fromkeys((*metrics[:1], *metrics[-1:]), "↓")
    return chosen


@dataclasses.dataclass(frozen=True)
class Identity:
    """Which method and setting a result is of."""

    method: str
    """'linear', 'rank', 'target', a baseline, or the model's name."""
    setting: str = ""
    """Such as 'linear:1.5', or the options of a baseline."""
    family: str = ""
    """The auxiliaries of a steered model, or the model; results of one rule and family are points of one curve."""
    size: float | None = None
    """Parameters in 10⁹: of each auxiliary of a steered model (0 of n-grams), else of the model."""
    seed: int | None = None
    rule: str | None = None
    """'linear' or 'rank'; 'scal' or 'sust' for the steps of a sequence of forget sets."""
    strength: float | None = None
    """α of the linear rule, k of the rank rule; the number of a step."""


def write_results(results: Results, folder: Path, *, openunlearning: bool = False) -> None:
    """Write `summary.json` and `items.jsonl`, and with `openunlearning` also its files (`TOFU_EVAL.json` and so on)."""
    lines = [
        json.dumps({"metric": metric, "index": index, **fields}, ensure_ascii=False)
        for metric, items in results.items.items()
        for index, fields in items.items()
    ]
    write_text(folder / ITEMS, "".join(f"{line}\n" for line in lines))
    content = dataclasses.asdict(results)
    del content["items"]
    write_json(folder / SUMMARY, content)
    if openunlearning:
        prefix = results.suite.upper()
        write_json(folder / f"{prefix}_EVAL.json", _to_openunlearning(results))
        figures = {name: value for name, value in sorted(results.figures.items()) if value is not None}
        write_json(folder / f"{prefix}_SUMMARY.json", {name: v for name, v in figures.items() if "." not in name})


def read_results(folder: str | Path) -> Results:
    """Read a folder that `divdec eval` or OpenUnlearning wrote; of the latter the summary is enough.

    Raises:
        UsageError: it holds no results, or a file cannot be read.
    """
    folder = _folder(folder)
    if (folder / SUMMARY).is_file():
        return _read_own(folder)
    for name in ("tofu", "muse"):
        evaluated, summary = (folder / f"{name.upper()}_{kind}.json" for kind in ("EVAL", "SUMMARY"))
        if evaluated.is_file() or summary.is_file():
            return _read_openunlearning(folder.name, name, evaluated, summary)
    raise UsageError(
        f"{folder} holds no results; looked for {SUMMARY} (divdec), TOFU_EVAL.json, TOFU_SUMMARY.json, "
        "MUSE_EVAL.json and MUSE_SUMMARY.json (OpenUnlearning)"
    )


def find_results(path: str | Path) -> list[Path]:
    """List the folders at or below a path that hold results, in the order of their names, 2 before 10.

    Raises:
        UsageError: there is none.
    """
    folders = _below(_folder(path), DEPTH)
    if not folders:
        raise UsageError(f"{path} holds no results, nor do the folders in it; looked for {', '.join(FILES)}")
    return folders


_STEERING = re.compile(
    r"(?P<rule>linear|rank):(?P<value>-?\d+(?:\.\d+)?)(?::(?P<margin>\d[\d.]*))?(?::(?P<fill>soft|hard))?"
)
# '1B-alpha-1.5' and '1B-topk-20' are folders of the paper's code, 'linear-1.5' and 'rank-20-soft' ours.
_FOLDER = re.compile(
    r"(?:(?P<family>.+)[-_])?(?P<rule>linear|alpha|rank|topk)-(?P<value>-?\d+(?:\.\d+)?)"
    r"(?:-(?P<margin>\d[\d.]*))?(?:-(?P<fill>soft|hard))?"
)
_SIZE = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)([bm])(?![a-z])", re.IGNORECASE)
_NGRAMS = re.compile(r"n-?gram|bigram|trigram", re.IGNORECASE)


def identify(results: Results, folder: Path) -> Identity:
    """Return the method and setting of a result, from its `run.json` or summary, else from the folder's name.

    Results of OpenUnlearning and of the paper's code have names alone: `dd_linear/1B-alpha-1.5` is the linear rule with
    α = 1.5 and auxiliaries of 1B parameters.
    """
    record = read_record(folder) or {}
    content = {**results.about, **(record.get("result") or {})}
    parent = folder.absolute().parent.name
    family = str(content.get("family") or Path(str(content.get("model") or parent)).name)
    method, size, seed = content.get("method"), content.get("size"), content.get("seed")
    sequence, step = content.get("sequence"), content.get("step")
    if sequence in ("scal", "sust") and isinstance(step, int):
        return Identity(str(method or sequence), str(step), parent, size, seed, sequence, float(step))
    match = _STEERING.fullmatch(str(content.get("steering")))
    if match is None and "method" in content:
        return Identity(str(method), str(content.get("setting") or ""), family, size, seed)
    if match is not None:
        rule, setting = match["rule"], match[0]
    else:
        match = _FOLDER.fullmatch(folder.name)
        if match is None:
            return Identity(folder.name)
        rule = "linear" if match["rule"] in ("linear", "alpha") else "rank"
        setting, seed = f"{rule}:{match['value']}", None
        family = match["family"] or parent
        parameters = _SIZE.search(family)
        size = None if parameters is None else float(parameters[1]) / (1000 if parameters[2] in "mM" else 1)
        size = 0.0 if _NGRAMS.search(family) else size
    family = f"{family} hard" if match["fill"] == "hard" else family
    family = f"{family} margin {match['margin']}" if match["margin"] else family
    return Identity(rule, setting, family, size, seed, rule, float(match["value"]))


def _folder(path: str | Path) -> Path:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise UsageError(f"results {path} is not a folder; give one that `divdec eval` or OpenUnlearning wrote")
    return folder


def _below(folder: Path, depth: int) -> list[Path]:
    if any((folder / name).is_file() for name in FILES):
        return [folder]
    if not depth:
        return []
    folders = [child for child in folder.iterdir() if child.is_dir() and not child.name.startswith(".")]
    return [result for child in sorted(folders, key=_natural) for result in _below(child, depth - 1)]


def _natural(path: Path) -> list[tuple[float, str]]:
    parts = re.split(r"(\d+(?:\.\d+)?)", path.name)
    return [(float(text), "") if index % 2 else (-1.0, text) for index, text in enumerate(parts)]


def _read_own(folder: Path) -> Results:
    content = read_json(folder / SUMMARY)
    known = {field.name for field in dataclasses.fields(Results)} - {"items"}
    if not isinstance(content, dict) or not {"name", "suite", "figures"} <= content.keys() <= known:
        raise UsageError(f"{folder / SUMMARY} is not a summary of divdec")
    results = Results(**content)
    if (folder / ITEMS).is_file():
        for number, line in enumerate((folder / ITEMS).read_text(encoding="utf-8").split("\n"), start=1):
            if not line:
                continue
            try:
                fields = json.loads(line)
                results.items.setdefault(fields.pop("metric"), {})[fields.pop("index")] = fields
            except (ValueError, KeyError, AttributeError):
                raise UsageError(f"{folder / ITEMS}, line {number} is not an item of divdec") from None
    return results


def _read_openunlearning(name: str, suite: str, evaluated: Path, summary: Path) -> Results:
    results = Results(name, suite)
    if evaluated.is_file():
        for metric, content in _object(evaluated).items():
            if not isinstance(content, Mapping):
                raise UsageError(f"{evaluated}: {metric} is not a metric of OpenUnlearning")
            results.figures[metric] = content.get("agg_value")
            if items := content.get("value_by_index"):
                results.items[metric] = dict(items)
            for group in GROUPS:
                if isinstance(content.get(group), Mapping):
                    results.figures[f"{metric}.{group}"] = content[group].get("agg_value")
                    results.items[f"{metric}.{group}"] = dict(content[group].get("value_by_index") or {})
    if summary.is_file():
        results.figures |= _object(summary)
    return results


def _to_openunlearning(results: Results) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    for metric, value in results.figures.items():
        name, dot, group = metric.partition(".")
        entry = metrics.setdefault(name, {})
        if dot:
            entry[group] = {"agg_value": value, "value_by_index": results.items.get(metric, {})}
            continue
        if name.startswith("mia_"):
            entry["auc"] = value
        entry["agg_value"] = value
        if metric in results.items:
            entry["value_by_index"] = results.items[metric]
    return metrics


def _object(path: Path) -> dict[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict):
        raise UsageError(f"{path} is not a JSON object")
    return content
