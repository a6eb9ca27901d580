"""The image demo: its parts by hand, the whole cut to a step, and its promises in the slow suite."""

import json
import warnings

import numpy as np
import pytest
import scipy.linalg
from PIL import Image

from divdec.cli import main
from divdec.data.formatting import IGNORED
from divdec.training.settings import TrainingSettings
from divdec_research.images import demo
from divdec_research.images.digits import CODES, LENGTH, Digits, frechet_distance, write_grid
from divdec_research.world.models import Shape


@pytest.fixture(scope="module")
def digits():
    return Digits(0)


def test_codes_are_tokens_of_an_ordinary_text(digits):
    examples = digits.examples(digits.retain)
    assert len(examples) == np.isin(digits.labels, digits.retain).sum()
    for example in examples:
        assert example.input_ids[0] - CODES in digits.retain
        assert example.labels == [IGNORED, *example.input_ids[1:]]
        assert len(example.input_ids) == LENGTH + 1
        assert max(example.input_ids[1:]) < CODES


def test_real_digits_are_recognised_and_near_themselves(digits):
    assert digits.accuracy > 0.95
    rows = [row for digit in (*digits.retain, *digits.forget) for row in (digits.labels == digit).nonzero()[0][:100]]
    measured = digits.measure(digits.images[rows])
    assert min(measured["retain"], measured["forget"]) > 0.97
    assert measured["FID(B_R, G_R)"] < 0.2 * measured["FID(B_R, G_F)"]


def test_frechet_distance_matches_scipy():
    generator = np.random.default_rng(0)
    real, drawn = (generator.normal(size=(300, 8)) @ generator.normal(size=(8, 8)) + shift for shift in (0.0, 0.7))
    covariances = [np.cov(features, rowvar=False) for features in (real, drawn)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        root = scipy.linalg.sqrtm(covariances[0] @ covariances[1]).real
    shift = real.mean(axis=0) - drawn.mean(axis=0)
    assert frechet_distance(real, drawn) == pytest.approx(shift @ shift + np.trace(sum(covariances) - 2 * root))
    assert frechet_distance(real, real) == pytest.approx(0, abs=1e-6)


def test_a_grid_has_a_row_for_each_class(tmp_path):
    write_grid(tmp_path / "grid.png", np.zeros((6, 8, 8)), columns=3)
    with Image.open(tmp_path / "grid.png") as grid:
        assert grid.size == (3 * 9 * 6, 2 * 9 * 6)


def test_mildest_rule_that_reaches_both_aims_is_recommended():
    rows = {"target": {"retain": 0.96, "forget": 0.95}, "linear:1": {"retain": 0.97, "forget": 0.2}}
    assert demo.recommend(rows) is None
    rows |= {"linear:1.5": {"retain": 0.92, "forget": 0.14}, "linear:5": {"retain": 0.5, "forget": 0.0}}
    assert demo.recommend(rows) == "linear:1.5"


def test_a_short_demo_writes_what_it_promises(tmp_path, monkeypatch, capsys):
    brief = TrainingSettings(epochs=0.1, learning_rate=1e-3, batch_size=32)
    for name in ("TARGET_TRAINING", "RETAIN_TRAINING", "FORGET_TRAINING"):
        monkeypatch.setattr(demo, name, brief)
    monkeypatch.setattr(demo, "TARGET", Shape(16, 1, 2, 64))
    monkeypatch.setattr(demo, "AUXILIARY", Shape(16, 1, 2, 64))
    monkeypatch.setattr(demo, "COUNT", 4)
    monkeypatch.setenv("DIVDEC_CACHE", str(tmp_path / "cache"))
    assert main(["image", "demo", "--output", str(tmp_path / "out"), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert list(content["results"])[:3] == ["target", "retrained", "linear:0.5"]
    assert content["recommended"] == demo.recommend(content["results"])
    assert len(list((tmp_path / "out" / "grids").iterdir())) == 3 + len(demo.RULES)
    assert "FID(B_F, G_F)" in (tmp_path / "out" / "table.md").read_text()
    assert main(["image", "demo", "--output", str(tmp_path / "out"), "--json"]) == 0
    assert "target: in the cache" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_image_demo_forgets_half_of_the_digits_only(seed, capsys):
    assert main(["image", "demo", "--seed", str(seed), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reached"]
