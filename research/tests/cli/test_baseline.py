"""`divdec baseline` as a user meets it."""

import dataclasses
import json
import signal

import pytest
import torch
from transformers import AutoModelForCausalLM

from divdec.cli import main
from divdec_research.baselines.settings import HelpedSettings
from divdec_research.baselines.table import METHODS
from divdec_research.world.models import Shape, new_model
from support.stopping import stopping_at

QUICK = ("--epochs", "2", "--batch-size", "2", "--gradient-accumulation", "1", "--precision", "float32")


def verb(*arguments):
    return main(["baseline", *map(str, arguments)])


@pytest.fixture(scope="module")
def given(world, tokenizer, tmp_path_factory):
    """A target and two sets, as options."""
    folder = tmp_path_factory.mktemp("given")
    new_model(Shape(32, 3, 2, 64), tokenizer, seed=0).save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    for name in ("forget", "retain"):
        rows = [{"question": one.question, "answer": one.answer} for one in getattr(world, name)[:4]]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {
        "--target": folder / "target",
        "--forget": folder / "forget.jsonl",
        "--retain": folder / "retain.jsonl",
    }


def options(given, **changed):
    return [text for pair in {**given, **changed}.items() for text in pair]


def test_method_writes_model_and_run_record(given, tmp_path, capsys):
    output = tmp_path / "npo"
    command = ("npo", *options(given), "--output", output, *QUICK, "--beta", "0.2", "--lr", "1e-3")
    assert verb(*command, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    record = json.loads((output / "run.json").read_text())
    assert record == printed
    assert record["status"] == "finished"
    assert record["method"] == "npo"
    assert record["settings"]["beta"] == 0.2
    assert record["settings"]["seed"] == 0
    assert record["forget_set"].startswith("forget (sha256 ")
    assert record["versions"]["torch"] == torch.__version__
    assert record["seconds"] > 0
    assert record["notes"] == []
    assert {path.name for path in output.iterdir()} == {"run.json", "model"}
    model = AutoModelForCausalLM.from_pretrained(record["model"])
    before = AutoModelForCausalLM.from_pretrained(given["--target"])
    assert not torch.equal(model.lm_head.weight, before.lm_head.weight)
    # A second run would lose the first.
    assert verb(*command) == 2
    assert "is not empty; give --overwrite" in capsys.readouterr().err
    assert verb(*command, "--overwrite", "--seed", "1") == 0
    assert f"model: {output / 'model'}" in capsys.readouterr().out
    other = AutoModelForCausalLM.from_pretrained(output / "model")
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)


def test_command_line_overrides_config_file_options(given, tmp_path, capsys):
    lines = [f"{name.lstrip('-')}: {value}" for name, value in given.items()]
    lines += ["epochs: 1.0", "layer: 0", "alpha: 7.0", "precision: float32"]
    (tmp_path / "run.yaml").write_text("\n".join(lines))
    command = ("rmu", "--config", tmp_path / "run.yaml", "--output", tmp_path / "out", "--alpha", "8")
    assert verb(*command, "--json") == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert (settings["layer"], settings["alpha"], settings["coefficient"]) == (0, 8.0, 20.0)


def test_killed_run_resumes_to_same_weights(given, tmp_path, capsys, monkeypatch):
    def command(name):
        return ("rmu", *options(given), "--output", tmp_path / name, *QUICK, "--layer", "1")

    assert verb(*command("whole")) == 0
    with stopping_at(2, signal.SIGTERM):
        assert verb(*command("cut")) == 2
    assert "interrupted at step 3; the same command resumes it" in capsys.readouterr().err
    assert json.loads((tmp_path / "cut" / "run.json").read_text())["status"] == "running"
    assert not (tmp_path / "cut" / "model").exists()
    assert verb(*command("cut"), "--alpha", "3") == 2
    assert "unfinished run with other settings" in capsys.readouterr().err
    assert verb(*command("cut"), "--json") == 0
    assert "resumed" in json.loads(capsys.readouterr().out)["notes"][0]
    found = [AutoModelForCausalLM.from_pretrained(tmp_path / name / "model").state_dict() for name in ("whole", "cut")]
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)
    assert not list((tmp_path / "cut").glob(".*"))


def test_non_finite_baseline_loss_exits_with_code_1(given, tmp_path, capsys):
    output = tmp_path / "out"
    command = ("grad-ascent", *options(given), "--output", output, *QUICK, "--warmup", "0", "--lr", "1e30")
    assert verb(*command) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("divdec")]
    assert len(lines) == 1
    assert "divdec baseline grad-ascent: the loss is nan at step" in lines[0]
    assert not (output / "model").exists()


def test_list(capsys):
    assert verb("list") == 0
    text = capsys.readouterr().out
    assert verb("list", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"grad-ascent", "grad-diff", "npo", "simnpo", "rmu", "undial", "idk-dpo"} <= {row["name"] for row in rows}
    assert all(row["name"] in text and row["source"] and row["summary"] for row in rows)
    assert {row["kind"] for row in rows} <= {"gradient", "inference"}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_help_has_its_options_and_example(name, capsys):
    method = METHODS[name]
    assert verb(name, "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"divdec baseline {name} --target" in text
    for field in dataclasses.fields(method.settings):
        name = "lr" if field.name == "learning_rate" else field.name.replace("_", "-")
        assert f"--{name} " in text


def test_help_describes_options(capsys):
    assert verb("npo", "--help") == 0
    text = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "the weight of an answer falls faster" in text  # NPO's own
    assert "Weight of the retain term" in text  # of all with a retain term
    assert "Forget set: a .jsonl" in text  # of all


@pytest.mark.parametrize("name", METHODS)
def test_method_options_do_not_collide_with_common_options(name):
    method = METHODS[name]
    own = {field.name for field in dataclasses.fields(method.settings)}
    common = {field.name for field in dataclasses.fields(HelpedSettings)} | {"json", "config", "method"}
    assert not own & common
    assert all(field.default is not dataclasses.MISSING for field in dataclasses.fields(method.settings))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["forgetful"], 'Unknown command "forgetful". Available commands: list, grad-ascent, grad-diff, npo'),
        (["--target", "t", "npo"], 'Unknown command "--target". Available commands: list, grad-ascent'),
        (["--json"], 'Unknown command "--json"'),
        (["npo", "--target", "t", "--forget", "f", "--output", "o"], "--retain is required"),
        (["npo", "--base", "b"], "Unknown option: --base"),
        (["grad-diff", "--beta", "1"], "Unknown option: --beta"),
        (
            ["rmu", "--target", "t", "--forget", "f", "--retain", "r", "--output", "o", "--trainable", "heads"],
            "--trainable is 'heads'; accepted: down-projections, layers, all",
        ),
    ],
)
def test_invalid_baseline_command_gives_one_line_error(arguments, message, capsys):
    assert verb(*arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("npo", {"--beta": "-1"}, "--beta is -1; accepted: a number above 0"),
        ("npo", {"--max-length": "1"}, "--max-length is 1; accepted"),
        ("rmu", {"--layer": "2"}, "layer is 2, but the target has 3 layers; accepted: 0 to 1"),
        ("npo", {"--target": "nowhere/at/all"}, "'nowhere/at/all' is not a folder"),
        ("npo", {"--retain": "FORGET"}, "hold the same records"),
        ("npo", {"--output": "TARGET"}, "lie one within the other"),
        ("idk-dpo", {"--forget": "TEXT"}, "is plain text"),
    ],
)
def test_invalid_baseline_input_leaves_no_output_folder(given, tmp_path, capsys, name, changed, message):
    (tmp_path / "novel.txt").write_text("It was a dark and stormy night.")
    names = {"FORGET": given["--forget"], "TARGET": given["--target"], "TEXT": tmp_path / "novel.txt"}
    changed = {option: names.get(value, value) for option, value in changed.items()}
    output = tmp_path / "out"
    assert verb(name, *options({**given, "--output": output}, **changed), *QUICK) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("divdec")]
    assert len(lines) == 1
    assert message in lines[0]
    assert not output.exists() or not any(output.iterdir())


def test_foreign_files_are_not_replaced(given, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    assert verb("npo", *options(given), "--output", tmp_path / "out", "--overwrite") == 2
    assert "not an earlier result of divdec" in capsys.readouterr().err
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"


def test_records_in_both_forget_and_retain_sets_give_warning(given, tmp_path, capsys):
    both = tmp_path / "both.jsonl"
    both.write_text(given["--retain"].read_text() + "\n" + given["--forget"].read_text().splitlines()[0])
    command = ("grad-diff", *options({**given, "--retain": both}), "--output", tmp_path / "out", *QUICK)
    assert verb(*command) == 0
    assert "warning: 1 of 4 forget records stand in the retain set too" in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "run.json").read_text())["overlap"] == {"records": 1, "prompts": 1}


def test_composite_target_is_rejected_before_training(given, bundle, tmp_path, capsys):
    command = ("npo", *options(given, **{"--target": bundle}), "--output", tmp_path / "out", *QUICK)
    assert verb(*command) == 2
    assert "is a bundle; give the plain model that it steers" in capsys.readouterr().err
    composite = tmp_path / "composite"
    assert verb("ngram-filter", *options(given), "--output", composite, "--ngram-size", "2") == 0
    assert verb("npo", *options(given, **{"--target": composite / "model"}), "--output", tmp_path / "out", *QUICK) == 2
    assert "is made of several checkpoints (divdec_composite)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
