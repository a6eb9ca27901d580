"""Result folders of evaluations: `summary.json` (figures), `items.jsonl` (items), and `run.json` beside them.

Metrics have OpenUnlearning's names.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from divdec.errors import UsageError
from divdec.runs import read_json, write_json, write_text

SUMMARY, ITEMS = "summary.json", "items.jsonl"

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


def write_results(results: Results, folder: Path) -> None:
    """Write `summary.json` and `items.jsonl`."""
    lines = [
        json.dumps({"metric": metric, "index": index, **fields}, ensure_ascii=False)
        for metric, items in results.items.items()
        for index, fields in items.items()
    ]
    write_text(folder / ITEMS, "".join(f"{line}\n" for line in lines))
    content = dataclasses.asdict(results)
    del content["items"]
    write_json(folder / SUMMARY, content)


def read_results(folder: str | Path) -> Results:
    """Read a folder that `divdec eval` wrote; a summary without items is enough.

    Raises:
        UsageError: it holds no results, or a file cannot be read.
    """
    folder = Path(folder).expanduser()
    if not (folder / SUMMARY).is_file():
        raise UsageError(f"{folder} holds no results; looked for {SUMMARY}")
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
