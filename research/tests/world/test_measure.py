import pytest

from divdec_research.world.models import Figures, Measurement, gap_closed, recommend, retain_kept


def row(forget, retain, setting=None, model="linear", holdout=0.1):
    accuracies = {"forget": forget, "retain": retain, "holdout": holdout}
    figures = {name: Figures(0.0, accuracy, 0.0) for name, accuracy in accuracies.items()}
    return Measurement(model, setting, figures, {})


TARGET, RETRAIN = row(0.9, 0.8, model="target"), row(0.1, 0.8, model="retrain")


def test_gap_closed_and_retention_match_hand_computed_values():
    assert gap_closed(row(0.5, 0.8), TARGET, RETRAIN) == pytest.approx(0.5)
    assert gap_closed(row(0.1, 0.8), TARGET, RETRAIN) == pytest.approx(1.0)
    assert gap_closed(row(0.02, 0.8), TARGET, RETRAIN) == pytest.approx(1.1)
    assert retain_kept(row(0.5, 0.6), TARGET) == pytest.approx(0.75)
    assert gap_closed(row(0.5, 0.8), RETRAIN, TARGET) == 0.0


def test_mildest_setting_at_chance_level_is_recommended():
    rows = [row(0.5, 0.8, "a"), row(0.11, 0.8, "b"), row(0.05, 0.79, "c"), row(0.0, 0.5, "d")]
    assert recommend(rows, TARGET).setting == "b"  # c goes further than guessing, d loses what is to be kept
    target = row(0.9, 0.8, holdout=0.0)
    assert recommend(rows, target).setting == "c"  # none comes so low: of those that keep, the one that forgets most


def test_setting_with_highest_retention_is_fallback_recommendation():
    rows = [row(0.0, 0.2, "a"), row(0.3, 0.5, "b")]
    assert recommend(rows, TARGET).setting == "b"


def test_setting_result_is_flattened_to_dict():
    flat = row(0.5, 0.8, "linear:1").to_dict()
    assert flat["setting"] == "linear:1"
    assert (flat["forget_accuracy"], flat["retain_accuracy"]) == (0.5, 0.8)
