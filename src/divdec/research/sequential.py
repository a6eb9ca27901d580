"""Requests that come one after the other (sustainability) and forget sets that grow (scaling), steered and distilled.

Paper, section Sustainability and Scaling and figure scal_sust. Step i of both ends with the first i requests forgotten.

- Sustainability: only the new request is at hand. The pair goes on from the pair before (p learns the new request and
  the retain set, q the retain set); the student goes on from the student before, on the new request alone.
- Scaling: all i requests are at hand at once. p begins anew from the auxiliaries' base, the student from the target.

Deployed at step i is, steered, the target with the pair of step i; distilled, the student of step i alone, whose
teacher that was. The first step of both is the same.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from divdec.evaluation.aggregate import Bootstrap
from divdec.research.charts import Step, distance_plot, sequential_table
from divdec.research.sequential_material import RETAIN, Course, request_name
from divdec.research.sequential_measure import Examiner
from divdec.research.sequential_models import Models, SequentialSettings, distil_step, write_requests, write_step
from divdec.runs import RECORD, goes_on, record, settings_hash, write_json, write_text

PROTOCOLS = ("sustainability", "scaling")
KEPT = ("bundles", "students")
WORKING = ("requests", "rows")
RESULTS = ("result.json", "items.jsonl", "table.md", "distance.svg")


def run_sequential(
    course: Course,
    settings: SequentialSettings,
    output: Path,
    cache: Path,
    *,
    overwrite: bool = False,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train what the cache lacks, distil, measure, and write table, plot, figures and items into `output`.

    Args:
        course: target's data and requests.
        settings: steering and distillation.
        output: folder for result.json, items.jsonl, table.md, distance.svg and run.json, with the bundle and the
            student of every step. A run that was stopped goes on there.
        cache: folder of finished stages.
        overwrite: replace an earlier result in `output`.
        report: told a line a stage.

    Returns:
        The content of result.json.

    Raises:
        UsageError: the output holds something else, or a setting cannot be used; nothing has then been trained.
        Interrupted: Ctrl-C while a model trains; the same call goes on where it stopped.
    """
    started = time.perf_counter()
    data = [course.texts, [request.sha256 for request in course.requests], course.retain.sha256, course.title]
    fingerprint = settings_hash([data, dataclasses.asdict(course.recipe), dataclasses.asdict(settings)])
    _open(output, fingerprint, settings, overwrite)
    models = Models.trained(course, settings, cache, report)
    requests = write_requests(course, output / "requests")

    measure = Examiner(course, models.tokenizer, output / "rows", report)
    found = {"target": measure.plain("target", models.target), "retrained": measure.plain("retrained", models.retrain)}
    steps: list[Step] = []
    students: dict[tuple[str, int], Path] = {}
    bootstrap = Bootstrap(seed=settings.seed)
    for protocol in PROTOCOLS:
        for step in range(1, len(course.requests) + 1):
            name = f"{protocol}-{step}" if step > 1 else "step-1"  # the first is the same in both
            bundle = write_step(output / "bundles" / name, models, models.pairs[protocol, step], course, settings, step)
            before = students.get((protocol, step - 1)) if protocol == "sustainability" else None
            asked_for = requests["new" if protocol == "sustainability" else "all", step]
            student = distil_step(output / "students" / name, bundle, asked_for, before, course, settings, report)
            students[protocol, step] = student
            rows = {
                "steered": measure.steered(f"{name}-steered", bundle),
                "distilled": measure.plain(f"{name}-distilled", student),
            }
            for method, scores in rows.items():
                first = scores if step == 1 else _of(steps, protocol, method, 1).scores
                low, high = distance_interval(scores, first, bootstrap)
                steps.append(
                    Step(
                        protocol, method, step, scores,
                        distance=distance(scores, first), low=low, high=high,
                        to_retrained=distance(scores, found["retrained"]),
                    )
                )  # fmt: skip
    references = {name: {asked: _mean(of) for asked, of in scores.items()} for name, scores in found.items()}
    result = {
        "title": course.title,
        "score": course.score,
        "level": bootstrap.level,
        "draws": bootstrap.draws,
        "references": references,
        "steps": [step.to_dict() for step in steps],
    }
    write_json(output / "result.json", result)
    items = [json.dumps(item, ensure_ascii=False) for name in measure.names() for item in measure.items(name)]
    write_text(output / "items.jsonl", "\n".join(items) + "\n")
    write_text(output / "table.md", sequential_table(course.title, course.score, references, steps))
    write_text(output / "distance.svg", distance_plot(steps, course.score, bootstrap.level))
    seconds = round(time.perf_counter() - started, 1)
    content = record("sequential", settings, title=course.title, fingerprint=fingerprint, seconds=seconds)
    write_json(output / RECORD, content)
    for name in WORKING:
        shutil.rmtree(output / name, ignore_errors=True)
    return {**result, "seconds": seconds}


def distance(scores: Mapping[str, Sequence[float]], first: Mapping[str, Sequence[float]]) -> float:
    """Euclidean distance between two models' mean scores on the original forget set and the retain set.

    In points of 100: √((100·Δforget)² + (100·Δretain)²) (paper, figure scal_sust).
    """
    return sum((100 * (_mean(scores[name]) - _mean(first[name]))) ** 2 for name in (request_name(1), RETAIN)) ** 0.5


def distance_interval(
    scores: Mapping[str, Sequence[float]], first: Mapping[str, Sequence[float]], bootstrap: Bootstrap
) -> tuple[float, float]:
    """The percentile interval of `distance`: both sets are resampled, with the same items for both models."""
    squares = np.zeros(bootstrap.draws)
    for name in (request_name(1), RETAIN):
        differences = np.asarray(scores[name]) - np.asarray(first[name])
        counts = bootstrap.counts(len(differences), name)
        squares += (100 * (counts @ differences) / len(differences)) ** 2
    return bootstrap.interval(np.sqrt(squares))


def _open(output: Path, fingerprint: str, settings: SequentialSettings, overwrite: bool) -> None:
    """Begin in an empty folder, or go on with the same run that was stopped."""
    if goes_on(output, "sequential", fingerprint, overwrite):
        return
    output.mkdir(parents=True, exist_ok=True)
    for name in (*KEPT, *WORKING):
        shutil.rmtree(output / name, ignore_errors=True)
    for name in RESULTS:
        (output / name).unlink(missing_ok=True)
    write_json(output / RECORD, record("sequential", settings, fingerprint=fingerprint) | {"status": "running"})


def _of(steps: Sequence[Step], protocol: str, method: str, step: int) -> Step:
    return next(row for row in steps if (row.protocol, row.method, row.step) == (protocol, method, step))


def _mean(scores: Sequence[float]) -> float:
    return statistics.fmean(scores)
