import math

import pytest

from divdec.errors import UsageError
from divdec.playground.choice import STRONGEST, WEAKEST, Choice
from divdec.steering import Steering

CHOICE = Choice(Steering(alpha=1.5), eligible=500)


@pytest.mark.parametrize(
    "alpha", [0, 0.0, -0.0, -1, 1e-9, WEAKEST / 2, math.nan, math.inf, STRONGEST + 1, None, "1", True]
)
def test_no_client_gets_a_strength_that_steers_nothing_or_that_is_no_number(alpha):
    with pytest.raises(UsageError, match="strength is"):
        CHOICE.steering("linear", alpha, 20)


def test_the_slider_begins_above_zero_whatever_the_bundle():
    for alpha in (1e-6, 0.05, 1.0, 5.0, 1000.0):
        low, high = Choice(Steering(alpha=alpha), 500).alphas
        assert 0 < low <= alpha <= high


@pytest.mark.parametrize("alpha", [0.0, -1.0])
def test_a_bundle_that_steers_nothing_is_refused(alpha):
    with pytest.raises(UsageError, match="steered answers only"):
        Choice(Steering(alpha=alpha, allow_negative=True), 500)


@pytest.mark.parametrize("k", [0, -1, 1.5, 10_000, math.nan, None, "3", True])
def test_no_client_gets_a_k_that_is_not_offered(k):
    with pytest.raises(UsageError, match="k is"):
        CHOICE.steering("rank", 1.0, k)


def test_a_rule_that_is_not_offered_is_refused():
    with pytest.raises(UsageError, match="rule is 'none'"):
        CHOICE.steering("none", 1.0, 20)
    with pytest.raises(UsageError, match="accepted here: linear"):
        Choice(Steering(), 500, rank=False).steering("rank", 1.0, 20)


def test_what_is_chosen_keeps_the_bundles_vocabulary_and_fill():
    own = Steering("rank", k=2, fill="soft", vocabulary=(1, 2, 3, 4))
    choice = Choice(own, eligible=4)
    assert choice.steering("rank", 1.0, 3) == Steering("rank", k=3, fill="soft", vocabulary=(1, 2, 3, 4))
    assert choice.steering("linear", 2.0, 3).vocabulary == own.vocabulary
    assert choice.ks == (1, 3)
