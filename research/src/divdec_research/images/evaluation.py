"""Evaluation of a setting's images: content, quality, and Fréchet distances to real images.

Every setting samples the same number of images of each class, with the same seed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from divdec.steering import Steering
from divdec_research.images.codecs import Codec, Codes, Images
from divdec_research.images.features import compute_features
from divdec_research.images.judges import Classifier, ImageJudge
from divdec_research.images.models import ImageLayout
from divdec_research.images.results import Distances, SettingResult, by_set
from divdec_research.images.sampling import decode, sample
from divdec_research.images.settings import SamplingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclasses.dataclass(frozen=True)
class ImageBenchmark:
    """Classes, sampling settings and judges of a comparison."""

    layout: ImageLayout
    codec: Codec
    retain: tuple[int, ...]
    """Indices of the classes to keep."""
    forget: tuple[int, ...]
    """Indices of the classes to forget."""
    count: int
    """Images of each class."""
    sampling: SamplingSettings
    real: Images
    """Real images."""
    real_labels: Sequence[int]
    """Indices of their classes."""
    classifier: Classifier
    """Trained on real images; its classes are `classes`, in this order."""
    networks: Mapping[str, nn.Module] = dataclasses.field(default_factory=dict)
    """Networks for the features of distances, by name, beside the classifier."""
    content: ImageJudge | None = None
    """Judge for VQAScore, which replaces the classifier's probabilities."""
    quality: Mapping[str, ImageJudge] = dataclasses.field(default_factory=dict)
    """Judges that compare images with the baseline's, by name."""

    @property
    def classes(self) -> tuple[int, ...]:
        """The classes to keep, then those to forget."""
        return (*self.retain, *self.forget)

    @property
    def labels(self) -> list[int]:
        """The class of each image of a setting."""
        return [index for index in self.classes for _ in range(self.count)]

    def sample(self, model: PreTrainedModel, title: str | None = None) -> Codes:
        """Sample the images of a setting."""
        return sample(model, self.layout, self.labels, self.sampling, title=title)

    def evaluate(self, method: str, config: str, codes: Codes, baseline: Images | None = None) -> SettingResult:
        """Evaluate the images of a setting, compared with the baseline's if these are given.

        Raises:
            UsageError: a judge cannot be reached or replies in another format, or there are too few images.
        """
        images, labels = decode(codes, self.codec), self.labels
        probabilities = self.classifier.probabilities(images)
        indices = [self.classes.index(label) for label in labels]
        hits = (probabilities.argmax(dim=-1) == torch.tensor(indices)).double().tolist()
        if self.content is None:
            content = probabilities[range(len(indices)), indices].tolist()
        else:
            content = self.content.vqa_scores(images, [self.layout.classes[label] for label in labels])
        judges = self.quality.items()
        quality = {} if baseline is None else {name: judge.preferences(images, baseline) for name, judge in judges}
        return SettingResult(
            method,
            config,
            content=by_set(content, labels, self.forget),
            accuracy=by_set(hits, labels, self.forget),
            quality={name: by_set(values, labels, self.forget) for name, values in quality.items()},
            distances={
                name: frechet_distances(*real, *self._features(network, "G", images, labels))
                for (name, network), real in zip(self._networks.items(), self._real_features, strict=True)
            },
        )

    @property
    def _networks(self) -> dict[str, nn.Module]:
        return {"classifier": self.classifier.body, **self.networks}

    @functools.cached_property
    def _real_features(self) -> list[tuple[Tensor, Tensor]]:
        networks = self._networks.values()
        return [self._features(network, "B", self.real, self.real_labels) for network in networks]

    def _features(self, network: nn.Module, name: str, images: Images, labels: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Features of the images of the classes to keep, and of those to forget."""
        rows = {
            group: [row for row, label in enumerate(labels) if label in classes]
            for group, classes in (("R", self.retain), ("F", self.forget))
        }
        retain, forget = (
            compute_features(images[indices], network, name=f"{name}_{group}") for group, indices in rows.items()
        )
        return retain, forget


def rule_name(steering: Steering) -> tuple[str, str]:
    """Method and config of a rule in the paper's tables."""
    margin = "" if steering.margin is None else f", margin={steering.margin:g}"
    if steering.rule == "linear":
        return "Linear", f"α={steering.alpha:g}{margin}" + (", full" if steering.full else "")
    return "Rank", f"k={steering.k}{margin}"


def frechet_distances(
    real_retain: Float[Tensor, "real_retain features"],
    real_forget: Float[Tensor, "real_forget features"],
    generated_retain: Float[Tensor, "generated_retain features"],
    generated_forget: Float[Tensor, "generated_forget features"],
) -> Distances:
    """Compute the paper's three distances (section 'Distributional Properties of Generated Images').

    Values of different networks cannot be compared.

    Args:
        real_retain: B_R, features of real images of the retain classes.
        real_forget: B_F, features of real images of the forget classes.
        generated_retain: G_R, features of generated images of the retain classes.
        generated_forget: G_F, features of generated images of the forget classes.
    """
    sets = {"B_R": real_retain, "B_F": real_forget, "G_R": generated_retain, "G_F": generated_forget}
    return Distances(
        frechet_distance(real_retain, generated_retain),
        frechet_distance(real_forget, generated_forget),
        frechet_distance(real_retain, generated_forget),
        tuple(
            f"{name} has {some.shape[0]} images for {some.shape[1]} features: its covariance is not "
            "determined, and distances are too high"
            for name, some in sets.items()
            if some.shape[0] <= some.shape[1]
        ),
    )


def frechet_distance(real: Float[Tensor, "real features"], generated: Float[Tensor, "generated features"]) -> float:
    """‖μ − μ'‖² + Tr(Σ + Σ' − 2(ΣΣ')^½) of the features of at least 2 images each (Heusel et al. 2017)."""
    means, roots = [], []
    for features in (real.double().cpu(), generated.double().cpu()):
        mean = features.mean(dim=0)
        means.append(mean)
        # RᵀR is the covariance. The singular values of RR'ᵀ are the square roots of the eigenvalues of ΣΣ', without
        # the rounding of such eigenvalues near 0, of which there are many for fewer images than features.
        roots.append(torch.linalg.qr((features - mean) / (len(features) - 1) ** 0.5, mode="r").R)
    shift, (root, other) = means[0] - means[1], roots
    traces = root.square().sum() + other.square().sum() - 2 * torch.linalg.svdvals(root @ other.T).sum()
    return max(float(shift @ shift + traces), 0.0)  # rounding gives slightly negative values for equal sets
