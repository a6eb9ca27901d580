"""Results of evaluations: their files, which method and setting each is of, and tables of many.

A result folder holds `summary.json` (figures), `items.jsonl` (items) and `run.json` (method, setting, family, size); or
the files that OpenUnlearning writes. Metrics have OpenUnlearning's names.
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divdec.errors import UsageError
from divdec.runs import read_json, read_record, write_json, write_text

if TYPE_CHECKING:
    import pandas

SUITES = ("tofu", "muse", "leak")
SUMMARY, ITEMS = "summary.json", "items.jsonl"
FILES = (SUMMARY, "TOFU_EVAL.json", "TOFU_SUMMARY.json", "MUSE_EVAL.json", "MUSE_SUMMARY.json")
DEPTH = 3  # a run, a model in it, a setting of that
# A membership attack scores two sets; each is a metric beside the attack's AUC.
GROUPS = ("forget", "holdout")
HEADLINES: dict[str, tuple[tuple[str, str], ...]] = {
    "tofu": (
        ("forget_Q_A_ROUGE", "lower"),
        ("extraction_strength", "lower"),
        ("forget_quality", "higher"),
        ("privleak", "towards 0"),
        ("model_utility", "higher"),
        ("forget_Q_A_gibberish", "higher"),
    ),
    "muse": (
        ("forget_verbmem_ROUGE", "lower"),
        ("forget_knowmem_ROUGE", "lower"),
        ("privleak", "towards 0"),
        ("retain_knowmem_ROUGE", "higher"),
        ("extraction_strength", "lower"),
    ),
}

Items = dict[str, dict[str, Any]]


@dataclasses.dataclass
class Results:
    """Figures and items of one model on one suite."""

    name: str
    suite: str
    figures: dict[str, float | None] = dataclasses.field(default_factory=dict)
    """The value of each metric; None if it could not be computed."""
    items: dict[str, Items] = dataclasses.field(default_factory=dict)
    """By metric, by index (a string), the item's fields, such as `prob` and `avg_loss`. The two sets of a membership
    attack are 'mia_loss.forget' and 'mia_loss.holdout'."""
    reasons: dict[str, str] = dataclasses.field(default_factory=dict)
    """Why a figure is None, by metric."""
    split: str | None = None
    """Forget split of TOFU, such as 'forget10', if it is known."""
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


@dataclasses.dataclass(frozen=True)
class Headline:
    """One of a suite's most important figures."""

    metric: str
    value: float | None
    better: str
    """'higher', 'lower' or 'towards 0'."""

    @property
    def arrow(self) -> str:
        """The direction as a sign."""
        return {"higher": "↑", "lower": "↓"}.get(self.better, "→0")


def headlines(results: Results) -> list[Headline]:
    """List about six figures that summarise a result: what is forgotten, and what is kept.

    Figures that were not computed have the value None. The leak suite has leak@k for its smallest and largest k.
    """
    known = HEADLINES.get(results.suite)
    if known is None:
        by_kind: dict[str, list[str]] = {}
        for metric in results.figures:
            if metric.startswith("leak@"):
                by_kind.setdefault(metric.rpartition("-")[2], []).append(metric)
        known = [
            (metric, "lower") for metrics in by_kind.values() for metric in dict.fromkeys((metrics[0], metrics[-1]))
        ]
    return [Headline(metric, results.figures.get(metric), better) for metric, better in known]


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
    """Write `summary.json` and `items.jsonl` into an existing folder.

    Args:
        results: figures and items.
        folder: an existing folder.
        openunlearning: also write `TOFU_EVAL.json` and `TOFU_SUMMARY.json` (or `MUSE_…`).
    """
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


def read_results(folder: str | Path, suite: str | None = None) -> Results:
    """Read a folder that `divdec eval` or OpenUnlearning wrote; of the latter the summary is enough.

    Args:
        folder: holds the files.
        suite: which of OpenUnlearning's files to read if a folder holds those of several suites.

    Raises:
        UsageError: it is not such a folder, or a file in it is not readable.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise UsageError(f"results {folder} is not a folder; give one that `divdec eval` or OpenUnlearning wrote")
    if (folder / SUMMARY).is_file():
        return _read_own(folder)
    for name in ("tofu", "muse"):
        evaluated, summary = (folder / f"{name.upper()}_{kind}.json" for kind in ("EVAL", "SUMMARY"))
        if suite in (None, name) and (evaluated.is_file() or summary.is_file()):
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
    root = Path(path).expanduser()
    if not root.is_dir():
        raise UsageError(f"results {path} is not a folder; give one that `divdec eval` or OpenUnlearning wrote")
    folders = _below(root, DEPTH)
    if not folders:
        raise UsageError(f"{path} holds no results, nor do the folders in it; looked for {', '.join(FILES)}")
    return folders


def identify(results: Results, folder: Path) -> Identity:
    """Say which method and setting a result is of, from its `run.json` or summary.

    Results of OpenUnlearning and of the paper's code do not say it: see `published_identity`.
    """
    record = read_record(folder) or {}
    content = {**results.about, **(record.get("result") or {})}
    family = str(content.get("family") or Path(str(content.get("model") or folder.absolute().parent.name)).name)
    size, seed = content.get("size"), content.get("seed")
    sequence, step = content.get("sequence"), content.get("step")
    if sequence in ("scal", "sust") and isinstance(step, int):
        family = folder.absolute().parent.name
        return Identity(str(content.get("method") or sequence), str(step), family, size, seed, sequence, float(step))
    steering = content.get("steering")
    match = _STEERING.fullmatch(steering) if isinstance(steering, str) else None
    if match is not None:
        family = f"{family} hard" if match["fill"] == "hard" else family
        return Identity(match["rule"], match[0], family, size, seed, match["rule"], float(match["value"]))
    if "method" in content:
        return Identity(str(content["method"]), str(content.get("setting") or ""), family, size, seed)
    return published_identity(folder)


_STEERING = re.compile(r"(?P<rule>linear|rank):(?P<value>-?\d+(?:\.\d+)?)(?::(?P<fill>soft|hard))?")
# '1B-alpha-1.5' and '1B-topk-20' are folders of the paper's code, 'linear-1.5' and 'rank-20-soft' ours.
_STRENGTH = re.compile(
    r"(?:(?P<family>.+)[-_])?(?P<rule>linear|alpha|rank|topk)-(?P<value>-?\d+(?:\.\d+)?)(?:-(?P<fill>soft|hard))?"
)
_SIZE = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)([bm])(?![a-z])", re.IGNORECASE)
_NGRAMS = re.compile(r"n-?gram|bigram|trigram", re.IGNORECASE)


def published_identity(folder: Path) -> Identity:
    """Read method, setting and family from the folder names of the paper's published files.

    `dd_linear/1B-alpha-1.5` is the linear rule with α = 1.5 and auxiliaries of 1B parameters.
    """
    match = _STRENGTH.fullmatch(folder.name)
    if match is None:
        return Identity(folder.name)
    rule = "linear" if match["rule"] in ("linear", "alpha") else "rank"
    family = match["family"] or folder.absolute().parent.name
    size = _SIZE.search(family)
    billions = None if size is None else float(size[1]) / (1000 if size[2] in "mM" else 1)
    return Identity(
        rule,
        f"{rule}:{match['value']}",
        f"{family} hard" if match["fill"] == "hard" else family,
        0.0 if _NGRAMS.search(family) else billions,
        rule=rule,
        strength=float(match["value"]),
    )


def results_table(paths: Sequence[str | Path]) -> pandas.DataFrame:
    """Tabulate all results at or below paths, one row each.

    Returns:
        The columns of `Identity`, `suite`, `split`, `name`, `folder`, and one for each figure.

    Raises:
        UsageError: a path holds no results.
    """
    import pandas

    rows = []
    for folder in dict.fromkeys(found for path in paths for found in find_results(path)):
        results = read_results(folder)
        rows.append(
            {
                **dataclasses.asdict(identify(results, folder)),
                "suite": results.suite,
                "split": results.split,
                "name": results.name,
                "folder": str(folder),
                **results.figures,
            }
        )
    return pandas.DataFrame(rows)


def _below(folder: Path, depth: int) -> list[Path]:
    if any((folder / name).is_file() for name in FILES):
        return [folder]
    if not depth:
        return []
    folders = [child for child in folder.iterdir() if child.is_dir() and not child.name.startswith(".")]
    return [found for child in sorted(folders, key=_natural) for found in _below(child, depth - 1)]


def _natural(path: Path) -> list[tuple[float, str]]:
    parts = re.split(r"(\d+(?:\.\d+)?)", path.name)
    return [(float(part), "") if index % 2 else (-1.0, part) for index, part in enumerate(parts)]


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
