"""The offline judge: what it reaches on real digits, that a seed repeats it, and what it refuses."""

import time

import pytest
import torch
from sklearn.datasets import load_digits

from divdec.errors import UsageError
from divdec_research.images.judges import FEATURES, Classifier

NAMES = tuple(str(digit) for digit in range(10))


@pytest.fixture(scope="module")
def digits():
    result = load_digits()
    return torch.from_numpy(result.images / 16).float()[:, None], result.target.tolist()


@pytest.fixture(scope="module")
def trained(digits):
    """A judge, and the processor's seconds that it took."""
    began = time.process_time()
    return Classifier.fit(*digits, NAMES), time.process_time() - began


@pytest.fixture(scope="module")
def judge(trained):
    return trained[0]


def test_digits_are_classified_accurately(trained):
    judge, seconds = trained
    assert seconds < 10 * torch.get_num_threads()
    assert judge.held_out.images == 360
    assert judge.held_out.accuracy >= 0.97


def test_reported_accuracy_is_on_held_out_images(digits):
    """With random labels it cannot be better than chance there, however well it learns the others."""
    images, labels = digits
    generator = torch.Generator().manual_seed(0)
    shuffled = [labels[index] for index in torch.randperm(len(labels), generator=generator).tolist()]
    judge = Classifier.fit(images, shuffled, NAMES, steps=60)
    assert judge.held_out.accuracy < 0.2


def test_probabilities_and_features(digits, judge):
    images, labels = digits
    probabilities = judge.probabilities(images[:300], batch_size=128)
    torch.testing.assert_close(probabilities.sum(dim=-1), torch.ones(300))
    assert (probabilities.argmax(dim=-1) == torch.tensor(labels[:300])).double().mean() > 0.97
    features = judge.features(images[:300], batch_size=7)
    assert features.shape == (300, FEATURES)
    torch.testing.assert_close(judge.head(features).softmax(dim=-1), probabilities)
    assert judge.probabilities(images[:0]).shape == (0, 10)


def test_noise_is_not_classified_as_digit(digits, judge):
    images, labels = digits
    noise = torch.rand(200, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    asked = torch.tensor(labels[:200])
    of_noise = judge.probabilities(noise).gather(1, asked[:, None]).mean()
    assert of_noise < 0.3 < judge.probabilities(images[:200]).gather(1, asked[:, None]).mean()


def test_classifier_fit_is_seeded_and_leaves_global_generator_unchanged(digits):
    images, labels = digits
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, same, other = (Classifier.fit(images, labels, NAMES, seed=seed, steps=3) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(one.probabilities(images), same.probabilities(images))
    assert not torch.equal(one.probabilities(images), other.probabilities(images))


@pytest.mark.parametrize(("channels", "height", "width"), [(3, 8, 8), (1, 9, 13), (3, 40, 12)])
def test_classifier_supports_other_image_sizes(channels, height, width):
    images = torch.rand(20, channels, height, width, generator=torch.Generator().manual_seed(0))
    images[10:] *= 0.2
    judge = Classifier.fit(images, [0] * 10 + [1] * 10, ("bright", "dark"), steps=50)
    assert judge.held_out.accuracy == 1
    assert judge.features(images).shape == (20, FEATURES)


def test_errors(digits):
    images, labels = digits
    for arguments, says in (
        ((images[..., :7], labels, NAMES), "8×8 and more"),
        ((images[:, [0, 0]], labels, NAMES), "1 channel or 3"),
        ((images, labels, (*NAMES, "ten")), "class 'ten' has 0 image"),
        ((images[:2], [0, 0], NAMES[:1]), "at least 2"),
    ):
        with pytest.raises(UsageError, match=says):
            Classifier.fit(*arguments, steps=3)
