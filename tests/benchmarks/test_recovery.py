"""The measured limits: that attacks are aligned with what they ask for, and that all of it runs on tiny models."""

import argparse
import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.attacks import recovery as attacks
from benchmarks.attacks import recovery as limits
from divdec.errors import UsageError
from divdec.model.modeling import DivergenceForCausalLM
from divdec.training.settings import TrainingSettings
from divdec_research.compare.benchmark import load_benchmarks
from divdec_research.compare.settings import CompareSettings, Trial
from divdec_research.world import demo as demo
from divdec_research.world.facts import build_world
from divdec_research.world.models import Recipe, Shape

SMALL = dataclasses.replace(
    demo.WORLD, forget_authors=3, retain_authors=3, holdout_authors=1, public_authors=12, passing_authors=5
)


@pytest.fixture(scope="module")
def small_world():
    return build_world(SMALL)


class TestPromptAttacks:
    def test_attack_prompts_do_not_contain_the_fact(self, small_world, tokenizer):
        for form in attacks.FORMS:
            tried = attacks.prompt_attacks(small_world, tokenizer, form, 5, 0)
            assert tried
            assert all(attack.prompts for attack in tried)
            told = [
                attack for attack in tried if any(attack.fact in tokenizer.decode(prompt) for prompt in attack.prompts)
            ]
            assert told == []

    def test_templates_give_requested_count_starting_with_plain_question(self, small_world, tokenizer):
        tried = attacks.prompt_attacks(small_world, tokenizer, "templates", 5, 0)
        assert all(len(attack.prompts) == 5 for attack in tried)
        plain = attacks.prompt_attacks(small_world, tokenizer, "as trained", 5, 0)
        assert [attack.prompts[0] for attack in tried] == [attack.prompts[0] for attack in plain]

    def test_first_words_attack_extends_question_prompt(self, small_world, tokenizer):
        plain = attacks.prompt_attacks(small_world, tokenizer, "as trained", 1, 0)
        begun = attacks.prompt_attacks(small_world, tokenizer, "first words", 1, 0)
        for before, after in zip(plain, begun, strict=True):
            assert after.prompts[0][: len(before.prompts[0])] == before.prompts[0]
            assert len(after.prompts[0]) > len(before.prompts[0])

    def test_half_fact_attack_asks_for_last_word(self, small_world, tokenizer):
        halves = attacks.prompt_attacks(small_world, tokenizer, "half the fact", 1, 0)
        assert all(" " not in attack.fact for attack in halves)
        whole = [asked.fact for asked in small_world.forget if asked.phrasing == 0 and " " in asked.fact]
        assert [fact.rsplit(" ", 1)[1] for fact in whole] == [attack.fact for attack in halves]

    def test_prose_has_no_chat_layout(self, small_world, tokenizer):
        special = set(tokenizer.all_special_ids)
        for attack in attacks.prompt_attacks(small_world, tokenizer, "as prose", 1, 0):
            assert special.isdisjoint(attack.prompts[0])

    def test_each_output_is_compared_with_its_own_fact(self, small_world, tokenizer, monkeypatch):
        """A fact told at the first of its prompts must not shift what later facts are compared with."""
        tried = attacks.prompt_attacks(small_world, tokenizer, "templates", 4, 0)
        found = []
        for place, attack in enumerate(tried):
            answers = [tokenizer("nothing")["input_ids"]] * 4
            if place % 2:
                answers[place % 4] = tokenizer(attack.fact)["input_ids"]
            found += answers
        monkeypatch.setattr(attacks, "continuations", lambda *_, **__: found)
        assert attacks.leaked_facts(None, tokenizer, tried) == [bool(place % 2) for place in range(len(tried))]


class TestCandidates:
    def test_candidate_ranks_match_hand_computed_values(self):
        found = attacks.share_at_ends([[0.0, -1.0, -2.0], [0.0, -1.0, -2.0], [-1.0, 0.0, -2.0, -3.0]], [0, 2, 0])
        assert found["top"] == pytest.approx(1 / 3)
        assert found["bottom"] == pytest.approx(1 / 3)
        assert found["place"] == pytest.approx((0 + 1 + 1 / 3) / 3)
        assert found["chance"] == pytest.approx((1 / 3 + 1 / 3 + 1 / 4) / 3)

    def test_the_true_answer_is_among_the_candidates(self, small_world, tokenizer):
        asked = attacks.candidate_questions(small_world, tokenizer)
        assert len(asked) == SMALL.forget_authors * len(attacks.INVENTORIES)
        truths = {question.answer for question in small_world.forget}
        for choice in asked:
            example = choice.examples[choice.true]
            answer = tokenizer.decode(example.input_ids[example.prompt_length :], skip_special_tokens=True)
            assert answer in truths


class TestRelearning:
    @pytest.mark.parametrize("attack", attacks.RELEARNING)
    def test_relearning_and_test_questions_are_disjoint(self, small_world, attack):
        parts = attacks.split_questions(small_world, attack, 3)
        assert parts.shown
        assert parts.asked
        assert not {q.answer for q in parts.shown} & {q.answer for q in parts.asked}
        shown, asked = ({q.subject for q in some} for some in (parts.shown, parts.asked))
        assert (shown == asked) is (attack == "same people")
        assert attacks.split_questions(small_world, attack, 3) == parts

    def test_seed_changes_relearning_questions(self, small_world):
        assert len({attacks.split_questions(small_world, "same people", seed).shown for seed in range(6)}) > 1


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """The demo with models of some thousand parameters, and one student and one baseline of a step or two."""
    brief = TrainingSettings(epochs=0.1, learning_rate=1e-3, batch_size=32)
    stages = [field.name for field in dataclasses.fields(Recipe) if field.type == "TrainingSettings"]
    monkeypatch.setattr(
        demo, "RECIPE", Recipe(400, Shape(32, 2, 2, 64), Shape(16, 1, 2, 32), **dict.fromkeys(stages, brief))
    )
    monkeypatch.setattr(demo, "WORLD", SMALL)
    few(monkeypatch, "distilled", "GradDiff")
    monkeypatch.setenv("DIVDEC_CACHE", str(tmp_path / "cache"))
    for name, value in (("PROMPTS", 2), ("SAMPLES", 2), ("STEPS", (0, 1, 2))):
        monkeypatch.setattr(limits, name, value)
    return argparse.Namespace(output=str(tmp_path / "limits"), seeds=1, parts=limits.PARTS, rate=5e-4)


def few(monkeypatch, *names):
    trials = {
        "distilled": Trial("distill", (("learning_rate", 1e-3), ("epochs", 1.0))),
        "GradDiff": Trial("grad-diff", (("learning_rate", 1e-3), ("epochs", 1.0))),
    }
    monkeypatch.setattr(limits, "CHECKPOINTS", {name: trials[name] for name in names})


@pytest.mark.slow
def test_selected_limits_experiments_run_and_resume(quick, monkeypatch):
    few(monkeypatch, "GradDiff")
    monkeypatch.setattr(limits, "RELEARNING", {"same people": "…"})
    monkeypatch.setattr(limits, "STEPS", (0, 1))
    quick.parts = ("candidates", "relearning")
    said = []
    found = limits.run_limits(quick, said.append)
    assert set(found[0]) == {"candidates", "relearning"}
    assert set(found[0]["candidates"][limits.STEERED]) == set(attacks.STRENGTHS)
    rows = found[0]["relearning"]["same people"]
    assert list(rows) == ["target", "retrain", "GradDiff"]
    assert all([row["step"] for row in of] == [0, 1] for of in rows.values())
    assert len(limits.tables(found, quick.parts)) == 2
    assert json.loads(json.dumps(found)) == found
    said.clear()
    assert limits.run_limits(quick, said.append) == found
    assert not [line for line in said if line.startswith("seed 0")]  # nothing was measured twice
    weights_of_a_bundle(quick, monkeypatch)


def weights_of_a_bundle(quick, monkeypatch):
    """What shall be steered is a bundle; with a changed auxiliary it is an error, never the target."""
    (benchmark,) = load_benchmarks(CompareSettings(output=quick.output, seeds=1), lambda line: None)
    targets = limits.AttackTargets(benchmark, Path(quick.output) / "seed-0", lambda line: None)
    for name in (*limits.BUNDLES, limits.NGRAM):
        assert isinstance(targets.load(name), DivergenceForCausalLM)
    place = targets.path(limits.STEERED)
    weights = benchmark.forget_auxiliary / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    monkeypatch.setattr(limits.AttackTargets, "path", lambda self, name: place)
    with pytest.raises(UsageError, match="has changed"):
        targets.load(limits.STEERED)


@pytest.mark.slow
def test_all_limits_experiments_run(quick):
    found = limits.run_limits(quick, lambda line: None)
    assert set(found[0]) == set(limits.PARTS)
    assert list(found[0]["prompts"]) == [
        "target", "retrain", "p alone", limits.STEERED, "rank:30", limits.NGRAM, "distilled",
    ]  # fmt: skip
    for of_attack in found[0]["relearning"].values():
        assert set(of_attack) == {"target", "retrain", "distilled", "GradDiff"}
    text = "\n".join(limits.tables(found, quick.parts))
    assert text.count("**") == 2 * (2 + len(attacks.RELEARNING))
