"""Membership by shadow models on SmolLM2: did a model read a question of TOFU's forget set?

    python benchmarks/smollm2_tofu.py --data TOFU --output runs/forget01 --split forget01 --limit 30   # the models
    python benchmarks/shadow_models_pretrained.py --run runs/forget01 --output runs/shadows

The attack is that of shadow_models.py. Each shadow model is SmolLM2 tuned as the run's target, on the retain set and on
a random half of the questions that the run asks of forget and holdout set. The attacked models are those of the run's
comparison, each method with its best setting. After a longer comparison the same command adds its rows, and trains no
shadow model again.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np

from divdec.data.formatting import encode_set
from divdec.data.records import RecordSet, read_records
from divdec.errors import UsageError
from divdec.evaluation.results import read_results
from divdec.evaluation.scoring import score
from divdec.model.checkpoint import CheckpointReference, load_tokenizer
from divdec.runs import read_json, write_json
from divdec.training.auxiliaries import load_for_training
from shadow_models import SETS, attacked, check_shadows, halves, power, table
from smollm2_tofu import FORM, SIZES, best_trials, split_of, tune


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="output folder of smollm2_tofu.py")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--target", default="smollm2", help="the pretrained model of the run")
    parser.add_argument("--shadows", type=int, default=8, help="number of shadow models; an even number from 4 on")
    given = parser.parse_args()
    try:
        run(given)
    except UsageError as error:
        parser.exit(2, f"shadow_models_pretrained: {error}\n")


def run(given):
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
    shadows, members = shadow_losses(given.output, original, asked, retain, size.tuning, given.shadows)
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


def shadow_losses(output, original, asked, retain, tuning, count):
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


if __name__ == "__main__":
    main()
