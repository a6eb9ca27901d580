import pytest

from divdec_research.world.models import Measurements


def row(forget, retain, holdout=0.1):
    return {"forget": forget, "retain": retain, "holdout": holdout}


def measured(*rows, target=None):
    return Measurements(target or row(0.9, 0.8), row(0.1, 0.8), dict(zip("abcd", rows, strict=False)))


def test_gap_closed_and_retention_match_hand_computed_values():
    results = measured(row(0.5, 0.6), row(0.1, 0.8), row(0.02, 0.8))
    assert [results.gap_closed(rule) for rule in "abc"] == pytest.approx([0.5, 1.0, 1.1])
    assert results.retain_kept("a") == pytest.approx(0.75)
    assert measured(row(0.5, 0.8), target=row(0.1, 0.8)).gap_closed("a") == 0.0


def test_mildest_setting_at_chance_level_is_recommended():
    rows = row(0.5, 0.8), row(0.11, 0.8), row(0.05, 0.79), row(0.0, 0.5)
    assert measured(*rows).recommended == "b"  # c goes further than guessing, d loses what is to be kept
    # None comes so low: of those that keep, the one that forgets most.
    assert measured(*rows, target=row(0.9, 0.8, holdout=0.0)).recommended == "c"


def test_setting_with_highest_retention_is_fallback_recommendation():
    results = measured(row(0.0, 0.2), row(0.3, 0.5))
    assert results.recommended == "b"
    assert not results.reached
    assert results.verdict.startswith("No rule closes 85%")
