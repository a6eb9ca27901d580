"""Leak@k: the share of questions that leak within the first k attack prompts, or in k samples."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from divdec.errors import UsageError
from divdec.evaluation.aggregate import Bootstrap
from divdec.evaluation.results import SUMMARY, read_results
from divdec.report.plots import panels
from divdec.report.plots.palette import LOOKS, RETRAIN, TARGET, Look
from divdec.report.plots.panels import Leaks
from divdec.research.figures.drawn import Asked, Drawn, Source, files_called, nothing
from divdec.research.figures.results import COMPARISON, OWN, REFERENCES, title_of
from divdec.runs import read_json

PUBLISHED = "rebel_cache.json"
FIGURE = re.compile(r"leak@(\d+)-(attack|sample)")
TITLED = {**{title: key for key, title in {**OWN, **REFERENCES}.items()}}


def leaks(asked: Asked) -> Drawn:
    """Leak@k of all methods in the runs; those other than Divergence Decoding and the references in grey.

    Raises:
        UsageError: the runs hold no leaks, or both leaks under attack and of samples and nothing else.
    """
    from matplotlib.figure import Figure

    found: dict[str, Leaks] = {}
    kinds: set[str] = set()
    sources = []
    files = files_called(asked.runs, PUBLISHED, COMPARISON, SUMMARY)
    compared = {source.path.parent for source in files if source.path.name == COMPARISON}
    for source in files:
        if source.path.name == SUMMARY and not compared.isdisjoint(source.path.parents):
            continue  # one seed of what the comparison has means of
        own, kind = _read(source, asked)
        if own:
            sources.append(source.name)
            kinds.add(kind)
            for line in own:
                name = line.label if line.label not in found else f"{line.label} ({source.path.parent.name})"
                found[name] = dataclasses.replace(line, label=name)
    if not found:
        raise nothing(asked.runs, "leak", f"results of `divdec eval leak`, a {COMPARISON} with leaks, or {PUBLISHED}")
    if len(kinds) > 1:
        raise UsageError("these runs hold leaks under attack and of samples; give runs of one kind")
    looks = iter(LOOKS)
    lines = []
    many = len(found) > len(LOOKS) + len(REFERENCES)
    for line in found.values():
        key = TITLED.get(line.label)
        look: Look | None = {"target": TARGET, "retrain": RETRAIN}.get(key or "")
        if look is None and (key in OWN or not many):
            look = next(looks, None)
        lines.append(dataclasses.replace(line, look=look))
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.subplots()
    what = "attack prompts a question" if kinds == {"attack"} else "samples a question"
    panels.leak_curves(axes, lines, f"k, {what}")
    title = "Leak@k" if kinds == {"attack"} else "Leak@k over samples"
    axes.set_title(title)
    largest = max(k for line in lines for k in line.shares)
    told = ", ".join(f"{line.label} {line.shares[largest]:.3f}" for line in lines if largest in line.shares)
    return Drawn(figure, title, f"Share of questions that leak; at k = {largest}: {told}.", tuple(sources))


def _read(source: Source, asked: Asked) -> tuple[list[Leaks], str]:
    """The lines of a file, and whether they are of attacks or samples; none where it holds no leaks."""
    if source.path.name == SUMMARY:
        return _evaluated(source, asked)
    content = read_json(source.path)
    if not isinstance(content, Mapping):
        return [], ""
    if isinstance(table := content.get("table_data"), list):
        return [_published(row) for row in table], "attack"
    if not isinstance(found := content.get("leaks"), Mapping):
        return [], ""
    return [
        Leaks(title_of(str(method)), None, {int(k): float(share) for k, share in shares.items()})
        for method, shares in found.items()
    ], "attack"


def _published(row: Mapping[str, Any]) -> Leaks:
    shares = {int(name[5:]): float(value) for name, value in row.items() if name.startswith("Leak@")}
    return Leaks(str(row["Method"]).replace("_", " ").replace("Offset", "δ-Unlearning"), None, shares)


def _evaluated(source: Source, asked: Asked) -> tuple[list[Leaks], str]:
    content = read_json(source.path)
    if not isinstance(content, Mapping) or content.get("suite") != "leak":
        return [], ""
    results = read_results(source.path.parent)
    figures = {(found[2], int(found[1])): name for name in results.figures if (found := FIGURE.fullmatch(name))}
    kinds = {kind for kind, _ in figures}
    kind = "attack" if "attack" in kinds else "sample"
    bootstrap = Bootstrap(asked.level, asked.draws, asked.seed)
    shares: dict[int, float] = {}
    intervals: dict[int, tuple[float, float]] = {}
    for (of, k), name in sorted(figures.items()):
        value = results.figures[name]
        if of != kind or value is None:
            continue
        shares[k] = value
        if results.items.get(name):
            scores = np.asarray(results.scores(name, "score"), dtype=float)
            low, high = bootstrap.interval(bootstrap.counts(len(scores), "leak") @ scores / len(scores))
            intervals[k] = (low, high)
    label = _label(results.name, source)
    return ([Leaks(label, None, shares, intervals)] if shares else []), kind


def _label(name: str, source: Source) -> str:
    """A reference by its title, any other model by its folder's name."""
    folder = source.path.parent.name
    return REFERENCES.get(folder.lower()) or folder or name
