"""The demo on images: handwritten digits, a model that draws them, and half of the digits forgotten."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table as Printed

from divdec.demo.models import Shape
from divdec.demo.run import console_for, reporter
from divdec.imaging.evaluation import named
from divdec.imaging.patches import PatchCodec
from divdec.imaging.settings import SamplingSettings
from divdec.imaging.tables import Mean, Setting, cell_text
from divdec.imaging.training import PAPER_SHARE
from divdec.model.bundle import is_bundle
from divdec.research.image_settings import NETWORK, Found, as_json, measure, write_found
from divdec.research.image_stages import (
    ImageMaterial,
    ImageModels,
    ImageRecipe,
    candidates_of,
    exam_of,
    train_images,
    write_image_bundle,
)
from divdec.runs import RECORD, cache_folder, output_folder, record, write_json
from divdec.steering import Steering
from divdec.training.settings import TrainingSettings

CODES, SIDE = 64, 2
COUNT = 40  # images of each digit and setting
_RATE = 3e-3
RECIPE = ImageRecipe(
    target=Shape(128, 4, 4, 512),
    auxiliary=Shape(64, 2, 4, 256),
    target_training=TrainingSettings(epochs=30.0, learning_rate=2e-3, batch_size=32, warmup=0.05, weight_decay=0.05),
    retain_training=TrainingSettings(epochs=30.0, learning_rate=_RATE, batch_size=32, warmup=0.05, weight_decay=0.05),
    # As in the paper: a tenth of the base's rate, ten passes.
    forget_training=TrainingSettings(epochs=10.0, learning_rate=PAPER_SHARE * _RATE, batch_size=32, warmup=0.05),
)
RULES = tuple(
    [Steering(alpha=alpha) for alpha in (0.5, 1.0, 1.5, 2.0, 5.0)]
    + [Steering("rank", k=k) for k in (8, 16, 24, 32, 48)]
)
FORGET_AIM, RETAIN_AIM = 0.15, 0.95
"""Accuracy on classes to forget at most; on those to keep at least so much of the target's."""


def digits(seed: int) -> ImageMaterial:
    """Scikit-learn's 1,797 digits of 8×8 pixels; the seed draws five to forget."""
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    images = torch.from_numpy(found.images / 16).float()[:, None]
    codec = PatchCodec.fit(images, SIDE, CODES)
    return ImageMaterial.of(images, found.target.tolist(), [str(digit) for digit in range(10)], codec, seed)


def run_image_demo(seed: int = 0, output: Path | None = None, quiet: bool = False) -> dict[str, Any]:
    """Train what the cache lacks, draw, measure, print, and write report, grids and bundle.

    Args:
        seed: of the digits to forget, the initial weights, the order of training, and chance.
        output: folder for the results; one in the user's cache by default.
        quiet: print to standard error.

    Returns:
        The content of `run.json`.

    Raises:
        Interrupted: Ctrl-C; the same call goes on where it stopped.
    """
    started = time.perf_counter()
    console = console_for(quiet)
    material = digits(seed)
    console.print(
        f"{len(material.images)} handwritten digits of 8×8 pixels as {material.layout.length} codes each; a model that "
        f"draws them\nis steered away from {material.forgotten}.",
        highlight=False,
    )
    cache = cache_folder() / "image-demo"
    models = train_images(material, RECIPE, seed, cache / "models", reporter(console))
    output = output or cache / f"seed-{seed}"
    with output_folder(output, overwrite=True, ours=is_demo) as folder:
        content = _measured(material, models, seed, folder, console)
        content |= {"seconds": round(time.perf_counter() - started, 1)}
        write_json(folder / RECORD, content)
        write_image_bundle(material, models, folder / "bundle", Steering.parse(str(content["recommended"])))
    console.print(
        f"{content['seconds']:.0f} s. Look at {output / 'report.html'}\n"
        f"Draw more: divdec image sample {output / 'bundle'} --output digits",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    return content


def is_demo(folder: Path) -> bool:
    """Whether a folder holds an earlier result of the demo."""
    return is_bundle(folder / "bundle") and (folder / "report.html").is_file()


def recommended(settings: Sequence[Setting]) -> Setting | None:
    """The mildest setting that reaches both aims, linear before rank; None where none does."""
    baseline = next(setting for setting in settings if setting.method == "Baseline")
    for setting in settings:
        if setting.method in ("Linear", "Rank") and reaches(setting, baseline):
            return setting
    return None


def reaches(setting: Setting, baseline: Setting) -> bool:
    """Whether a setting forgets what it should, and keeps the rest."""
    forget, retain, before = accuracy(setting, "forget"), accuracy(setting, "retain"), accuracy(baseline, "retain")
    return forget <= FORGET_AIM and retain >= RETAIN_AIM * before


def accuracy(setting: Setting, name: str) -> float:
    """Share of a set's images that show what was asked for."""
    found = Mean.of((setting.accuracy or {})[name])
    assert found is not None
    return found.value


def _measured(
    material: ImageMaterial, models: ImageModels, seed: int, folder: Path, console: Console
) -> dict[str, Any]:
    exam = exam_of(material, COUNT, SamplingSettings(batch_size=COUNT * 10, seed=seed))
    candidates = candidates_of(models, material.layout, RULES)
    settings = measure(exam, candidates, folder, lambda line: None)
    held_out = exam.classifier.held_out
    found = write_found(
        exam, candidates, settings, folder,
        title=f"divdec image demo, seed {seed}",
        lead=f"A model that draws handwritten digits is steered away from {material.forgotten}. "
        f"A classifier judges what is drawn; it is right on {held_out.accuracy:.1%} of "
        f"{held_out.images} real digits that it has not seen.",
        notes=[NETWORK],
    )  # fmt: skip
    print_tables(found, console)
    best = recommended(settings)
    console.print(_told(best, settings), highlight=False)
    rules = {named(rule): rule for rule in RULES}
    return record(
        "image demo", {"seed": seed},
        forget=list(material.forget), held_out=dataclasses.asdict(held_out), results=as_json(settings),
        recommended=str(Steering() if best is None else rules[best.method, best.config]), reached=best is not None,
        training_seconds=models.seconds,
    )  # fmt: skip


def print_tables(found: Found, console: Console) -> None:
    """Print what was found."""
    for caption, table in found.tables.items():
        printed = Printed(title=caption, box=box.SIMPLE_HEAD, title_justify="left", title_style="none")
        for head in ("", "", *(column.head for column in table.columns)):
            printed.add_column(head, justify="right" if head else "left")
        for setting, cells in table.rows:
            printed.add_row(setting.method, setting.config, *map(cell_text, cells))
        console.print(printed)


def _told(best: Setting | None, settings: Sequence[Setting]) -> str:
    if best is None:
        return f"No setting reaches forget accuracy ≤ {FORGET_AIM} with retain accuracy ≥ {RETAIN_AIM} × the target's."
    return (
        f"{best.name}: {accuracy(best, 'forget'):.2f} of the images asked for as a digit to forget show it, "
        f"{accuracy(best, 'retain'):.2f} as a digit to keep (the target: {accuracy(settings[0], 'forget'):.2f}, "
        f"{accuracy(settings[0], 'retain'):.2f})."
    )
