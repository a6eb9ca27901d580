"""Gradient depth, and requests one after the other, drawn anew from what their runs have written."""

from __future__ import annotations

import dataclasses

from divdec.errors import UsageError
from divdec.evaluation.aggregate import FORGET_KNOWMEM, RETAIN_KNOWMEM
from divdec.evaluation.results import FILES, SUITES, identify, read_results
from divdec.report import depth as of_depth
from divdec.report import sequential as of_sequential
from divdec.report.sequential import Step
from divdec.research.figures.drawn import Asked, Drawn, Source, files_called, nothing
from divdec.runs import read_json
from divdec.training.depth import LayerDepth

RESULT = "result.json"
PROTOCOLS = {"sust": "sustainability", "scal": "scaling"}


def depth(asked: Asked) -> Drawn:
    """Norm of distillation's gradient by layer, from depth.json (paper, figure gradient_depth).

    Raises:
        UsageError: there is no depth.json in the runs, or more than one.
    """
    found = files_called(asked.runs, of_depth.RESULT)
    if not found:
        raise nothing(asked.runs, "depth", f"the {of_depth.RESULT} of `divdec depth`")
    source = _only(found)
    content = read_json(source.path)
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
        raise UsageError(f"{source.path} is not the {of_depth.RESULT} of `divdec depth`")
    fields = [field.name for field in dataclasses.fields(LayerDepth) if field.name != "norms"]
    if not content["rows"]:
        raise nothing(asked.runs, "depth", f"a {of_depth.RESULT} that holds layers; {source.name} holds none")
    rows = [LayerDepth(**{name: row[name] for name in fields}, norms=tuple(row["norms"])) for row in content["rows"]]
    figure = of_depth.depth_figure(rows, content["level"])
    title = "Distillation's gradient, layer by layer"
    figure.suptitle(title, fontsize=11.5)
    peaks = ", ".join(f"{top.set} {top.part}: layer {top.layer}" for top in of_depth.peaks(rows))
    return Drawn(figure, title, f"L2 norm of the gradient by layer; the largest of {peaks}.", (source.name,))


def sequential(asked: Asked) -> Drawn:
    """Distance from a method's first step, over requests or growing forget sets (paper, figure scal_sust).

    Raises:
        UsageError: the runs hold no steps.
    """
    for source in files_called(asked.runs, RESULT):
        content = read_json(source.path)
        if isinstance(content, dict) and isinstance(content.get("steps"), list) and content["steps"]:
            steps = [_step(row) for row in content["steps"]]
            return _drawn(steps, str(content["score"]), float(content["level"]), (source.name,))
    steps, sources = _evaluated(asked)
    if not steps:
        needs = f"the {RESULT} of benchmarks/sequential.py, or MUSE's results of two steps of scal or sust"
        raise nothing(asked.runs, "sequential", needs)
    return _drawn(steps, "knowmem ROUGE-L", None, sources)


def _drawn(steps: list[Step], score: str, level: float | None, sources: tuple[str, ...]) -> Drawn:
    figure = of_sequential.distance_figure(steps, score, level)
    title = "Requests one after the other, and growing forget sets"
    figure.suptitle(title, fontsize=11.5)
    last = {(one.protocol, one.method): one for one in steps}
    told = "; ".join(f"{protocol}, {method}: {one.distance:.1f}" for (protocol, method), one in last.items())
    return Drawn(figure, title, f"Distance from the first step in points, at the last step: {told}.", sources)


def _step(row: dict) -> Step:
    low, high = row["distance_interval"]
    return Step(
        row["protocol"], row["method"], row["step"], {}, row["distance"], low, high, row["distance_to_retrained"]
    )


def _evaluated(asked: Asked) -> tuple[list[Step], tuple[str, ...]]:
    """Steps from results of MUSE that say of which step of which sequence they are; without intervals."""
    rows: dict[tuple[str, str], dict[int, dict[str, float | None]]] = {}
    sources: list[Source] = []
    for source in files_called(asked.runs, *FILES):
        results = read_results(source.path.parent)
        step = identify(results, source.path.parent)
        if results.suite in SUITES and step.rule in PROTOCOLS and step.strength is not None:
            rows.setdefault((step.rule, step.family), {})[int(step.strength)] = results.figures
            sources.append(source)
    steps = []
    for (rule, family), of in rows.items():
        first = of[min(of)]
        if len(of) > 1:
            for step, figures in sorted(of.items()):
                away = _distance(figures, first)
                if away is not None:
                    steps.append(Step(PROTOCOLS[rule], family, step, {}, away, away, away, 0.0))
    return steps, tuple(dict.fromkeys(source.name for source in sources))


def _distance(figures: dict[str, float | None], first: dict[str, float | None]) -> float | None:
    total = 0.0
    for name in (FORGET_KNOWMEM, RETAIN_KNOWMEM):
        here, there = figures.get(name), first.get(name)
        if here is None or there is None:
            return None
        total += (100 * (here - there)) ** 2
    return total**0.5


def _only(found: list[Source]) -> Source:
    if len(found) > 1:
        names = ", ".join(source.name for source in found[:4])
        raise UsageError(f"these runs hold {len(found)} results of that kind ({names}); give one of them")
    return found[0]
