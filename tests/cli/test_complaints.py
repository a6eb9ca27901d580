"""What the parser refuses: in our words, with the option as it is typed, exit code 2, and never a traceback."""

import pytest

from divdec.cli import VERBS, main

NO_ARGUMENTS_NEEDED = {"demo", "doctor"}


@pytest.mark.parametrize("verb", [name for name, _, _ in VERBS if name not in NO_ARGUMENTS_NEEDED])
def test_a_verb_alone_says_what_it_needs(verb, capsys):
    assert main([verb]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "required" in error


@pytest.mark.parametrize("verb", [name for name, _, _ in VERBS])
def test_every_verb_has_help_with_an_example(verb, capsys):
    assert main([verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert "example" in text
    assert f"divdec {verb}" in text


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("cost --target 8B", "--aux, --forget-tokens are required"),
        ("calibrate b --forget f --retain r", "--holdout is required"),
        ("generate", "bundle is required"),
        ("forget frobnicate folder", "action is 'frobnicate'; accepted: init, add, remove, list, verify"),
        ("train --recipe other", "--recipe is 'other'; accepted: full-retain, forget-retain"),
        ("generate b --temperature warm", "--temperature is 'warm'; accepted: a number ("),
        ("generate b --temperature=", "--temperature is ''; accepted: a number ("),
        ("demo --seed 1.5", "--seed is '1.5'; accepted: a whole number ("),
        ("eval tofu b --limit some", "--limit is 'some'; accepted: a whole number ("),
        ("bench compute --vocabularies many", "--vocabularies is 'many'; accepted: a whole number ("),
        ("demo --config absent.yaml", "absent.yaml', which does not exist; accepted: a YAML file with options"),
        ("demo --sed 3", "unrecognized arguments: --sed"),
        ("train --lora 3", "unrecognized arguments: --lora"),
        ("image draw", "action 'draw' is not known; there are: demo, train"),
        ("plot", "runs is required"),
    ],
)
def test_in_one_line(line, says, capsys):
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert says in error
    assert "typing." not in error


def test_options_may_be_put_before_what_they_belong_to(capsys):
    assert main(["plot", "--list"]) == main(["plot", "some/run", "--list"]) == 0
    assert "tofu-bars" in capsys.readouterr().out
