"""Fréchet distances against scipy's own computation, and what small sets say."""

import warnings

import numpy as np
import pytest
import scipy.linalg
import torch
from sklearn.datasets import load_digits
from torch import nn

from divdec.errors import UsageError
from divdec_research.images.evaluation import frechet_distance, frechet_distances
from divdec_research.images.features import compute_features
from divdec_research.images.judges import Classifier


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


def test_more_features_than_images():
    """Distances do not depend on the coordinates: 8 features, and the same ones turned in a space of 500."""
    real, generated = correlated(60, 8, 0).double(), correlated(40, 8, 1, 0.7).double()
    turned = torch.linalg.qr(torch.randn(500, 8, generator=torch.Generator().manual_seed(2)).double()).Q.T
    expected = frechet_distance(real, generated)
    assert frechet_distance(real @ turned, generated @ turned) == pytest.approx(expected, rel=1e-9)


def test_three_frechet_distances(digits):
    images, labels = digits
    judge = Classifier.fit(images, labels.tolist(), [str(digit) for digit in range(10)], steps=60)
    forget = labels < 5
    real = {True: images[forget], False: images[~forget]}
    half = {which: len(real[which]) // 2 for which in real}
    pixels = (real[False][: half[False]], real[True][: half[True]])
    rest = (real[False][half[False] :], real[True][half[True] :])
    features = [judge.features(images) for images in (*pixels, *rest)]
    remaining = frechet_distances(*features)
    # Forget classes that are answered with retain images: near the retain set, far from the forget set.
    steered = frechet_distances(*features[:3], features[2])
    assert remaining.retain == steered.retain
    assert remaining.forget < 0.2 * steered.forget
    assert steered.forget_to_retain == steered.retain < 0.2 * remaining.forget_to_retain
    assert remaining.retain == pytest.approx(by_scipy(features[0], features[2]), rel=1e-4)
    assert remaining.warnings == ()


def test_small_image_sets_give_warnings(digits):
    pixels = digits[0].flatten(1)
    result = frechet_distances(pixels[:100], pixels[:4], pixels[:9], pixels[4:104])
    assert [warning.split(":")[0] for warning in result.warnings] == [
        "B_F has 4 images for 64 features",
        "G_R has 9 images for 64 features",
    ]
    assert result.forget == pytest.approx(by_scipy(pixels[:4], pixels[4:104]), rel=1e-3)
    with pytest.raises(UsageError, match="G_F has 1 image"):
        compute_features(digits[0][:1], nn.Flatten(), name="G_F")
