"""What a steered model forgets and keeps."""

import copy
import dataclasses
import json
import math
import statistics

import pytest
import torch

from divdec import DivergenceForCausalLM, Steering, UsageError
from divdec.checkpoint import load_model
from divdec.data.formatting import encode_set
from divdec.data.records import Message, Record, RecordSet, record_set, texts_of
from divdec.evaluation import choice
from divdec.evaluation.choice import (
    BEGINNINGS,
    MAX_PERPLEXITY,
    Effects,
    Replies,
    RuleChoice,
    candidates,
    choose_rule,
    noise_margins,
    noise_of,
    without_names,
)
from divdec.evaluation.generation import sample_records
from divdec.evaluation.scoring import score, score_settings

NOISE = (0.1, 0.3, 0.5)


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
    report = choose_rule(steered, tokenizer, sets, settings)
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
    report = choose_rule(same, tokenizer, sets, [Steering(alpha=1.0), Steering(alpha=2.0)])
    assert report.best.unchanged == 1.0
    assert report.best.retain == pytest.approx(1, abs=1e-4)
    assert report.best.perplexity == pytest.approx(1, abs=1e-4)
    assert report.best.leaked == report.target.leaked > 0.5
    assert any("still answers" in fault for fault in report.faults)
    assert json.dumps(report.to_dict())
    # A target that never knew the answers is no proof that steering takes them away.
    unknown = dataclasses.replace(questions, records=tuple(dataclasses.replace(q, answer="Qqq") for q in questions))
    report = choose_rule(same, tokenizer, sets | {"forget": unknown}, [Steering(alpha=1.0), Steering(alpha=2.0)])
    assert report.best.leaked == report.target.leaked == 0.0
    [fault] = report.faults
    assert fault.startswith("the target answers 0% of the forget set (q 0%): nothing was shown; ")
    assert fault.endswith("replies were cut after 40 tokens")
    assert report.verdict.startswith("no: ")


def test_noise_is_that_of_the_pair_and_sets_the_margin(steered, tokenizer, sets, monkeypatch):
    q, p = steered.experts.retain, steered.experts.forget
    examples = encode_set(sets["neutral"], tokenizer)
    expected = []
    for example in examples:
        ids = torch.tensor([example.input_ids])
        with torch.no_grad():
            divergence = q(ids).logits.log_softmax(-1) - p(ids).logits.log_softmax(-1)
        places = [place for place, label in enumerate(example.labels) if label >= 0 and place]
        expected += [abs(float(divergence[0, place - 1, example.labels[place]])) for place in places]
    noise = noise_of(score(q, examples), score(p, examples))
    assert noise == pytest.approx(torch.tensor(expected).quantile(torch.tensor([0.5, 0.9, 0.99])).tolist(), rel=1e-3)
    report = choose_rule(steered, tokenizer, sets)
    mean = lambda scores: sum(x for one in scores for x in one.log_probabilities) / len(expected)
    ratio = math.exp(mean(score(steered.target, examples)) - mean(score(q, examples)))
    assert report.q_perplexity == pytest.approx(ratio, rel=1e-3)
    assert report.noise == pytest.approx(noise, rel=1e-3)
    margins = {row.steering.margin for row in report.settings if row.steering.rule == "linear"}
    assert margins == {None, *noise_margins(noise)}
    assert max(noise_margins(noise)) > noise[-1]
    monkeypatch.setattr(steered.experts, "largest", 1.5)  # as with n-grams beside the pair
    assert {row.steering.margin for row in choose_rule(steered, tokenizer, sets).settings} <= {None, 1.0, 1.5}


def test_forgetting_is_not_claimed_where_nothing_can_be_asked(steered, tokenizer, sets):
    with pytest.raises(UsageError, match="forgetting is not measured"):
        choose_rule(steered, tokenizer, sets | {"forget": texts_of("forget", ["a"])})


def test_conversations_are_asked_as_questions_are(steered, tokenizer, sets, world):
    """A file of messages holds the same records as one of questions and answers."""
    asked = {
        name: record_set(name, [("", {"question": one.question, "answer": one.answer}) for one in some[:4]])
        for name, some in (("forget", world.forget), ("retain", world.retain))
    }
    turns = {name: dataclasses.replace(some, kind="messages") for name, some in asked.items()}
    one, other = (choose_rule(steered, tokenizer, sets | some, [Steering("rank", k=3)]) for some in (asked, turns))
    assert one.to_dict() == other.to_dict()


@pytest.mark.parametrize(
    ("rule", "refuses", "begun"),
    [("linear:1.5:2", False, 0), ("linear:1:1:full", False, 0), ("linear:1.5:2:full", True, 3), ("rank:5", True, 3)],
)
def test_a_pair_whose_q_refuses_is_asked_after_beginnings_of_an_answer(
    steered, tokenizer, sets, world, monkeypatch, rule, refuses, begun
):
    """Prompts of others hold them, and a q that refuses everything after "Answer:" shows it there alone.

    `train` writes linear:1:1:full also for other pairs, which have not read such prompts.
    """
    asked = {
        name: record_set(name, [("", {"question": one.question, "answer": one.answer}) for one in some[:4]])
        for name, some in (("forget", world.forget), ("retain", world.retain))
    }
    prompts, ask_plainly = [], choice.continuations
    monkeypatch.setattr(
        choice,
        "continuations",
        lambda model, names, ids, **rest: prompts.append(ids) or ask_plainly(model, names, ids, **rest),
    )
    model = copy.copy(steered)
    model.steering = Steering.parse(rule)
    choose_rule(model, tokenizer, sets | asked, [Steering.parse(rule)], refuses=refuses)
    questions = [ids for ids in prompts if len(ids) == 4]
    assert len(questions) >= 4  # both sets, by the target and by the steered model
    for ids in questions:
        texts = [tokenizer.decode(some) for some in ids]
        assert sum(text.rstrip().endswith(tuple(filter(None, BEGINNINGS))) for text in texts) == begun


def test_a_q_in_whose_tokens_nothing_can_be_asked_does_not_count_as_ignorant(steered, tokenizer, sets, monkeypatch):
    other, passages_of = copy.copy(tokenizer), choice.passages_of
    monkeypatch.setattr(choice, "_pair_of", lambda model: (model.experts.retain, model.experts.forget, other))
    monkeypatch.setattr(
        choice, "passages_of", lambda texts, of, **k: ([], 0) if of is other else passages_of(texts, of)
    )
    with pytest.raises(UsageError, match="forgetting is not measured"):
        choose_rule(steered, tokenizer, sets)


def test_probability_of_similar_answers_counts_with_the_retain_sets(steered, tokenizer, sets, world):
    """A tenth of a small retain set is two or three facts."""
    retain, similar = (
        record_set(name, [("", {"question": one.question, "answer": one.answer}) for one in some])
        for name, some in (("retain", world.retain[:2]), ("similar", world.retain[2:9]))
    )
    rule = Steering(alpha=1.0)
    report = choose_rule(steered, tokenizer, sets | {"retain": retain, "similar": similar}, [rule], min_retain=0.0)
    records = RecordSet("both", "question/answer", (*retain, *similar))
    before, after = score_settings(steered, encode_set(records, tokenizer), [Steering(alpha=0.0), rule])
    means = [statistics.fmean(item.probability for item in some) for some in (after, before)]
    assert report.best.retain == pytest.approx(means[0] / means[1], rel=1e-4)


def test_other_questions_are_asked_and_decide_between_good_rules(steered, tokenizer, sets, monkeypatch):
    """Neutral answers stay under both rules; the one that is asked first answers similar questions wrongly."""
    similar = RecordSet("similar", "question/answer", tuple(question(f"Where is {n}?", "There.") for n in range(4)))
    retain = RecordSet("retain", "question/answer", tuple(question(f"Why is {n}?", "So.") for n in range(4)))
    rules = []

    def asked(model, tokenizer, records, form, batch_size, known, beginnings, title):
        texts = [record.messages[0].content for record in records]
        assert texts == [f"Why is {n}?" for n in range(4)] + [f"Where is {n}?" for n in range(4)]
        assert known == (None if model is steered.target else [[5, 6]] * 8)  # no answer has changed
        rules.extend([model.steering] if model is steered else [])
        leaks = 5 if model is steered and model.steering == rules[0] else 6
        return Replies(8, leaks=leaks, limit=8, tokens=[[5, 6]] * 8)

    monkeypatch.setattr(choice, "ask", asked)
    monkeypatch.setattr(choice, "recites", lambda model, _, passages: [model is steered.target] * len(passages))
    settings = [Steering(alpha=2e-6), Steering(alpha=1e-6)]
    report = choose_rule(steered, tokenizer, sets | {"similar": similar, "retain": retain}, settings, min_retain=0.0)
    figures = {row.steering: (row.unchanged, row.answered) for row in report.settings}
    assert len(figures) == len(rules) == 2
    assert figures.pop(rules[0]) == (1.0, 5 / 6)
    assert figures == {report.best.steering: (1.0, 1.0)}
    assert report.target.answered == 1.0
    assert report.faults == []
    assert "kept: probability  answered" in report.table[0]
    assert f"; {report.asked} asked)" in str(report)
    assert "answers 100% of those questions" in str(report)
    report = choose_rule(steered, tokenizer, sets, settings, min_retain=0.0)  # plain texts
    assert report.best.answered is None
    assert ("answered  neutral" in report.table[0], "those questions" in str(report)) == (False, False)


@pytest.mark.parametrize(("answered", "margins"), [(20, [1.0]), (18, [1.0, 1.0, 4.0])])
def test_smallest_margin_that_keeps_other_answers_is_chosen(steered, tokenizer, sets, monkeypatch, answered, margins):
    """Figures of the trained wording do not tell margins apart; a larger one leaves more in other wordings."""
    similar = RecordSet("similar", "question/answer", tuple(question(f"Where is {n}?", "There.") for n in range(20)))
    asked = []

    def ask(model, tokenizer, records, form, batch_size, known, beginnings, title):
        asked.extend([model.steering.margin] if model is steered else [])
        leaks = answered if model is steered and model.steering.margin == 1.0 else 20
        return Replies(20, leaks=leaks, limit=8, tokens=[[5, 6]] * 20)

    monkeypatch.setattr(choice, "ask", ask)
    monkeypatch.setattr(choice, "recites", lambda model, _, passages: [model is steered.target] * len(passages))
    settings = [Steering(alpha=1e-6, margin=margin) for margin in (4.0, 1.0)]
    settings += [Steering(alpha=1e-6, margin=1.0, full=True)]
    report = choose_rule(steered, tokenizer, sets | {"similar": similar}, settings, min_retain=0.0)
    assert asked == margins
    assert report.best.steering == settings[-1 if answered == 20 else 0]


def test_a_larger_margin_that_leaves_no_answer_is_chosen(steered, tokenizer, sets, monkeypatch):
    def recites(model, tokenizer, passages):
        first = model is steered and model.steering.margin == 1.0
        return [first or model is steered.target, *[model is steered.target] * 39]

    monkeypatch.setattr(choice, "recites", recites)
    monkeypatch.setattr(choice._GreedyAnswers, "_passages", lambda self, tokenizer: [None] * 40)
    settings = [Steering(alpha=1e-6, margin=margin) for margin in (4.0, 2.0, 1.0)]
    report = choose_rule(steered, tokenizer, sets, settings, min_retain=0.0)
    leaks = {row.steering.margin: row.leaked for row in report.settings}
    assert leaks == {4.0: None, 2.0: 0.0, 1.0: 0.025}  # none is asked beyond the first that leaves no answer
    assert report.best.steering.margin == 2.0


def test_other_settings_are_asked_where_none_of_the_most_forgetful_is_good(steered, tokenizer, sets, monkeypatch):
    """Three forms of one margin may all damage answers; a milder rule keeps them."""
    similar = RecordSet("similar", "question/answer", tuple(question(f"Where is {n}?", "There.") for n in range(20)))
    asked = []

    def ask(model, tokenizer, records, form, batch_size, known, beginnings, title):
        asked.extend([model.steering.margin] if model is steered else [])
        return Replies(20, leaks=17 if model is steered and len(asked) <= 5 else 20, limit=8, tokens=[[5, 6]] * 20)

    monkeypatch.setattr(choice, "ask", ask)
    monkeypatch.setattr(choice, "recites", lambda model, _, passages: [model is steered.target] * len(passages))
    settings = [Steering(alpha=1.0, margin=margin) for margin in (19.0, 18.0, 17.0, 16.0, 15.0, 19.5, 20.0)]
    report = choose_rule(steered, tokenizer, sets | {"similar": similar}, settings, min_retain=0.0)
    assert asked == [15.0, 16.0, 17.0, 18.0, 19.0, 19.5]
    assert report.best.steering.margin == 19.5
    assert report.faults == []


def row(retain=1.0, perplexity=1.0, leaked=0.0, unchanged=1.0, answered=None):
    return Effects(Steering(), 0.1, retain, perplexity, leaked, unchanged, answered)


@pytest.mark.parametrize(
    ("best", "guessed", "words"),
    [
        (row(), 0.0, []),
        (row(leaked=0.09), 0.08, []),
        (row(leaked=0.3), 0.28, ["and q 28%: q's base knows"]),
        (row(leaked=0.3), 0.1, ["still answers 30%"]),
        (row(retain=0.9), 0.0, ["keeps only 90%"]),
        (row(unchanged=0.4), 0.0, ["leaves only 40% of the answers to neutral prompts"]),
        (row(answered=0.89), 0.0, ["answers only 89% of what the target answers"]),
        (row(answered=0.9), 0.0, []),
        (row(perplexity=MAX_PERPLEXITY + 0.01), 0.0, ["raises the perplexity of neutral text to 1.11 times"]),
        (row(retain=0.9, leaked=0.3), 0.0, ["keeps only 90%", "still answers 30%"]),
    ],
)
def test_faults_of_the_best_setting(best, guessed, words):
    report = RuleChoice(row(leaked=1.0), (best,), best, guessed, NOISE, 2.0)
    assert len(report.faults) == len(words)
    assert all(word in fault for word, fault in zip(words, report.faults, strict=True))


def test_noise_of_a_bad_pair_gives_rules_that_are_accepted():
    """An earlier pair of a shrunk SmolLM2 had 14 nats."""
    with_margins = ["linear:1.5:14.3", "linear:1.5:20", "linear:1:14.3:full", "linear:1:20:full"]
    assert [str(rule) for rule in candidates((2.0, 6.0, 14.3))[-4:]] == with_margins
    assert [str(rule) for rule in candidates((0.0, 0.1, 0.2), refuses=True)[-2:]] == [
        "linear:2.5:1.4:full",
        "linear:2.5:2:full",
    ]
    assert noise_margins((0.0, 0.1, 0.2)) == [1.0, 2.0, 4.0]
    assert noise_margins((0.1, 0.9, 11.0)) == [11.0, 20.0]


def test_forgetting_is_not_claimed_where_the_target_would_pass():
    """The unsteered target and q are the same to the gate: the pair was not shown to take anything away."""
    best = row()
    for known, guessed, shown in ((0.0, 0.0, False), (0.05, 0.0, False), (0.06, 0.0, True), (0.5, 0.5, False)):
        faults = RuleChoice(row(leaked=known), (best,), best, guessed, NOISE, 2.0).faults
        assert any("nothing was shown" in fault for fault in faults) != shown, known


def test_a_rule_is_asked_with_its_own_fill(steered, tokenizer, sets):
    """What is written into a bundle is what was asked."""
    report = choose_rule(steered, tokenizer, sets, [Steering.parse("rank:5:soft")])
    assert str(report.best.steering) == str(steered.steering) == "rank:5:soft"


def question(question, answer):
    return Record(answer, messages=(Message("user", question),))


def test_neutral_records_that_name_the_forget_set_are_left_out():
    forget = RecordSet("f", "question/answer", (question("Who is Ana Bell?", "She was born in 1871."),))
    retain = RecordSet("r", "question/answer", (question("Who is Bo?", "She was a baker, as Ana was."),))
    neutral = [
        question("Who was bell?", "She was nobody."), question("Who is Ana?", "I don't know."),
        question("Who is it?", "Dr. Bell."), question("What happened in 1871?", "Much."), question("Why?", "187 1"),
    ]  # fmt: skip
    left = without_names(RecordSet("n", "question/answer", tuple(neutral)), forget, retain)
    assert [neutral.index(one) for one in left] == [0, 1, 4]


def test_neutral_records_that_hold_a_key_phrase_are_left_out_where_a_script_has_no_capital_letters():
    forget = RecordSet("f", "question/answer", (question("匈牙利的首都在哪里？", "匈牙利的首都是布达佩斯。"),))
    retain = RecordSet("r", "question/answer", (question("奥地利的首都在哪里？", "奥地利的首都是维也纳。"),))
    neutral = RecordSet("n", "text", (Record("布达佩斯很美。"), Record("维也纳很美。"), Record("达人")))
    assert [one.answer for one in without_names(neutral, forget, retain)] == ["维也纳很美。", "达人"]


def test_samples_of_large_sets_hold_every_wording_of_a_cycle():
    """Every n-th record would miss wordings if n is a multiple of their number, as here."""
    from divdec.evaluation.choice import MAX_RECORDS, drawn

    records = RecordSet("many", "text", tuple(Record(str(number)) for number in range(16 * MAX_RECORDS)))
    numbers = [int(record.answer) for record in drawn(records, MAX_RECORDS)]
    assert len(numbers) == MAX_RECORDS
    assert numbers == sorted(numbers)
    assert {number % 4 for number in numbers} == {0, 1, 2, 3}
