"""What an evaluation found, as files: `summary.json`, `items.jsonl`, and the layout that OpenUnlearning writes.

It knows nothing of models. Metrics are called what OpenUnlearning calls them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from divdec.errors import UsageError
from divdec.runs import read_json, write_json, write_text

SUITES = ("tofu", "muse", "leak")
SUMMARY, ITEMS = "summary.json", "items.jsonl"
# A membership attack scores two sets; each is kept as a metric of its own beside the attack's AUC.
GROUPS = ("forget", "holdout")

Items = dict[str, dict[str, Any]]


@dataclasses.dataclass
class Results:
    """Figures and items of one model on one suite."""

    name: str
    suite: str
    figures: dict[str, float | None] = dataclasses.field(default_factory=dict)
    """The value of each metric; None where it could not be had."""
    items: dict[str, Items] = dataclasses.field(default_factory=dict)
    """By metric, by index (a string), the item's fields, such as `prob` and `avg_loss`. The two sets of a membership
    attack stand under 'mia_loss.forget' and 'mia_loss.holdout'."""
    reasons: dict[str, str] = dataclasses.field(default_factory=dict)
    """Why a figure is None, by metric."""
    split: str | None = None
    """Forget split of TOFU, such as 'forget10', where it is known."""
    about: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The model, its steering, and what else a reader wants to know."""

    def scores(self, metric: str, field: str) -> list[Any]:
        """One field of a metric's items, in the order of their indices: numbers, lists of them, or texts.

        Raises:
            UsageError: the items are not at hand, or lack the field.
        """
        if not self.items.get(metric):
            raise UsageError(f"{self.name}: there are no items of {metric}; a summary alone does not hold them")
        ordered = sorted(self.items[metric].items(), key=lambda item: int(item[0]))
        if lacking := next((index for index, fields in ordered if field not in fields), None):
            raise UsageError(f"{self.name}: item {lacking} of {metric} has no {field}")
        return [fields[field] for _, fields in ordered]


def write_results(results: Results, folder: Path, *, openunlearning: bool = False) -> None:
    """Write `summary.json` and `items.jsonl` into an existing folder, each whole or not at all.

    Args:
        results: what was found.
        folder: where it goes.
        openunlearning: write `TOFU_EVAL.json` and `TOFU_SUMMARY.json` (or `MUSE_…`) too.
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
    """Read a folder that `divdec eval` or OpenUnlearning wrote; of the latter the summary alone will do.

    Args:
        folder: holds the files.
        suite: which of OpenUnlearning's files to read where a folder holds those of several.

    Raises:
        UsageError: it is no such folder, or a file in it is not readable.
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
    found: dict[str, Any] = {}
    for metric, value in results.figures.items():
        name, dot, group = metric.partition(".")
        if dot:
            found.setdefault(name, {})[group] = {"agg_value": value, "value_by_index": results.items.get(metric, {})}
            continue
        entry = found.setdefault(name, {})
        if name.startswith("mia_"):
            entry["auc"] = value
        entry["agg_value"] = value
        if metric in results.items:
            entry["value_by_index"] = results.items[metric]
    return found


def _object(path: Path) -> dict[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict):
        raise UsageError(f"{path} is not a JSON object")
    return content
