"""Did a model read a fact of the forget set? Membership by shadow models, which did and did not.

    divdec compare --data demo --methods all --search-seeds 1 --output runs/compare-demo      # first: the models
    python -m benchmarks.attacks.shadow_models --run runs/compare-demo --output runs/shadow-models
    python -m research.studies.tofu --data TOFU --output runs/forget01 --split forget01 --limit 30
    python -m benchmarks.attacks.shadow_models --run runs/forget01 --output runs/shadows

Each seed of the comparison gets --shadows models, trained as its target was, but each on a random half of the facts (of
a run of research.studies.tofu: questions) of forget and holdout set. A shadow model that was not trained on a fact
shows how surprising it is to a model that never read it. The attack subtracts their mean loss from the loss of the
attacked one (the reference attack with several references; LiRA's offline variant with one variance for all,
arXiv:2112.03570) and takes the facts with the lowest difference for members. The attacker thus knows the training data
but for the forget set, which is more than an API shows.

Prints, for each method's best setting in the comparison, the AUC of the loss alone, the AUC of the attack, and the
share of the forget set that is found when at most 5 % of the holdout set is taken for members. Every seed counts
equally. The retrained model's row shows what chance gives. After a longer comparison the same command adds its rows,
and trains no shadow model again.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import shutil
import statistics
from pathlib import Path

import numpy as np

from divdec.checkpoint import CheckpointReference, load_tokenizer
from divdec.data.formatting import encode_records, encode_set
from divdec.data.records import Message, Record, RecordSet, read_records
from divdec.errors import UsageError
from divdec.evaluation.metrics import holdout_wins
from divdec.evaluation.results import read_results
from divdec.evaluation.scoring import score
from divdec.runs import cache_folder, read_json, write_json
from divdec.training.auxiliaries import load_for_training
from divdec_research.baselines.table import REFERENCES, TITLES
from divdec_research.compare.benchmark import load_benchmarks
from divdec_research.compare.settings import CompareSettings, Trial, trials_of
from divdec_research.report.tables import markdown_table
from divdec_research.world import demo as demo
from divdec_research.world.facts import build_world
from divdec_research.world.models import StageCache, encode_material
from research.studies.tofu import FORM, SIZES, best_trials, split_of, tune, tuning_of


def run_pretrained(given):
    """Train the shadow models that the output folder lacks, attack the run's best settings, and print the table."""
    check_shadows(given.shadows)
    split = split_of(given.run)
    size = SIZES[split]
    forget, retain, holdout = (
        read_records(given.run / "tofu" / f"{name}.json") for name in (f"{split}_perturbed", size.retain, size.holdout)
    )
    asked = RecordSet("asked", "question/answer", (*forget, *holdout))
    original = CheckpointReference.parse(given.target).resolve(Path(), weights=True)
    given.output.mkdir(parents=True, exist_ok=True)
    how = tuning_of(given.run)
    shadows, members = pretrained_shadow_losses(given.output, original, asked, retain, how, given.shadows)
    rows = {
        trial.method: {
            "setting": trial.label,
            "seeds": [attacked(losses(folder), shadows, members, len(forget.records))],
        }
        for trial, folder in best_trials(given.run, size).items()
    }
    shown = power(shadows, members)
    write_json(given.output / "results.json", {"shadows": given.shadows, "power": shown, "methods": rows})
    print(f"AUC of the attack on the shadow models themselves: {shown:.2f}")
    print(table(rows))


def pretrained_shadow_losses(output, original, asked, retain, tuning, count):
    """Return losses of the asked questions under the shadow models, and which of them each was trained on.

    Both have the shape (shadow models, questions). A model is deleted when its losses are written.
    """
    file = output / "losses.json"
    kept = read_json(file) if file.exists() else []
    examples = encode_set(asked, load_tokenizer(original), FORM)
    chosen = halves(range(len(asked.records)), count, seed=0)
    for number in range(len(kept), count):
        half = [asked.records[index] for index in sorted(chosen[number])]
        folder = tune(original, [RecordSet("half", "question/answer", tuple(half)), retain],
                      output / f"shadow-{number}", tuning)  # fmt: skip
        kept.append([item.loss for item in score(load_for_training(folder).eval(), examples)])
        write_json(file, kept)
        shutil.rmtree(folder)
    members = [[index in half for index in range(len(asked.records))] for half in chosen]
    return np.array(kept[:count]), np.array(members)


def losses(folder):
    """Losses of the questions of forget and holdout set, as the comparison measured them."""
    results = read_results(folder)
    return [value for name in SETS for value in results.scores(f"mia_loss.{name}", "score")]


SETS = "forget", "holdout"
FALSE_POSITIVES = 0.05


def fact_of(question):
    return question.subject, question.relation


def halves(facts, count, seed):
    """Facts that each shadow model is trained on: two models in a row share none and together have all."""
    generator = random.Random(seed)
    chosen = []
    for _ in range(count // 2):
        shuffled = generator.sample(facts, len(facts))
        middle = len(facts) // 2
        chosen += [set(shuffled[:middle]), set(shuffled[middle:])]
    return chosen


def shadow_losses(benchmark, count):
    """Losses of the suite's forget and holdout questions under the shadow models, and which of them were trained on.

    Returns:
        losses (shadow models, questions), trained on (shadow models, questions), number of forget questions.
    """
    world = build_world(dataclasses.replace(demo.WORLD, seed=benchmark.seed))
    material = demo.material_of(world)
    tokenizer = load_tokenizer(benchmark.target)
    cache = cache_folder() / "demo" / "models"
    corpus, _, retain, general = encode_material(material, tokenizer)
    recipe = demo.RECIPE
    base = StageCache(cache, tokenizer, benchmark.seed, print).run(
        "large base", recipe.target, corpus, recipe.target_pretraining
    )
    pool = [*world.forget, *world.holdout]
    fact_by_question = {item.question: fact_of(item) for item in pool}
    asked = [item.record for name in SETS for item in benchmark.suite.data.sets[name]]
    facts = [fact_by_question[record.messages[-1].content] for record in asked]
    examples = benchmark.suite.layout(tokenizer).encode(asked)
    losses, members = [], []
    for number, half in enumerate(halves(sorted(set(facts)), count, benchmark.seed)):
        records = [
            Record(item.answer, messages=(Message("user", item.question),)) for item in pool if fact_of(item) in half
        ]
        folder = StageCache(cache, tokenizer, 100 * benchmark.seed + number + 1, print).run(
            f"shadow {number}", base, encode_records(records, tokenizer, material.form) + retain + general,
            recipe.target_tuning,
        )  # fmt: skip
        model = load_for_training(folder).eval()
        losses.append([item.loss for item in score(model, examples)])
        members.append([fact in half for fact in facts])
    return np.array(losses), np.array(members), len(benchmark.suite.data.sets["forget"])


def auc(members, others):
    """Area under the ROC curve: members have the lower values."""
    return float(holdout_wins(members, others).mean())


def attacked(losses, shadows, members, forget):
    """AUC of the loss, AUC of the attack, and share found at the accepted share of false positives."""
    reference = np.ma.masked_array(shadows, mask=members).mean(axis=0).filled(np.nan)
    losses = np.asarray(losses)
    scores = losses - reference
    threshold = np.sort(scores[forget:])[int(FALSE_POSITIVES * len(scores[forget:]))]
    return (
        auc(losses[:forget], losses[forget:]),
        auc(scores[:forget], scores[forget:]),
        float((scores[:forget] < threshold).mean()),
    )


def power(shadows, members):
    """Mean AUC of the attack on the shadow models themselves, each judged by the others."""
    values = []
    for number in range(len(shadows)):
        others = np.arange(len(shadows)) != number
        reference = np.ma.masked_array(shadows[others], mask=members[others]).mean(axis=0).filled(np.nan)
        scores = shadows[number] - reference
        values.append(auc(scores[members[number]], scores[~members[number]]))
    return statistics.fmean(values)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="output of divdec compare --data demo, or the study's")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--shadows", type=int, default=8, help="shadow models a seed; an even number from 4 on")
    parser.add_argument("--seeds", type=int, help="of the comparison's seeds the first; by default all")
    parser.add_argument("--target", default="smollm2", help="that study's pretrained model")
    given = parser.parse_args()
    try:
        (run_pretrained if (given.run / "tofu").is_dir() else run_world)(given)
    except UsageError as error:
        parser.exit(2, f"shadow_models: {error}\n")


def run_world(given):
    """Train the shadow models that the cache lacks, attack the comparison's best settings, and print the table."""
    check_shadows(given.shadows)
    file = given.run / "run.json"
    settings = read_json(file)["settings"] if file.exists() else {}
    if settings.get("data") != "demo":
        raise UsageError(f"{given.run} is no output folder of divdec compare --data demo")
    seeds = settings["seeds"] if given.seeds is None else given.seeds
    if not 1 <= seeds <= settings["seeds"]:
        raise UsageError(f"--seeds is {seeds}; accepted: 1 to {settings['seeds']}, those of {given.run}")
    settings = CompareSettings(
        output=str(given.output), data="demo", seeds=seeds, grid=settings["grid"], limit=settings["limit"]
    )
    best = {row["method"]: row["setting"] for row in read_json(given.run / "comparison.json")["best"]}
    trials = [*map(Trial, REFERENCES), *trials_of([name for name in best if name not in REFERENCES], settings.grid)]
    values = {trial: [] for trial in trials if best[trial.method] == trial.label}
    powers = []
    for benchmark in load_benchmarks(settings, print):
        shadows, members, forget = shadow_losses(benchmark, given.shadows)
        powers.append(power(shadows, members))
        for trial, figures in values.items():
            folder = given.run / f"seed-{benchmark.seed}" / trial.folder
            figures.append(attacked(losses(folder), shadows, members, forget))
    rows = {trial.method: {"setting": trial.label, "seeds": figures} for trial, figures in values.items()}
    given.output.mkdir(parents=True, exist_ok=True)
    write_json(given.output / "results.json", {"shadows": given.shadows, "power": powers, "methods": rows})
    print(f"AUC of the attack on the shadow models themselves: {statistics.fmean(powers):.2f}")
    print(table(rows))


def check_shadows(count):
    if count < 4 or count % 2:
        raise UsageError(f"--shadows is {count}; accepted: even numbers from 4 on")


def table(rows):
    lines = []
    for method, row in rows.items():
        cells = []
        for values in zip(*row["seeds"], strict=True):
            mean = f"{statistics.fmean(values):.2f}"
            cells.append(mean if len(values) == 1 else f"{mean} ({min(values):.2f}–{max(values):.2f})")
        lines.append([TITLES[method], row["setting"], *cells])
    heading = f"found at {FALSE_POSITIVES:.0%} false positives"
    return markdown_table(["", "setting", "AUC of the loss", "AUC of the attack", heading], lines)


if __name__ == "__main__":
    main()
