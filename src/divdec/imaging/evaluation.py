"""Evaluation of a setting's images: content, quality, and Fréchet distances to real images.

Every setting samples the same number of images of each class, with the same seed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from divdec.errors import UsageError, first_line
from divdec.extras import require
from divdec.imaging.codecs import Codec, Codes, Images
from divdec.imaging.judges import Classifier, Features, ImageJudge
from divdec.imaging.models import ImageLayout
from divdec.imaging.results import Distances, SettingResult, by_set
from divdec.imaging.sampling import decode, sample
from divdec.imaging.settings import SamplingSettings
from divdec.steering import Steering

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
    network: nn.Module | None = None
    """Network for the features of distances; the classifier's by default."""
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
        sets = [
            some[[row for row, label in enumerate(of) if label in classes]]
            for some, of in ((self.real, self.real_labels), (images, labels))
            for classes in (self.retain, self.forget)
        ]
        return SettingResult(
            method,
            config,
            content=by_set(content, labels, self.forget),
            accuracy=by_set(hits, labels, self.forget),
            quality={name: by_set(values, labels, self.forget) for name, values in quality.items()} or None,
            distances=frechet_distances(*sets, network=self.network or self.classifier.body),
        )


def rule_name(steering: Steering) -> tuple[str, str]:
    """Method and config of a rule in the paper's tables."""
    if steering.rule == "linear":
        return "Linear", f"α={steering.alpha:g}"
    return "Rank", f"k={steering.k}" + ("" if steering.margin is None else f", margin={steering.margin:g}")


def frechet_distances(
    real_retain: Float[Tensor, "real_retain channels _ _"],
    real_forget: Float[Tensor, "real_forget channels _ _"],
    generated_retain: Float[Tensor, "generated_retain channels _ _"],
    generated_forget: Float[Tensor, "generated_forget channels _ _"],
    network: nn.Module,
    batch_size: int = 64,
) -> Distances:
    """Compute the paper's three distances (section 'Distributional Properties of Generated Images').

    Values of different networks cannot be compared.

    Args:
        real_retain: B_R, real images of the retain classes.
        real_forget: B_F, real images of the forget classes.
        generated_retain: G_R, generated images of the retain classes.
        generated_forget: G_F, generated images of the forget classes.
        network: from images, pixels from 0 to 1, to [images, features].
        batch_size: images in a pass.

    Raises:
        UsageError: a set has fewer than 2 images, or the features are not finite.
    """
    sets = {"B_R": real_retain, "B_F": real_forget, "G_R": generated_retain, "G_F": generated_forget}
    features = {name: compute_features(images, network, batch_size, name) for name, images in sets.items()}
    return Distances(
        frechet_distance(features["B_R"], features["G_R"]),
        frechet_distance(features["B_F"], features["G_F"]),
        frechet_distance(features["B_R"], features["G_F"]),
        tuple(
            f"{name} has {some.shape[0]} images for {some.shape[1]} features: its covariance is not "
            "determined, and distances are too high"
            for name, some in features.items()
            if some.shape[0] <= some.shape[1]
        ),
    )


def frechet_distance(real: Float[Tensor, "real features"], generated: Float[Tensor, "generated features"]) -> float:
    """‖μ − μ'‖² + Tr(Σ + Σ' − 2(ΣΣ')^½) of the features of at least 2 images each (Heusel et al. 2017; torchmetrics).

    Raises:
        UsageError: torchmetrics is not installed.
    """
    require("image", "the Fréchet distance")
    from torchmetrics.image.fid import FrechetInceptionDistance

    identity = nn.Identity()
    identity.num_features = real.shape[1]  # pyright: ignore[reportArgumentType]
    metric = FrechetInceptionDistance(identity)
    for features, is_real in ((real, True), (generated, False)):
        metric.update(features.double().cpu(), real=is_real)
    return max(float(metric.compute()), 0.0)  # rounding gives slightly negative values for equal sets


@torch.no_grad()
def compute_features(images: Images, network: nn.Module, batch_size: int = 64, name: str = "a set") -> Features:
    """Compute the features of at least 2 images; `name` is for errors, see `frechet_distances`."""
    if len(images) < 2:
        raise UsageError(
            f"{name} has {len(images)} image(s); a Fréchet distance needs at least 2, and many more to be reliable"
        )
    network.eval()
    weights = next(network.parameters(), images)
    features = torch.cat([network(batch.to(weights.device)) for batch in images.split(batch_size)])
    if features.ndim != 2 or not features.isfinite().all():
        raise UsageError(
            f"the network gives {tuple(features.shape)} for the {len(images)} images of {name}, or values that are not "
            "finite; a Fréchet distance needs finite features, [images, features]"
        )
    return features


class PretrainedFeatures(nn.Module):
    """Features of a transformers image model: DINOv2's class token, CLIP's image embedding, or the pooled output."""

    def __init__(self, folder: Path) -> None:
        """Load a checkpoint with config.json, safetensors and preprocessor_config.json.

        Raises:
            UsageError: a file or weights are missing, or it is no image model.
        """
        from transformers import AutoImageProcessor, AutoModel

        from divdec.model.checkpoint import check_weights

        super().__init__()
        check_weights(folder)
        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        try:
            self.processor = AutoImageProcessor.from_pretrained(folder, **options)
            loaded = AutoModel.from_pretrained(folder, use_safetensors=True, output_loading_info=True, **options)
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            raise UsageError(f"{folder} cannot be loaded as a model of images ({first_line(error)})") from None
        self.model, info = loaded
        if missing := sorted(map(str, info["missing_keys"])):
            # A missing pooler would be initialised at random.
            raise UsageError(
                f"{folder} lacks the weights {', '.join(missing[:3])}; give a checkpoint that has them all"
            )

    def forward(self, images: Images) -> Features:
        """Features of images of any size."""
        coloured = images.expand(-1, 3, -1, -1)
        pixels = list((coloured * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy())
        inputs = self.processor(images=pixels, return_tensors="pt").to(self.model.device)
        if hasattr(self.model, "get_image_features"):
            features = self.model.get_image_features(**inputs)
            return getattr(features, "pooler_output", features)
        output = self.model(**inputs)
        pooled = getattr(output, "pooler_output", None)
        return (output.last_hidden_state[:, 0] if pooled is None else pooled).flatten(1)
