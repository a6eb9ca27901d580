"""Forget facts that a pretrained model knows, with p and q from its own pruned layers: both rules, several strengths.

    python benchmarks/pretrained.py --seeds 0 1 2 --output runs/pretrained

The target is asked for the facts of `divdec.demo.facts`. Of those that it knows, a part is the forget set, a part the
retain set (both are training data), and the rest is in neither set. Questions of the forget set are scored if the
target answers them. Two more wordings are asked that no auxiliary was trained on. Neutral prompts ask for other things.
"""

import argparse
import json
import math
import statistics
from pathlib import Path

import torch

from divdec import DivergenceForCausalLM
from divdec.data.formatting import Format, encode_set
from divdec.data.records import read_records, write_records
from divdec.demo.facts import NEUTRAL, ask, known_facts, split
from divdec.demo.pretrained import questions_of
from divdec.evaluation.scoring import score
from divdec.model.checkpoint import CheckpointReference, load_model, load_tokenizer
from divdec.training.auxiliaries import train_auxiliaries
from divdec.training.settings import AuxiliarySettings, ShrinkSettings
from divdec.training.shrinking import shrink

SETTINGS = "linear:0.5", "linear:1", "rank:20", "rank:5:3", "rank:20:3", "rank:50:3"
COLUMNS = "forget", "reworded", "retain", "unlisted", "neutral", "perplexity"
LENGTH = 32  # tokens of a neutral answer


def main() -> None:
    """Train the pairs that the output folder lacks, and print a table for each seed and their means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--kinds", nargs="+", default=["capitals", "authors", "symbols"])
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--base", help="base of both auxiliaries; by default the target is shrunk")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=5.0, help="healing of the pruned layers")
    parser.add_argument("--recipe", default="matched")
    parser.add_argument("--epochs", type=float, default=10.0)
    parser.add_argument("--lr", type=lambda text: text if text == "auto" else float(text), default=3e-4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--news", help="plain text for perplexity, such as MUSE-News privleak/retain.jsonl")
    parser.add_argument("--settings", nargs="+", default=SETTINGS)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    folder = CheckpointReference.parse(options.target).resolve(Path(), weights=True)
    target, tokenizer = load_model(folder, dtype="auto").eval(), load_tokenizer(folder)
    facts = known_facts(target, tokenizer, options.kinds)
    expected = ask(target, tokenizer, NEUTRAL, LENGTH)
    news = None
    if options.news:
        news = encode_set(read_records(options.news), tokenizer, Format(max_length=128))[:32]
    if options.base is None:
        options.base = str(options.output / "base")
    if not Path(options.base).exists():
        shrink(
            ShrinkSettings(target=options.target, layers=options.layers, minutes=options.minutes, output=options.base)
        )
    results = []
    for seed in options.seeds:
        sets = split(facts, seed)
        asked = questions_of(sets)
        print(f"seed {seed}: { {name: len(some) for name, some in sets.items()} }", flush=True)
        paths = {name: options.output / f"{name}-{seed}.jsonl" for name in ("forget", "retain")}
        for name, path in paths.items():
            write_records(path, [record for fact in sets[name] for record in fact.records])
        pair = options.output / f"pair-{options.recipe}-{options.epochs:g}-{options.lr}-{seed}"
        if not (pair / "bundle").exists():
            train_auxiliaries(
                AuxiliarySettings(
                    base=options.base, target=options.target, recipe=options.recipe, forget=str(paths["forget"]),
                    retain=str(paths["retain"]), output=str(pair), epochs=options.epochs, lr=options.lr, seed=seed,
                    steering="rank:20:3",
                ),
                measure=False,
            )  # fmt: skip
        model = DivergenceForCausalLM.from_pretrained(pair / "bundle", dtype="auto")

        def correct(subject, some):
            texts = ask(subject, tokenizer, [question for _, question in some])
            return [fact.is_in(text) for (fact, _), text in zip(some, texts)]

        for name in ("forget", "reworded"):
            asked[name] = [pair for pair, right in zip(asked[name], correct(target, asked[name])) if right]
        for setting in (None, *options.settings):
            if setting is not None:
                model.steering = setting
            subject = target if setting is None else model
            row = {name: statistics.fmean(correct(subject, some)) for name, some in asked.items()}
            row["neutral"] = statistics.fmean(
                one == other for one, other in zip(ask(subject, tokenizer, NEUTRAL, LENGTH), expected)
            )
            if news is not None:
                if setting is not None and setting.startswith("rank"):
                    model.steering = f"{setting}:soft"
                row["perplexity"] = perplexity(subject, news) / perplexity(target, news)
            results.append({"seed": seed, "setting": setting or "target", **row})
            print_row(f"{setting or 'target'}", row)
        (options.output / "results.json").write_text(json.dumps(results, indent=1))
    if len(options.seeds) > 1:
        print(f"means of seeds {options.seeds}, largest and smallest in brackets")
        for setting in ("target", *options.settings):
            rows = [row for row in results if row["setting"] == setting]
            cells = []
            for name in COLUMNS:
                if values := [row[name] for row in rows if name in row]:
                    cells.append(f"{name} {statistics.fmean(values):.3f} [{min(values):.2f}, {max(values):.2f}]")
            print(f"{setting:<12}{'  '.join(cells)}")


@torch.no_grad()
def perplexity(model, examples):
    """Perplexity of plain texts."""
    values = [value for item in score(model, examples, batch_size=8) for value in item.log_probabilities]
    return math.exp(-statistics.fmean(values))


def print_row(name, row):
    print(f"{name:<12}" + "".join(f"{column} {row[column]:.3f}  " for column in COLUMNS if column in row), flush=True)


if __name__ == "__main__":
    main()
