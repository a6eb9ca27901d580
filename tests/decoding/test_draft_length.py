"""The number of drafted tokens follows what gives most tokens a second."""

import numpy as np
import pytest

from divdec.decoding.statistics import DraftLengthController


def settled(acceptance, seconds, largest=8, passes=200, seed=0):
    """What is chosen most often in the end, with noise on every measurement."""
    controller, chosen = DraftLengthController(largest), []
    generator = np.random.default_rng(seed)
    for _ in range(passes):
        drafted = controller.choose()
        chosen.append(drafted)
        judged = generator.random(drafted + 1) < acceptance
        accepted = int(np.cumprod(judged).sum())
        noise = 1 + 0.3 * generator.random()
        controller.record(drafted, accepted, min(accepted + 1, drafted + 1), seconds(drafted) * noise)
    return np.bincount(chosen[-50:]).argmax()


def stepped(drafted):
    """A machine on which up to three tokens cost the target no more than one, and up to nine twice that."""
    return (1.0 if drafted <= 2 else 2.0) + 0.1 * (drafted + 1)


def best(acceptance, seconds, largest=8):
    rates = [sum(acceptance**n for n in range(d + 1)) / seconds(d) for d in range(largest + 1)]
    return rates, int(np.argmax(rates))


@pytest.mark.parametrize("acceptance", [0.02, 0.5, 0.8, 0.97])
@pytest.mark.parametrize("seconds", [stepped, lambda drafted: 1 + 0.05 * drafted, lambda drafted: 1 + 0.9 * drafted])
def test_chosen_draft_length_is_near_optimal(acceptance, seconds):
    rates, _ = best(acceptance, seconds)
    found = [rates[settled(acceptance, seconds, seed=seed)] for seed in range(5)]
    assert np.median(found) > 0.85 * max(rates)


def test_no_tokens_are_drafted_at_zero_acceptance():
    assert settled(0.0, lambda drafted: 1 + 0.2 * drafted) == 0
    assert settled(1.0, lambda drafted: 1 + 0.05 * drafted) == 8
    assert DraftLengthController(0).choose() == 0
