"""`divdec eval` and `divdec calibrate` as a user meets them, on real TOFU and small models."""

import json

import pytest
import torch

from divdec import DivergenceForCausalLM, UsageError, write_bundle
from divdec.evaluation.run import _model_runs, parse_sweep
from divdec.evaluation.scoring import EvaluatedModel
from divdec_research.suites import tofu as tofu_suite
from divdec_research.suites.results import read_results
from divdec_research.suites.settings import TofuSettings


def main(*arguments):
    from divdec.cli import main

    return main([str(argument) for argument in arguments])


@pytest.fixture
def steered(shared, tmp_path):
    models = shared / "oracle/models"
    return write_bundle(
        tmp_path / "bundle",
        target=str(models / "full"),
        retain_auxiliary=str(models / "retain90"),
        forget_auxiliary=str(models / "full"),
        steering="linear:1",
    )


@pytest.fixture
def tofu(shared):
    return (
        "--data", shared / "data/tofu", "--split", "forget01", "--limit", 2, "--fluency", "none",
        "--holdout", shared / "oracle/holdout01.json",
    )  # fmt: skip


def test_default_fluency_classifier_may_be_missing(steered, tofu, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tofu_suite, "FLUENCY_CLASSIFIER", "nobody/nothing")
    tofu = tuple(option for option in tofu if option not in ("--fluency", "none"))
    assert main("eval", "tofu", steered, *tofu, "--output", tmp_path / "out", "--json") == 0
    captured = capsys.readouterr()
    assert captured.err.count("fluency is left out: its classifier nobody/nothing cannot be loaded") == 1
    result = json.loads(captured.out)["figures"]
    assert result["model_utility"] is not None
    assert result["forget_Q_A_gibberish"] is None
    asked = ("--fluency", "nobody/nothing")
    assert main("eval", "tofu", steered, *tofu, *asked, "--output", tmp_path / "asked") == 2
    assert "fluency classifier 'nobody/nothing' cannot be loaded" in capsys.readouterr().err
    assert not (tmp_path / "asked").exists()


def test_sweep_writes_one_folder_per_setting(steered, tofu, tmp_path, capsys):
    out = tmp_path / "out"
    sweep = ("--sweep", "linear:0,1", "rank:5")
    assert main("eval", "tofu", steered, *tofu, *sweep, "--output", out, "--openunlearning", "--json") == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["steering"] for line in printed] == ["linear:0", "linear:1", "rank:5"]
    assert sorted(path.name for path in out.iterdir()) == ["linear-0", "linear-1", "rank-5", "run.json"]
    result = read_results(out / "linear-1")
    assert result.figures == printed[1]["figures"]
    assert result.split == "forget01"
    assert result.reasons["forget_Q_A_gibberish"] == "there is no fluency classifier (--fluency)"
    summary = json.loads((out / "linear-1/TOFU_SUMMARY.json").read_text())
    assert summary["forget_Q_A_Prob"] == result.figures["forget_Q_A_Prob"]
    assert "mia_loss.forget" not in summary
    for line in (out / "linear-1/items.jsonl").read_text().splitlines():
        assert {"metric", "index"} < json.loads(line).keys()
    # Alone, each setting gives what it gave in the sweep.
    assert main("eval", "tofu", steered, *tofu, "--output", tmp_path / "alone", "--json") == 0
    alone = json.loads(capsys.readouterr().out)["figures"]
    for metric, value in printed[1]["figures"].items():
        assert alone[metric] == (None if value is None else pytest.approx(value, rel=1e-5, abs=1e-6)), metric


def test_multiple_models_with_retrained_reference(shared, steered, tofu, tmp_path, capsys):
    models = shared / "oracle/models"
    out = tmp_path / "out"
    assert main("eval", "tofu", models / "full", models / "retain90", *tofu, "--output", out) == 0
    assert "forget_truth_ratio" in capsys.readouterr().out
    assert main("eval", "tofu", steered, *tofu, "--retain-results", out / "retain90", "--output", out / "s") == 0
    assert read_results(out / "s").figures["forget_quality"] == pytest.approx(1.0)
    assert read_results(out / "s").figures["privleak"] == pytest.approx(0, abs=1e-6)


def test_result_folders_are_named_after_models(shared, tmp_path):
    paths = [tmp_path / "a" / "one", tmp_path / "b" / "one", tmp_path / "two"]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(shared / "oracle/models/full")
    settings = TofuSettings(tuple(map(str, paths)), data="", output="out")
    names = [run.name for run in _model_runs(settings, tmp_path)]
    assert len(set(names)) == 3
    assert [name.partition("-")[0] for name in names] == ["one", "one", "two"]
    assert names[2] == "two"
    with pytest.raises(UsageError, match="given twice"):
        _model_runs(TofuSettings((str(paths[0]),) * 2, data="", output="out"), tmp_path)


def test_interrupted_evaluation_is_resumed(steered, tofu, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    monkeypatch.setattr(tofu_suite, "continuations", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main("eval", "tofu", steered, *tofu, "--output", out) == 130
    monkeypatch.undo()
    assert read_results(out).figures["extraction_strength"] > 0
    assert main("eval", "tofu", steered, *tofu, "--batch-size", 8, "--max-length", 400, "--output", out) == 2
    assert "unfinished run with other settings" in capsys.readouterr().err
    monkeypatch.setattr(EvaluatedModel, "scores", None)  # the pass that was made is not made again
    assert main("eval", "tofu", steered, *tofu, "--output", out) == 0
    assert read_results(out).figures["forget_Q_A_ROUGE"] >= 0
    assert main("eval", "tofu", steered, *tofu, "--output", out) == 2
    assert "--overwrite" in capsys.readouterr().err
    monkeypatch.undo()
    (out / "TOFU_EVAL.json").write_text("{}")  # of an earlier run with --openunlearning
    assert main("eval", "tofu", steered, *tofu, "--output", out, "--overwrite") == 0
    assert not (out / "TOFU_EVAL.json").exists()


def test_leak_evaluation(shared, steered, tmp_path, capsys):
    arguments = ("eval", "leak", steered, "--data", shared / "data/tofu/forget01.json", "--limit", 2)
    assert main(*arguments, "--attacks", 10, "--samples", 2, "--output", tmp_path / "out", "--json") == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert figures.keys() >= {"leak@1-attack", "leak@10-attack", "leak@1-sample", "leak@2-sample"}
    assert main(*arguments, "--attack-prompts", "none", "--output", tmp_path / "o2") == 2
    assert "nothing to measure" in capsys.readouterr().err
    assert main(*arguments, "--judge", "endpoint", "--output", tmp_path / "o3") == 2
    assert "--endpoint URL" in capsys.readouterr().err


def test_overwriting_removes_the_earlier_result_and_no_other(shared, steered, tmp_path):
    model, out = tmp_path / "full[1]", tmp_path / "out"
    model.symlink_to(shared / "oracle/models/full")
    leak = ("eval", "leak", "--data", shared / "data/tofu/forget01.json", "--limit", 1)
    assert main(*leak, steered, "--sweep", "linear:1,2", "--attacks", 2, "--output", out) == 0
    assert main(*leak, steered, "--attacks", 2, "--output", out / "other") == 0
    for attacks in (2, 4):
        assert main(*leak, model, steered, "--attacks", attacks, "--output", out, "--overwrite") == 0
    folders = [out / name for name in ("bundle", "full[1]", "other")]
    assert sorted(path.parent for path in out.rglob("summary.json")) == folders
    assert "leak@4-attack" not in read_results(folders[2]).figures
    for folder in folders[:2]:
        assert read_results(folder).figures["leak@4-attack"] is not None


def test_a_refused_evaluation_leaves_its_folder_free(shared, steered, tmp_path, capsys):
    leak = (
        "eval",
        "leak",
        steered,
        "--data",
        shared / "data/tofu/forget01.json",
        "--limit",
        1,
        "--output",
        tmp_path / "o",
    )
    assert main(*leak, "--attack-prompts", tmp_path / "absent.jsonl") == 2
    assert "absent.jsonl" in capsys.readouterr().err
    assert main(*leak, "--attacks", 1) == 0


def test_calibrate_finds_setting_matching_retrained_model(shared, steered, tmp_path, capsys):
    """With P = p the setting linear:1 gives exactly q, whose own figures are the reference."""
    data = shared / "data/tofu"
    (tmp_path / "retain.json").write_text("\n".join((data / "full.json").read_text().splitlines()[:30]))
    arguments = (
        "calibrate", steered, "--forget", data / "forget01.json", "--retain", tmp_path / "retain.json",
        "--holdout", shared / "oracle/holdout01.json", "--limit", 20, "--sweep", "linear:0.25,0.5,1,2", "rank:5",
        "--max-retain-drop", "0.05",
    )  # fmt: skip
    assert main(*arguments, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["best"] == "linear:1"
    assert result["faults"] == []
    rows = result["settings"]
    best = next(row for row in rows if row["steering"] == "linear:1")
    assert best["leaked"] == result["guessed"]
    assert rows[2]["distance"] == pytest.approx(0, abs=1e-3)
    assert rows[0]["distance"] > 0.1
    assert main(*arguments[:-5], "--sweep", "linear:2", "--write") == 3
    assert "linear:2 is the mildest of its rule" in capsys.readouterr().err
    assert str(DivergenceForCausalLM.from_pretrained(steered).steering) == "linear:1"
    assert main(*arguments, "--write") == 0
    assert "→ linear:1" in capsys.readouterr().out
    model = DivergenceForCausalLM.from_pretrained(steered)
    assert str(model.steering) == "linear:1"
    assert "| steering | linear:1 |" in (steered / "README.md").read_text()
    with torch.no_grad():
        model(input_ids=torch.tensor([[1, 2, 3]]))
    for share in ("2", "1", "-0.1", "nan", "2%"):
        assert main(*arguments[:-1], share) == 2
        assert "max-retain-drop" in capsys.readouterr().err
    forget = data / "forget01.json"
    assert main("calibrate", steered, "--forget", forget, "--retain", forget, "--holdout", forget) == 2
    assert "are also in the retain set" in capsys.readouterr().err


def test_sweep_specs_are_parsed():
    result = parse_sweep(["linear:0.5,1", "rank:1,20", "rank:5:soft"])
    assert [str(setting) for setting in result] == ["linear:0.5", "linear:1", "rank:1", "rank:20", "rank:5:soft"]
    with pytest.raises(UsageError, match="twice"):
        parse_sweep(["linear:1,1.0"])
    with pytest.raises(UsageError, match="not a number"):
        parse_sweep(["linear:a"])


class TestRejectsInvalidInput:
    def refused(self, capsys, *arguments, says):
        assert main(*arguments) == 2
        error = capsys.readouterr().err
        assert says in error
        assert "Traceback" not in error

    def test_incompatible_evaluation_options(self, shared, steered, tofu, tmp_path, capsys):
        plain, out = shared / "oracle/models/full", ("--output", tmp_path / "out")
        self.refused(
            capsys, "eval", "tofu", plain, *tofu, *out, "--sweep", "linear:1", says="is a plain checkpoint, not steered"
        )
        self.refused(
            capsys,
            "eval",
            "tofu",
            plain,
            *tofu,
            *out,
            "--steering",
            "linear:1",
            says="is a plain checkpoint, not steered",
        )
        self.refused(capsys, "eval", "tofu", steered, *tofu, *out, "--sweep", "linear:x", says="not a number")
        self.refused(capsys, "eval", "tofu", steered, *tofu, *out, "--steering", "rank:9999", says="between 1 and")
        self.refused(capsys, "eval", "tofu", steered, *tofu[2:], "--data", tmp_path, *out, says="does not exist")
        self.refused(capsys, "eval", "tofu", tmp_path / "no", *tofu, *out, says="is not a folder")
        self.refused(
            capsys, "eval", "tofu", steered, *tofu, *out, "--limit", "0", says="--limit is given more than once"
        )
        self.refused(capsys, "eval", "tofu", steered, "--data", "d", *out, "--limit", "0", says="--limit is 0")
        for suite, option, value in (
            ("tofu", "--attacks", 5), ("muse", "--seed", 1), ("leak", "--retain-results", "r"),
            ("muse", "--system-prompt", ""),
        ):  # fmt: skip
            says = f"Unknown option: {option}"
            self.refused(capsys, "eval", suite, steered, "--data", "d", option, value, *out, says=says)
        assert not (tmp_path / "out").exists()
