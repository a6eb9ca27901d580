"""Fréchet distances against scipy's own computation, what small sets say, and models of transformers as features."""

import warnings

import numpy as np
import pytest
import scipy.linalg
import torch
import transformers
from sklearn.datasets import load_digits
from torch import nn

from divdec.errors import UsageError
from divdec.imaging.evaluation import PretrainedFeatures, compute_features, frechet_distance, frechet_distances
from divdec.imaging.judges import Classifier


def by_scipy(real, generated):
    """The formula as Heusel et al. write it."""
    real, generated = real.double().numpy(), generated.double().numpy()
    one, other = np.cov(real, rowvar=False), np.cov(generated, rowvar=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        root = scipy.linalg.sqrtm(one @ other).real
    difference = real.mean(axis=0) - generated.mean(axis=0)
    return difference @ difference + np.trace(one + other - 2 * root)


def correlated(images, features, seed, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(features, features, generator=generator)
    return torch.randn(images, features, generator=generator) @ mix + shift


@pytest.fixture(scope="module")
def digits():
    result = load_digits()
    return torch.from_numpy(result.images / 16).float()[:, None], torch.from_numpy(result.target)


@pytest.mark.parametrize(("images", "features", "shift"), [(500, 8, 0.0), (300, 64, 0.7), (200, 16, 30.0)])
def test_frechet_distance_matches_scipy(images, features, shift):
    real, generated = correlated(images, features, 0), correlated(images + 50, features, 1, shift)
    assert frechet_distance(real, generated) == pytest.approx(by_scipy(real, generated), rel=1e-6)


def test_one_dimensional_frechet_distance_matches_hand_computed_value():
    """(μ − μ')² + (σ − σ')²: means 2 and 7, deviations √2 and √8."""
    assert frechet_distance(torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [9.0]])) == pytest.approx(25 + 2)


def test_distance_of_set_to_itself_is_zero():
    real = correlated(400, 32, 3, shift=5.0)
    assert frechet_distance(real, real.flip(0)) == pytest.approx(0, abs=1e-6)
    assert frechet_distance(real, real.flip(0)) >= 0


def test_three_frechet_distances(digits):
    images, labels = digits
    judge = Classifier.fit(images, labels.tolist(), [str(digit) for digit in range(10)], steps=60)
    forget = labels < 5
    real = {True: images[forget], False: images[~forget]}
    half = {which: len(real[which]) // 2 for which in real}
    pixels = (real[False][: half[False]], real[True][: half[True]])
    rest = (real[False][half[False] :], real[True][half[True] :])
    remaining = frechet_distances(*pixels, *rest, judge.body)
    # Forget classes that are answered with retain images: near the retain set, far from the forget set.
    steered = frechet_distances(*pixels, rest[0], rest[0], judge.body)
    assert remaining.retain == steered.retain
    assert remaining.forget < 0.2 * steered.forget
    assert steered.forget_to_retain == steered.retain < 0.2 * remaining.forget_to_retain
    assert remaining.retain == pytest.approx(by_scipy(judge.features(pixels[0]), judge.features(rest[0])), rel=1e-4)
    assert remaining.warnings == ()


def test_small_image_sets_give_warnings(digits):
    images, _ = digits
    result = frechet_distances(images[:100], images[:4], images[:9], images[4:104], nn.Flatten())
    assert [warning.split(":")[0] for warning in result.warnings] == [
        "B_F has 4 images for 64 features",
        "G_R has 9 images for 64 features",
    ]
    assert result.forget == pytest.approx(by_scipy(images[:4].flatten(1), images[4:104].flatten(1)), rel=1e-3)
    with pytest.raises(UsageError, match="G_F has 1 image"):
        frechet_distances(images[:100], images[:100], images[:100], images[:1], nn.Flatten())


def test_features_of_wrong_shape_are_rejected():
    images = torch.rand(4, 1, 8, 8)
    with pytest.raises(UsageError, match="B_R"):
        frechet_distances(images, images, images, images, nn.Identity())
    with pytest.raises(UsageError, match="not finite"):
        compute_features(images.log().where(images > 2, torch.nan), nn.Flatten())


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
        distances = frechet_distances(images, images, generated, generated, network)
        assert distances.retain == distances.forget > 0
        assert len(distances.warnings) == 4

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
