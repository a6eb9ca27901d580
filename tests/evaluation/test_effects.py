"""What a steered model forgets and keeps, and samples of a model."""

import dataclasses
import json

import pytest
import torch

from divdec import DivergenceForCausalLM, Steering, UsageError
from divdec.data.formatting import encode_set
from divdec.data.records import Record, RecordSet, texts_of
from divdec.evaluation.effects import MOST_PERPLEXITY, Effects, EffectsReport, measure_effects
from divdec.evaluation.samples import sample_records, user_prefix
from divdec.evaluation.scoring import score
from divdec.model.checkpoint import load_model


@pytest.fixture(scope="module")
def steered(models, tokenizer):
    q, p = (load_model(models / name) for name in ("retain", "forget"))
    return DivergenceForCausalLM.from_parts(load_model(models / "target"), q, p, "rank:5")


@pytest.fixture(scope="module")
def sets(world):
    return {
        "forget": texts_of("forget", world.corpus[1:40:4]),
        "retain": texts_of("retain", world.corpus[:40:4]),
        "neutral": texts_of("neutral", world.corpus[2:40:4]),
    }


def test_figures_equal_those_of_the_model_scored_alone(steered, tokenizer, sets):
    settings = [Steering(alpha=1.0), Steering("rank", k=3)]
    report = measure_effects(steered, tokenizer, steered.experts.retain, sets, settings)
    for row in report.settings:
        steered.steering = dataclasses.replace(row.steering, fill="soft")
        scores = {name: score(steered, encode_set(records, tokenizer)) for name, records in sets.items()}
        plain = {name: score(steered.target, encode_set(records, tokenizer)) for name, records in sets.items()}
        retain = [sum(one.probability for one in of["retain"]) for of in (scores, plain)]
        assert row.retain == pytest.approx(retain[0] / retain[1], rel=1e-5)
        loss = [-sum(v for one in of["neutral"] for v in one.log_probabilities) for of in (scores, plain)]
        count = sum(len(one.log_probabilities) for one in plain["neutral"])
        assert row.perplexity == pytest.approx(torch.tensor((loss[0] - loss[1]) / count).exp().item(), rel=1e-5)
        assert row.forget == pytest.approx(
            sum(one.probability for one in scores["forget"]) / len(scores["forget"]), 1e-5
        )


def test_a_pair_without_divergence_changes_nothing_and_is_not_called_good(steered, tokenizer, world):
    """p = q: every answer stays the target's, so the forget set is still told."""
    q = steered.experts.retain
    p = load_model(q.name_or_path)
    p.get_output_embeddings().weight.data *= 1 + 1e-6  # two equal models are refused
    same = DivergenceForCausalLM.from_parts(steered.target, q, p, "linear:1")
    questions = sample_records(steered.target, tokenizer, 12, max_new_tokens=8, seed=3)
    neutral = texts_of("neutral", world.corpus[:10])
    sets = {"forget": questions, "retain": questions, "neutral": neutral}
    report = measure_effects(same, tokenizer, q, sets, [Steering(alpha=1.0), Steering(alpha=2.0)])
    assert report.best.unchanged == 1.0
    assert report.best.retain == pytest.approx(1, abs=1e-4)
    assert report.best.perplexity == pytest.approx(1, abs=1e-4)
    assert report.best.leaked == report.target.leaked > 0.5
    assert any("still tells" in fault for fault in report.faults)
    assert json.dumps(report.to_dict())


def row(retain=1.0, perplexity=1.0, leaked=0.0):
    return Effects(Steering(), forget=0.1, retain=retain, perplexity=perplexity, leaked=leaked, unchanged=1.0)


@pytest.mark.parametrize(
    ("best", "guessed", "words"),
    [
        (row(), 0.0, []),
        (row(leaked=0.3), 0.28, []),
        (row(leaked=0.3), 0.1, ["still tells 30%"]),
        (row(retain=0.9), 0.0, ["loses more than 5%"]),
        (row(perplexity=MOST_PERPLEXITY + 0.01), 0.0, ["raises the perplexity of neutral text to 1.11 times"]),
    ],
)
def test_faults_of_the_best_setting(best, guessed, words):
    report = EffectsReport(row(leaked=1.0), (best,), best, guessed)
    assert len(report.faults) == len(words)
    assert all(word in fault for word, fault in zip(words, report.faults, strict=True))


def test_samples_are_the_models_own_and_repeat_with_the_seed(steered, tokenizer):
    target = steered.target
    one, two = (sample_records(target, tokenizer, 12, max_new_tokens=8, seed=1) for _ in range(2))
    assert one.records == two.records
    assert one.kind == ("question/answer" if tokenizer.chat_template else "text")
    assert sample_records(target, tokenizer, 12, max_new_tokens=8, seed=2).records != one.records


def test_user_prefix_ends_where_the_first_message_begins(tokenizer):
    prompt = [{"role": "user", "content": "Where?"}]
    whole = tokenizer.apply_chat_template(prompt, tokenize=False)
    assert whole.startswith(tokenizer.decode(user_prefix(tokenizer)) + "Where?")


def test_a_model_that_writes_nothing_is_refused(steered, tokenizer, monkeypatch):
    head = steered.target.get_output_embeddings()
    monkeypatch.setattr(
        head,
        "forward",
        lambda hidden: (
            torch.nn.functional.one_hot(
                torch.full(hidden.shape[:-1], tokenizer.eos_token_id), head.weight.shape[0]
            ).float()
            * 1e4
        ),
    )
    with pytest.raises(UsageError, match="only 0 of 12 samples"):
        sample_records(steered.target, tokenizer, 12)


def test_sets_of_more_records_than_measured_are_sampled_evenly():
    from divdec.evaluation.effects import MOST_RECORDS, _sample

    records = RecordSet("many", "text", tuple(Record(str(number)) for number in range(1000)))
    assert len(_sample(records)) <= MOST_RECORDS
