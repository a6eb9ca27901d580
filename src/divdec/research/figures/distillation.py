"""Heat maps of distillation over its learning rate and another setting: its temperature, or whatever was varied."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from divdec.errors import UsageError
from divdec.report.measures import MEASURES
from divdec.report.plots import panels
from divdec.report.plots.panels import Tile
from divdec.research.figures.drawn import Asked, Drawn, Source, files_called, nothing
from divdec.research.figures.results import COMPARISON, OWN, REFERENCES
from divdec.runs import RECORD, read_json

LR, TEMPERATURE = "lr", "temperature"
LABELS = {TEMPERATURE: "temperature T", "rehearse": "rehearsed examples of the retain set", "epochs": "epochs"}
OPTION = re.compile(r"(\w+) (-?[\d.]+(?:e[-+]?\d+)?)")


@dataclasses.dataclass(frozen=True)
class _Student:
    """One distillation: what was varied, and what came of it."""

    options: dict[str, float]
    values: dict[str, float]
    source: Source


def heat_map(asked: Asked) -> Drawn:
    """Agg of each student of a comparison (paper, figure distill_tofu), or each run's distance from its teacher.

    Students of a comparison that are better than every other method in it have a frame.

    Raises:
        UsageError: the runs hold no students that differ in their learning rate or another setting.
    """
    for read in (_compared, _distilled):
        students, names, record = read(asked)
        if students:
            return _drawn(asked, students, names, record)
    needs = f"a {COMPARISON} with the method distill, or the folders of several runs of `divdec distill`"
    raise nothing(asked.runs, "distillation", needs)


def _drawn(asked: Asked, students: Sequence[_Student], names: dict[str, str], record: float | None) -> Drawn:
    from matplotlib.figure import Figure

    other = _other(students)
    figure = Figure(figsize=(5.0 * len(names) + 0.4, 4.2), layout="constrained")
    axes = list(figure.subplots(1, len(names), squeeze=False)[0])
    title = "Distillation by learning rate"
    for own, (name, label) in zip(axes, names.items(), strict=True):
        higher = name in MEASURES and MEASURES[name].better == "higher"
        shown = [one for one in students if name in one.values]
        tiles = [
            Tile(
                one.options[LR], one.options.get(other or "", 0.0), one.values[name],
                marked=record is not None and one.values[name] > record,
            )
            for one in shown
        ]  # fmt: skip
        y_label = LABELS.get(other, other.replace("_", " ")) if other else ""
        if len({(tile.x, tile.y) for tile in tiles}) < len(tiles):
            axis = f" and {other}" if other else ""
            raise UsageError(f"several students have one {LR}{axis}; give runs that differ in these alone")
        mesh = panels.heat(
            own, tiles, x_label="learning rate", y_label=y_label, text=lambda value: f"{value:.2f}", reverse=not higher
        )
        if other is None:
            own.set_yticks([])
        bar = figure.colorbar(mesh, ax=own, shrink=0.9)
        bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
        own.set_title(label)
    if record is not None:
        figure.supxlabel(f"framed: above the best other method there, {record:.2f}", fontsize=9)
    figure.suptitle(title if not other else f"{title} and {LABELS.get(other, other).partition(' ')[0]}", fontsize=11.5)
    text = f"{len(students)} students; {', '.join(names.values())}."
    return Drawn(figure, title, text, tuple(dict.fromkeys(one.source.name for one in students)))


def _other(students: Sequence[_Student]) -> str | None:
    """What differs beside the learning rate: the temperature, where it does."""
    seen: dict[str, set[float]] = {}
    for one in students:
        for name, value in one.options.items():
            if name != LR:
                seen.setdefault(name, set()).add(value)
    varied = [name for name, values in seen.items() if len(values) > 1]
    return TEMPERATURE if TEMPERATURE in varied or (not varied and TEMPERATURE in seen) else next(iter(varied), None)


def _compared(asked: Asked) -> tuple[list[_Student], dict[str, str], float | None]:
    students, others = [], []
    for source in files_called(asked.runs, COMPARISON):
        for line in _lines(read_json(source.path)):
            agg = line["values"].get("agg")
            options = {name: float(value) for name, value in OPTION.findall(line["setting"])}
            if agg is None:
                continue
            if line["method"] == "distill" and LR in options:
                students.append(_Student(options, {"agg": agg}, source))
            elif line["method"] not in (*OWN, *REFERENCES):
                others.append(agg)
    return students, {"agg": f"Agg, 0 to 1 ({MEASURES['agg'].better} is better)"}, max(others, default=None)


def _distilled(asked: Asked) -> tuple[list[_Student], dict[str, str], float | None]:
    students = []
    for source in files_called(asked.runs, RECORD):
        content = read_json(source.path)
        if not isinstance(content, dict) or content.get("verb") != "distill" or content.get("status") != "finished":
            continue
        settings, after = content["settings"], content["after"]
        values = {role: float(after[role]["kl"]) for role in ("forget", "retain") if after.get(role)}
        options = {name: float(settings[name]) for name in (LR, TEMPERATURE, "rehearse", "epochs")}
        students.append(_Student(options, values, source))
    names = {
        role: f"{role} set: KL(teacher ‖ student),\nnats a token (lower is better)"
        for role in ("forget", "retain")
        if any(role in one.values for one in students)
    }
    return students, names, None


def _lines(content: Any) -> list[dict[str, Any]]:
    return content["grid"] if isinstance(content, dict) and isinstance(content.get("grid"), list) else []
