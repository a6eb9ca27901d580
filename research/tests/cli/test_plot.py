"""`divdec results plot`: what it writes and prints, and what it refuses."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
from PIL import Image

from divdec.cli import main
from divdec.runs import write_json
from divdec_research.figures import benchmarks, runs  # noqa: F401  # they register their figures
from divdec_research.figures.registry import FIGURES


@pytest.fixture
def compared(tmp_path):
    """The leaks of a comparison."""
    run = tmp_path / "run"
    run.mkdir()
    leaks = {"target": {"1": 0.5, "10": 0.9}, "linear": {"1": 0.0, "10": 0.1}}
    write_json(run / "comparison.json", {"suite": "tofu", "leaks": leaks})
    return run


def test_plot_command_writes_svg_and_png(compared, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["results", "plot", str(compared), "--figure", "leak"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "leak.svg (from 1 file)\n"
    assert "at k = 10: Target 0.900, Linear DD 0.100" in printed.err
    text = (tmp_path / "leak.svg").read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "run/comparison.json" in text
    assert str(tmp_path) not in text
    assert main(["results", "plot", str(compared), "--figure=leak", "--output=deep/one.png", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["figure"], printed["output"], printed["sources"]) == (
        "leak", "deep/one.png", ["run/comparison.json"],
    )  # fmt: skip
    picture = Image.open(tmp_path / "deep" / "one.png")
    assert picture.text["Source"] == "run/comparison.json"
    assert picture.text["Description"] == printed["description"]
    assert min(picture.size) > 500


def test_plot_command_requires_overwrite(compared, tmp_path, capsys):
    arguments = ["results", "plot", str(compared), "--figure", "leak", "--output", str(tmp_path / "one.svg")]
    assert main(arguments) == 0
    first = (tmp_path / "one.svg").read_bytes()
    capsys.readouterr()
    assert main(arguments) == 2
    assert "give --overwrite" in capsys.readouterr().err
    assert main([*arguments, "--overwrite"]) == 0
    assert (tmp_path / "one.svg").read_bytes() == first
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_list(capsys):
    assert main(["results", "plot", "--list-figures"]) == 0
    printed = capsys.readouterr().out
    for name, figure in FIGURES.items():
        assert name in printed
        assert figure.shows in printed
        assert figure.needs in printed
    assert main(["results", "plot", "--list-figures", "--json"]) == 2


class TestBadInput:
    """One line that names what was wrong, exit code 2."""

    def refused(self, capsys, *arguments, says):
        assert main(["results", "plot", *map(str, arguments)]) == 2
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1

    def test_figures(self, compared, capsys):
        self.refused(capsys, compared, "--figure", "pie", says="--figure is 'pie'; accepted: ")
        self.refused(capsys, compared, says="--figure is None; accepted: ")
        self.refused(capsys, "--figure", "leak", says="required")
        self.refused(capsys, compared, "--figure", "leak", "--variant", "best", says="variant")
        self.refused(capsys, compared, "--figure", "tofu-bars", says="is not a comparison")

    def test_outputs(self, compared, tmp_path, capsys):
        arguments = (compared, "--figure", "leak", "--output")
        self.refused(capsys, *arguments, tmp_path / "one.pdf", says="accepted: .svg and .png")
        self.refused(capsys, *arguments, tmp_path / "one", says="ends in nothing")
        self.refused(capsys, *arguments, compared / "comparison.json" / "one.svg", says="is a file")
        (tmp_path / "folder.svg").mkdir()
        self.refused(capsys, *arguments, tmp_path / "folder.svg", says="is a folder")

    def test_files_with_unexpected_content(self, tmp_path, capsys):
        arguments = (tmp_path, "--figure", "tofu-bars", "--output", tmp_path / "x.svg")
        (tmp_path / "comparison.json").write_text("[]")
        self.refused(capsys, *arguments, says="comparison.json is not")
        (tmp_path / "comparison.json").write_text("{")
        self.refused(capsys, *arguments, says="comparison.json is not readable JSON")
