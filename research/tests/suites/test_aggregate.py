"""Mem, Priv, Utility, Agg and MUSE's distances: by hand, on an oracle's results, and on published figures."""

import json
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from divdec.errors import UsageError
from divdec.evaluation.results import Results
from divdec_research.suites.aggregate import (
    ATTACKS,
    FLUENCY,
    PROB_MEAN,
    VARIANTS,
    aggregate,
    harmonic_mean,
    memorization,
    muse_distances,
    needed,
    privacy,
    probability_truth_ratios,
    tofu_figures,
    utility,
)
from divdec_research.suites.results import read_results

share = st.floats(0, 1)
FIGURES = {
    "extraction_strength": 0.5,
    "exact_memorization": 0.75,
    "forget_Q_A_PARA_Prob": 0.0,
    "forget_truth_ratio": 0.2,
    PROB_MEAN: 0.6,
    "mia_loss": 0.6,
    "mia_zlib": 0.5,
    "mia_min_k": 0.4,
    "mia_min_k_plus_plus": 0.5,
    "model_utility": 0.6,
    FLUENCY: 0.3,
}
RETRAIN = {**FIGURES, **dict.fromkeys(ATTACKS, 0.5)}
TARGET = {**FIGURES, "model_utility": 0.8, FLUENCY: 0.8}


@given(st.lists(st.floats(1e-6, 1), min_size=1, max_size=9))
def test_harmonic_mean_matches_standard_library(values):
    assert harmonic_mean(values) == pytest.approx(statistics.harmonic_mean(values))


@given(st.lists(share, min_size=1, max_size=5), st.integers(0, 4))
def test_harmonic_mean_with_zero_is_zero(values, index):
    values.insert(index, 0.0)
    assert harmonic_mean(values) == 0
    assert harmonic_mean([*values, -0.5]) == 0
    assert harmonic_mean([5e-324, 1.0]) == 0


def test_harmonic_mean_of_arrays():
    result = harmonic_mean([np.array([0.5, 0.0, 1.0]), 0.5])
    np.testing.assert_allclose(result, [0.5, 0.0, 2 / 3])


def test_memorization_matches_hand_computed_values():
    assert memorization(FIGURES, "openunlearning") == pytest.approx(4 / (1 / 0.5 + 1 / 0.25 + 1 + 1 / 0.4))
    assert memorization(FIGURES, "relative") == memorization(FIGURES, "openunlearning")
    assert memorization(FIGURES, "dd-paper") == pytest.approx(4 / (1 / 0.5 + 1 / 0.25 + 1 + 1 / 0.8))
    assert memorization({**FIGURES, "exact_memorization": 1}, "openunlearning") == 0


def test_privacy_matches_hand_computed_values():
    assert privacy(FIGURES, RETRAIN, "openunlearning") == pytest.approx(4 / (1 / 0.9 + 1 + 1 / 0.9 + 1))
    assert privacy(FIGURES, RETRAIN, "dd-paper") == privacy(FIGURES, RETRAIN, "openunlearning")
    assert privacy(FIGURES, RETRAIN, "relative") == pytest.approx(4 / (1 / 0.8 + 1 + 1 / 0.8 + 1))
    assert privacy({**FIGURES, "mia_loss": 1.0}, {**RETRAIN, "mia_loss": 0.4}, "relative") == 0
    nothing = dict.fromkeys(ATTACKS, 0.0)
    assert privacy(nothing, nothing, "relative") == 1
    assert privacy(FIGURES, nothing, "relative") == 0


def test_utility_matches_hand_computed_values():
    assert utility(FIGURES, TARGET) == pytest.approx(0.4 / 0.8)
    assert utility(FIGURES, TARGET, fluency=False) == pytest.approx(0.6 / 0.8)
    assert utility(TARGET, TARGET) == 1
    assert utility(FIGURES, {**TARGET, "model_utility": 0}) == 0


def test_agg_matches_hand_computed_values():
    for variant in VARIANTS:
        values = aggregate(FIGURES, TARGET, RETRAIN, variant).values
        parts = [values[name] for name in ("mem", "priv", "utility")]
        assert values["agg"] == pytest.approx(statistics.harmonic_mean(parts))
        assert values["agg_without_privacy"] == pytest.approx(statistics.harmonic_mean(parts[::2]))


@given(st.fixed_dictionaries(dict.fromkeys(FIGURES, share)), st.sampled_from(VARIANTS))
def test_aggregate_accepts_zeros_and_ones(figures, variant):
    for target in (figures, dict.fromkeys(FIGURES, 0), dict.fromkeys(FIGURES, 1)):
        scores = aggregate(figures, target, target, variant)
        assert scores.reasons == {}
        for name in ("mem", "priv"):
            assert 0 <= scores.values[name] <= 1
        assert all(math.isfinite(value) and value >= 0 for value in scores.values.values())


@pytest.mark.parametrize("variant", VARIANTS)
def test_aggregate_of_arrays_matches_scalars(variant):
    columns = {name: np.array([value, 0.1, 1.0]) for name, value in FIGURES.items()}
    scores = aggregate(columns, TARGET, RETRAIN, variant)
    for index in range(3):
        row = {name: float(values[index]) for name, values in columns.items()}
        single = aggregate(row, TARGET, RETRAIN, variant)
        assert {name: values[index] for name, values in scores.values.items()} == pytest.approx(single.values)


class TestMissingData:
    @pytest.mark.parametrize("name", FIGURES)
    @pytest.mark.parametrize("lack", ["absent", None])
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_each_missing_metric(self, name, lack, variant):
        figures = {key: value for key, value in FIGURES.items() if key != name}
        if lack is None:
            figures[name] = None
        scores = aggregate(figures, TARGET, RETRAIN, variant)
        parts = [part for part, names in needed(variant).items() if name in names and name != FLUENCY]
        assert [part for part in ("mem", "priv", "utility") if scores.values[part] is None] == parts
        assert scores.reasons.keys() == {part for part, value in scores.values.items() if value is None}
        assert all(name in scores.reasons[part] for part in parts)
        assert (scores.values["agg"] is None) == bool(parts)
        assert (scores.values["agg_without_privacy"] is None) == bool(set(parts) - {"priv"})

    def test_references(self):
        scores = aggregate(FIGURES, {}, {}, "openunlearning")
        assert "the target's model_utility is missing" in scores.reasons["utility"]
        assert "the retrain model's mia_loss, mia_zlib" in scores.reasons["priv"]
        assert scores.values["mem"] is not None

    @pytest.mark.parametrize("side", ["result", "target"])
    def test_missing_fluency_is_excluded_with_note(self, side):
        without = {name: value for name, value in FIGURES.items() if name != FLUENCY}
        figures, target = (without, TARGET) if side == "result" else (FIGURES, {**without, "model_utility": 0.8})
        scores = aggregate(figures, target, RETRAIN)
        assert scores.values["utility"] == pytest.approx(0.6 / 0.8)
        assert "without fluency" in scores.notes[0]
        assert not aggregate(FIGURES, TARGET, RETRAIN).notes

    @pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -0.5, 2, "0.5", True, np.array([0.5, np.nan])])
    def test_metric_outside_0_to_1(self, wrong):
        scores = aggregate({**FIGURES, "extraction_strength": wrong}, TARGET, RETRAIN)
        assert scores.values["mem"] is scores.values["agg"] is None
        assert "accepted: a number from 0 to 1" in scores.reasons["mem"]

    def test_unknown_aggregate_variant(self):
        with pytest.raises(UsageError, match="openunlearning, dd-paper, relative"):
            aggregate(FIGURES, TARGET, RETRAIN, "mine")


class TestTruthRatioFromItems:
    def test_matches_hand_computed_values(self):
        results = Results(
            "r", "tofu",
            items={
                "forget_Q_A_PARA_Prob": {"0": {"avg_loss": 1.0}, "1": {"avg_loss": 0.0}, "7": {"avg_loss": 0.0}},
                "forget_Q_A_PERT_Prob": {"0": {"avg_loss": [1.0, 3.0]}, "1": {"avg_loss": [0.0]}},
            },
        )  # fmt: skip
        expected = {"0": math.exp(-1) / (math.exp(-1) + math.exp(-2)), "1": 0.5}
        assert probability_truth_ratios(results) == pytest.approx(expected)
        assert tofu_figures(results)[PROB_MEAN] == pytest.approx(sum(expected.values()) / 2)
        results.figures[PROB_MEAN] = 0.25
        assert tofu_figures(results)[PROB_MEAN] == 0.25

    def test_equals_reciprocal_of_one_plus_openunlearning_ratio(self, shared):
        results = read_results(shared / "oracle" / "results" / "full01")
        ratios = results.scores("forget_truth_ratio", "score")
        expected = sum(1 / (1 + ratio) for ratio in ratios) / len(ratios)
        assert tofu_figures(results)[PROB_MEAN] == pytest.approx(expected, abs=1e-6)

    @pytest.mark.parametrize("wrong", [{}, {"avg_loss": None}, {"avg_loss": []}, {"avg_loss": ["x"]}])
    def test_items_without_required_fields(self, wrong):
        items = {"forget_Q_A_PARA_Prob": {"0": {"avg_loss": 1.0}}, "forget_Q_A_PERT_Prob": {"0": wrong}}
        with pytest.raises(UsageError, match="item 0"):
            probability_truth_ratios(Results("r", "tofu", items=items))
        with pytest.raises(UsageError, match="needs items"):
            probability_truth_ratios(Results("r", "tofu"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_aggregate_identities_hold_on_oracle(shared, variant):
    """With P = p and α = 1 the steered model is the retrained one, and so are its aggregates."""
    full, retrained, steered = (
        tofu_figures(read_results(shared / "oracle" / "results" / run)) for run in ("full01", "retain01", "dd1_01")
    )
    assert aggregate(full, full, retrained, variant).values["utility"] == 1
    assert aggregate(retrained, full, retrained, variant).values["priv"] == 1
    ours, theirs = (aggregate(of, full, retrained, variant).values for of in (steered, retrained))
    assert ours == pytest.approx(theirs, abs=1e-6)


def test_memorization_reproduces_published_values(shared):
    """METRICS §3: the paper's tables penalise the truth ratio's rise."""
    expected = {
        "baselines/target": 0.006, "baselines/retrain": 0.535, "dd_linear/1B-alpha-1.5": 0.563,
        "dd_rank/1B-topk-20": 0.799,
    }  # fmt: skip
    for folder, value in expected.items():
        path = shared / "paper" / "results" / "tofu" / folder / "TOFU_SUMMARY.json"
        assert memorization(json.loads(path.read_text()), "dd-paper") == pytest.approx(value, abs=5e-4)


MUSE_RETRAIN = {"forget_verbmem_ROUGE": 0.2, "forget_knowmem_ROUGE": 0.3, "retain_knowmem_ROUGE": 0.5}
MUSE_TARGET = {"forget_verbmem_ROUGE": 0.6, "forget_knowmem_ROUGE": 0.7, "retain_knowmem_ROUGE": 0.5}


class TestMuse:
    def test_matches_hand_computed_values(self):
        own = {"forget_verbmem_ROUGE": 0.5, "forget_knowmem_ROUGE": 0.3, "retain_knowmem_ROUGE": 0.1}
        result = muse_distances(own, MUSE_TARGET, MUSE_RETRAIN).values
        assert result == pytest.approx({"verbmem_distance": 125, "knowmem_distance": 100})
        ends = [muse_distances(of, MUSE_TARGET, MUSE_RETRAIN).values for of in (MUSE_TARGET, MUSE_RETRAIN)]
        assert [list(values.values()) for values in ends] == [pytest.approx([100, 100]), [0, 0]]

    def test_missing_muse_metrics(self):
        scores = muse_distances({**MUSE_TARGET, "forget_knowmem_ROUGE": None}, MUSE_TARGET, MUSE_RETRAIN)
        assert scores.values == {"verbmem_distance": pytest.approx(100), "knowmem_distance": None}
        assert "the result's forget_knowmem_ROUGE is missing" in scores.reasons["knowmem_distance"]

    def test_target_equal_to_retrained_model(self):
        scores = muse_distances(MUSE_TARGET, MUSE_RETRAIN, MUSE_RETRAIN)
        assert set(scores.values.values()) == {None}
        assert "does not differ" in scores.reasons["verbmem_distance"]
