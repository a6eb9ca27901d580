"""Membership by shadow models: did a model read a fact of the forget set, judged by models that did and did not?

    divdec compare --data demo --methods all --search-seeds 1 --output runs/compare-demo      # first: the models
    python benchmarks/shadow_models.py --run runs/compare-demo --output runs/shadow-models

Each seed of the comparison gets --shadows models, trained as its target was, but each on a random half of the facts of
forget and holdout set. A shadow model that was not trained on a fact shows how surprising the fact is to a model that
never read it. The attack subtracts the mean loss of these models from the loss of the attacked one (the reference
attack with several references; LiRA's offline variant with one variance for all, arXiv:2112.03570) and takes the facts
with the lowest difference for members. The attacker thus knows the training data but for the forget set, which is more
than an API shows.

The table has, for each method's best setting in the comparison, the AUC of the loss alone, the AUC of the attack, and
the share of the forget set that is found when at most 5 % of the holdout set is taken for members. Every seed counts
equally. The retrained model's row shows what chance gives.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
from pathlib import Path

import numpy as np

from divdec.data.formatting import encode_records
from divdec.data.records import Message, Record
from divdec.data.world import build_world
from divdec.demo import run as demo
from divdec.demo.models import StageCache, encode_material
from divdec.errors import UsageError
from divdec.evaluation.metrics import holdout_wins
from divdec.evaluation.results import read_results
from divdec.evaluation.scoring import score
from divdec.model.checkpoint import load_tokenizer
from divdec.research.baselines.methods import REFERENCES, TITLES
from divdec.research.charts import markdown_table
from divdec.research.compare.benchmark import load_benchmarks
from divdec.research.compare.settings import CompareSettings, Trial, trials_of
from divdec.runs import cache_folder, read_json, write_json
from divdec.training.auxiliaries import load_for_training

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
    told = [*world.forget, *world.holdout]
    fact_by_question = {one.question: fact_of(one) for one in told}
    asked = [one.record for name in SETS for one in benchmark.suite.data.sets[name]]
    facts = [fact_by_question[record.messages[-1].content] for record in asked]
    examples = benchmark.suite.layout(tokenizer).encode(asked)
    losses, members = [], []
    for number, half in enumerate(halves(sorted(set(facts)), count, benchmark.seed)):
        records = [
            Record(one.answer, messages=(Message("user", one.question),)) for one in told if fact_of(one) in half
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
    parser.add_argument("--run", type=Path, required=True, help="output folder of divdec compare --data demo")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--shadows", type=int, default=8, help="shadow models a seed; an even number from 4 on")
    parser.add_argument("--seeds", type=int, help="of the comparison's seeds the first; by default all")
    given = parser.parse_args()
    try:
        run(given)
    except UsageError as error:
        parser.exit(2, f"shadow_models: {error}\n")


def run(given):
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
        for trial, own in values.items():
            results = read_results(given.run / f"seed-{benchmark.seed}" / trial.folder)
            losses = [value for name in SETS for value in results.scores(f"mia_loss.{name}", "score")]
            own.append(attacked(losses, shadows, members, forget))
    rows = {trial.method: {"setting": trial.label, "seeds": own} for trial, own in values.items()}
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
    found = f"found at {FALSE_POSITIVES:.0%} false positives"
    return markdown_table(["", "setting", "AUC of the loss", "AUC of the attack", found], lines)


if __name__ == "__main__":
    main()
