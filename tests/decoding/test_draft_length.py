"""Drafts end where another token costs more than it is likely to gain."""

import numpy as np
import pytest

from divdec.decoding.speculative import FIRST_CHANCE, MAX_CHANCE, DraftController

LARGEST = 8


class Machine:
    """Texts whose tokens a drafter knows with different certainty, and the time of a step."""

    def __init__(self, acceptance, seconds, calibrated=True, seed=0):
        self.generator = np.random.default_rng(seed)
        self.acceptance, self.seconds, self.calibrated = acceptance, seconds, calibrated

    def rate(self, fixed=None, steps=400):
        """Tokens a second of the second half, with drafts of a fixed length or as the controller decides."""
        controller, rates = DraftController(), []
        for _ in range(steps):
            controller.start()
            chances = self.generator.choice(self.acceptance, LARGEST + 1)
            judged = self.generator.random(LARGEST + 1) < chances
            size = 1
            for chance in chances[:LARGEST]:
                shown = chance if self.calibrated else 0.9
                if (fixed is None and not controller.wants_more(shown)) or size == fixed:
                    break
                size += 1
            grown = int(np.cumprod(judged[: size - 1]).sum()) + 1
            seconds = self.seconds(size - 1) * (1 + 0.3 * self.generator.random())
            controller.record(judged[:grown].tolist(), size - 1, grown, seconds)
            rates.append((grown, seconds))
        tokens, seconds = np.sum(rates[steps // 2 :], axis=0)
        return tokens / seconds


def stepped(drafted):
    """A machine on which up to three tokens cost the target no more than one, and up to nine twice that."""
    return (1.0 if drafted <= 2 else 2.0) + 0.1 * (drafted + 1)


CHEAP, DEAR = (lambda drafted: 1 + 0.05 * drafted), (lambda drafted: 1 + 0.9 * drafted)


@pytest.mark.parametrize("acceptance", [[0.02], [0.5], [0.97], [0.3, 0.99], [0.05, 0.6, 0.95]])
@pytest.mark.parametrize("seconds", [stepped, CHEAP, DEAR])
def test_drafts_are_nearly_as_fast_as_those_of_the_best_fixed_length(acceptance, seconds):
    found = np.median([Machine(acceptance, seconds, seed=seed).rate() for seed in range(5)])
    fixed = [
        np.median([Machine(acceptance, seconds, seed=seed).rate(size) for seed in range(5)]) for size in range(1, 10)
    ]
    assert found > 0.85 * max(fixed)


def test_uncertain_tokens_end_drafts_where_lengths_cannot():
    machine = [0.05, 0.99], lambda drafted: 1 + 0.3 * drafted
    fixed = max(Machine(*machine).rate(size) for size in range(1, 10))
    assert Machine(*machine).rate() > 1.05 * fixed


def test_an_overconfident_drafter_drafts_nothing():
    """Its drafts are taken as seriously as they were right before."""
    plain = Machine([0.02], DEAR, calibrated=False).rate(1)
    assert Machine([0.02], DEAR, calibrated=False).rate() > 0.95 * plain


def test_the_first_draft_ends_by_its_probability_alone():
    controller = DraftController()
    assert controller.least_chance == FIRST_CHANCE
    assert controller.wants_more(0.9)
    assert not controller.wants_more(FIRST_CHANCE / 2)


def test_dear_tokens_are_drafted_where_they_are_certain():
    """Otherwise their time would never be measured again."""
    controller = DraftController()
    for drafted in (0, 1) * 20:
        controller.start()
        controller.record([True] * (drafted + 1), drafted, drafted + 1, 1.0 + 9 * drafted)
    assert controller.least_chance == MAX_CHANCE
    controller.start()
    assert controller.wants_more(0.99)


def test_drafts_are_tried_again_after_many_steps_without_any():
    controller = DraftController()
    for _ in range(20_000):
        controller.start()
        assert not controller.wants_more(0.0)
        controller.record([False], 0, 1, 1.0)
    controller.start()
    assert controller.wants_more(1.0)
