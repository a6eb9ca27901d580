"""The reference of a calibration is validated: a q that knows the forget set shows nothing."""

import dataclasses

import pytest

from divdec import DivergenceForCausalLM, Steering
from divdec.data.records import RecordSet
from divdec.evaluation.calibration import MOST_REFERENCE, LeakCheck, calibrate
from divdec.evaluation.samples import sample_records
from divdec.model.checkpoint import load_model


@pytest.fixture(scope="module")
def sets(models, tokenizer):
    """The target's own answers to questions, and other answers to others of its questions."""
    records = sample_records(load_model(models / "target"), tokenizer, 36, max_new_tokens=8, seed=3).records
    unknown = [dataclasses.replace(one, answer=f"zq {one.answer[::-1]} xj") for one in records]
    halves = {"forget": records[:12], "retain": records[12:24], "holdout": unknown[24:]}
    return {name: RecordSet(name, "question/answer", tuple(half)) for name, half in halves.items()}


def test_a_reference_that_has_read_the_forget_set_is_refused(models, tokenizer, sets):
    """q is the target itself."""
    target, q, p = (load_model(models / name) for name in ("target", "target", "forget"))
    model = DivergenceForCausalLM.from_parts(target, q, p, "linear:1")
    result = calibrate(model, tokenizer, sets, [Steering(alpha=1.0)], max_retain_drop=0.99)
    assert sum(result.reference.values()) / 4 > MOST_REFERENCE
    told = result.leak_check
    assert (told.asked, told.retain_auxiliary > 4) == (12, True)
    for words in (
        "much likelier than the holdout set",
        f"q itself tells {told.retain_auxiliary} of 12",
        "nothing was shown",
    ):
        assert any(words in fault for fault in result.faults), words


@pytest.mark.parametrize(
    ("steered", "q", "faulty"),
    [(1, 0, "none"), (2, 0, "too many"), (3, 0, "too many"), (3, 3, "guessed"), (4, 4, "guessed"), (1, 12, "none")],
)
def test_told_answers_are_bounded_relatively_and_absolutely(steered, q, faulty):
    check = LeakCheck(20, steered, q)
    assert (check.too_many, check.guessed) == (faulty == "too many", faulty == "guessed")
