import math

import pytest

from divdec.training.learning_rate import Probe, search


@pytest.mark.parametrize("halving_rate", [3e-6, 8e-5, 1e-4, 2e-3])
def test_search_finds_learning_rate_that_halves_loss(halving_rate):
    probes = search(lambda rate: Probe(rate, 1 / (1 + (rate / halving_rate) ** 0.9)))
    best = min(probes, key=lambda probe: abs(probe.loss_ratio - 0.5))
    assert abs(best.loss_ratio - 0.5) <= 0.08
    assert len(probes) <= 7


def test_search_ends_if_training_diverges_before_halving_loss():
    probes = search(lambda rate: Probe(rate, 0.8 if rate < 5e-4 else math.inf))
    assert len(probes) <= 3
    assert min(probe.loss_ratio for probe in probes) == 0.8


def test_diverging_upper_bound_does_not_mislead_search():
    probes = search(lambda rate: Probe(rate, 0.9 - 1.2 * rate / 1e-3 if rate < 4e-4 else math.inf))
    assert any(abs(probe.loss_ratio - 0.5) <= 0.2 for probe in probes)
