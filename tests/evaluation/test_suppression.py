"""The threshold of `divdec serve --on-suppressed`."""

import dataclasses

import pytest
import torch

from divdec import DivergenceForCausalLM, Steering
from divdec.checkpoint import load_model
from divdec.data.formatting import Format, encode_prompts
from divdec.data.records import Message, Record, RecordSet, texts_of
from divdec.errors import FailedClosed
from divdec.evaluation import suppression
from divdec.evaluation.recitation import passages_of
from divdec.evaluation.suppression import LENGTH, REPLIES, SuppressionThreshold, measure_suppression


@pytest.fixture(scope="module")
def steered(models):
    q, p = (load_model(models / name) for name in ("retain", "forget"))
    return DivergenceForCausalLM.from_parts(load_model(models / "target"), q, p, "rank:5")


def questions(facts):
    records = tuple(Record(one.answer, messages=(Message("user", one.question),)) for one in facts)
    return RecordSet("facts", "question/answer", records)


@pytest.mark.parametrize(
    ("shares", "share", "marked"),
    [
        ({"forget": [0.2, 0.9], "retain": [0.0, 0.1]}, 0.15, {"forget": 2, "retain": 0}),
        # A reply of the forget set that cannot be told from others.
        ({"forget": [0.0, 0.4, 0.9], "retain": [0.3] * 4}, 0.35, {"forget": 2, "retain": 0}),
        # Each set counts the same, however many replies it has.
        ({"forget": [0.5], "retain": [0.0] * 9, "neutral": [0.6]}, 0.25, {"forget": 1, "retain": 0, "neutral": 1}),
        # Near both ends, where a rounded number would lie outside.
        ({"forget": [0.0008], "retain": [0.0]}, 0.0004, {"forget": 1, "retain": 0}),
        ({"forget": [0.9999], "retain": [0.9996]}, 0.99975, {"forget": 1, "retain": 0}),
        # Nothing tells the sets apart, or there is nothing to compare.
        ({"forget": [0.0], "retain": [0.0]}, None, {}),
        ({"forget": [1.0], "retain": [1.0]}, None, {}),
        ({"forget": [0.5], "retain": [1.0]}, None, {}),
        ({"forget": [0.5], "retain": []}, None, {}),
        ({"forget": [], "retain": [0.0]}, None, {}),
    ],
)
def test_threshold_with_the_largest_difference_is_chosen(shares, share, marked):
    threshold = SuppressionThreshold.between(shares)
    assert threshold.share == pytest.approx(share)
    assert threshold.marked == marked
    assert ("no --suppressed-share" in str(threshold)) == (share is None)
    if share is not None:
        assert f"forget {marked['forget']} of {len(shares['forget'])}" in str(threshold)


def test_shares_are_those_of_the_replies(steered, tokenizer, world, monkeypatch):
    """A reply's share is half the distance of the two distributions, at the token where it is largest."""
    sets = {"forget": questions(world.forget[:3]), "retain": texts_of("retain", [" ".join(world.corpus[:12])])}
    form = Format(system_prompt="Be brief.")
    given = {}
    monkeypatch.setattr(SuppressionThreshold, "between", classmethod(lambda cls, shares: given.update(shares)))
    steered.steering = Steering.parse("rank:5")
    measure_suppression(steered, tokenizer, sets, form=form)
    passages, _ = passages_of(sets["retain"], tokenizer, most=REPLIES)
    prompts = {
        "forget": encode_prompts(sets["forget"].records, tokenizer, form),
        "retain": [passage.prompt for passage in passages],
    }
    assert len(prompts["retain"]) > 1  # of one text
    for name, own in prompts.items():
        expected = []
        for prompt in own:
            tokens = steered.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=LENGTH)
            with torch.inference_mode():
                one, other = (model(tokens).logits[0].softmax(-1) for model in (steered, steered.target))
            expected.append(float((one - other).abs().sum(-1)[len(prompt) - 1 : -1].max()) / 2)
        assert sorted(given[name]) == pytest.approx(sorted(expected), abs=1e-3)


def test_many_records_are_drawn_and_long_ones_left_out(steered, tokenizer, world, monkeypatch):
    asked = []

    def one_token(model, tokenizer, prompts, **options):
        asked.append(prompts)
        return [[1]] * len(prompts)

    monkeypatch.setattr(suppression, "continuations", one_token)
    long = Record("a", messages=(Message("user", "word " * 5000),))
    some = questions(world.forget[:40])
    measure_suppression(steered, tokenizer, {"forget": some, "retain": dataclasses.replace(some, records=(long,))})
    assert [len(prompts) for prompts in asked] == [REPLIES, 0]
    assert len({tuple(prompt) for prompt in asked[0]}) == REPLIES


def test_no_threshold_is_chosen_from_shares_that_are_no_numbers(steered, tokenizer, world, monkeypatch):
    monkeypatch.setattr(suppression, "suppressed_share", lambda *arguments: float("nan"))
    sets = {name: questions(world.forget[:2]) for name in ("forget", "retain")}
    with pytest.raises(FailedClosed, match="no threshold"):
        measure_suppression(steered, tokenizer, sets)
