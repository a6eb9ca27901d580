"""From images to the four models of an experiment, and what each rule draws with them.

It knows nothing of what the images show.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divdec.data.formatting import Example, encode_set
from divdec.demo.models import Shape, StageCache
from divdec.imaging.codec import Codec, Images
from divdec.imaging.evaluation import Exam, named, train_classifier
from divdec.imaging.layout import ImageLayout
from divdec.imaging.models import new_image_model
from divdec.imaging.opened import for_codes, write_image_files
from divdec.imaging.settings import SamplingSettings
from divdec.imaging.training import encode, learned
from divdec.model.bundle import write_bundle
from divdec.research.image_settings import Candidate
from divdec.steering import Steering
from divdec.training.settings import TrainingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclasses.dataclass(frozen=True)
class ImageRecipe:
    """Sizes and training of the four models."""

    target: Shape
    auxiliary: Shape
    target_training: TrainingSettings
    """Target (all classes) and retrain reference (those to keep), from nothing."""
    retain_training: TrainingSettings
    """q, on the classes to keep, from nothing."""
    forget_training: TrainingSettings
    """p, on the classes to forget, from q: two small models trained apart differ by more than what they have seen."""


@dataclasses.dataclass(frozen=True)
class ImageMaterial:
    """Images, their codes, and which are forgotten."""

    images: Images
    labels: list[int]
    codec: Codec
    layout: ImageLayout
    forget: tuple[int, ...]
    """Classes, by place."""
    retain: tuple[int, ...]

    @classmethod
    def of(cls, images: Images, labels: list[int], names: Sequence[str], codec: Codec, seed: int) -> ImageMaterial:
        """Images with half of the classes, drawn by seed, to be forgotten.

        Args:
            images: what is learned.
            labels: the class of each, as a place among the names.
            names: of the classes.
            codec: turns them into codes.
            seed: draws the classes.
        """
        forget = tuple(sorted(random.Random(seed).sample(range(len(names)), len(names) // 2)))
        layout = ImageLayout.new(codec.codes, *codec.grid, names)
        return cls(images, labels, codec, layout, forget, tuple(p for p in range(len(names)) if p not in forget))

    @property
    def forgotten(self) -> str:
        """Names of the classes to forget."""
        *names, last = (self.layout.classes[place] for place in self.forget)
        return f"{', '.join(names)} and {last}"

    def examples(self, classes: Sequence[int], seed: int) -> list[Example]:
        """The images of some classes, as models learn them."""
        rows = [row for row, label in enumerate(self.labels) if label in classes]
        codes = encode(self.images[rows], self.codec, title=None)
        records = learned(self.layout, "images", codes, [self.labels[row] for row in rows], seed)
        return encode_set(records, self.layout.tokenizer())


@dataclasses.dataclass(frozen=True)
class ImageModels:
    """Where the models lie, and what they cost."""

    target: Path
    retrain: Path
    retain_auxiliary: Path
    forget_auxiliary: Path
    seconds: dict[str, float]
    """Training time by stage; that of the run that trained it, where it came from the cache."""


def train_images(
    material: ImageMaterial, recipe: ImageRecipe, seed: int, cache: Path, report: Callable[[str], None]
) -> ImageModels:
    """Train whatever the cache does not hold yet.

    Args:
        material: what they learn.
        recipe: sizes and training.
        seed: of initial weights and order.
        cache: folder of finished stages.
        report: told a line a stage.

    Raises:
        Interrupted: Ctrl-C; the same call goes on where it stopped.
    """

    def new(shape: Shape, tokenizer: Any, seed: int) -> PreTrainedModel:
        return new_image_model(material.layout, shape.width, shape.layers, shape.heads, seed)

    cache.mkdir(parents=True, exist_ok=True)
    stages = StageCache(cache, material.layout.tokenizer(), seed, report, new=new)
    forget, retain = material.examples(material.forget, seed), material.examples(material.retain, seed)
    target = stages.run("target", recipe.target, forget + retain, recipe.target_training)
    retrain = stages.run("retrain reference", recipe.target, retain, recipe.target_training)
    q = stages.run("retain auxiliary", recipe.auxiliary, retain, recipe.retain_training)
    p = stages.run("forget auxiliary", q, forget, recipe.forget_training)
    return ImageModels(target, retrain, q, p, stages.seconds)


def candidates_of(
    models: ImageModels, layout: ImageLayout, rules: Sequence[Steering], device: str = "cpu"
) -> list[Candidate]:
    """Baseline, retrained reference and every rule, ready to draw.

    Args:
        models: where they lie.
        layout: what their tokens mean.
        rules: what to steer with.
        device: where the models go.
    """
    from transformers import AutoModelForCausalLM

    from divdec.model.modeling import DivergenceForCausalLM

    places = (models.target, models.retrain, models.retain_auxiliary, models.forget_auxiliary)
    loaded: list[Any] = [AutoModelForCausalLM.from_pretrained(place, local_files_only=True) for place in places]
    target, retrain, q, p = (one.eval().to(device) for one in loaded)
    model = DivergenceForCausalLM.from_parts(target, q, p).eval()

    def steered(rule: Steering) -> PreTrainedModel:
        model.steering = for_codes(rule, layout)
        return model

    plain = [Candidate("Baseline", "", lambda: target), Candidate("Retrain", "", lambda: retrain)]
    return plain + [Candidate(*named(rule), model=lambda rule=rule: steered(rule)) for rule in rules]


def exam_of(material: ImageMaterial, count: int, sampling: SamplingSettings) -> Exam:
    """What every candidate is asked: so many images of each class, judged by a classifier of the real ones."""
    order = (*material.retain, *material.forget)
    classifier = train_classifier(material.layout, material.images, material.labels, order)
    return Exam(
        material.layout, material.codec, material.retain, material.forget, count, sampling, material.images,
        material.labels, classifier,
    )  # fmt: skip


def write_image_bundle(material: ImageMaterial, models: ImageModels, folder: Path, steering: Steering) -> None:
    """A bundle of the experiment's models that draws by itself: layout and codec lie in it."""
    write_bundle(
        folder,
        target=str(models.target),
        retain_auxiliary=str(models.retain_auxiliary),
        forget_auxiliary=str(models.forget_auxiliary),
        steering=for_codes(steering, material.layout),
        forget_set=f"classes {material.forgotten}",
    )
    write_image_files(folder, material.layout, material.codec)
