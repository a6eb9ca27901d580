"""The attack on replies before and after steering: what it reads from them, and what servers let it read."""

import argparse
import json

import pytest

from benchmarks.attacks import difference as attack
from divdec.data.records import Message, Record, write_records
from support.served import bundle_of, engine_of, serving


@pytest.fixture(scope="module")
def demo(models, world, tmp_path_factory):
    """Output of a demo: three sets of facts, and a bundle."""
    folder = tmp_path_factory.mktemp("demo")
    for name, facts in (("forget", world.forget), ("retain", world.retain), ("unlisted", world.holdout)):
        records = [Record(one.answer, messages=(Message("user", one.question),)) for one in facts[:6]]
        write_records(folder / f"{name}.jsonl", records)
    (folder / "bundle").symlink_to(bundle_of(models, "attacked", "linear:3"))
    return folder


@pytest.fixture
def options(demo, tmp_path, monkeypatch):
    monkeypatch.setattr(attack, "NEUTRAL", attack.NEUTRAL[:3])
    monkeypatch.setattr(attack, "LENGTH", 6)
    monkeypatch.setattr(attack, "SAMPLES", 2)
    return argparse.Namespace(
        demo=demo, output=tmp_path / "out", student=None, rules=["linear:3"], before=None, after=None, name="servers"
    )


def test_every_token_has_its_word(tokenizer):
    ids = tokenizer("The city of Paris, France.", add_special_tokens=False)["input_ids"]
    words = attack.words_of(tokenizer, ids)
    assert len(words) == len(ids)
    assert list(dict.fromkeys(word for word in words if word)) == ["The", "city", "of", "Paris", "France"]


@pytest.mark.slow
def test_all_models_are_attacked_with_all_views(options, capsys):
    attack.run(options)
    results = json.loads((options.output / "results.json").read_text())
    assert set(results) == {"linear:3", "n-grams", "registry"}
    for own in results.values():
        assert set(own) == set(attack.VIEWS)
        assert all(0 <= value <= 1 for figures in own.values() for value in figures.values())
    assert "| linear:3 |" in capsys.readouterr().out


@pytest.mark.slow
def test_servers_that_do_not_differ_give_nothing_away(options, models):
    """Whether they allow log-probabilities or text only."""
    for level, views in (("full", attack.VIEWS), ("off", attack.TEXTS)):
        with serving([engine_of(models / "attacked")], logprobs=level) as url:
            options.before = options.after = url
            options.name = level
            attack.run(options)
        results = json.loads((options.output / "results.json").read_text())[level]
        assert set(results) == set(views)
        if level == "off":
            del results["sampled"]  # drawn without a seed, so differences are chance
        assert all(figures == {"auc": 0.5, "named": 0.0, "tokens": 0.0} for figures in results.values())


def test_column_1_is_what_a_server_with_top_1_shows(options, models, tokenizer):
    """The attack reads log-probabilities by echo, which top-1 refuses; a client asks token by token."""
    with serving([engine_of(models / "attacked")]) as url, attack.Client(url, tokenizer) as client:
        (full, *_) = client.ask_all(attack.read_questions(options.demo)[:1])
    with serving([engine_of(models / "attacked")], logprobs="top-1") as url, attack.Client(url, tokenizer) as client:
        prompt, ids = full["prompt"], full["ids"]
        assert client.complete(prompt, echo=True, logprobs=1) is None
        fields = {"max_tokens": 1, "temperature": 0, "logprobs": 1, "return_tokens_as_token_ids": True}
        for index, top in enumerate(full["top"]):
            (choice,) = client.complete([*prompt, *ids[:index]], **fields)
            shown = {attack.token_id(name): value for name, value in choice["logprobs"]["top_logprobs"][0].items()}
            assert shown == pytest.approx(dict(top[:1]), abs=1e-4)


def test_figures_of_an_attack_that_finds_everything_or_nothing(tokenizer):
    questions = [attack.AttackQuestion("q", "Paris"), *[attack.AttackQuestion("q", None)] * 3]
    ids = tokenizer("It is Paris.", add_special_tokens=False)["input_ids"]
    secret = [float(word == "Paris") for word in attack.words_of(tokenizer, ids)]
    nothing = attack.Guess([0.0] * len(ids), 0.0, "It")
    for right, expected in ((attack.Guess(secret, 1.0, "Paris"), 1.0), (nothing, 0.0)):
        figures = attack.figures(questions, [{"ids": ids}] * 4, [right, nothing, nothing, nothing], tokenizer)
        assert figures == {"auc": (1 + expected) / 2, "named": expected, "tokens": expected}


def test_an_empty_reply_is_no_clue(tokenizer):
    before = {"ids": [], "text": "", "samples": [""], "own": [], "top": []}
    assert {attack.guess(view, before, before, tokenizer).score for view in attack.VIEWS} == {0.0}


def test_a_token_that_is_not_shown_counts_as_the_least_likely_that_is():
    before = {"ids": [7], "own": [-0.1], "top": [[(7, -0.1)]]}
    now = {"own": [-8.0], "top": [[(1, -0.5), (2, -2.0), (7, -8.0)]]}
    drops = {view: attack.drop(view, before, now, 0) for view in ("echo", "20", "rounded:0.5", "1")}
    assert drops == pytest.approx({"echo": 7.9, "20": 7.9, "rounded:0.5": 8.0, "1": 0.4})
