import math

import pytest
import torch

from divdec.playground.pushes import LEAST_LOSS, MOST, places
from divdec.steering import steer_linear, steer_rank


def test_a_push_is_the_change_of_the_log_probability_by_hand():
    target = torch.tensor([[0.6, 0.3, 0.1]]).log()
    # Steering halves the first token's weight: 0.3, 0.3, 0.1 of 0.7.
    steered = target + torch.tensor([[math.log(0.5), 0.0, 0.0]])
    (found,) = places(target, steered, torch.tensor([1]))
    assert found.chosen.token == 1
    assert found.chosen.logprob_shift == pytest.approx(math.log(0.3 / 0.7) - math.log(0.3), abs=1e-5)
    (lost,) = found.lost
    assert (lost.token, lost.before, lost.after) == (0, pytest.approx(0.6, abs=1e-5), pytest.approx(3 / 7, abs=1e-5))


def test_only_what_lost_probability_is_named_the_greatest_loss_first_and_never_the_chosen_token():
    generator = torch.Generator().manual_seed(0)
    target, divergence = torch.randn(6, 50, generator=generator), torch.randn(6, 50, generator=generator)
    steered = steer_linear(target, divergence, 2.0)
    chosen = steered.argmin(dim=-1)
    before, after = target.softmax(-1), steered.softmax(-1)
    for place, found in enumerate(places(target, steered, chosen)):
        losses = [push.before - push.after for push in found.lost]
        assert losses == sorted(losses, reverse=True)
        assert min(losses, default=1) >= LEAST_LOSS
        assert len(losses) <= MOST
        assert chosen[place] not in [push.token for push in found.lost]
        others = (before - after)[place].clone()
        others[chosen[place]] = -1
        if found.lost:
            assert found.lost[0].token == int(others.argmax())


def test_a_masked_token_is_pushed_without_end_and_one_that_nobody_would_say_not_at_all():
    target = torch.tensor([[3.0, 2.0, 1.0, -math.inf]])
    steered = steer_rank(target, torch.tensor([[-1.0, 0.0, 0.0, 0.0]]), 1)
    (found,) = places(target, steered, torch.tensor([1]))
    assert found.lost[0].logprob_shift == -math.inf
    assert found.lost[0].after == 0
    (silent,) = places(target, steered, torch.tensor([3]))
    assert silent.chosen.logprob_shift == 0


def test_no_steering_pushes_nothing():
    target = torch.randn(3, 20, generator=torch.Generator().manual_seed(1))
    for found in places(target, steer_linear(target, torch.zeros(3, 20), 1.0), torch.tensor([0, 1, 2])):
        assert found.chosen.logprob_shift == pytest.approx(0, abs=1e-6)
        assert found.lost == ()
