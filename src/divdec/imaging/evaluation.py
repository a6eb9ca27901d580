"""What a setting's images show, how good they look, and how far they are from real ones: the paper's three tables.

Every setting draws the same number of images of each class, with the same seed. It knows nothing of files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor, nn

from divdec.imaging.classifier import Classifier
from divdec.imaging.codec import Codec, Images
from divdec.imaging.distances import frechet_distances
from divdec.imaging.drawing import decode
from divdec.imaging.judges import ImageJudge
from divdec.imaging.layout import Codes, ImageLayout
from divdec.imaging.sampling import sample
from divdec.imaging.settings import SamplingSettings
from divdec.imaging.tables import Setting, asked_probabilities, by_set, hits
from divdec.steering import Steering

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Some = Float[Tensor, "_ channels _ _"]
"""Some of the images."""


@dataclasses.dataclass(frozen=True)
class Exam:
    """What every setting is asked, and who judges it."""

    layout: ImageLayout
    codec: Codec
    retain: tuple[int, ...]
    """Classes to keep, by place."""
    forget: tuple[int, ...]
    """Classes to forget."""
    count: int
    """Images of each class."""
    sampling: SamplingSettings
    real: Images
    """Images that no model has made."""
    real_classes: Sequence[int]
    """Theirs, by place."""
    classifier: Classifier
    """Trained on real images; its classes are `retain + forget` in this order."""
    network: nn.Module | None = None
    """Gives the features of distances; the classifier's by default."""
    content: ImageJudge | None = None
    """Gives VQAScore in place of the classifier's probabilities."""
    quality: Mapping[str, ImageJudge] = dataclasses.field(default_factory=dict)
    """Compare images with the baseline's, by name."""

    @property
    def classes(self) -> tuple[int, ...]:
        """Those to keep, then those to forget."""
        return (*self.retain, *self.forget)

    @property
    def asked(self) -> list[int]:
        """The class of each image that is drawn."""
        return [place for place in self.classes for _ in range(self.count)]

    def draw(self, model: PreTrainedModel, title: str | None = None) -> Codes:
        """The images of a setting, as codes."""
        return sample(model, self.layout, self.asked, self.sampling, title=title)

    def judge(self, method: str, config: str, codes: Codes, baseline: Images | None = None) -> Setting:
        """What is found of the images of a setting.

        Args:
            method: such as 'Linear'.
            config: such as 'α=1'.
            codes: as `draw` gives them.
            baseline: what quality is compared with; None for the baseline itself.

        Raises:
            UsageError: a judge cannot be reached or does not answer as it must, or there are too few images.
        """
        images, asked = decode(codes, self.codec), self.asked
        probabilities = self.classifier.probabilities(images)
        places = [self.classes.index(place) for place in asked]
        if self.content is None:
            content = asked_probabilities(probabilities, places)
        else:
            content = self.content.vqa_scores(images, [self.layout.classes[place] for place in asked])
        quality = (
            {name: judge.preferences(images, baseline) for name, judge in self.quality.items()}
            if baseline is not None
            else {}
        )
        real, drawn = self._parted(self.real, self.real_classes), self._parted(images, asked)
        return Setting(
            method,
            config,
            content=by_set(content, asked, self.forget),
            accuracy=by_set(hits(probabilities, places), asked, self.forget),
            quality={name: by_set(values, asked, self.forget) for name, values in quality.items()} or None,
            distances=frechet_distances(
                real["retain"], real["forget"], drawn["retain"], drawn["forget"], self.network or self.classifier.body
            ),
        )

    def _parted(self, images: Images, classes: Sequence[int]) -> dict[str, Some]:
        parts = {"retain": self.retain, "forget": self.forget}
        return {
            name: images[[row for row, place in enumerate(classes) if place in wanted]]
            for name, wanted in parts.items()
        }


def train_classifier(
    layout: ImageLayout, real: Images, real_classes: Sequence[int], order: Sequence[int]
) -> Classifier:
    """A classifier of real images, whose classes stand in the order that `Exam` wants.

    Args:
        layout: names the classes.
        real: images that no model has made.
        real_classes: theirs, by place.
        order: the classes, those to keep before those to forget.

    Raises:
        UsageError: a class has too few images.
    """
    labels = [order.index(place) for place in real_classes]
    return Classifier.fit(real, labels, [layout.classes[place] for place in order])


def named(steering: Steering) -> tuple[str, str]:
    """A rule's method and config as the paper's tables name them."""
    if steering.rule == "linear":
        return "Linear", f"α={steering.alpha:g}"
    return "Rank", f"k={steering.k}"
