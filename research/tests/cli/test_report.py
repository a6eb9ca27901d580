"""`divdec results report`: what it writes and prints, and what it refuses."""

import json

import pytest

from divdec.cli import main
from support.tiny import loads_torch


@pytest.fixture(scope="module")
def oracle(shared):
    return shared / "oracle" / "results"


@pytest.fixture
def arguments(oracle, tmp_path):
    return ["results", "report", str(oracle / "dd1_01"), str(oracle / "rank20_01"), "--target", str(oracle / "full01"),
            "--retrain", str(oracle / "retain01"), "--draws", "20", "--examples", "2", "--output",
            str(tmp_path / "deep" / "report.html")]  # fmt: skip


@pytest.fixture
def figures(shared, tmp_path):
    """Quickly drawn: one result without items."""
    folder = shared / "paper" / "results" / "tofu" / "dd_linear" / "1B-alpha-1.5"
    return ["results", "report", str(folder), "--output", str(tmp_path / "report.html")]


def test_json(arguments, tmp_path, capsys):
    assert main([*arguments, "--json", "--variant", "relative"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["report"] == str(tmp_path / "deep" / "report.html")
    assert (printed["variant"], printed["level"]) == ("relative", 0.99)
    assert any(line.startswith("muse-scatter: ") for line in printed["left_out"])
    rows = {row["name"]: row for row in printed["rows"]}
    assert set(rows) == {"dd1_01", "rank20_01", "Target", "Retrain"}
    assert {row["suite"] for row in rows.values()} == {"tofu"}
    steered = rows["rank20_01"]
    low, high = steered["ci"]["mem"]
    assert low < steered["mem"] < high
    page = (tmp_path / "deep" / "report.html").read_text()
    assert "variant relative" in page
    assert f"{steered['mem']:.2f} <small>" in page


def test_text_output_and_overwrite(figures, tmp_path, capsys):
    page_path = tmp_path / "report.html"
    assert main(figures) == 0
    printed = capsys.readouterr().out
    assert "not on the page: tofu-bars" in printed
    assert f"report: {page_path}" in printed
    first = page_path.read_text()
    assert "figures only, no items" in first
    assert "Not on this page" in first
    assert main(figures) == 2
    assert "give --overwrite" in capsys.readouterr().err
    assert main([*figures, "--overwrite"]) == 0
    assert page_path.read_text() == first
    assert main([*figures, "--overwrite", "--variant", "dd-paper"]) == 0
    assert page_path.read_text() != first


def test_report_from_metrics_without_items(figures, capsys):
    assert main([*figures, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["ci"] == {}
    assert "forget_truth_ratio_prob_mean" in row["reason"]["mem"]


class TestBadInput:
    """One line that names what was wrong, exit code 2."""

    def refused(self, capsys, *arguments, says):
        assert main(["results", "report", *map(str, arguments)]) == 2
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1

    def test_results(self, oracle, tmp_path, capsys):
        (tmp_path / "empty").mkdir()
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "notes.txt").write_text("mine")
        self.refused(capsys, says="required")
        self.refused(capsys, tmp_path / "none", says="does not exist")
        self.refused(capsys, tmp_path / "empty", says="is an empty folder")
        self.refused(capsys, tmp_path / "other", says="holds no results")
        self.refused(capsys, oracle / "dd1_01", "--target", oracle, says="both results of the target")

    def test_settings(self, oracle, tmp_path, capsys, monkeypatch):
        monkeypatch.chdir(tmp_path)
        run = oracle / "dd1_01"
        self.refused(capsys, run, "--variant", "mine", says="variant")
        self.refused(capsys, run, "--level", "99", says="level is 99")
        self.refused(capsys, run, "--draws", "0", says="draws is 0")
        self.refused(capsys, run, "--examples", "-1", says="examples is -1")
        assert list(tmp_path.iterdir()) == []

    def test_output(self, oracle, tmp_path, capsys):
        run, other = oracle / "dd1_01", tmp_path / "thesis.html"
        other.write_text("<p>mine")
        self.refused(capsys, run, "--output", tmp_path, says="is a folder")
        self.refused(capsys, run, "--output", other, says="give --overwrite")
        self.refused(capsys, run, "--output", other, "--overwrite", says="not an earlier result")
        self.refused(capsys, run, "--output", other / "report.html", says="is a file")
        assert other.read_text() == "<p>mine"


def test_report_command_does_not_import_torch(figures):
    assert not loads_torch(figures)


def test_help_has_an_example(capsys):
    assert main(["results", "report", "--help"]) == 0
    text = capsys.readouterr().out
    assert "divdec results report runs/sweep" in text
    assert "--retrain" in text
