"""The demo: a fictitious world of authors, models trained on it from nothing, and some of the authors forgotten."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from divdec.data.records import Message, Record, RecordSet
from divdec.data.world import Question, World, WorldSettings, build_world, general_questions
from divdec.research.comparison import Presentation, compare, console_for, present, teller
from divdec.research.demo_files import leave_files
from divdec.research.measure import Questions
from divdec.research.small_models import Shape
from divdec.research.stages import Material, Recipe, train_all
from divdec.runs import cache_folder
from divdec.steering import Steering
from divdec.training.settings import TrainingSettings

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


def run_demo(seed: int = 0, output: Path | None = None, quiet: bool = False) -> dict[str, Any]:
    """Train what the cache lacks, measure, print, and write report, bundle and files to try other verbs on.

    Args:
        seed: of the world, the initial weights and the order of training.
        output: folder for all of it; a folder in the user's cache by default.
        quiet: print to standard error.

    Returns:
        Figures of target, retrain, best linear and best rank setting, and the recommended one.
    """
    started = time.perf_counter()
    console = console_for(quiet)
    world = build_world(dataclasses.replace(WORLD, seed=seed))
    material = material_of(world)
    cache = cache_folder() / "demo"
    console.print(_introduction(world), highlight=False)
    trained = train_all(material, RECIPE, seed, cache / "models", teller(console))
    sets = question_sets(world)
    comparison = compare(trained, sets, SETTINGS, form=material.form, max_new_tokens=32)
    presentation = Presentation(
        title=f"divdec demo, seed {seed}",
        lead=(
            f"A small language model has learned about {WORLD.forget_authors + WORLD.retain_authors} fictitious "
            f"authors and is steered away from {WORLD.forget_authors} of them."
        ),
        accuracy_note="Accuracy: share of generated answers that state the fact.",
        examples={"forget": 3, "retain": 2, "holdout": 1},
    )
    output = output or cache / f"seed-{seed}"
    result = present(
        comparison, trained, sets, presentation, output,
        started=started, forget_set=material.forget.label, console=console,
    )  # fmt: skip
    leave_files(output, world, trained)
    console.print(
        f"{result['seconds']:.0f} s. Report: {result['report']}\n"
        f"Data and models for everything else: {output}\n"
        f"Talk to it: {_command()} chat {result['bundle']}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    return result


def material_of(world: World) -> Material:
    """What the models of a world learn."""
    return Material(
        _corpus(world),
        _record_set("forget", world.forget),
        _record_set("retain", world.retain),
        general=tuple(_single(question, answer) for question, answer in general_questions(world)),
    )


def _command() -> str:
    """How to call divdec from here: by its name where that is found, else by its place."""
    place = Path(sys.executable).with_name("divdec")
    return "divdec" if shutil.which("divdec") or not place.is_file() else os.path.relpath(place)


def question_sets(world: World) -> list[Questions]:
    """What the models are asked: forget, retain and holdout in a trained wording, the first two reworded as well."""
    first = {name: [q for q in getattr(world, name) if q.phrasing == 0] for name in ("forget", "retain", "holdout")}
    chosen = first | {"forget_reworded": world.forget_unseen, "retain_reworded": world.retain_unseen}
    return [
        Questions(name, tuple(map(_record, questions)), tuple(question.fact for question in questions))
        for name, questions in chosen.items()
    ]


def _record(question: Question) -> Record:
    return _single(question.question, question.answer)


def _single(question: str, answer: str) -> Record:
    return Record(answer, messages=(Message("user", question),))


def _record_set(name: str, questions: Sequence[Question]) -> RecordSet:
    return RecordSet(name, "question/answer", tuple(map(_record, questions)))


def _corpus(world: World) -> list[Record]:
    """The corpus's questions as conversations, so that the bases know the chat layout; its prose as it is."""
    records = []
    for document in world.corpus:
        question, found, answer = document.removeprefix("Question: ").partition("\nAnswer: ")
        turns = (Message("user", question),) if found else ()
        records.append(Record(answer if found else document, messages=turns))
    return records


def _introduction(world: World) -> str:
    question = next(q for q in world.forget if q.relation == "birthplace")
    return (
        f"A fictitious world: {WORLD.forget_authors} authors to forget ({question.subject}, …), "
        f"{WORLD.retain_authors} to keep, {WORLD.holdout_authors} that no model sees.\n"
        "The target learns the first two groups, the retrain reference only the second. Steering changes\n"
        "no weight of the target and knows no reference: it has two auxiliaries, each a quarter of its size."
    )
