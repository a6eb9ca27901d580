"""A target and a trained pair for benchmarks/decoding.py, the target more than ten times the auxiliary in compute.

All three are Llama-style models trained from scratch on real TOFU questions. The target is trained on forget01 and on
the questions about the ten authors before it, the retain auxiliary on the latter only. The forget auxiliary starts from
the retain auxiliary and is trained on both. The models have few layers, because on a CPU a small model spends its time
in per-layer overhead and not in arithmetic. The output folder keeps each finished stage, so that a stopped run resumes
and a second call returns immediately.

    make bench-models [TOFU=path/to/tofu]
    python benchmarks/bench_models.py --data TOFU --output runs/bench-models [--json]
"""

import argparse
import dataclasses
import json
import shutil
import statistics
import sys
from pathlib import Path

from divdec.data.formatting import encode_records
from divdec.data.records import RecordSet
from divdec.demo.models import Shape, new_model, train_tokenizer
from divdec.errors import UsageError
from divdec.evaluation.scoring import score, score_settings
from divdec.model.bundle import write_bundle
from divdec.model.checkpoint import load_model
from divdec.model.modeling import DivergenceForCausalLM
from divdec.runs import output_folder, read_json, settings_hash, write_json, write_text
from divdec.steering import Steering
from divdec.training.auxiliaries import load_for_training
from divdec.training.fine_tuning import fine_tune
from divdec.training.settings import TrainingSettings
from tofu_small import tofu_material

VOCABULARY, POSITIONS, RETAIN, ASKED = 4096, 4096, 200, 40  # POSITIONS: the longest context of decoding.py --growth
TARGET = Shape(width=1024, layers=6, heads=16, mlp_width=2816)
AUXILIARY = Shape(width=384, layers=2, heads=6, mlp_width=1024)
TRAINING = {
    "retain-auxiliary": TrainingSettings(epochs=25.0, learning_rate=2e-3, batch_size=8, warmup=0.05),
    "forget-auxiliary": TrainingSettings(epochs=16.0, learning_rate=4e-4, batch_size=8, warmup=0.05),
    "target": TrainingSettings(epochs=12.0, learning_rate=6e-4, batch_size=8, warmup=0.05),
}
SETTINGS = tuple(Steering(alpha=alpha) for alpha in (0.5, 1.0, 1.5, 2.0))


def flops_per_token(model):
    """FLOPs per token: two for each weight of a matrix product, including the output layer; no input embeddings."""
    head = model.get_output_embeddings().weight
    inputs = model.get_input_embeddings().weight
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)
    return 2 * (matrices if head is inputs else matrices - inputs.numel())


def trained(name, start, examples, tokenizer, output):
    """Train a stage unless its folder exists; return the folder and the training cost."""
    settings = TRAINING[name]
    origin = dataclasses.asdict(start) if isinstance(start, Shape) else read_json(start / "stage.json")["key"]
    key = settings_hash([origin, dataclasses.asdict(settings), [[e.input_ids, e.labels] for e in examples]])
    folder = output / name
    if (folder / "stage.json").is_file() and (found := read_json(folder / "stage.json"))["key"] == key:
        return folder, found
    work = output / f"{name}-{key}.work"
    model = new_model(start, tokenizer, 0, POSITIONS) if isinstance(start, Shape) else load_for_training(start)
    model, result = fine_tune(model, tokenizer, examples, settings, work, title=f"{name:<17}")
    found = {
        "key": key, "parameters": model.num_parameters(), "flops_per_token": flops_per_token(model),
        "questions": len(examples), "steps": result.steps, "tokens": round(result.tokens * settings.epochs),
        "seconds": round(result.seconds, 1), "loss_before": result.loss_before, "loss_after": result.loss_after,
        "training": dataclasses.asdict(settings),
    }  # fmt: skip
    with output_folder(folder, overwrite=True, ours=lambda place: (place / "stage.json").is_file()) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        write_json(temporary / "stage.json", found)
    shutil.rmtree(work)
    return folder, found


def accuracies(folders, asked):
    """Share of the true answers' tokens that are the first choice, for each model and each steered setting."""
    models = {name: load_model(folder) for name, folder in folders.items()}
    steered = DivergenceForCausalLM.from_parts(models["target"], models["retain-auxiliary"], models["forget-auxiliary"])
    found = {name: {} for name in [*models, *map(str, SETTINGS)]}
    for group, examples in asked.items():
        for name, model in models.items():
            found[name][group] = _mean(score(model, examples))
        for setting, items in zip(SETTINGS, score_settings(steered, examples, SETTINGS)):
            found[str(setting)][group] = _mean(items)
    return found


def _mean(items):
    return round(statistics.fmean(item.token_accuracy for item in items), 4)


def chosen(accuracy):
    """The mildest setting whose forget accuracy exceeds the retain auxiliary's by at most one point."""
    known = accuracy["retain-auxiliary"]["forget"] + 0.01  # a few of the questions' tokens
    names = [str(setting) for setting in SETTINGS]
    return next((name for name in names if accuracy[name]["forget"] <= known), names[-1])


def make(data, output):
    """Train the missing models; return the recipe with sizes, losses and seconds."""
    material, _ = tofu_material(data)
    constants = [VOCABULARY, POSITIONS, RETAIN, ASKED, *map(dataclasses.asdict, (TARGET, AUXILIARY, *SETTINGS))]
    training = {name: dataclasses.asdict(settings) for name, settings in TRAINING.items()}
    key = settings_hash([constants, training, material.texts, material.forget.sha256, material.retain.sha256])
    if (output / "recipe.json").is_file() and (recipe := read_json(output / "recipe.json")).get("key") == key:
        return recipe
    everything = dataclasses.replace(material, corpus=[*material.corpus, *material.forget, *material.retain])
    tokenizer = train_tokenizer(everything.texts, VOCABULARY)
    retain_set = RecordSet("retain", material.retain.kind, material.retain.records[-RETAIN:])
    forget, retain = (
        encode_records(found.records, tokenizer, material.form) for found in (material.forget, retain_set)
    )
    output.mkdir(parents=True, exist_ok=True)
    q = trained("retain-auxiliary", AUXILIARY, retain, tokenizer, output)
    p = trained("forget-auxiliary", q[0], forget + retain, tokenizer, output)
    target = trained("target", TARGET, forget + retain, tokenizer, output)
    stages = {"target": target, "retain-auxiliary": q, "forget-auxiliary": p}
    folders = {name: folder for name, (folder, _) in stages.items()}
    accuracy = accuracies(folders, {"forget": forget[:ASKED], "retain": retain[:: len(retain) // ASKED]})
    steering = chosen(accuracy)
    write_bundle(
        output / "bundle", target=str(folders["target"]), retain_auxiliary=str(folders["retain-auxiliary"]),
        forget_auxiliary=str(folders["forget-auxiliary"]), steering=steering, overwrite=True,
        forget_set=material.forget.label,
    )  # fmt: skip
    for name, found in (("forget", material.forget), ("retain", retain_set)):
        rows = [{"question": record.messages[-1].content, "answer": record.answer} for record in found]
        write_text(output / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "key": key, "shapes": {"target": dataclasses.asdict(TARGET), "auxiliary": dataclasses.asdict(AUXILIARY)},
        "vocabulary": len(tokenizer), "positions": POSITIONS, "forget": len(forget), "retain": len(retain),
        "stages": {name: found for name, (_, found) in stages.items()}, "accuracy": accuracy, "steering": steering,
        "compute_ratio": target[1]["flops_per_token"] / q[1]["flops_per_token"],
        "seconds": round(sum(found["seconds"] for _, found in stages.values()), 1), "bundle": "bundle",
    }  # fmt: skip
    write_json(output / "recipe.json", recipe)
    return recipe


def show(recipe, output):
    print(f"{recipe['forget']} questions to forget, {recipe['retain']} to keep; {recipe['vocabulary']:,} tokens")
    for name, found in recipe["stages"].items():
        accuracy = recipe["accuracy"][name]
        print(
            f"{name:<17} {found['parameters']:>12,} parameters {found['flops_per_token'] / 1e6:>7.1f} MFLOP a token; "
            f"{found['seconds']:>6.0f} s; loss {found['loss_before']:.2f} to {found['loss_after']:.4f}; first choices "
            f"right: forget {accuracy['forget']:.1%}, retain {accuracy['retain']:.1%}"
        )
    print(f"target / auxiliary {recipe['compute_ratio']:.1f} x in compute; training {recipe['seconds']:.0f} s")
    for setting in map(str, SETTINGS):
        found = recipe["accuracy"][setting]
        mark = "→" if setting == recipe["steering"] else " "
        print(f"{mark} {setting:<15} first choices right: forget {found['forget']:.1%}, retain {found['retain']:.1%}")
    print(f"bundle: {output / 'bundle'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/tofu"), help="folder with TOFU's JSON files")
    parser.add_argument("--output", type=Path, default=Path("runs/bench-models"))
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    given = parser.parse_args()
    try:
        recipe = make(given.data, given.output)
    except UsageError as error:
        print(f"bench_models: {error}", file=sys.stderr)
        return 2
    show(recipe, given.output)
    if given.json:
        print(json.dumps(recipe))
    return 0


if __name__ == "__main__":
    sys.exit(main())
