"""Result folders of divdec, of OpenUnlearning and of the paper's code: reading, and the method and setting of each."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import divdec.evaluation.results
from divdec.errors import UsageError
from divdec.evaluation.results import SUMMARY, Results
from divdec.runs import read_json, read_record, write_json

FILES = (SUMMARY, "TOFU_EVAL.json", "TOFU_SUMMARY.json", "MUSE_EVAL.json", "MUSE_SUMMARY.json")
DEPTH = 3  # a run, a model in it, a setting of that
# The two sets of a membership attack; each is a metric beside the attack's AUC.
GROUPS = ("forget", "holdout")


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
    rule: str | None = None
    """'linear' or 'rank'."""
    strength: float | None = None
    """α of the linear rule, k of the rank rule."""


def write_openunlearning(results: Results, folder: Path) -> None:
    """Write the files of OpenUnlearning, such as `TOFU_EVAL.json` and `TOFU_SUMMARY.json`."""
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
        return divdec.evaluation.results.read_results(folder)
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
    r"(?P<rule>linear|rank):(?P<value>-?\d+(?:\.\d+)?)(?::(?P<margin>\d[\d.]*))?(?::(?P<fill>soft|hard|full))?"
    r"(?: and takedowns)?"
)
# '1B-alpha-1.5' and '1B-topk-20' are folders of the paper's code, 'linear-1.5' and 'rank-20-soft' ours.
_FOLDER = re.compile(
    r"(?:(?P<family>.+)[-_])?(?P<rule>linear|alpha|rank|topk)-(?P<value>-?\d+(?:\.\d+)?)"
    r"(?:-(?P<margin>\d[\d.]*))?(?:-(?P<fill>soft|hard|full))?"
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
    method, size = content.get("method"), content.get("size")
    match = _STEERING.fullmatch(str(content.get("steering")))
    if match is None and "method" in content:
        return Identity(str(method), str(content.get("setting") or ""), family, size)
    if match is not None:
        rule, setting = match["rule"], match[0]
    else:
        match = _FOLDER.fullmatch(folder.name)
        if match is None:
            return Identity(folder.name)
        rule = "linear" if match["rule"] in ("linear", "alpha") else "rank"
        setting = f"{rule}:{match['value']}"
        family = match["family"] or parent
        parameters = _SIZE.search(family)
        size = None if parameters is None else float(parameters[1]) / (1000 if parameters[2] in "mM" else 1)
        size = 0.0 if _NGRAMS.search(family) else size
    family = f"{family} {match['fill']}" if match["fill"] in ("hard", "full") else family
    family = f"{family} margin {match['margin']}" if match["margin"] else family
    return Identity(rule, setting, family, size, rule, float(match["value"]))


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
