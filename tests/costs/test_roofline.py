"""The latency model against cases that can be worked out by hand, and its invariants."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from divdec.costs.devices import DEVICES, find_device, measure_device
from divdec.costs.roofline import Device, Workload, latency, pass_parts, pass_seconds
from divdec.costs.sizes import guessed_size
from divdec.errors import UsageError

FAST = Device("fast", bandwidth=1e12, flops=1e15, layer_seconds=0.0, pass_seconds=0.0, link=1e11, link_seconds=0.0)
P, p = guessed_size(8e9), guessed_size(1e9)


def test_one_token_waits_for_the_weights():
    # 16 GB at 1 TB/s, no context.
    assert pass_seconds(P, FAST, Workload(context=0.0)) == pytest.approx(0.016)


def test_many_tokens_wait_for_the_arithmetic():
    # At 1e15 operations a second.
    assert pass_seconds(P, FAST, Workload(context=0.0), tokens=4096) == pytest.approx(2 * 8e9 * 4096 / 1e15)


def test_twice_as_wide_numbers_take_twice_the_bytes_and_half_the_rate():
    narrow, wide = (pass_parts(P, FAST, Workload(width=width, context=0.0), tokens=8) for width in (2, 4))
    assert wide[0] == pytest.approx(2 * narrow[0])
    assert wide[1] == pytest.approx(2 * narrow[1])


def test_beginnings_are_added():
    slow = dataclasses.replace(FAST, layer_seconds=1e-3, pass_seconds=5e-3)
    work = Workload(context=0.0)
    assert pass_seconds(P, slow, work) == pytest.approx(0.016 + 5e-3 + P.layers * 1e-3)
    added = latency(P, p, slow, work).plain - latency(P, p, FAST, work).plain
    assert added == pytest.approx(3 * 5e-3 + (P.layers + 2 * p.layers) * 1e-3)
    assert latency(P, p, slow, work).bound == "launches"


def test_plain_steering_without_context_costs_the_compute_increase_more_time():
    found = latency(P, p, FAST, Workload(context=0.0))
    assert found.plain / found.target == pytest.approx(1 + 2 / 8, rel=1e-3)  # and the rule's little
    assert found.bound == "bandwidth"


def test_speculation_with_all_accepted_shares_the_targets_pass():
    found = latency(P, p, FAST, Workload(context=0.0, acceptance=1.0, block=4))
    # Five passes of q, one of the target and of p, for five tokens.
    assert found.speculative == pytest.approx((5 * 0.002 + 0.016 + 0.002) / 5, rel=1e-2)


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 8))
def test_more_acceptance_is_never_slower(one, other, block):
    low, high = sorted((one, other))
    times = [latency(P, p, FAST, Workload(acceptance=a, block=block)).speculative for a in (low, high)]
    assert times[1] <= times[0] * (1 + 1e-9)


@given(st.sampled_from(sorted(DEVICES)), st.integers(1, 64), st.floats(1, 1e5))
def test_apart_is_between_the_target_and_one_after_the_other(name, rows, context):
    found = latency(P, p, DEVICES[name], Workload(rows=rows, context=context))
    assert found.target <= found.apart
    assert found.apart <= found.plain + 4 * P.vocabulary * rows / DEVICES[name].link + 1e-4


def test_no_link_no_prediction_apart():
    assert latency(P, p, dataclasses.replace(FAST, link=None), Workload()).apart is None


@pytest.mark.parametrize("wrong", [{"acceptance": 1.1}, {"acceptance": -0.1}, {"block": 0}, {"rows": 0}])
def test_what_cannot_be_decoded_is_refused(wrong):
    with pytest.raises(UsageError, match="accepted"):
        Workload(**wrong)


def test_every_device_says_where_its_figures_come_from():
    assert all(device.source and device.bandwidth > 1e12 and device.link for device in DEVICES.values())
    with pytest.raises(UsageError, match=r"device is 'abacus'; accepted: a100, h100, h200, b200, measured"):
        find_device("abacus")


def test_this_machine_can_be_measured():
    device = measure_device("cpu", "float32", rounds=1)
    assert 1e7 < device.bandwidth < 1e13
    assert 1e8 < device.flops < 1e15
    assert device.layer_seconds >= 0
    assert device.pass_seconds >= 0
    assert device.rate(4) == device.flops
    assert device.link is None
