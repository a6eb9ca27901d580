"""Demo on images: a model learns to draw handwritten digits, and is steered away from half of them."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from divdec.data.formatting import Example, encode_set
from divdec.demo.pretrained import console_for, reporter
from divdec.model.bundle import is_bundle, write_bundle
from divdec.runs import RECORD, cache_folder, output_folder, record, write_json
from divdec.steering import Steering
from divdec.training.settings import TrainingSettings
from divdec_research.images.codecs import Codec, Images, PatchCodec
from divdec_research.images.evaluation import ImageBenchmark, rule_name
from divdec_research.images.features import EFFICIENTNET, load_network
from divdec_research.images.judges import Classifier
from divdec_research.images.models import ImageLayout, new_image_model, restrict_to_codes, write_image_files
from divdec_research.images.report import Candidate, evaluate_candidates, list_candidates, write_results
from divdec_research.images.results import Mean, SettingResult, tabulate
from divdec_research.images.settings import SamplingSettings
from divdec_research.images.training import PAPER_SHARE, encode, training_records
from divdec_research.world.models import Shape, StageCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CODES, SIDE = 64, 2
COUNT = 40  # images of each digit and setting
_RATE = 3e-3
RULES = tuple(
    [Steering(alpha=alpha) for alpha in (0.5, 1.0, 1.5, 2.0, 5.0)]
    + [Steering("rank", k=k) for k in (8, 16, 24, 32, 48)]
)
FORGET_AIM, RETAIN_AIM = 0.15, 0.95
"""Maximum accuracy on forget classes, and minimum accuracy on retain classes relative to the target's."""

TARGET, AUXILIARY = Shape(128, 4, 4, 512), Shape(64, 2, 4, 256)
# Target (all classes) and retrained reference (classes to keep), from random weights.
TARGET_TRAINING = TrainingSettings(epochs=30.0, learning_rate=2e-3, batch_size=32, warmup=0.05, weight_decay=0.05)
# q, on the classes to keep, from random weights.
RETAIN_TRAINING = dataclasses.replace(TARGET_TRAINING, learning_rate=_RATE)
# p, on the classes to forget, from q: small models trained separately differ by more than their data. As in the paper:
# a tenth of the base's rate, ten epochs.
FORGET_TRAINING = TrainingSettings(epochs=10.0, learning_rate=PAPER_SHARE * _RATE, batch_size=32, warmup=0.05)


@dataclasses.dataclass(frozen=True)
class ImageMaterial:
    """Images with their codec and layout, and the classes to forget and to keep."""

    images: Images
    labels: list[int]
    codec: Codec
    layout: ImageLayout
    forget: tuple[int, ...]
    """Indices of classes."""
    retain: tuple[int, ...]

    @property
    def forgotten(self) -> str:
        """Names of the classes to forget."""
        *names, last = (self.layout.classes[index] for index in self.forget)
        return f"{', '.join(names)} and {last}"

    def examples(self, classes: Sequence[int], seed: int) -> list[Example]:
        """The images of some classes as training examples."""
        rows = [row for row, label in enumerate(self.labels) if label in classes]
        codes = encode(self.images[rows], self.codec, title=None)
        records = training_records(self.layout, "images", codes, [self.labels[row] for row in rows], seed)
        return encode_set(records, self.layout.tokenizer())

    def benchmark(
        self, count: int, sampling: SamplingSettings, networks: Mapping[str, nn.Module] | None = None
    ) -> ImageBenchmark:
        """Create a benchmark with `count` images of each class and a classifier of the real images."""
        labels = [*self.retain, *self.forget]
        names = [self.layout.classes[index] for index in labels]
        classifier = Classifier.fit(self.images, [labels.index(label) for label in self.labels], names)
        return ImageBenchmark(
            self.layout, self.codec, self.retain, self.forget, count, sampling, self.images, self.labels, classifier,
            networks or {},
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ImageModels:
    """Folders of an experiment's models."""

    target: Path
    retrain: Path
    retain_auxiliary: Path
    forget_auxiliary: Path
    seconds: dict[str, float]
    """Training time by stage, including cached stages."""

    def candidates(self, layout: ImageLayout, rules: Sequence[Steering]) -> list[Candidate]:
        """Load baseline, retrained reference and every rule as candidates."""
        from transformers import AutoModelForCausalLM

        from divdec.model.modeling import DivergenceForCausalLM

        folders = (self.target, self.retrain, self.retain_auxiliary, self.forget_auxiliary)
        loaded: list[Any] = [AutoModelForCausalLM.from_pretrained(folder, local_files_only=True) for folder in folders]
        target, retrain, q, p = (loaded_model.eval() for loaded_model in loaded)
        model = DivergenceForCausalLM.from_parts(target, q, p).eval()
        return list_candidates(model, rules, layout, lambda: retrain)

    def write_bundle(self, material: ImageMaterial, folder: Path, steering: Steering) -> None:
        """Write a bundle with layout and codec."""
        write_bundle(
            folder, target=str(self.target), retain_auxiliary=str(self.retain_auxiliary),
            forget_auxiliary=str(self.forget_auxiliary), steering=restrict_to_codes(steering, material.layout),
            forget_set=f"classes {material.forgotten}",
        )  # fmt: skip
        write_image_files(folder, material.layout, material.codec)


def train_images(material: ImageMaterial, seed: int, cache: Path, report: Callable[[str], None]) -> ImageModels:
    """Train the models that are not cached.

    Raises:
        Interrupted: Ctrl-C; the same call resumes.
    """

    def new(shape: Shape, tokenizer: Any, seed: int) -> PreTrainedModel:
        return new_image_model(material.layout, shape.width, shape.layers, shape.heads, seed)

    cache.mkdir(parents=True, exist_ok=True)
    stages = StageCache(cache, material.layout.tokenizer(), seed, report, new=new)
    forget, retain = material.examples(material.forget, seed), material.examples(material.retain, seed)
    target = stages.run("target", TARGET, forget + retain, TARGET_TRAINING)
    retrain = stages.run("retrain reference", TARGET, retain, TARGET_TRAINING)
    q = stages.run("retain auxiliary", AUXILIARY, retain, RETAIN_TRAINING)
    p = stages.run("forget auxiliary", q, forget, FORGET_TRAINING)
    return ImageModels(target, retrain, q, p, stages.seconds)


def digits(seed: int) -> ImageMaterial:
    """Scikit-learn's 1,797 digits of 8×8 pixels. The seed selects five digits to forget."""
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    images = torch.from_numpy(data.images / 16).float()[:, None]
    codec = PatchCodec.fit(images, SIDE, CODES)
    layout = ImageLayout.new(codec.codes, *codec.grid, [str(digit) for digit in range(10)])
    forget = tuple(sorted(random.Random(seed).sample(range(10), 5)))
    retain = tuple(digit for digit in range(10) if digit not in forget)
    return ImageMaterial(images, data.target.tolist(), codec, layout, forget, retain)


def run_image_demo(seed: int = 0, output: Path | None = None, quiet: bool = False) -> dict[str, Any]:
    """Train the models, sample and evaluate, print tables, and write them, grids and bundle.

    Args:
        seed: seed of the digits to forget, training and sampling.
        output: folder for the results; one in the user's cache by default.
        quiet: print to standard error.

    Returns:
        The content of `run.json`.

    Raises:
        UsageError: EfficientNet-Lite0 is not installed.
        Interrupted: Ctrl-C; the same call resumes.
    """
    started = time.perf_counter()
    console = console_for(quiet)
    networks = {EFFICIENTNET: load_network(EFFICIENTNET)}
    material = digits(seed)
    console.print(
        f"{len(material.images)} handwritten digits of 8×8 pixels as {material.layout.length} codes each; a model that "
        f"draws them\nis steered away from {material.forgotten}.",
        highlight=False,
    )
    cache = cache_folder() / "image-demo"
    models = train_images(material, seed, cache / "models", reporter(console))
    output = output or cache / f"seed-{seed}"
    with output_folder(output, overwrite=True, ours=is_demo) as folder:
        benchmark = material.benchmark(COUNT, SamplingSettings(batch_size=COUNT * 10, seed=seed), networks)
        candidates = models.candidates(material.layout, RULES)
        results = evaluate_candidates(benchmark, candidates, folder)
        held_out = benchmark.classifier.held_out
        lead = (
            f"A model that draws handwritten digits is steered away from {material.forgotten}. A classifier judges "
            f"what is drawn; it is right on {held_out.accuracy:.1%} of {held_out.images} real digits that it has not "
            "seen."
        )
        text = write_results(benchmark, candidates, results, folder, lead)
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        best = recommend(results)
        console.print(_summary(best, results[0]), highlight=False)
        rules = {rule_name(rule): rule for rule in RULES}
        recommended = Steering() if best is None else rules[best.method, best.config]
        content = record(
            "image demo", {"seed": seed},
            forget=list(material.forget), held_out=dataclasses.asdict(held_out), results=tabulate(results).json(),
            recommended=str(recommended), reached=best is not None, training_seconds=models.seconds,
            seconds=round(time.perf_counter() - started, 1),
        )  # fmt: skip
        write_json(folder / RECORD, content)
        models.write_bundle(material, folder / "bundle", recommended)
    console.print(
        f"{content['seconds']:.0f} s. Look at {output / 'grids'}\n"
        f"Draw more: divdec image sample {output / 'bundle'} --output digits",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    return content


def _summary(best: SettingResult | None, baseline: SettingResult) -> str:
    if best is None:
        return f"No setting reaches forget accuracy ≤ {FORGET_AIM} with retain accuracy ≥ {RETAIN_AIM} × the target's."
    return (
        f"{best.name}: {accuracy(best, 'forget'):.2f} of the images asked for as a digit to forget show it, "
        f"{accuracy(best, 'retain'):.2f} as a digit to keep (the target: {accuracy(baseline, 'forget'):.2f}, "
        f"{accuracy(baseline, 'retain'):.2f})."
    )


def is_demo(folder: Path) -> bool:
    """Whether a folder holds an earlier result of the demo."""
    return is_bundle(folder / "bundle") and (folder / "table.md").is_file()


def recommend(results: Sequence[SettingResult]) -> SettingResult | None:
    """Return the mildest setting that reaches both goals, linear before rank; None if no setting does."""
    baseline = next(result for result in results if result.method == "Baseline")
    steered = (result for result in results if result.method in ("Linear", "Rank"))
    return next((result for result in steered if reaches_aims(result, baseline)), None)


def reaches_aims(result: SettingResult, baseline: SettingResult) -> bool:
    """Whether a setting forgets the classes to forget, and keeps the others."""
    forget, retain, before = accuracy(result, "forget"), accuracy(result, "retain"), accuracy(baseline, "retain")
    return forget <= FORGET_AIM and retain >= RETAIN_AIM * before


def accuracy(result: SettingResult, name: str) -> float:
    """Share of a set's images that show their class."""
    return Mean.of(result.accuracy[name]).value
