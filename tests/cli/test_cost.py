"""`divdec cost` and `divdec bench` at the command line: what is printed and refused."""

import json

import pytest
import transformers

from divdec.cli import main
from divdec.cli.app import app
from support.tiny import loads_torch

GIVEN = ["cost", "--target", "8B", "--aux", "1B", "--forget-tokens", "1M", "--retain-tokens", "10M", "--epochs", "10"]


def test_cost_command_documented_example(capsys):
    assert main([*GIVEN, "--volume", "1B"]) == 0
    out = capsys.readouterr().out
    assert "compute increase 2n/N 25.0%" in out
    assert "break-even volume 130M tokens" in out
    assert "distil: 1B tokens are more than the break-even volume of 130M" in out


def test_cost_command_writes_complete_json(capsys):
    assert main([*GIVEN, "--volume", "8e6", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["choice"] == "steer"
    assert result["compute_increase"] == 0.25
    assert result["break_even_tokens"]["paper"] == pytest.approx(130e6)
    assert result["flops_at_volume"]["target"] == pytest.approx(2 * 8e9 * 8e6)


def test_cost_options_from_config_file(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("target: 8e9\naux: 1000000000\nforget_tokens: 1M\nvolume: 1_000_000\n")
    before = app.config
    assert main(["cost", "--config", str(tmp_path / "run.yaml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["volume"] == 1e6
    assert app.config == before  # later command lines do not read the file


def test_cost_estimate_requires_only_configs(tmp_path, capsys):
    for name, width in (("target", 64), ("aux", 32)):
        transformers.LlamaConfig(
            vocab_size=500, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2,
        ).save_pretrained(tmp_path / name)  # fmt: skip
    models = ["--target", str(tmp_path / "target"), "--aux", str(tmp_path / "aux"), "--forget-tokens", "1K"]
    assert main(["cost", *models, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["N"] == result["target"]["parameters"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "8Q", "--aux", "1B", "--forget-tokens", "1M"], "--target is '8Q'; accepted: a number"),
        (["--target=-8B", "--aux", "1B", "--forget-tokens", "1M"], "--target is '-8B'; accepted: a number"),
        (["--target", "8B", "--aux=-1", "--forget-tokens", "1M"], "--aux is -1.0; accepted: a number"),
        (["--target", "8B", "--aux", "1B", "--forget-tokens=-1M"], "--forget-tokens is '-1M'; accepted"),
        (["--target", "8B", "--aux", "1B", "--forget-tokens", "1M", "--volume", "8Q"], "--volume is '8Q'; accepted"),
        (["--target", "8B", "--aux", "no/such", "--forget-tokens", "1M"], "--aux no/such is neither a number nor"),
        (["--target", "8B", "--aux", "1B"], "--forget-tokens is required"),
    ],
)
def test_invalid_input_gives_one_line_error_and_exit_code_2(options, message, capsys):
    assert main(["cost", *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert len(printed.err.strip().splitlines()) == 1


def test_oversized_auxiliaries_give_warning(capsys):
    assert main(["cost", "--target", "8B", "--aux", "5B", "--forget-tokens", "1M", "--json"]) == 0
    printed = capsys.readouterr()
    assert "warning: the two auxiliaries hold more parameters (10B) than the target (8B)" in printed.err
    assert json.loads(printed.out)["compute_increase"] == 1.25


def test_cost_command_does_not_import_torch():
    assert not loads_torch([*GIVEN, "--volume", "1B"])


def test_bench_lists_actions_and_rejects_unknown_ones(tmp_path, capsys):
    assert main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    assert "compute" in out
    for arguments, message in (
        (["bench", "speed"], 'Unknown command "speed". Available commands: compute'),
        (["bench", "compute"], "output"),
        (["bench", "compute", "--output", "o", "--rounds", "0"], "rounds is 0; accepted"),
        (["bench", "compute", "--output", str(tmp_path), "--targets", "gpt-5"], "shape 'gpt-5' is not known"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.strip().splitlines()) == 1
