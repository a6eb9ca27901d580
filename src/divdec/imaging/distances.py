"""Fréchet distances between sets of images, over the features of any network.

Paper, 'Distributional Properties of Generated Images'; Heusel et al. 2017. What the network is decides what a distance
means: values of two networks cannot be compared. It knows nothing of how images came about.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from divdec.errors import UsageError, first_line
from divdec.extras import require
from divdec.imaging.codec import Images

Features = Float[Tensor, "images features"]


@dataclasses.dataclass(frozen=True)
class Distances:
    """The three distances of a setting; B are real images, G generated ones, R the retain and F the forget classes."""

    retain: float
    """FID(B_R, G_R): lower is better, the retain classes keep their quality."""
    forget: float
    """FID(B_F, G_F): higher is better, what is asked for as a forget class no longer looks like one."""
    forget_to_retain: float
    """FID(B_R, G_F): lower is better, it looks like the retain classes instead."""
    warnings: tuple[str, ...] = ()
    """Which sets are so small that the figures say little."""


def frechet_distances(
    real_retain: Float[Tensor, "real_retain channels _ _"],
    real_forget: Float[Tensor, "real_forget channels _ _"],
    generated_retain: Float[Tensor, "generated_retain channels _ _"],
    generated_forget: Float[Tensor, "generated_forget channels _ _"],
    network: nn.Module,
    batch_size: int = 64,
) -> Distances:
    """The paper's three distances.

    Args:
        real_retain: B_R, images of the retain classes that no model has made.
        real_forget: B_F, of the forget classes.
        generated_retain: G_R, what a model has made when asked for the retain classes.
        generated_forget: G_F, for the forget classes.
        network: from images, pixels from 0 to 1, to [images, features].
        batch_size: images in a pass.

    Raises:
        UsageError: a set has fewer than 2 images, or the network gives no finite features.
    """
    sets = {"B_R": real_retain, "B_F": real_forget, "G_R": generated_retain, "G_F": generated_forget}
    found = {name: features_of(images, network, batch_size, name) for name, images in sets.items()}
    return Distances(
        frechet_distance(found["B_R"], found["G_R"]),
        frechet_distance(found["B_F"], found["G_F"]),
        frechet_distance(found["B_R"], found["G_F"]),
        tuple(
            f"{name} has {features.shape[0]} images for {features.shape[1]} features: its covariance is not "
            "determined, and distances are too high"
            for name, features in found.items()
            if features.shape[0] <= features.shape[1]
        ),
    )


def frechet_distance(real: Float[Tensor, "real features"], generated: Float[Tensor, "generated features"]) -> float:
    """‖μ − μ'‖² + Tr(Σ + Σ' − 2(ΣΣ')^½), by torchmetrics.

    Args:
        real: features of at least 2 images.
        generated: likewise.

    Raises:
        UsageError: torchmetrics is not installed.
    """
    require("image", "the Fréchet distance")
    from torchmetrics.image.fid import FrechetInceptionDistance

    given = nn.Identity()
    given.num_features = real.shape[1]  # pyright: ignore[reportArgumentType]
    metric = FrechetInceptionDistance(given)
    for features, is_real in ((real, True), (generated, False)):
        metric.update(features.double().cpu(), real=is_real)
    return max(float(metric.compute()), 0.0)  # rounding leaves a little less than 0 of equal sets


@torch.no_grad()
def features_of(images: Images, network: nn.Module, batch_size: int = 64, name: str = "a set") -> Features:
    """What a network says of images.

    Args:
        images: at least 2.
        network: as in `frechet_distances`.
        batch_size: images in a pass.
        name: of the set, for errors.

    Raises:
        UsageError: as `frechet_distances`.
    """
    if len(images) < 2:
        raise UsageError(
            f"{name} has {len(images)} image(s); a Fréchet distance needs at least 2, and says little of few"
        )
    network.eval()
    weights = next(network.parameters(), images)
    found = torch.cat([network(batch.to(weights.device)) for batch in images.split(batch_size)])
    if found.ndim != 2 or not found.isfinite().all():
        raise UsageError(
            f"the network gives {tuple(found.shape)} for the {len(images)} images of {name}, or values that are not "
            "finite; a Fréchet distance needs finite features, [images, features]"
        )
    return found


class PretrainedFeatures(nn.Module):
    """An image model of transformers: DINOv2's class token, CLIP's image embedding, or what it pools by itself."""

    def __init__(self, folder: Path) -> None:
        """Load it with the image processor that lies beside it.

        Args:
            folder: a checkpoint with config.json, safetensors and preprocessor_config.json.

        Raises:
            UsageError: one of these is missing, or it is no model of images.
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
        self.model, about = loaded
        if missing := sorted(map(str, about["missing_keys"])):
            # A pooler that is not in the file would be random, and so the distances.
            raise UsageError(
                f"{folder} lacks the weights {', '.join(missing[:3])}; give a checkpoint that has them all"
            )

    def forward(self, images: Images) -> Features:
        """Features of images of any size."""
        coloured = images.expand(-1, 3, -1, -1)
        pixels = list((coloured * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy())
        inputs = self.processor(images=pixels, return_tensors="pt").to(self.model.device)
        if hasattr(self.model, "get_image_features"):
            found = self.model.get_image_features(**inputs)
            return getattr(found, "pooler_output", found)
        found = self.model(**inputs)
        pooled = getattr(found, "pooler_output", None)
        return (found.last_hidden_state[:, 0] if pooled is None else pooled).flatten(1)
