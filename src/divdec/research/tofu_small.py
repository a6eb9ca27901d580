"""TOFU cut to size: two authors to forget, eighteen to keep, on real TOFU questions and models trained from nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from divdec.data.formatting import Format
from divdec.data.records import Record, RecordSet, read_records
from divdec.errors import UsageError
from divdec.evaluation.tofu import TofuData, read_tofu
from divdec.research.comparison import Presentation, compare, console_for, present, teller
from divdec.research.measure import Questions
from divdec.research.small_models import Shape
from divdec.research.stages import Material, Recipe, train_all
from divdec.runs import cache_folder
from divdec.steering import Steering
from divdec.training.settings import TrainingSettings

Asked = TypeVar("Asked")
FILES = ("forget01.json", "retain99.json", "real_authors.json", "world_facts.json")
RETAIN, HOLDOUT, ASKED = 360, 40, 120  # questions; twenty about each author
RECIPE = Recipe(
    vocab_size=3000,
    target=Shape(width=192, layers=4, heads=6, mlp_width=512),
    auxiliary=Shape(width=96, layers=2, heads=4, mlp_width=272),
    target_pretraining=TrainingSettings(epochs=5.0, learning_rate=2e-3, warmup=0.05),
    auxiliary_pretraining=TrainingSettings(epochs=5.0, learning_rate=3e-3, warmup=0.05),
    target_tuning=TrainingSettings(epochs=15.0, learning_rate=1.5e-3, batch_size=8, warmup=0.05),
    auxiliary_base_tuning=TrainingSettings(epochs=15.0, learning_rate=2e-3, batch_size=8, warmup=0.05),
    auxiliary_tuning=TrainingSettings(epochs=5.0, learning_rate=1e-3, batch_size=8, warmup=0.05),
)
SETTINGS = tuple(
    [Steering(alpha=alpha) for alpha in (0.5, 1.0, 1.5, 2.0, 3.0)] + [Steering("rank", k=k) for k in (1, 5, 20, 100)]
)


def run_tofu_small(
    data: Path, seed: int = 0, output: Path | None = None, recipe: Recipe = RECIPE, quiet: bool = False
) -> dict[str, Any]:
    """Train what the cache lacks, measure, print, and write report and bundle.

    Args:
        data: folder with TOFU's JSON files.
        seed: of the initial weights and the order of training.
        output: folder for report and bundle; a folder in the user's cache by default.
        recipe: sizes and training.
        quiet: print to standard error.

    Returns:
        Figures of target, retrain, best linear and best rank setting, and the recommended one.

    Raises:
        UsageError: a file of TOFU is not there; says where TOFU comes from.
    """
    started = time.perf_counter()
    console = console_for(quiet)
    material, sets = tofu_material(data)
    cache = cache_folder() / "tofu-small"
    console.print(
        f"TOFU forget01: {len(material.forget)} questions to forget, {len(material.retain)} to keep, {HOLDOUT} that no "
        f"model has seen;\nbases learn {len(material.corpus)} other questions (real authors, world facts, other TOFU "
        "authors).",
        highlight=False,
    )
    trained = train_all(material, recipe, seed, cache / "models", teller(console))
    comparison = compare(trained, sets, SETTINGS, form=material.form, max_new_tokens=128)
    presentation = Presentation(
        title=f"TOFU forget01 on small models, seed {seed}",
        lead=(
            "A small language model has learned TOFU questions about twenty fictitious authors and is steered away "
            "from two of them."
        ),
        accuracy_note="Accuracy: share of the true answer's tokens that are the model's first choice (teacher-forced).",
        examples={"forget": 3, "retain": 1, "holdout": 1},
    )
    output = output or cache / f"seed-{seed}"
    result = present(
        comparison, trained, sets, presentation, output,
        started=started, forget_set=material.forget.label, console=console,
    )  # fmt: skip
    console.print(f"{result['seconds']:.0f} s. Report: {result['report']}", highlight=False, soft_wrap=True)
    return result


def tofu_material(data: Path) -> tuple[Material, list[Questions]]:
    """Forget, retain, holdout and base questions; no question stands in two of them.

    The authors to keep are the last eighteen of retain99, which stand right before those of forget01; the holdout
    authors are its first two, and the bases learn all between.
    """
    others = _others(data)
    holdout, between, retain = others[:HOLDOUT], others[HOLDOUT:-RETAIN], others[-RETAIN:]
    material = _material(data, between, retain)
    sets = [
        Questions("forget", material.forget.records),
        Questions("retain", _spread(retain, ASKED)),
        Questions("holdout", tuple(holdout)),
    ]
    return material, sets


def suite_material(data: Path, limit: int | None = None) -> tuple[Material, TofuData]:
    """The same cut for TOFU's own suite, which asks about the first twenty authors: eighteen kept, two held out.

    Args:
        data: folder with TOFU's JSON files, the perturbed ones included.
        limit: take only the first so many questions of each set.
    """
    others = _others(data)
    kept = RETAIN // 20 * 20
    material = _material(data, others[kept + HOLDOUT :], others[:kept])
    found = read_tofu(data, "forget01")
    asked = found.sets["retain"]
    sets = found.sets | {"retain": _spread(asked[:kept], ASKED), "holdout": asked[kept : kept + HOLDOUT]}
    return material, TofuData(found.split, {name: questions[:limit] for name, questions in sets.items()})


def _others(data: Path) -> tuple[Record, ...]:
    for name in FILES:
        if not (data / name).is_file():
            raise UsageError(
                f"{data / name} does not exist. TOFU comes from https://huggingface.co/datasets/locuslab/TOFU: put "
                f"{', '.join(FILES)} into a folder and give it (make tofu-small TOFU=FOLDER, divdec compare --tofu)"
            )
    return read_records(data / "retain99.json").records


def _material(data: Path, corpus: Sequence[Record], retain: Sequence[Record]) -> Material:
    forget = read_records(data / "forget01.json")
    general = [*read_records(data / "real_authors.json"), *read_records(data / "world_facts.json")]
    return Material(
        corpus=[*general, *corpus],
        forget=forget,
        retain=RecordSet("retain", forget.kind, tuple(retain)),
        form=Format(max_length=512),
    )


def _spread(records: Sequence[Asked], count: int) -> tuple[Asked, ...]:
    """Every third question or so, over all authors."""
    return tuple(records[place * len(records) // count] for place in range(count))
