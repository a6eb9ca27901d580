"""What the README says can be typed: every command parses, the Python runs, every link leads somewhere."""

import os
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands():
    text = README.replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if re.match(r"divdec [a-z]+ ", line) and "…" not in line]


def test_there_are_commands():
    assert {shlex.split(command)[1] for command in commands()} >= {"train", "bundle", "generate", "chat"}


@pytest.mark.parametrize("command", commands())
def test_commands_parse(command):
    from divdec.cli import VERBS
    from divdec.cli.parsing import parse

    _, verb, *arguments = shlex.split(command)
    modules = {name: module for name, module, _ in VERBS}
    parse(import_module(modules[verb]), verb, arguments)


def test_the_python_runs(bundle, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names = {}
    exec(block, names)
    assert str(names["model"].steering) == "rank:20"
    assert "Where was Jasper Ashild born?" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_make_targets_that_are_named_exist():
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"`make ([a-z-]+)", page.read_text()):
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"{page.name}: make {target}"


def test_every_verb_is_in_the_readme():
    from divdec.cli import VERBS

    assert all(f"`divdec {verb}`" in README for verb, _, _ in VERBS)
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
