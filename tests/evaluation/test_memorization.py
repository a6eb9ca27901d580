"""Metrics on hand-made scores that can be checked by eye, and what holds for every score."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from divdec.evaluation import metrics
from divdec.evaluation.scoring import ItemScore
from divdec_research.suites.metrics import (
    closer_to_1_better,
    exact_memorization,
    extraction_strength,
    normalised_probability,
    prob_mean,
    true_better,
    truth_ratio,
)


def item(hits="", log_probabilities=None, moments=()):
    """Hits as a text such as '01101'; the last token ends the answer and is left out by most metrics."""
    result = tuple(character == "1" for character in hits)
    return ItemScore(tuple(log_probabilities or [-1.0] * len(result)), result, tuple(moments))


@pytest.mark.parametrize(
    ("hits", "strength", "memorised"),
    [
        ("01111", 3 / 4, 3 / 4),
        ("11110", 1.0, 1.0),  # the last token does not count
        ("11101", 1 / 4, 3 / 4),  # nothing at the end is right: OpenUnlearning's loop still gives 1/L
        ("00000", 1 / 4, 0.0),
        ("01011", 1 / 4, 2 / 4),
    ],
)
def test_memorization_metrics_match_hand_computed_values(hits, strength, memorised):
    assert extraction_strength(item(hits)) == strength
    assert exact_memorization(item(hits)) == memorised


def test_answer_with_only_eos_token():
    assert extraction_strength(item("1")) == 0
    assert math.isnan(exact_memorization(item("1")))


@given(st.text("01", min_size=2, max_size=40))
def test_extraction_strength_is_between_1_over_length_and_1(hits):
    length = len(hits) - 1
    assert 1 / length <= extraction_strength(item(hits)) <= 1


def test_membership_attacks_match_hand_computed_values():
    scored = item("00000", [-1.0, -2.0, -3.0, -4.0, -100.0], [(-2.0, 4.0)] * 5)
    assert scored.loss == 22
    # 40 % of four tokens is one.
    assert metrics.min_k(scored) == 4
    assert metrics.min_k(scored, 0.5) == 3.5
    assert metrics.min_k_plus_plus(scored) == pytest.approx(1.0)  # the standardised (-4 - -2) / 2, with its sign turned
    assert metrics.min_k(item("1", [-3.0])) == 0


def test_truth_ratios_match_hand_computed_values():
    ratio = truth_ratio(1.0, [1.0, 3.0])  # the mean of the losses, 2, is taken before the exponential
    assert ratio == pytest.approx(math.exp(-1))
    assert closer_to_1_better(ratio) == pytest.approx(ratio)
    assert closer_to_1_better(1 / ratio) == pytest.approx(ratio)
    assert true_better(ratio) == pytest.approx(1 - ratio)
    assert true_better(2.0) == 0
    assert prob_mean(1.0, [1.0]) == pytest.approx(0.5)
    assert normalised_probability(0.6, [0.1, 0.1]) == pytest.approx(0.75)
