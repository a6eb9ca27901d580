"""Messages for unusable command lines: one line, the option as it is typed, exit code 2, and never a traceback."""

import re

import pytest

from divdec.cli import main
from divdec.cli.app import app

NO_ARGUMENTS_NEEDED = {"demo", "doctor", "world"}
GROUPS = ("takedown", "eval", "results", "baseline", "image", "bench")
COMMANDS = [name for name in app if not name.startswith("-")]
NESTED = [[group, name] for group in GROUPS for name in app[group] if not name.startswith("-")]


def test_every_command_is_registered():
    assert set(COMMANDS) == {
        "demo", "train", "bundle", "generate", "chat", "serve", "playground", "remote", "shrink", "ngram",
        "takedown", "calibrate", "distill", "gradient-depth", "baseline", "compare", "eval", "results", "image",
        "cost", "bench", "doctor", "world",
    }  # fmt: skip


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in (*NO_ARGUMENTS_NEEDED, *GROUPS)])
def test_command_without_arguments_names_required_options(command, capsys):
    assert main([command]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "required" in error or "give either" in error


@pytest.mark.parametrize("group", GROUPS)
def test_group_without_command_lists_commands(group, capsys):
    assert main([group]) == 2
    assert f"Usage: divdec {group} COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize("command", [*([name] for name in COMMANDS if name not in GROUPS), *NESTED])
def test_every_command_help_has_example_within_80_columns(command, capsys):
    assert main([*command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "example" in text
    assert f"divdec {' '.join(command)}" in text
    assert max(map(len, text.splitlines())) <= 80
    assert not re.search(r"\[default: (\(\))?\]", text)
    assert " STR" not in text
    assert "typing." not in text


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("cost --target 8B", "--aux is required"),
        ("calibrate b --forget f --retain r", "--holdout is required"),
        ("calibrate b --forget f --retain r --reference none", "--neutral is required with --reference none"),
        ("calibrate b --forget f --retain r --reference none --neutral n --holdout h", "--holdout is for --refer"),
        ("calibrate b --forget f --retain r --holdout h --limit 0", "--limit is 0; accepted: a whole number"),
        ("calibrate org/b --forget f --retain r --holdout h --write", "org/b is no folder that may be written to"),
        ("generate", "bundle is required"),
        ("generate b c", "'c'"),
        ("generat b", 'Did you mean "generate"?'),
        ("takedown frobnicate folder", "Available commands: init, add, remove, list, verify"),
        ("train --base b --forget f --retain r --output o --recipe other",
         "--recipe is 'other'; accepted: matched, refusal, full-retain, forget-retain"),
        ("generate b --temperature warm", "--temperature is 'warm'; accepted: a number ("),
        ("generate b --temperature=", "--temperature is ''; accepted: a number ("),
        ("generate b --top-k 3", "give --temperature above 0"),
        ("generate b --temperatur 1", "Did you mean --temperature?"),
        ("generate b --alpha 1", "use --steering linear:ALPHA"),
        ("generate b --raw --system-prompt s", "leave it out with --raw"),
        ("generate folder --prompt x", "folder is not a bundle"),  # not that it has no tokenizer
        ("chat demo/bundle", "is not a folder or hub id; `divdec demo --output demo`"),  # README's first command
        ("chat my/own/bundel", "is not a folder or hub id; `divdec bundle` writes one"),
        ("takedown check absent.html", "absent.html cannot be read (No such file or directory)"),
        ("demo --seed 1.5", "--seed is '1.5'; accepted: a whole number"),
        ("eval tofu b --data d --output o --limit some", "--limit is 'some'; accepted: a whole number"),
        ("eval leak b --data d --output o --samples -1", "--samples is -1; accepted: a whole number of at least 0"),
        ("eval leak b --data d --output o --samples 8 --temperature 0", "--temperature is 0; accepted: a number above"),
        ("eval leak b --data d --output o --top-p 1.5", "--top-p is 1.5; accepted: above 0, at most 1"),
        ("eval leak b --data d --output o --seed -1", "--seed is -1; accepted: 0 to 4294967295"),
        ("train --base b --forget f --retain r --output o --seed 4294967296", "--seed is 4294967296; accepted: 0 to"),
        ("eval trivia b --data d --output o", "Available commands: leak, muse, rwku, tofu"),
        ("compare --data muse-small --output o", "--data muse-small needs MUSE-News: give its folder with --muse"),
        ("compare --data muse-small --muse absent --output o", "absent/knowmem/forget_qa.jsonl does not exist"),
        ("bench compute --output o --vocabularies many", "--vocabularies is 'many'; accepted: a whole number"),
        ("demo --config absent.yaml", "absent.yaml, which does not exist; accepted: a YAML file of options"),
        ("demo --sed 3", "Did you mean --seed?"),
        ("train --bse x", "Unknown option: --bse. Did you mean --base?"),  # not "--base is required"
        ("demo --seed 1 --seed 2", "--seed is given more than once"),
        ("image draw", "Available commands: demo"),
        ("results plot", "results is required"),
        ("serve b --extra-bundle other", "--extra-bundle is 'other'; accepted: name=path"),
    ],
)  # fmt: skip
def test_invalid_commands_give_one_line_error(line, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert says in error
    assert "typing." not in error


def test_unknown_config_file_key_is_rejected(tmp_path, capsys):
    file = tmp_path / "options.yaml"
    file.write_text("seeed: 3\n")
    assert main(["demo", "--config", str(file)]) == 2
    assert "seeed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- 1", "holds no options"),
        ("1: 2", "holds no options"),
        ("demo:\n  seed: 3", "demo"),
        ("seed: {", "no readable"),
    ],
)
def test_config_file_that_is_no_list_of_options_is_rejected(tmp_path, text, says, capsys):
    (tmp_path / "c.yaml").write_text(text)
    assert main(["demo", "--config", str(tmp_path / "c.yaml")]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_a_file_that_may_not_be_read_is_one_line(capsys, monkeypatch):
    def forbid(*arguments):
        raise PermissionError(13, "Permission denied", "models/big/config.json")

    monkeypatch.setattr("divdec.costs.estimate.read_size", forbid)
    assert main(["cost", "--target", "models/big", "--aux", "1B", "--forget-tokens", "1M"]) == 2
    assert capsys.readouterr().err == "divdec cost: [Errno 13] Permission denied: 'models/big/config.json'\n"


def test_bundle_as_target_is_rejected(bundle, tmp_path, capsys):
    assert main(["bundle", "--target", str(bundle), "--output", str(tmp_path / "b")]) == 2
    assert "is a bundle; give the plain model that it steers" in capsys.readouterr().err


def test_unknown_split_error_lists_available_splits(shared, tmp_path, capsys):
    arguments = ["eval", "tofu", "b", "--data", str(shared / "data/tofu"), "--output", str(tmp_path / "o")]
    assert main([*arguments, "--split", "forget20"]) == 2
    assert "accepted: the splits of" in (error := capsys.readouterr().err)
    assert "forget01" in error
