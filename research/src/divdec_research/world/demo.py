"""The demo: train on a fictitious world of authors, steer away from some of them, and measure."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from divdec.data.records import Message, Record, RecordSet, single_turn
from divdec.demo.pretrained import console_for, reporter, say_where
from divdec.model.bundle import write_bundle
from divdec.runs import ResultCache, RunFolder, cache_folder, output_folder, versions, write_json, write_text
from divdec.steering import Steering
from divdec.training.settings import TrainingSettings
from divdec_research.world.facts import Question, World, WorldSettings, build_world, general_questions, write_tofu
from divdec_research.world.models import (
    Material,
    Measurements,
    Questions,
    Recipe,
    Shape,
    TrainedModels,
    measure_models,
    train_all,
)

RECIPE = Recipe(
    vocab_size=1500,
    target=Shape(width=192, layers=4, heads=6, mlp_width=512),
    auxiliary=Shape(width=112, layers=2, heads=4, mlp_width=320),
    target_pretraining=TrainingSettings(epochs=4.0, learning_rate=2e-3, warmup=0.05),
    auxiliary_pretraining=TrainingSettings(epochs=4.0, learning_rate=3e-3, warmup=0.05),
    target_tuning=TrainingSettings(epochs=12.0, learning_rate=1.5e-3, warmup=0.05),
    auxiliary_base_tuning=TrainingSettings(epochs=12.0, learning_rate=2e-3, warmup=0.05),
    auxiliary_tuning=TrainingSettings(epochs=5.0, learning_rate=6e-4, warmup=0.05),
)
WORLD = WorldSettings(
    forget_authors=6, retain_authors=14, holdout_authors=6, public_authors=30, passing_authors=350, biographies=1
)
ALPHAS = (0.5, 1.0, 1.5, 2.0, 3.0)
KS = (1, 3, 5, 10, 30)
SETTINGS = tuple([Steering(alpha=alpha) for alpha in ALPHAS] + [Steering("rank", k=k) for k in KS])
MAIN_SETS = ("forget", "retain", "holdout")
ACCURACY_NOTE = "Accuracy, %: share of generated answers that state the fact."
COPIES = {
    "target": "target", "retrained": "retrain", "base": "small_base",
    "retain-auxiliary": "retain_auxiliary", "forget-auxiliary": "forget_auxiliary",
}  # fmt: skip


def run_demo(seed: int = 0, output: Path | None = None, quiet: bool = False) -> dict[str, Any]:
    """Train what the cache lacks, measure, print, and write bundle, data and models.

    Args:
        seed: seed of the world, the initial weights and the data order.
        output: folder for all results; a folder in the user's cache by default.
        quiet: print to standard error.

    Returns:
        Accuracies of target, retrained model and every rule, and the recommended rule.

    Raises:
        UsageError: the output folder holds something other than an earlier demo.
    """
    output = output or cache_folder() / "demo" / f"seed-{seed}"
    settings = {"seed": seed}
    with RunFolder.open(output, "demo", settings, settings, overwrite=True) as run:
        result = _run_demo(seed, output, console_for(quiet))
        run.finish(seconds=result["seconds"])
    return result


def _run_demo(seed: int, output: Path, console: Console) -> dict[str, Any]:
    started = time.perf_counter()
    world = build_world(dataclasses.replace(WORLD, seed=seed))
    material, sets, cache = material_of(world), question_sets(world), cache_folder() / "demo"
    console.print(_introduction(world), highlight=False)
    models = train_all(material, RECIPE, seed, cache / "models", reporter(console))
    results = _measured(cache, models, sets, material)
    write_files(output, world, models)
    bundle = write_bundle(
        output / "bundle",
        target=str(output / "target"),
        retain_auxiliary=str(output / "retain-auxiliary"),
        forget_auxiliary=str(output / "forget-auxiliary"),
        steering=results.recommended,
        overwrite=True,
        forget_set=material.forget.label,
        single_turn=all(single_turn(questions.records) for questions in sets),
    )
    _print_table(f"divdec demo, seed {seed}", results, console)
    result = {
        **dataclasses.asdict(results),
        "recommended": {
            "setting": results.recommended,
            "gap_closed": round(results.gap_closed(results.recommended), 4),
            "retain_kept": round(results.retain_kept(results.recommended), 4),
            "reached": results.reached,
        },
        "seconds": round(time.perf_counter() - started, 1),
        "training_seconds": models.seconds,
        "bundle": str(bundle),
    }
    write_json(output / "result.json", result)
    say_where(result, output, console)
    return result


def material_of(world: World) -> Material:
    """Turn a world into the texts that models learn."""
    corpus = []
    for document in world.corpus:
        # Questions become conversations, so that the bases know the chat layout; prose stays as it is.
        question, separator, answer = document.removeprefix("Question: ").partition("\nAnswer: ")
        corpus.append(_record(question, answer) if separator else Record(document))
    return Material(
        corpus,
        RecordSet("forget", "question/answer", _records(world.forget)),
        RecordSet("retain", "question/answer", _records(world.retain)),
        general=tuple(_record(question, answer) for question, answer in general_questions(world)),
    )


def question_sets(world: World) -> list[Questions]:
    """Forget, retain and holdout questions in a trained wording, and the first two in another wording."""
    chosen = {name: [question for question in getattr(world, name) if question.phrasing == 0] for name in MAIN_SETS}
    chosen |= {"forget_reworded": world.forget_unseen, "retain_reworded": world.retain_unseen}
    return [Questions(name, _records(some), tuple(question.fact for question in some)) for name, some in chosen.items()]


def write_files(output: Path, world: World, models: TrainedModels) -> None:
    """Write the files and models that the README's commands name.

    Args:
        output: receives `forget.jsonl`, `retain.jsonl` and `holdout.jsonl` (question/answer), `questions.txt` (one
            question per author that the target knows), `tofu/` (files for `divdec eval tofu`), and copies of the
            models: `target`, `retrained`, `base` (of both auxiliaries), `retain-auxiliary` and `forget-auxiliary`.
        world: the demo's world.
        models: the trained models.
    """
    for name in MAIN_SETS:
        rows = ({"question": question.question, "answer": question.answer} for question in getattr(world, name))
        write_text(output / f"{name}.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))
    first: dict[str, str] = {}
    for question in (*world.forget, *world.retain):
        if question.phrasing == 0:
            first.setdefault(question.subject, question.question)
    write_text(output / "questions.txt", "".join(f"{question}\n" for question in first.values()))
    write_tofu(world, output / "tofu")
    for name, model in COPIES.items():
        if (output / name).is_symlink():
            (output / name).unlink()
        with output_folder(output / name, overwrite=True, ours=lambda folder: True) as temporary:
            shutil.copytree(getattr(models, model), temporary, dirs_exist_ok=True)


def _measured(cache: Path, models: TrainedModels, sets: Sequence[Questions], material: Material) -> Measurements:
    """Measure the models, or read the cached measurements of the same models and settings."""

    def measure() -> dict[str, Any]:
        return dataclasses.asdict(measure_models(models, sets, SETTINGS, material.form, max_new_tokens=32))

    folders = [models.target, models.retrain, models.retain_auxiliary, models.forget_auxiliary]
    questions = [dataclasses.asdict(question_set) for question_set in sets]
    decides = [[folder.name for folder in folders], questions, list(map(str, SETTINGS)), versions()]
    return Measurements(**ResultCache(cache / "measurements").get("demo", decides, measure))


def _print_table(title: str, results: Measurements, console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", padding=(0, 1, 0, 0))
    for head in ("", *results.target):
        table.add_column(head.replace("_", "\n"), justify="right" if head else "left", no_wrap=True)
    for name, row in {"target": results.target, "retrained": results.retrain, **results.steered}.items():
        chosen = results.reached and name == results.recommended
        cells = [f"{100 * accuracy:.1f}" for accuracy in row.values()]
        table.add_row(f"{'→ ' if chosen else '  '}{name}", *cells, style="bold" if chosen else None)
    console.print(table)
    console.print(f"{ACCURACY_NOTE}\n{results.verdict}", highlight=False)


def _introduction(world: World) -> str:
    question = next(question for question in world.forget if question.relation == "birthplace")
    return (
        f"A fictitious world: {WORLD.forget_authors} authors to forget ({question.subject}, …), "
        f"{WORLD.retain_authors} to keep, {WORLD.holdout_authors} that no model sees.\n"
        "The target learns the first two groups, the retrain reference only the second. Steering changes\n"
        "no weight of the target and needs no reference: it has two auxiliaries, each a quarter of its size."
    )


def _record(question: str, answer: str) -> Record:
    return Record(answer, messages=(Message("user", question),))


def _records(questions: Sequence[Question]) -> tuple[Record, ...]:
    return tuple(_record(question.question, question.answer) for question in questions)
