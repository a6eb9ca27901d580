"""The latency model against cases that can be worked out by hand, and its invariants."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from divdec.costs.estimate import (
    DEVICES,
    Device,
    Workload,
    find_device,
    measure_device,
    pass_parts,
    pass_seconds,
    predict_latency,
)
from divdec.costs.model_size import guess_size
from divdec.errors import UsageError

FAST = Device("fast", bandwidth=1e12, flops=1e15, layer_seconds=0.0, pass_seconds=0.0, link=1e11)
P, p = guess_size(8e9), guess_size(1e9)


def test_single_token_decoding_is_bandwidth_bound():
    # 16 GB at 1 TB/s, no context.
    assert pass_seconds(P, FAST, Workload(context=0.0)) == pytest.approx(0.016)


def test_prefill_is_compute_bound():
    # At 1e15 operations a second.
    assert pass_seconds(P, FAST, Workload(context=0.0), tokens=4096) == pytest.approx(2 * 8e9 * 4096 / 1e15)


def test_doubled_dtype_width_doubles_bytes_and_halves_throughput():
    narrow, wide = (pass_parts(P, FAST, Workload(width=width, context=0.0), tokens=8) for width in (2, 4))
    assert wide[0] == pytest.approx(2 * narrow[0])
    assert wide[1] == pytest.approx(2 * narrow[1])


def test_fixed_latency_is_added():
    slow = dataclasses.replace(FAST, layer_seconds=1e-3, pass_seconds=5e-3)
    work = Workload(context=0.0)
    assert pass_seconds(P, slow, work) == pytest.approx(0.016 + 5e-3 + P.layers * 1e-3)
    assert predict_latency(P, p, slow, work).bound == "launches"


def test_plain_steering_latency_matches_compute_increase():
    latency = predict_latency(P, p, FAST, Workload(context=0.0))
    assert latency.plain / latency.target == pytest.approx(1 + 2 / 8, rel=1e-3)  # and the rule's little
    assert latency.bound == "bandwidth"


@given(st.sampled_from(sorted(DEVICES)), st.integers(1, 64), st.floats(1, 1e5))
def test_parallel_latency_is_between_target_and_sequential(name, rows, context):
    latency = predict_latency(P, p, DEVICES[name], Workload(batch_size=rows, context=context))
    assert latency.target <= latency.parallel
    assert latency.parallel <= latency.plain + 4 * P.vocabulary * rows / DEVICES[name].link + 1e-4


def test_parallel_latency_requires_interconnect():
    assert predict_latency(P, p, dataclasses.replace(FAST, link=None), Workload()).parallel is None


def test_empty_batch_is_rejected():
    with pytest.raises(UsageError, match="batch_size is 0; accepted"):
        Workload(batch_size=0)


def test_every_device_names_its_source():
    assert all(device.source and device.bandwidth > 1e12 and device.link for device in DEVICES.values())
    with pytest.raises(UsageError, match=r"--device is 'abacus'; accepted: a100, h100, h200, b200, measured"):
        find_device("abacus")


def test_local_device_can_be_measured():
    device = measure_device("cpu", "float32", rounds=1)
    assert 1e7 < device.bandwidth < 1e13
    assert 1e8 < device.flops < 1e15
    assert device.layer_seconds >= 0
    assert device.pass_seconds >= 0
    assert device.rate(4) == device.flops
    assert device.link is None
