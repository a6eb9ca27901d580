"""Why a distilled student lags behind its teacher: what it rehearses, and which tokens the loss measures.

The TOFU suite measures students of linear:1.5 on the models of `make world`, and models that the cache lacks are
trained. A student rehearses questions about the authors of the retain set, or also general questions (public authors
and cities), on which target and retrained model were tuned. Aggregates are means over the seeds, of the variant
`openunlearning` without fluency. Two students are trained on every seed, the others on seed 0.

The second table is about the tokens of the true answers of the forget set to which the teacher gives less than 1e-4:
the mean log-probability of teacher and student, and how much of KL(teacher ‖ student) and of KL(student ‖ teacher) at
these positions comes from the true token.

    python -m research.studies.distillation_gap --output runs/distillation-gap
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path

import torch

from divdec.checkpoint import load_tokenizer
from divdec_research.compare.benchmark import load_benchmarks
from divdec_research.compare.run import MODEL, load_trial, read_trial, run_trial
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
STUDENTS = {
    **EVERY_SEED,
    "authors and general, teacher-student": ("general", ALL, "teacher-student"),
    "200 of the authors, student-teacher": ("authors", 200, "student-teacher"),
}
SHOWN = ("agg", "mem", "priv", "utility")
UNLIKELY = math.log(1e-4)


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


@torch.no_grad()
def unlikely_tokens(teacher, student, benchmark):
    """Rows of tokens to which the teacher gives less than 1e-4: its log-probability, the student's, and the parts."""
    records = benchmark.suite.questions("forget")
    rows = []
    for example in benchmark.suite.layout(load_tokenizer(benchmark.target)).encode(records):
        ids = torch.tensor([example.input_ids])
        ours, theirs = (
            model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, :-1].float().log_softmax(dim=-1)
            for model in (student, teacher)
        )
        for position, label in enumerate(example.labels[1:]):
            p, q = theirs[position], ours[position]
            if label >= 0 and p[label] < UNLIKELY:
                terms = p.exp() * (p - q), q.exp() * (q - p)
                rows.append([p[label], q[label], *(value for term in terms for value in (term.sum(), term[label]))])
    return torch.tensor(rows)


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
    tokens = []
    for name, benchmark in [(name, one) for name in STUDENTS for one in benchmarks]:
        if benchmark is not benchmarks[0] and name not in EVERY_SEED:
            continue
        rehearsed, trial = student_of(name)
        folder = given.output / f"seed-{benchmark.seed}" / rehearsed
        results[name][benchmark.seed] = one = trained(trial, rehearsing(benchmark, rehearsed), folder)
        print(f"seed {benchmark.seed}, {name}: {one.failed or 'measured'}", flush=True)
        if benchmark is benchmarks[0]:
            teacher = results["Teacher"][benchmark.seed]
            models = (load_trial(result.folder / MODEL, result.trial) for result in (teacher, one))
            part = unlikely_tokens(*models, benchmark)
            tokens.append([name, str(len(part)), *(f"{value:.2g}" for value in part.mean(dim=0).tolist())])
    rows = []
    for name, by_seed in results.items():
        own = {seed: SeedResult(one.results, one.seconds, None) for seed, one in by_seed.items()}
        summary = summarize(name, name, own, references, benchmarks[0].suite, Bootstrap(), {})
        each = ", ".join(f"{values['agg']:.3f}" for values in summary.seeds.values())
        rows.append([name, *(f"{summary.values[value]:.3f}" for value in SHOWN), each])
    print(markdown_table(["", *(value.capitalize() for value in SHOWN), "Agg of each seed"], rows))
    heads = ["", "tokens", "teacher", "student", "forward KL", "of the token", "reverse KL", "of the token"]
    print(markdown_table(heads, tokens))


if __name__ == "__main__":
    main()
