"""The demo cut to a few steps in the default suite; the whole of it, with its promises, in the slow one."""

import dataclasses
import json
import time
from pathlib import Path

import pytest

from divdec import DivergenceForCausalLM
from divdec.checkpoint import load_config
from divdec.data.records import read_records
from divdec.runs import RunFolder
from divdec.steering import Steering
from divdec.training.settings import TrainingSettings
from divdec_research.suites.aggregate import aggregate
from divdec_research.suites.results import read_results
from divdec_research.suites.tofu import read_tofu
from divdec_research.world import demo as demo
from divdec_research.world.facts import build_world
from divdec_research.world.models import GAP_AIM, RETAIN_AIM, Shape


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """The demo with models of some thousand parameters that train for a step or two."""
    brief = TrainingSettings(epochs=0.1, learning_rate=1e-3, batch_size=32)
    stages = [field.name for field in dataclasses.fields(demo.Recipe) if field.type == "TrainingSettings"]
    assert len(stages) == 5
    recipe = demo.Recipe(400, Shape(32, 2, 2, 64), Shape(16, 1, 2, 32), **dict.fromkeys(stages, brief))
    monkeypatch.setattr(demo, "RECIPE", recipe)
    world = dataclasses.replace(demo.WORLD, forget_authors=1, retain_authors=2, holdout_authors=1, public_authors=5)
    monkeypatch.setattr(demo, "WORLD", dataclasses.replace(world, passing_authors=5))
    monkeypatch.setattr(demo, "SETTINGS", (Steering(alpha=0.5), Steering(alpha=2.0), Steering("rank", k=3)))
    monkeypatch.setenv("DIVDEC_CACHE", str(tmp_path / "cache"))


def test_a_stopped_demo_is_given_again_and_writes_what_it_promises(quick, tmp_path, capsys, monkeypatch):
    from divdec.cli import main
    from divdec_research.world import demo as run

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(run, "_print_table", stop)
        assert main(["world", "--json", "--output", str(tmp_path / "out")]) == 130
    capsys.readouterr()
    assert main(["world", "--json", "--output", str(tmp_path / "out")]) == 0
    output = capsys.readouterr()
    result = json.loads(output.out)
    assert {"target", "retrain", "steered", "recommended", "seconds", "bundle"} <= set(result)
    for row in (result["target"], result["retrain"], *result["steered"].values()):
        assert set(row) == {"forget", "retain", "holdout", "forget_reworded", "retain_reworded"}
        assert all(0 <= accuracy <= 1 for accuracy in row.values())
    assert list(result["steered"]) == ["linear:0.5", "linear:2", "rank:3"]
    assert "target: in the cache" in output.err
    # Models of a step or two forget nothing, and nothing is recommended.
    assert result["recommended"]["reached"] is False
    assert "No rule closes 85% of the gap" in output.err
    assert "→" not in output.err
    model = DivergenceForCausalLM.from_pretrained(result["bundle"])
    assert str(model.steering) == result["recommended"]["setting"]
    assert model.config.single_turn
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == result
    assert_it_can_be_tried_on(tmp_path / "out")


def assert_it_can_be_tried_on(folder):
    """The README's commands name these files and models."""
    world = build_world(dataclasses.replace(demo.WORLD, seed=0))
    for name in ("forget", "retain", "holdout"):
        read = [(record.messages[0].content, record.answer) for record in read_records(str(folder / f"{name}.jsonl"))]
        assert read == [(question.question, question.answer) for question in getattr(world, name)]
    asked = (folder / "questions.txt").read_text().splitlines()
    assert len(asked) == len({q.subject for q in (*world.forget, *world.retain)}) == 3
    assert set(asked) <= {q.question for q in (*world.forget, *world.retain)}
    assert len(read_tofu(folder / "tofu", "forget01", None, None).sets["forget"]) > 0
    for name in ("target", "base", "retrained"):
        assert load_config(folder / name).model_type == "llama"


def test_demo_rejects_output_folder_with_other_files(quick, tmp_path, capsys):
    from divdec.cli import main

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("x")
    assert main(["world", "--output", str(tmp_path / "mine")]) == 2
    assert "not an earlier result" in capsys.readouterr().err
    with RunFolder.open(tmp_path / "out", "demo", {}, {}):
        assert main(["world", "--output", str(tmp_path / "out")]) == 2
    assert "another `divdec demo` is running in" in capsys.readouterr().err


@pytest.mark.slow
def test_demo_seed_changes_world(quick, tmp_path):
    for seed in (0, 1):
        demo.run_demo(seed, tmp_path / str(seed), quiet=True)
    assert (tmp_path / "0" / "forget.jsonl").read_text() != (tmp_path / "1" / "forget.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_demo_reaches_documented_forgetting_and_retention(seed, tmp_path, monkeypatch):
    """At least 85 % of the gap closed, at least 95 % of the retain accuracy kept, at every seed."""
    monkeypatch.setenv("DIVDEC_CACHE", str(tmp_path / "cache"))
    started = time.perf_counter()
    result = demo.run_demo(seed, tmp_path / "out", quiet=True)
    print(f"seed {seed}: {result['recommended']}, {time.perf_counter() - started:.0f} s")
    assert result["target"]["forget"] > 0.9
    assert result["retrain"]["forget"] < 0.2
    assert result["recommended"]["gap_closed"] >= GAP_AIM
    assert result["recommended"]["retain_kept"] >= RETAIN_AIM
    assert_the_suite_tells_the_models_apart(tmp_path / "out", tmp_path / "runs")


def assert_the_suite_tells_the_models_apart(folder, runs):
    """TOFU's suite on what the demo leaves: Agg near 0 for the target, high for the retrained and steered models."""
    from divdec.cli import main

    options = ["--data", f"{folder}/tofu", "--split", "forget01", "--holdout", f"{folder}/tofu/holdout01.json"]
    options += ["--fluency", "none", "--retain-results", f"{runs}/retrained"]
    for name in ("retrained", "target", "bundle"):
        given = options if name != "retrained" else options[:-2]
        assert main(["eval", "tofu", f"{folder}/{name}", *given, "--output", f"{runs}/{name}"]) == 0
    target, retrained, steered = (read_results(runs / name).figures for name in ("target", "retrained", "bundle"))
    scores = [
        aggregate(one, target, retrained, "openunlearning", fluency=False).values["agg"]
        for one in (target, retrained, steered)
    ]
    assert scores[0] < 0.1
    assert min(scores[1:]) > 0.65  # 0.69 at seed 1 on processors with AVX-512, whose rounding differs


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_calibrate_writes_a_rule_that_forgets_or_refuses(tmp_path, monkeypatch, capsys):
    """`train` and `calibrate` on the world's data, then every question of the forget set."""
    from divdec.cli import main

    monkeypatch.setenv("DIVDEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert main(["world", "--output", "demo"]) == 0
    sets = ["--forget", "demo/forget.jsonl", "--retain", "demo/retain.jsonl"]
    options = ["--recipe", "full-retain", "--lora-rank", "0", "--lr", "1e-3", "--epochs", "10"]
    train = ["train", *options, "--base", "demo/base", *sets, "--target", "demo/target", "--output", "runs/first"]
    # These models' pairs also change what they say about the rest of their small world, and train says so.
    assert main(train) in (0, 3)
    capsys.readouterr()
    code = main(["calibrate", "runs/first/bundle", *sets, "--holdout", "demo/holdout.jsonl", "--write", "--json"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == (0 if result["written"] else 3)
    assert result["written"] == (result["faults"] == [])
    asked = [one for one in build_world(demo.WORLD).forget if one.phrasing == 0]
    Path("questions.txt").write_text("".join(f"{one.question}\n" for one in asked))
    assert main(["generate", "runs/first/bundle", "--file", "questions.txt", "--max-new-tokens", "32"]) == 0
    answers = capsys.readouterr().out.splitlines()
    leaks = sum(one.fact in answer for answer, one in zip(answers, asked, strict=True))
    assert not result["written"] or leaks / len(asked) <= 0.1
    assert result["asked"] >= len(asked)
    best = next(row for row in result["settings"] if row["steering"] == result["best"])
    assert not result["written"] or best["leaked"] <= 0.05 + result["guessed"]
