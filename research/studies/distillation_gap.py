"""Why a distilled student lags behind its teacher: what it rehearses, and the direction of the loss.

The TOFU suite measures students of linear:1.5 on the models of `make world`, and models that the cache lacks are
trained. A student rehearses questions about the authors of the retain set, or also general questions (public authors
and cities), on which target and retrained model were tuned. Aggregates are means over the seeds, of the variant
`openunlearning` without fluency. Two students are trained on every seed, the third on seed 0.

    python -m research.studies.distillation_gap --output runs/distillation-gap
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from divdec_research.compare.benchmark import load_benchmarks
from divdec_research.compare.run import read_trial, run_trial
from divdec_research.compare.settings import CompareSettings, Trial
from divdec_research.compare.table import SeedResult, summarize
from divdec_research.report.tables import markdown_table
from divdec_research.suites.aggregate import Bootstrap
from divdec_research.world import demo as demo
from divdec_research.world.facts import build_world

TEACHER = Trial("linear", steering="linear:1.5")
ALL = 1000  # more than there are
EVERY_SEED = {
    "200 of the authors, teacher-student": ("authors", 200, "teacher-student"),
    "authors and general, student-teacher": ("general", ALL, "student-teacher"),
}
STUDENTS = {**EVERY_SEED, "200 of the authors, student-teacher": ("authors", 200, "student-teacher")}
SHOWN = ("agg", "mem", "priv", "utility")


def student_of(name: str) -> tuple[str, Trial]:
    rehearsed, count, direction = STUDENTS[name]
    return rehearsed, Trial("distill", (("learning_rate", 1e-3), ("rehearse", count), ("direction", direction)))


def rehearsing(benchmark, rehearsed):
    """Set the records that a student can rehearse."""
    material = demo.material_of(build_world(dataclasses.replace(demo.WORLD, seed=benchmark.seed)))
    general = material.general if rehearsed == "general" else ()
    return dataclasses.replace(
        benchmark, retain=dataclasses.replace(material.retain, records=(*material.retain, *general))
    )


def trained(trial, benchmark, folder):
    return read_trial(trial, benchmark, folder) or run_trial(trial, benchmark, folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the students and their results")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    benchmarks = load_benchmarks(CompareSettings(output=str(given.output), seeds=given.seeds), print)
    references, results = {}, {name: {} for name in ("Teacher", *STUDENTS)}
    for benchmark in benchmarks:
        folder = given.output / f"seed-{benchmark.seed}"
        target, retrain = (trained(Trial(name), benchmark, folder).results for name in ("target", "retrain"))
        references[benchmark.seed] = target, retrain
        results["Teacher"][benchmark.seed] = trained(TEACHER, benchmark, folder)
    for name, benchmark in [(name, benchmark) for name in STUDENTS for benchmark in benchmarks]:
        if benchmark is not benchmarks[0] and name not in EVERY_SEED:
            continue
        rehearsed, trial = student_of(name)
        folder = given.output / f"seed-{benchmark.seed}" / rehearsed
        results[name][benchmark.seed] = student = trained(trial, rehearsing(benchmark, rehearsed), folder)
        print(f"seed {benchmark.seed}, {name}: {student.failed or 'measured'}", flush=True)
    rows = []
    for name, by_seed in results.items():
        seeds = {seed: SeedResult(model.results, model.seconds) for seed, model in by_seed.items()}
        summary = summarize(name, name, seeds, references, benchmarks[0].suite, Bootstrap(), {})
        each = ", ".join(f"{values['agg']:.3f}" for values in summary.seeds.values())
        rows.append([name, *(f"{summary.values[value]:.3f}" for value in SHOWN), each])
    print(markdown_table(["", *(value.capitalize() for value in SHOWN), "Agg of each seed"], rows))


if __name__ == "__main__":
    main()
