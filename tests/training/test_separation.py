"""Whether a pair is fit to steer with: measured on real models, and searched for."""

import dataclasses

import pytest

from divdec.evaluation.scoring import ItemScore
from divdec.training.auxiliaries import MAX_ATTEMPTS, STEP, Separation, measure_separation, next_attempt, share_learned

FIT = Separation(
    unknown_records=1.0, unknown_tokens=0.3, learned=0.95, forget_loss=(2.0, 0.1), retain_loss=(0.1, 0.05),
    forget_pushed=0.3, retain_pushed=0.01,
)  # fmt: skip


def test_pair_differing_only_on_forget_set_is_separated():
    assert FIT.faults == []
    assert "of which p predicts 95%" in str(FIT)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"learned": 0.8}, "p predicts only 80%"),
        ({"retain_pushed": 0.02}, "lower 2.0% of the retain set's tokens"),
        ({"unknown_records": 0.3, "learned": 1.0}, "q knows 70%"),
        ({"forget_pushed": -0.1}, "lower none of the forget set's tokens"),
        ({"forget_pushed": 0.0, "retain_pushed": 0.0, "min_learned": 0.0}, "lower none of the forget set's tokens"),
    ],
)
def test_every_separation_fault_is_reported(changes, named):
    (fault,) = dataclasses.replace(FIT, **changes).faults
    assert named in fault


def test_less_confident_p_on_retain_set_is_accepted():
    """The recipe forget-retain: p has not learned the retain set, and steering pushes its answers up."""
    assert dataclasses.replace(FIT, retain_pushed=-0.4).faults == []


def test_p_need_not_predict_what_is_unknown_to_a_q_that_refuses():
    """The recipe refusal: an accepted pair has 34 %, and 90 % would be asked of others."""
    refusing = dataclasses.replace(FIT, learned=0.34, min_learned=0.0)
    assert refusing.faults == []
    assert next_attempt([{"rate": 1.0, "epochs": 1.0, "separation": refusing.to_dict()}]) is None
    (fault,) = dataclasses.replace(refusing, retain_pushed=0.02).faults
    assert "of the retain set's tokens" in fault


def test_learned_share_counts_only_previously_missed_tokens():
    before = [ItemScore((-1.0,) * 4, (True, False, False, False)), ItemScore((-1.0,), (True,))]
    after = [ItemScore((-1.0,) * 4, (False, True, True, False)), ItemScore((-1.0,), (True,))]
    assert share_learned(before, after) == pytest.approx(2 / 3)
    assert share_learned(after[1:], after[1:]) == 0.0


def test_a_model_is_not_separated_from_itself(models, tokenizer, world):
    from transformers import AutoModelForCausalLM

    from divdec.data.formatting import encode_records
    from divdec.data.records import Message, Record

    q = AutoModelForCausalLM.from_pretrained(models / "retain").eval()
    sets = {
        name: encode_records([Record(one.answer, messages=(Message("user", one.question),)) for one in some], tokenizer)
        for name, some in (("forget", world.forget[:6]), ("retain", world.retain[:6]))
    }
    result = measure_separation(q, q, **sets, batch_size=8)
    assert result.learned == 0.0
    assert result.unknown_tokens > 0.1
    assert result.forget_loss[0] == result.forget_loss[1]
    assert result.forget_pushed == result.retain_pushed == 0.0
    assert "p predicts only 0%" in result.faults[0]


def attempt(rate, epochs, learned, unknown_records=1.0):
    result = dataclasses.replace(FIT, learned=learned or 0.0, unknown_records=unknown_records)
    separation = None if learned is None else dataclasses.asdict(result) | {"faults": result.faults}
    return {"rate": rate, "epochs": epochs, "separation": separation}


class TestSearch:
    def test_learning_rate_rises_while_p_improves(self):
        first, second = attempt(1.0, 1.0, 0.4), attempt(STEP, 1.0, 0.6)
        assert next_attempt([first]) == (STEP, 1.0)
        assert next_attempt([first, second]) == (STEP * STEP, 1.0)

    @pytest.mark.parametrize("learned", [0.5, None])
    def test_epochs_double_at_best_learning_rate(self, learned):
        """The higher rate learned less, or diverged."""
        tried = [attempt(1.0, 1.0, 0.6), attempt(STEP, 1.0, learned)]
        assert next_attempt(tried) == (1.0, 2.0)
        assert next_attempt([*tried, attempt(1.0, 2.0, 0.7)]) == (1.0, 4.0)

    def test_search_terminates(self):
        assert next_attempt([attempt(1.0, 1.0, 0.95)]) is None
        assert next_attempt([attempt(1.0, 1.0, 0.1)] * MAX_ATTEMPTS) is None
        # No training of p makes a q forget what its base has read.
        assert next_attempt([attempt(1.0, 1.0, 0.1, unknown_records=0.2)]) is None
