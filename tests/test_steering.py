import importlib.util
import json
import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from divdec import Steering, UsageError, steer_linear, steer_rank
from divdec.errors import FailedClosed
from divdec.steering import FILLS
from support import reference

VOCAB = 7
NUMBERS = st.floats(-20, 20, width=32)
ROW = st.lists(NUMBERS, min_size=VOCAB, max_size=VOCAB).map(torch.tensor)
# Few distinct values, so that ties are common.
TIED_ROW = st.lists(st.integers(-2, 2).map(float), min_size=VOCAB, max_size=VOCAB).map(torch.tensor)


@given(ROW, ROW)
def test_alpha_zero_returns_target_logits(target, divergence):
    assert torch.equal(steer_linear(target, divergence, 0.0), target)


@given(ROW, ROW)
def test_alpha_one_with_target_equal_to_p_gives_q(p, q):
    torch.testing.assert_close(steer_linear(p, q - p, 1.0), q, rtol=1e-5, atol=1e-4)


@given(ROW, ROW, ROW, st.floats(0, 4))
def test_linear_rule_is_product_of_experts(target, q, p, alpha):
    steered = steer_linear(target, q - p, alpha).double().softmax(-1)
    product = target.double().softmax(-1) * (q.double().softmax(-1) / p.double().softmax(-1)) ** alpha
    torch.testing.assert_close(steered, product / product.sum(), rtol=1e-3, atol=1e-6)


@given(ROW, st.one_of(ROW, TIED_ROW), st.floats(0, 4), st.sampled_from([0.0, 0.5, 3.0]))
def test_linear_rule_with_a_margin_lowers_what_p_prefers_clearly(target, divergence, alpha, margin):
    steering = Steering(alpha=alpha, margin=margin)
    steered = steering.apply(target, divergence)
    torch.testing.assert_close(steered, reference.linear(target, divergence, steering))
    acts = divergence <= -margin
    assert torch.equal(steered[~acts], target[~acts])
    assert torch.equal(steered[acts], steer_linear(target, divergence, alpha)[acts])


def test_linear_rule_with_a_margin_keeps_nan_and_exclusions():
    target = torch.tensor([1.0, 2.0, 3.0])
    assert steer_linear(target, torch.tensor([-math.inf, -2.0, 5.0]), 0.5, margin=2.0).tolist() == [-math.inf, 1.0, 3.0]
    with pytest.raises(FailedClosed):
        Steering.parse("linear:1:3").apply(target, torch.tensor([math.nan, 0.0, 0.0]))


@given(ROW, ROW, st.floats(0, 4), st.sampled_from([0.0, 0.5, 3.0]))
def test_full_rule_moves_all_tokens_where_it_lowers_the_first_choice(target, divergence, alpha, margin):
    steered = Steering(alpha=alpha, margin=margin, full=True).apply(target, divergence)
    contested = divergence[target.argmax()] <= -margin
    expected = steer_linear(target, divergence, alpha, margin=None if contested else margin)
    assert torch.equal(steered, expected)


def test_full_rule_decides_for_each_position_alone():
    target = torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]])
    divergence = torch.tensor([[-4.0, 5.0, 1.0], [-4.0, 5.0, 1.0]])
    steered = Steering.parse("linear:1:3:full").apply(target, divergence)
    assert steered.tolist() == [[-1.0, 7.0, 2.0], [-3.0, 2.0, 3.0]]


@pytest.mark.parametrize("place", range(3))
def test_full_rule_keeps_nan(place):
    divergence = torch.zeros(3)
    divergence[place] = math.nan
    with pytest.raises(FailedClosed):
        Steering.parse("linear:1:3:full").apply(torch.tensor([1.0, 2.0, 3.0]), divergence)


@pytest.mark.parametrize("fields", [{"full": True}, {"full": True, "rule": "rank", "margin": 3.0}])
def test_full_belongs_to_a_linear_rule_with_a_margin(fields):
    with pytest.raises(UsageError, match="full is"):
        Steering.from_dict(fields)


@given(ROW, ROW, st.floats(-50, 50), st.floats(-50, 50), st.floats(0, 3))
def test_constant_logit_offset_does_not_change_linear_rule(target, divergence, a, b, alpha):
    plain = steer_linear(target, divergence, alpha).softmax(-1)
    shifted = steer_linear(target + a, divergence + b, alpha).softmax(-1)
    torch.testing.assert_close(plain, shifted, rtol=1e-3, atol=1e-4)


@given(ROW, TIED_ROW, st.integers(1, VOCAB - 1), st.sampled_from([1.0, -3.0, 100.0]))
def test_constant_logit_offset_does_not_change_rank_rule(target, divergence, k, constant):
    plain = steer_rank(target, divergence, k).softmax(-1)
    shifted = steer_rank(target + constant, divergence + constant, k).softmax(-1)
    torch.testing.assert_close(plain, shifted, rtol=1e-3, atol=1e-5)


@given(ROW, TIED_ROW, st.integers(1, VOCAB - 1), st.floats(0.1, 10))
def test_rank_rule_depends_only_on_divergence_order(target, divergence, k, scale):
    other = (divergence * scale).exp()  # any increasing function
    assert torch.equal(steer_rank(target, divergence, k), steer_rank(target, other, k))


@settings(max_examples=300)
@given(
    ROW, st.one_of(ROW, TIED_ROW), st.data(), st.sampled_from(["hard", "soft"]), st.sampled_from([None, 0.0, 0.5, 3.0])
)
def test_rank_rule_matches_stable_sort(target, divergence, data, fill, margin):
    eligible = data.draw(st.none() | st.sets(st.integers(0, VOCAB - 1), min_size=2).map(lambda ids: tuple(sorted(ids))))
    k = data.draw(st.integers(1, (VOCAB if eligible is None else len(eligible)) - 1))
    steering = Steering("rank", k=k, margin=margin, fill=fill, vocabulary=eligible)
    expected = reference.rank(target, divergence, steering)
    assert torch.equal(steering.apply(target, divergence), expected)
    assert steering.apply(target, divergence).isfinite().any()


def test_rank_masks_match_hand_computed_values():
    target = torch.tensor([5.0, 4.0, 3.0, 2.0])
    divergence = torch.tensor([-1.0, 0.0, -1.0, -2.0])  # p prefers token 3 most, then 0 and 2 alike
    hard = steer_rank(target, divergence, 2)
    assert hard.tolist() == [-math.inf, 4.0, 3.0, -math.inf]
    soft = steer_rank(target, divergence, 2, fill="soft")
    assert soft.tolist() == [4.0, 4.0, 3.0, 4.0]
    # With a margin, tokens on which p and q nearly agree stay, and no logit is raised.
    assert steer_rank(target, divergence, 3, margin=1.5).tolist() == [5.0, 4.0, 3.0, -math.inf]
    assert steer_rank(target, divergence, 2, fill="soft", margin=0.5).tolist() == [4.0, 4.0, 3.0, 2.0]
    eligible = torch.tensor([False, True, True, False])
    assert steer_rank(target, divergence, 1, eligible=eligible).tolist() == [5.0, 4.0, -math.inf, 2.0]


def test_batched_positions_match_single_positions():
    torch.manual_seed(0)
    target, divergence = torch.randn(2, 3, 50), torch.randn(2, 3, 50).round()
    for steering in map(Steering.parse, ("linear:1.3", "rank:5", "rank:9:soft")):
        together = steering.apply(target, divergence)
        for row in range(2):
            for position in range(3):
                alone = steering.apply(target[row, position], divergence[row, position])
                assert torch.equal(together[row, position], alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_computed_and_returned_in_float32(dtype):
    target, divergence = torch.randn(9).to(dtype), torch.randn(9).to(dtype)
    for steering in map(Steering.parse, ("linear:1.3", "rank:5")):
        steered = steering.apply(target, divergence)
        assert steered.dtype == torch.float32
        assert torch.equal(steered, steering.apply(target.float(), divergence.float()))


def test_nan_divergence_does_not_return_target_logits():
    target = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    divergence = torch.tensor([[math.nan, 0.0, 0.0], [1.0, 0.0, -1.0]])
    for steered in (steer_linear(target, divergence, 1.0), *(steer_rank(target, divergence, 1, f) for f in FILLS)):
        assert steered[0].isnan().any()
        assert not steered[1].isnan().any()
    for steering in (Steering(), Steering("rank", k=1), Steering("rank", k=1, fill="soft")):
        assert steering.apply(target[1:], divergence[1:]).isfinite().any()
        with pytest.raises(FailedClosed, match="NaN"):
            steering.apply(target, divergence)


@pytest.mark.parametrize("k", [0, -1, 4, 5])
def test_k_out_of_range_is_rejected(k):
    with pytest.raises(UsageError, match="between 1 and 3"):
        steer_rank(torch.zeros(4), torch.zeros(4), k)


@pytest.mark.parametrize("rule", ["rank:1:soft", "rank:1:3:soft"])
def test_a_soft_fill_that_masks_nothing_steers_no_model(rule):
    with pytest.raises(UsageError, match="steers nothing"):
        Steering.parse(rule)
    with pytest.raises(UsageError, match="steers nothing"):
        Steering.parse(Steering("rank", k=1, fill="soft").to_dict())


def test_k_is_checked_against_eligible_vocabulary():
    with pytest.raises(UsageError, match="2 eligible tokens"):
        Steering("rank", k=2, vocabulary=(3, 5)).check_vocabulary(10)
    with pytest.raises(UsageError, match="token 12"):
        Steering("rank", k=1, vocabulary=(3, 12)).check_vocabulary(10)


@pytest.mark.parametrize("text", ["linear:1.5", "linear:0", "rank:20", "rank:20:soft", "rank:20:3", "rank:20:2.5:soft"])
def test_steering_round_trips_through_string_and_json(text):
    steering = Steering.parse(text)
    assert str(steering) == text
    assert Steering.from_dict(json.loads(json.dumps(steering.to_dict()))) == steering


@given(st.sets(st.integers(0, 5000), min_size=1))
def test_eligible_vocabulary_round_trips_through_json(ids):
    steering = Steering("rank", k=1, vocabulary=tuple(ids))
    assert Steering.from_dict(json.loads(json.dumps(steering.to_dict()))).vocabulary == tuple(sorted(ids))
    assert Steering.from_dict({"rule": "rank", "vocabulary": list(ids)}).vocabulary == tuple(sorted(ids))


def test_large_vocabulary_bitmap_is_compact():
    ids = tuple(range(0, 128_000, 3))
    assert len(json.dumps(Steering("rank", vocabulary=ids).to_dict())) < 4_000


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("sideways:1", "unknown|accepted"),
        ("linear:much", "not a number"),
        ("linear:1_5", "not a number"),
        ("rank:1_5", "whole number"),
        ("linear:nan", "a number from 0 to 1000"),
        ("linear:inf", "a number from 0 to 1000"),
        ("linear:-1", "towards the forget set"),
        ("linear", "accepted"),
        ("linear:1:much", "margin in 'linear:1:much' is not a number"),
        ("linear:1:-3", "margin is -3.0; accepted: a number from 0 to 20"),
        ("linear:1:3:soft", "accepted"),
        ("rank:1.5", "whole number"),
        ("rank:0", "at least 1"),
        ("rank:5:medium", "margin in 'rank:5:medium' is not a number"),
        ("rank:5:3:medium", "unknown fill 'medium'"),
        ("rank:5:-1", "margin is -1.0; accepted: a number from 0 to 20"),
        ("rank:5:nan", "margin is nan"),
        (7, "accepted"),
        ({"rule": "linear", "strength": 2}, "unknown fields"),
        ({"rule": "rank", "vocabulary": "%%%"}, "bitmap"),
        ({"rule": "rank", "vocabulary": []}, "at least one"),
    ],
)
def test_invalid_settings_error_lists_accepted_values(options, said):
    with pytest.raises(UsageError, match=said):
        Steering.parse(options)


@pytest.fixture(scope="module")
def unchecked():
    """`Steering` as users have it: under pytest its signature is checked before it can refuse anything."""
    spec = importlib.util.spec_from_file_location("unchecked_steering", sys.modules["divdec.steering"].__file__)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module.Steering
    del sys.modules[spec.name]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"alpha": 10**400}, "accepted: a number from 0 to 1000"),
        ({"alpha": -(10**400)}, "a number from 0 to 1000"),
        ({"alpha": "1"}, "alpha is '1'; accepted: a number"),
        ({"alpha": True}, "a number"),
        ({"alpha": None}, "a number"),
        ({"alpha": 1j}, "a number"),
        ({"alpha": torch.tensor(1.0)}, "a number"),
        ({"alpha": np.float32("nan")}, "a number from 0 to 1000"),
        ({"k": 2.5}, "k is 2.5; accepted: a whole number"),
        ({"k": 2.0}, "whole number"),
        ({"k": "20"}, "whole number"),
        ({"k": True}, "whole number"),
        ({"k": math.nan}, "whole number"),
        ({"k": np.float64(3)}, "whole number"),
        ({"margin": "3"}, "margin is '3'; accepted: a number from 0 to 20"),
        ({"margin": -1}, "margin is -1"),
        ({"margin": math.inf}, "margin is inf"),
        ({"rule": ["rank"]}, "unknown steering rule"),
        ({"fill": None}, "unknown fill"),
        ({"vocabulary": (1, 2.5)}, "list of token ids"),
        ({"vocabulary": 7}, "list of token ids"),
        ({"vocabulary": {1: 2}}, "list of token ids"),
        ({"vocabulary": (True, 3)}, "list of token ids"),
        ({"vocabulary": torch.tensor([1, 2])}, "list of token ids"),
        ({"vocabulary": (-1, 3)}, "at least one token id"),
    ],
)
@pytest.mark.parametrize("rule", ["linear", "rank"])
def test_invalid_values_are_rejected_by_every_constructor(fields, said, rule, unchecked):
    for way in (lambda fields: unchecked(**fields), unchecked.from_dict, unchecked.parse):
        with pytest.raises(UsageError, match=said) as error:
            way({"rule": rule, **fields})
        assert "\n" not in str(error.value)


def test_numpy_numbers_are_accepted(unchecked):
    Steering = unchecked
    steering = Steering("rank", alpha=np.float32(1.5), k=np.int64(3), vocabulary=np.array([5, 2, 5, 9, 1]))
    assert steering == Steering("rank", alpha=1.5, k=3, vocabulary=(1, 2, 5, 9))
    assert Steering.from_dict(json.loads(json.dumps(steering.to_dict()))) == steering


def test_changed_steering_keeps_eligible_vocabulary():
    steering = Steering("rank", k=2, vocabulary=(1, 5, 9))
    assert steering.revised("linear:2") == Steering(alpha=2.0, vocabulary=(1, 5, 9))
    assert steering.revised("linear:2").revised("rank:1") == Steering("rank", k=1, vocabulary=(1, 5, 9))
    with pytest.raises(UsageError):
        steering.revised("linear:-2")


def test_negative_alpha_is_refused():
    with pytest.raises(UsageError, match="towards the forget set"):
        Steering(alpha=-0.5)
