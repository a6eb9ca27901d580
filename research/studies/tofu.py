"""How well does every method let a pretrained model forget TOFU? The target learns and forgets a part of it.

    make smollm2-tofu                    # SmolLM2, TOFU in ../shared/data/tofu
    make tofu-real                       # Qwen2.5-Coder 1.5B with its 0.5B sibling as auxiliary, all with LoRA
    python -m research.studies.tofu --data TOFU --output runs/forget01 --split forget01 --limit 30 --jobs 2

The target is the pretrained model tuned on forget05 and on the questions of retain_perturbed, the retrained model the
same tuned on the latter alone. `--split forget01` is a fifth of the work: 40 questions to forget, 80 to keep. With
`--forget N` the split's first N questions are forgotten, and twice as many kept. The pair is trained from --base, or
from the target's shrunk sibling. First the right answers are scored under 20 strengths of the linear rule and 8 of the
rank rule, in shared passes. Then `divdec compare` measures every method of the grid; questions of other authors, which
no model was trained on, are the holdout set. At last the methods that change weights are trained on a part of the
forget set, and asked for the rest of it ("relearning").

Every step is resumed by the same command: a model, a pair or a trial is a piece. The tables are in compare/table.md as
soon as a group of methods is done, and in results.json and on standard output at the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import time
from pathlib import Path

import torch

from benchmarks.training.models import check_training
from divdec.checkpoint import CheckpointReference, dtype_for_passes, load_config, load_tokenizer
from divdec.data.formatting import Format, encode_set
from divdec.data.records import RecordSet, read_records
from divdec.errors import Interrupted, UsageError
from divdec.evaluation.generation import answers
from divdec.evaluation.scoring import score, score_settings
from divdec.model.modeling import DivergenceForCausalLM
from divdec.runs import output_folder, read_json, write_json
from divdec.steering import Steering
from divdec.training.auxiliaries import load_for_training, train_auxiliaries
from divdec.training.fine_tuning import fine_tune
from divdec.training.settings import AuxiliarySettings, ShrinkSettings, TrainingSettings
from divdec.training.shrinking import shrink
from divdec_research.baselines.table import REFERENCES, TITLES
from divdec_research.compare.benchmark import spread
from divdec_research.compare.run import compare_methods
from divdec_research.compare.settings import GRIDS, CompareSettings, Grid, Trial, trials_of
from divdec_research.report.tables import markdown_table
from divdec_research.suites import rows as suite_rows
from divdec_research.suites.aggregate import VARIANTS, aggregate, tofu_figures
from divdec_research.suites.metrics import extraction_strength, rouge
from divdec_research.suites.questions import BenchmarkFormat
from divdec_research.suites.results import read_results
from divdec_research.suites.tofu import read_tofu


@dataclasses.dataclass(frozen=True)
class Size:
    """How much of TOFU is learned and forgotten."""

    retain: str
    holdout: str
    kept: int
    """Number of retain questions: the first of the retain set, which are those of retain_perturbed too."""
    tuning: TrainingSettings
    shown: int
    """Relearning: number of forget questions that are shown again."""
    asked: int
    """Relearning: number of other forget questions that are asked."""
    grid: Grid = dataclasses.field(default_factory=dict)
    """Settings that replace those of the grid `pretrained`."""


TUNING = TrainingSettings(epochs=5.0, learning_rate=3e-4, batch_size=8, warmup=0.05)
SIZES = {
    "forget05": Size("retain95", "holdout05", 400, TUNING, shown=20, asked=40),
    # Smaller batches, so that the gradient methods take 30 steps, and distillation 90; with forget05 39 and 114.
    "forget01": Size(
        "retain99", "holdout01", 80, dataclasses.replace(TUNING, batch_size=4), shown=10, asked=30,
        grid={"batch_size": (4,)},
    ),
}  # fmt: skip
LAYERS, HEALING_MINUTES = 8, 5.0
PAIR_EPOCHS, PAIR_RATE = 10.0, 3e-4  # with six, p still misses a fifth of what q does not know
PART_EPOCHS, PART_BATCH = 5.0, 4  # a part of a split, in as many steps as the whole of forget01
# The paper's range for the linear rule, in twenty steps, and its values of k.
SWEEP = (*(f"linear:{n / 5:g}" for n in range(1, 21)), *(f"rank:{k}" for k in (1, 5, 20, 50, 100, 200, 500, 1000)))
# Those at the front take minutes; the table is complete in itself after each group.
GROUPS = (
    ("linear", "rank", "ngram-filter", "guardrail"), ("npo", "grad-diff"), ("simnpo", "rmu", "whp", "distill"),
)  # fmt: skip
LORA_GROUP = "grad-ascent", "undial", "offset", "ucd"  # the grid for all weights does not have them
# Relearning: the methods, and the epochs after which questions are asked.
RELEARNED = "retrain", "distill", "npo", "grad-diff", "simnpo", "rmu"
EPOCHS = (1, 2, 4, 8)
RELEARNING = TrainingSettings(epochs=float(EPOCHS[-1]), learning_rate=5e-5, batch_size=4)
ANSWER = 64  # tokens of an answer after relearning
FORM = Format(
    system_prompt=BenchmarkFormat.system_prompt, date=BenchmarkFormat.date, max_length=BenchmarkFormat.max_length
)
FIGURES = {
    "forget prob": "forget_Q_A_Prob", "forget ROUGE": "forget_Q_A_ROUGE", "extraction": "extraction_strength",
    "retain prob": "retain_Q_A_Prob", "retain ROUGE": "retain_Q_A_ROUGE", "model utility": "model_utility",
}  # fmt: skip
TRAINED = "trained.json"  # options that decide what the models are


def grid_of(lora_rank):
    """Three settings of each method, with all weights or with adapters, whose rates are ten times higher."""
    grid = dict(GRIDS["pretrained"])
    if not lora_rank:
        return grid
    lora = {"lora_rank": (lora_rank,), "epochs": (3.0,), "batch_size": (8,)}
    gradient = {**lora, "gradient_accumulation": (1,), "learning_rate": (5e-5, 1.5e-4, 5e-4)}
    return grid | {
        "linear": {"steering": ("linear:1", "linear:1.5", "linear:1.5:1")},
        "rank": {"steering": ("rank:20", "rank:20:3", "rank:200")},
        "distill": {**lora, "learning_rate": (5e-5, 1.5e-4, 5e-4), "steering": ("linear:1.5",), "rehearse": (200,)},
        **dict.fromkeys(("grad-ascent", "grad-diff", "npo", "undial"), gradient),
        "simnpo": {**gradient, "gamma": (1.0,)},
        "rmu": {**gradient, "alpha": (1.0,), "coefficient": (20.0,), "layer": (14,), "trainable": ("all",)},
        "whp": {**lora, "alpha": (1.0, 2.0, 4.0), "learning_rate": (2e-4,)},
        "offset": {**lora, "learning_rate": (5e-5, 1.5e-4, 5e-4)},
        "ucd": {**lora, "alpha": (0.5, 1.0, 2.0), "learning_rate": (2e-4,), "epochs": (PAIR_EPOCHS,)},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/tofu"), help="folder with TOFU's JSON files")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--target", default="smollm2", help="the pretrained model")
    parser.add_argument("--base", help="base of both auxiliaries; by default the pretrained model is shrunk")
    parser.add_argument("--split", choices=SIZES, default="forget05", help="forget split")
    parser.add_argument("--lora-rank", type=int, default=0, help="train adapters of this rank everywhere; 0 trains all")
    parser.add_argument(
        "--recipe", default="matched", choices=("matched", "full-retain"), help="the pair's; the paper's is full-retain"
    )
    parser.add_argument("--methods", nargs="+", help="measure these methods alone, such as: linear rank")
    parser.add_argument("--forget", type=int, help="forget the split's first N questions, and keep twice as many")
    parser.add_argument("--limit", type=int, default=60, help="questions asked of each set")
    parser.add_argument(
        "--attacks", type=int, default=20, help="prompts a question for Leak@k; 0: no relearning either"
    )
    parser.add_argument("--jobs", type=int, default=1, help="number of trials to run in parallel")
    try:
        run(parser.parse_args())
    except (UsageError, Interrupted) as error:
        parser.exit(2, f"tofu: {error}\n")


def run(options, more_methods=None):
    """Make the models that the output folder lacks, compare the methods, attack the results, and print the tables.

    Args:
        options: of the command line.
        more_methods: settings of methods that this study does not know, or other settings of those that it knows.
    """
    data, output, limit, split = options.data, options.output, options.limit, options.split
    size = size_of(split, options.forget)
    groups = (*GROUPS, LORA_GROUP) if options.lora_rank else GROUPS
    known = [method for group in groups for method in group]
    if added := [method for method in more_methods or () if method not in known]:
        groups, known = (groups[0], added, *groups[1:]), [*known, *added]
    if unknown := [method for method in options.methods or () if method not in known]:
        raise UsageError(f"--methods: {unknown[0]} is not known; accepted: {', '.join(known)}")
    groups = [[name for name in group if name in (options.methods or known)] for group in groups]
    groups = [group for group in groups if group]
    output.mkdir(parents=True, exist_ok=True)
    folder = output / "tofu"
    if not folder.exists():
        with output_folder(folder) as temporary:
            assemble(data, temporary, limit, split, options.forget)
    elif not (folder / f"{split}.json").exists():
        raise UsageError(f"{output} was begun with another --split than {split}; give another --output")
    elif (asked := len(read_rows(folder / "real_authors_perturbed.json"))) != limit:
        raise UsageError(f"{output} was begun with --limit {asked}, not {limit}; give another --output")
    trained = {"lora_rank": options.lora_rank, "recipe": options.recipe}
    begun = {"target": options.target, "base": options.base} | trained
    begun |= {"forget": options.forget} if options.forget else {}
    if (output / TRAINED).exists() and (earlier := read_json(output / TRAINED)) != begun:
        raise UsageError(f"{output} was begun with {earlier}, not {begun}; give another --output")
    write_json(output / TRAINED, begun)
    check_training(options.target, "this study", lora=options.lora_rank > 0)
    original = CheckpointReference.parse(options.target).resolve(Path(), weights=True)
    forget, retain = (read_records(folder / f"{name}.json") for name in (split, size.retain))
    tuning = dataclasses.replace(size.tuning, lora_rank=options.lora_rank)
    tuned = tune(original, [forget, retain], output / "target", tuning)
    retrained = tune(original, [retain], output / "retrain", tuning)
    base = make_base(options.target, output / "base") if options.base is None else options.base
    steps = {"epochs": PART_EPOCHS, "batch_size": PART_BATCH} if options.forget else {"epochs": PAIR_EPOCHS}
    sets = folder / f"{split}.json", folder / f"{size.retain}.json"
    pair = make_pair(tuned, base, *sets, output / "pair", trained, steps)
    print(sweep(folder, split, pair / "bundle", output / "sweep.json"), flush=True)
    adapt_grid(size, options.lora_rank)
    GRIDS["pretrained"].update(more_methods or {})
    methods = []
    for group in groups:
        methods += group
        settings = CompareSettings(
            data=str(folder), split=split, bundle=str(pair / "bundle"), retrain=str(retrained), base=base,
            methods=tuple(methods), grid="pretrained", seeds=1, output=str(output / "compare"),
            attacks=options.attacks if group is groups[-1] else 0, jobs=options.jobs,
        )  # fmt: skip
        compare_methods(settings, report)
        write_json(output / "results.json", collect(output, methods))
        print(tables(read_json(output / "results.json")), flush=True)
    if options.attacks:
        relearned = relearn_all(output, tuned, retrained, methods, forget, size)
        write_json(output / "results.json", collect(output, methods) | {"relearning": relearned})
        print(tables(read_json(output / "results.json")))


def report(line):
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def size_of(split, forget=None):
    """Return how much of a split is learned: all, or its first `forget` questions in as many steps."""
    size = SIZES[split]
    if forget is None:
        return size
    batch = max(1, round(size.tuning.batch_size * 2 * forget / size.kept))
    shown = max(1, forget // 4)
    tuning = dataclasses.replace(size.tuning, batch_size=batch)
    return dataclasses.replace(size, kept=2 * forget, tuning=tuning, shown=shown, asked=forget - shown)


def assemble(data, folder, limit, split, first=None):
    """Write TOFU's files for one target: forget and retain set cut to what is learned, and a holdout set."""
    size = size_of(split, first)
    most = len(read_rows(data / "real_authors_perturbed.json"))
    if not 1 <= limit <= most:
        raise UsageError(f"--limit is {limit}; accepted: 1 to {most}, the questions about real authors")
    retain = read_rows(data / f"{size.retain}.json")
    asked = read_rows(data / "retain_perturbed.json")[: size.kept]
    kept = retain[: size.kept]
    if [row["question"] for row in kept] != [row["question"] for row in asked]:
        raise UsageError(
            f"{data}: retain_perturbed.json does not hold the first {size.kept} questions of {size.retain}.json"
        )
    known = {row["question"] for row in kept}
    files = {
        split: (forget := read_rows(data / f"{split}.json")[:first]),
        size.retain: kept,
        size.holdout: spread([row for row in retain[size.kept :] if row["question"] not in known], limit),
    }
    files["retain_perturbed"] = spread(asked, limit)
    # The perturbed questions are a split's first ones, too, in its order.
    files[f"{split}_perturbed"] = spread(read_rows(data / f"{split}_perturbed.json")[: len(forget)], limit)
    for name in ("real_authors_perturbed", "world_facts_perturbed"):
        files[name] = spread(read_rows(data / f"{name}.json"), limit)
    for name, rows in files.items():
        (folder / f"{name}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_rows(file):
    return [*suite_rows.read_rows(file, "locuslab/TOFU", lambda row, location: row)]


def tune(original, sets, folder, settings):
    """Train all weights on the questions of several sets."""
    if not folder.exists():
        tokenizer = load_tokenizer(original)
        examples = [example for records in sets for example in encode_set(records, tokenizer, FORM)]
        work = folder.with_name(f"{folder.name}.work")
        model, result = fine_tune(
            load_for_training(original), tokenizer, examples, settings, work, title=folder.name,
            on_epoch=lambda _, epoch: report(f"{folder.name}: epoch {epoch}"),
        )  # fmt: skip
        report(
            f"{folder.name}: loss {result.loss_before:.3f} → {result.loss_after:.3f}, {result.seconds:.0f} s, "
            f"{result.precision}"
        )
        with output_folder(folder) as temporary:
            model.to(load_config(original).dtype or torch.float32).save_pretrained(temporary)  # pyright: ignore[reportArgumentType]
            tokenizer.save_pretrained(temporary)
        shutil.rmtree(work)
    return folder


def make_base(target, folder):
    if not folder.exists():
        shrink(ShrinkSettings(target=target, layers=LAYERS, minutes=HEALING_MINUTES, output=str(folder)), report)
    return str(folder)


def make_pair(target, base, forget, retain, folder, trained, steps):
    if not (folder / "run.json").exists() or not (folder / "bundle").exists():
        train_auxiliaries(
            AuxiliarySettings(
                base=base, target=str(target), forget=str(forget), retain=str(retain), output=str(folder),
                learning_rate=PAIR_RATE, system_prompt=FORM.system_prompt, merge=True, **trained, **steps,
            ),
            report,
            measure=trained["recipe"] == "matched",  # the paper's recipes are trained once, on the whole retain set
        )  # fmt: skip
    return folder


def sweep(folder, split, bundle, file):
    """Score the right answers under every strength of both rules, in passes that all share."""
    if not file.exists():
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
        model = DivergenceForCausalLM.from_pretrained(bundle, dtype=dtype_for_passes()).to(device)  # pyright: ignore[reportArgumentType]
        sets = read_tofu(folder, split).sets
        form, rows = BenchmarkFormat(load_tokenizer(bundle)), [{"rule": rule} for rule in SWEEP]
        rules = tuple(map(Steering.parse, SWEEP))
        for name in ("forget", "retain", "holdout"):
            examples = form.encode([question.record for question in sets[name]])
            for row, items in zip(rows, score_settings(model, examples, rules, title=name), strict=True):
                row |= {
                    f"{name}_prob": statistics.fmean(item.probability for item in items),
                    f"{name}_extraction": statistics.fmean(map(extraction_strength, items)),
                }
        write_json(file, rows)
    rows = read_json(file)
    return markdown_table(list(rows[0]), [[row["rule"], *map(number, list(row.values())[1:])] for row in rows])


def adapt_grid(size, lora_rank):
    """Replace settings of the grid."""
    GRIDS["pretrained"] = {
        method: {**grid, **{name: values for name, values in size.grid.items() if name in grid}}
        for method, grid in grid_of(lora_rank).items()
    }


def collect(output, methods):
    """Gather figures, and aggregates in all variants, of every finished trial."""
    compared = read_json(output / "compare" / "comparison.json")
    best = {row["method"]: row["setting"] for row in compared["best"]}
    costs = {(row["method"], row["setting"]): row["seconds"] for row in compared["grid"]}
    trials = [*map(Trial, REFERENCES), *trials_of(methods, "pretrained")]
    figures = {}
    for trial in trials:
        folder = output / "compare" / "seed-0" / trial.folder
        if (folder / "run.json").exists() and not read_json(folder / "run.json")["failed"]:
            figures[trial] = tofu_figures(read_results(folder))
    target, retrain = (figures[Trial(name)] for name in REFERENCES)
    rows = []
    for trial, values in figures.items():
        row = {"method": trial.method, "setting": trial.label, "best": best[trial.method] == trial.label}
        row |= {name: values.get(figure) for name, figure in FIGURES.items()}
        for variant in VARIANTS:
            row[variant] = aggregate(values, target, retrain, variant).values
        row["seconds"] = costs[trial.method, trial.label]
        rows.append(row | {"leak": compared["leaks"].get(trial.method) if row["best"] else None})
    return {"rows": rows}


def split_of(run):
    """Return the forget split of a run, the output folder of this script."""
    split = next((name for name in SIZES if (run / "tofu" / f"{name}.json").exists()), None)
    if split is None:
        raise UsageError(f"{run} has no questions; make them with: python -m research.studies.tofu")
    return split


def tuning_of(run):
    """Return how the target of a run learns."""
    if (run / TRAINED).exists() and "forget" in read_json(run / TRAINED):
        raise UsageError(f"{run} was begun with --forget; this needs a run on a whole split")
    return dataclasses.replace(SIZES[split_of(run)].tuning, lora_rank=lora_rank_of(run))


def lora_rank_of(run):
    """Return the rank of a run's adapters; 0 if all weights are trained."""
    return read_json(run / TRAINED)["lora_rank"] if (run / TRAINED).exists() else 0


def best_trials(run, size):
    """Return each method's best setting in a run's comparison, and the folder of its results."""
    file = run / "compare" / "comparison.json"
    if not file.exists():
        raise UsageError(f"{run} has no comparison; make it with: python -m research.studies.tofu")
    adapt_grid(size, lora_rank_of(run))
    best = {row["method"]: row["setting"] for row in read_json(file)["best"]}
    methods = [name for name in best if name not in REFERENCES]
    trials = (*map(Trial, REFERENCES), *trials_of(methods, "pretrained"))
    return {trial: run / "compare" / "seed-0" / trial.folder for trial in trials if best[trial.method] == trial.label}


def relearn_all(output, target, retrained, methods, forget, size):
    """Attack the best setting of each method that changes weights; keep each result as soon as it is there."""
    file = output / "relearning.json"
    done = read_json(file) if file.exists() else {}
    best = {row["method"]: row["setting"] for row in read_json(output / "compare" / "comparison.json")["best"]}
    folders = {trial.method: output / "compare" / "seed-0" / trial.folder / "model"
               for trial in trials_of(methods, "pretrained") if best[trial.method] == trial.label}  # fmt: skip
    folders |= {"retrain": retrained}
    shown = forget.records[:: len(forget) // size.shown]
    asked = spread([record for record in forget if record not in shown], size.asked)
    if "target" not in done:
        done["target"] = {"curve": [measure(load_for_training(target), load_tokenizer(target), asked, 0)]}
    rank = lora_rank_of(output)
    training = dataclasses.replace(RELEARNING, lora_rank=rank, learning_rate=(4 if rank else 1) * 5e-5)
    for method in RELEARNED:
        if method not in done and method in folders:
            report(f"relearning: {method}")
            curve = relearn(folders[method], shown, asked, training)
            done[method] = {"setting": best[method], "curve": curve}
            write_json(file, done)
    return done


def relearn(folder, shown, asked, training):
    """Train a model on the shown questions, and measure it on the asked ones after some epochs."""
    model, tokenizer = load_for_training(folder), load_tokenizer(folder)
    examples = encode_set(RecordSet("shown", "question/answer", tuple(shown)), tokenizer, FORM)
    curve = [measure(model, tokenizer, asked, 0)]
    steps = -(-len(examples) // RELEARNING.batch_size)
    fine_tune(
        model, tokenizer, examples, training, folder.parent, title="relearning", measure=False, resumable=False,
        on_epoch=lambda trained, epoch: (
            curve.append(measure(trained, tokenizer, asked, epoch * steps)) if epoch in EPOCHS else None
        ),
    )  # fmt: skip
    return curve


def measure(model, tokenizer, asked, step):
    """Mean probability of the true answers, and mean ROUGE-L recall of the model's answers."""
    records = RecordSet("asked", "question/answer", tuple(asked))
    texts = answers(model.eval(), tokenizer, asked, form=FORM, max_new_tokens=ANSWER)
    return {
        "step": step,
        "probability": statistics.fmean(
            item.probability for item in score(model, encode_set(records, tokenizer, FORM))
        ),
        "ROUGE": statistics.fmean(
            rouge(text, record.answer)["rougeL_recall"] for text, record in zip(texts, asked, strict=True)
        ),
    }


def tables(results):
    """Format the best settings, all settings and relearning in Markdown."""
    heads = ["Method", "Setting", *FIGURES, "Mem", "Priv", "Utility", *(f"Agg {name}" for name in VARIANTS)]
    rows = []
    for row in results["rows"]:
        cells = [row[name] for name in FIGURES] + [row["openunlearning"][name] for name in ("mem", "priv", "utility")]
        cells += [row[variant]["agg"] for variant in VARIANTS]
        title = f"**{TITLES[row['method']]}**" if row["best"] else TITLES[row["method"]]
        rows.append([title, row["setting"], *map(number, cells)])
    text = f"{markdown_table(heads, rows)}\n(bold: the best setting by Agg)\n"
    best = [row for row in results["rows"] if row["best"]]
    attacked = [row for row in best if row["leak"]]
    if attacked:
        ks = list(attacked[0]["leak"])
        rows = [[TITLES[row["method"]], row["setting"], "–" if row["seconds"] is None else f"{row['seconds']:.0f} s",
                 *(number(row["leak"][k]) for k in ks)] for row in attacked]  # fmt: skip
        heads = ["Method", "Setting", "Training", *(f"Leak@{k}" for k in ks)]
        text += f"\n{markdown_table(heads, rows)}"
    if "relearning" in results:
        heads = ["Relearning", "Setting", "Probability by step", "ROUGE by step"]
        rows = []
        for method, relearned in results["relearning"].items():
            curves = [", ".join(f"{point['step']}: {point[name]:.2f}" for point in relearned["curve"])
                      for name in ("probability", "ROUGE")]  # fmt: skip
            rows.append([TITLES[method], relearned.get("setting", ""), *curves])
        text += f"\n{markdown_table(heads, rows)}"
    return text


def number(value):
    return "–" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    main()
