"""The demo on images: handwritten digits, a model that draws them, and half of the digits forgotten."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table as Printed

from divdec.data.formatting import Example, encode_set
from divdec.experiments.comparison import console_for, teller
from divdec.experiments.image_settings import Candidate, Found, as_json, measure, write_found
from divdec.experiments.small_models import Shape
from divdec.experiments.stages import Stages
from divdec.imaging.codec import Images
from divdec.imaging.evaluation import Exam, named, train_classifier
from divdec.imaging.layout import ImageLayout
from divdec.imaging.models import new_image_model
from divdec.imaging.opened import for_codes, write_image_files
from divdec.imaging.patches import PatchCodec
from divdec.imaging.settings import SamplingSettings
from divdec.imaging.tables import Mean, Setting, cell_text
from divdec.imaging.training import PAPER_SHARE, encode, learned
from divdec.model.bundle import is_bundle, write_bundle
from divdec.runs import RECORD, cache_folder, output_folder, record, write_json
from divdec.steering import Steering
from divdec.training.settings import TrainingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CODES, SIDE = 64, 2
COUNT = 40  # images of each digit and setting
TARGET, AUXILIARY = Shape(128, 4, 4, 512), Shape(64, 2, 4, 256)
TARGET_TRAINING = TrainingSettings(epochs=30.0, learning_rate=2e-3, batch_size=32, warmup=0.05, weight_decay=0.05)
AUXILIARY_TRAINING = TrainingSettings(epochs=30.0, learning_rate=3e-3, batch_size=32, warmup=0.05, weight_decay=0.05)
# As in the paper: a tenth of the base's rate, ten passes. p goes on from q: two small models trained apart differ by
# more than what they have seen.
FORGET_TRAINING = TrainingSettings(
    epochs=10.0, learning_rate=PAPER_SHARE * AUXILIARY_TRAINING.learning_rate, batch_size=32, warmup=0.05
)
RULES = tuple(
    [Steering(alpha=alpha) for alpha in (0.5, 1.0, 2.0, 5.0)] + [Steering("rank", k=k) for k in (8, 16, 24, 32, 48)]
)
FORGET_AIM, RETAIN_AIM = 0.15, 0.95
"""Accuracy on digits to forget at most; on those to keep at least so much of the target's."""


@dataclasses.dataclass(frozen=True)
class Digits:
    """The images, their codes, and which are forgotten."""

    images: Images
    labels: list[int]
    codec: PatchCodec
    layout: ImageLayout
    forget: tuple[int, ...]
    retain: tuple[int, ...]

    @classmethod
    def load(cls, seed: int) -> Digits:
        """Scikit-learn's 1,797 digits of 8×8 pixels; the seed draws five digits to forget."""
        from sklearn.datasets import load_digits

        found: Any = load_digits()
        images = torch.from_numpy(found.images / 16).float()[:, None]
        forget = tuple(sorted(random.Random(seed).sample(range(10), 5)))
        codec = PatchCodec.fit(images, SIDE, CODES)
        layout = ImageLayout.new(CODES, *codec.grid, [str(digit) for digit in range(10)])
        retain = tuple(digit for digit in range(10) if digit not in forget)
        return cls(images, found.target.tolist(), codec, layout, forget, retain)

    def examples(self, digits: Sequence[int], seed: int) -> list[Example]:
        """The images of some digits, as models learn them."""
        rows = [row for row, label in enumerate(self.labels) if label in digits]
        codes = encode(self.images[rows], self.codec, title=None)
        records = learned(self.layout, "digits", codes, [self.labels[row] for row in rows], seed)
        return encode_set(records, self.layout.tokenizer())


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
    digits = Digits.load(seed)
    console.print(
        f"{len(digits.images)} handwritten digits of 8×8 pixels as {digits.layout.length} codes each; a model that "
        f"draws them\nis steered so that it behaves as if it had never seen {_listed(digits.forget)}.",
        highlight=False,
    )
    cache = cache_folder() / "image-demo"
    models = train(digits, seed, cache / "models", teller(console))
    output = output or cache / f"seed-{seed}"
    with output_folder(output, overwrite=True, ours=is_demo) as folder:
        content = _measured(digits, models, seed, folder, console)
        content |= {"seconds": round(time.perf_counter() - started, 1)}
        write_json(folder / RECORD, content)
        _bundle(digits, models, folder / "bundle", str(content["recommended"]))
    console.print(
        f"{content['seconds']:.0f} s. Look at {output / 'report.html'}\n"
        f"Draw more: divdec image sample {output / 'bundle'} --output digits",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    return content


def train(digits: Digits, seed: int, cache: Path, report: Any) -> dict[str, Path]:
    """Target, retrained reference, q and p, where the cache does not hold them.

    Args:
        digits: what they learn.
        seed: of initial weights and order.
        cache: folder of finished stages.
        report: told a line a stage.
    """
    layout = digits.layout

    def new(shape: Shape, tokenizer: Any, seed: int) -> PreTrainedModel:
        return new_image_model(layout, shape.width, shape.layers, shape.heads, seed)

    cache.mkdir(parents=True, exist_ok=True)
    stages = Stages(cache, layout.tokenizer(), seed, report, new=new)
    forget, retain = digits.examples(digits.forget, seed), digits.examples(digits.retain, seed)
    target = stages.run("target", TARGET, forget + retain, TARGET_TRAINING)
    retrain = stages.run("retrain reference", TARGET, retain, TARGET_TRAINING)
    q = stages.run("retain auxiliary", AUXILIARY, retain, AUXILIARY_TRAINING)
    p = stages.run("forget auxiliary", q, forget, FORGET_TRAINING)
    return {"target": target, "retrain": retrain, "retain_auxiliary": q, "forget_auxiliary": p}


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


def _measured(digits: Digits, models: dict[str, Path], seed: int, folder: Path, console: Console) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    from divdec.model.modeling import DivergenceForCausalLM

    target, retrain, q, p = (
        AutoModelForCausalLM.from_pretrained(models[name], local_files_only=True).eval()
        for name in ("target", "retrain", "retain_auxiliary", "forget_auxiliary")
    )
    model = DivergenceForCausalLM.from_parts(target, q, p).eval()

    def steered(rule: Steering) -> PreTrainedModel:
        model.steering = for_codes(rule, digits.layout)
        return model

    order = (*digits.retain, *digits.forget)
    classifier = train_classifier(digits.layout, digits.images, digits.labels, order)
    exam = Exam(
        digits.layout, digits.codec, digits.retain, digits.forget, COUNT,
        SamplingSettings(batch_size=COUNT * 10, seed=seed), digits.images, digits.labels, classifier,
    )  # fmt: skip
    candidates = [Candidate("Baseline", "", lambda: target), Candidate("Retrain", "", lambda: retrain)]
    candidates += [Candidate(*named(rule), model=lambda rule=rule: steered(rule)) for rule in RULES]
    settings = measure(exam, candidates, folder, lambda line: None)
    found = write_found(
        exam, candidates, settings, folder,
        title=f"divdec image demo, seed {seed}",
        lead=f"A model that draws handwritten digits is steered so that it behaves as if it had never seen "
        f"{_listed(digits.forget)}. A classifier judges what is drawn; it is right on "
        f"{classifier.held_out.accuracy:.1%} of {classifier.held_out.images} real digits that it has not seen.",
    )  # fmt: skip
    _print(found, console)
    best = recommended(settings)
    console.print(_told(best, settings), highlight=False)
    rules = {named(rule): rule for rule in RULES}
    return record(
        "image demo", {"seed": seed},
        forget=list(digits.forget), held_out=dataclasses.asdict(classifier.held_out), results=as_json(settings),
        recommended=str(Steering() if best is None else rules[best.method, best.config]), reached=best is not None,
    )  # fmt: skip


def _told(best: Setting | None, settings: Sequence[Setting]) -> str:
    if best is None:
        return f"No setting reaches forget accuracy ≤ {FORGET_AIM} with retain accuracy ≥ {RETAIN_AIM} × the target's."
    return (
        f"{best.name}: {accuracy(best, 'forget'):.2f} of the images asked for as a digit to forget show it, "
        f"{accuracy(best, 'retain'):.2f} as a digit to keep (the target: {accuracy(settings[0], 'forget'):.2f}, "
        f"{accuracy(settings[0], 'retain'):.2f})."
    )


def _bundle(digits: Digits, models: dict[str, Path], folder: Path, steering: str) -> None:
    write_bundle(
        folder,
        target=str(models["target"]),
        retain_auxiliary=str(models["retain_auxiliary"]),
        forget_auxiliary=str(models["forget_auxiliary"]),
        steering=for_codes(Steering.parse(steering), digits.layout),
        forget_set=f"digits {_listed(digits.forget)}",
    )
    write_image_files(folder, digits.layout, digits.codec)


def _print(found: Found, console: Console) -> None:
    for caption, table in found.tables.items():
        printed = Printed(title=caption, box=box.SIMPLE_HEAD, title_justify="left", title_style="none")
        for head in ("", "", *(column.head for column in table.columns)):
            printed.add_column(head, justify="right" if head else "left")
        for setting, cells in table.rows:
            printed.add_row(setting.method, setting.config, *map(cell_text, cells))
        console.print(printed)


def _listed(digits: Sequence[int]) -> str:
    return f"{', '.join(map(str, digits[:-1]))} and {digits[-1]}"
