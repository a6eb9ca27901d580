"""The page of results: scores, figures and answers, what it says is missing, and that it needs no network."""

import json
import re
from html.parser import HTMLParser

import pytest

from divdec.errors import UsageError
from divdec.evaluation.results import Results, write_results
from divdec.runs import write_json
from divdec_research.figures.page import write_report
from divdec_research.figures.registry import FIGURES, FigureRequest
from divdec_research.suites.results import read_results
from divdec_research.suites.settings import Scoring

EVIL = "<script>alert('x')</script><img src=x onerror=alert(1)>$\\frac{1}$ --> ]]>"


class Checker(HTMLParser):
    """Every element is closed, and no id stands twice; the text of each cell."""

    def __init__(self, page):
        super().__init__()
        self.open, self.ids, self.cells = [], [], []
        self.feed(page)
        assert self.open == []
        assert len(set(self.ids)) == len(self.ids)

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br", "line", "link"):
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_startendtag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th", "small"):
            self.cells[-1] += data


@pytest.fixture(scope="module")
def oracle(shared):
    return shared / "oracle" / "results"


def report(path, *runs, target=None, retrain=None, variant="openunlearning", examples=4):
    """Page, results by suite, and what is not on the page."""
    references = (str(folder) if folder else None for folder in (target, retrain))
    request = FigureRequest(tuple(map(str, runs)), *references, Scoring(variant=variant, draws=50))
    suites, left_out = write_report(path / "page.html", request, examples)
    return (path / "page.html").read_text(), suites, left_out


@pytest.fixture(scope="module")
def steered(oracle, tmp_path_factory):
    """Two steered results with all their items, beside target and retrained model."""
    runs = (oracle / "dd1_01", oracle / "rank20_01")
    folder = tmp_path_factory.mktemp("page")
    return report(folder, *runs, target=oracle / "full01", retrain=oracle / "retain01")


@pytest.fixture
def copied(oracle, tmp_path):
    """Write a result with answers alone, changed, into a folder."""

    def write(folder, **fields):
        results = read_results(oracle / "dd1_01")
        results.items = {name: results.items[name] for name in ("forget_Q_A_ROUGE", "retain_Q_A_ROUGE")}
        for item in results.items["forget_Q_A_ROUGE"].values():
            item |= fields
        folder.mkdir(parents=True)
        write_results(results, folder)
        return folder

    return write


def test_page_is_self_contained(steered):
    page, *_ = steered
    Checker(page)
    # Names of SVG's vocabulary are no addresses that anything fetches.
    without = re.sub(r'xmlns(:xlink)?="[^"]*"', "", page)
    assert "http" not in without
    assert not re.search(r"<(script|link|img|iframe)|@import|url\((?!#)", without)


def test_every_result_has_the_scores_of_the_score_command(steered, oracle, capsys):
    from divdec.cli import main

    page, suites, _ = steered
    assert list(suites["tofu"]) == ["dd1_01", "rank20_01", "Target", "Retrain"]
    arguments = [str(oracle / "rank20_01"), "--target", str(oracle / "full01"), "--retrain",
                 str(oracle / "retain01"), "--draws", "50", "--json"]  # fmt: skip
    assert main(["results", "score", "tofu", *arguments]) == 0
    (expected,) = json.loads(capsys.readouterr().out)
    shown = suites["tofu"]["rank20_01"]
    for name, interval in expected["ci"].items():
        assert shown.values[name] == expected[name]
        assert shown.intervals[name] == tuple(interval)
    cells = Checker(page).cells
    assert cells[:6] == ["result", "Agg ↑", "Agg w/o Priv ↑", "Mem ↑", "Priv ↑", "Utility ↑"]
    low, high = expected["ci"]["mem"]
    assert cells[cells.index("rank20_01") + 3] == f"{expected['mem']:.2f} [{low:.2f}, {high:.2f}]"
    assert {"Extraction strength ↓", "AUC loss ", "Forget quality ↑"} <= set(cells)
    assert "variant openunlearning\n99 % percentile bootstrap intervals (50 draws" in page


def test_figures_of_these_runs_are_drawn_and_others_named(steered):
    page, _, left_out = steered
    assert page.count('<svg role="img"') == 2
    assert "TOFU: the best setting of each method" in page
    assert "Utility over Mem of 4 results" in page
    names = [line.partition(":")[0] for line in left_out]
    assert names == [name for name in FIGURES if name not in ("tofu-bars", "tofu-scatter")]
    assert all(line.partition(":")[0] in page for line in left_out)
    assert any("it needs results of MUSE" in line for line in left_out)


def test_answers_stand_side_by_side(steered, oracle):
    page, *_ = steered
    assert page.count("<h2>Answers, forget set ") == page.count("<h2>Answers, retain set ") == 4
    items = read_results(oracle / "rank20_01").items["forget_Q_A_ROUGE"]
    cells = Checker(page).cells
    start = len(cells) - cells[::-1].index("model") - 1
    assert cells[start + 2 :: 2] == ["dd1_01", "rank20_01", "Target", "Retrain"]
    assert items["0"]["generation"].strip() in cells
    assert "What is the full name of the author born in Kuwait City" in page


def test_text_is_escaped(copied, tmp_path):
    folder = copied(tmp_path / "<script>alert('name')<" / "$a$ <u>&", generation=EVIL, ground_truth=EVIL, input=EVIL)
    other = copied(tmp_path / "<i>$\\x" / "$a$ <u>&", generation=f"{EVIL} other", ground_truth=EVIL, input=EVIL)
    page, suites, _ = report(tmp_path, folder, other)
    Checker(page)
    assert not re.search(r"<(script|img|u>|i>)", page)
    assert "&lt;script&gt;alert(&#39;x&#39;)" in page
    # Two results have one name: the folder tells them apart.
    assert len(suites["tofu"]) == 2


def test_answers_to_different_questions_are_not_compared(copied, tmp_path):
    runs = [copied(tmp_path / "a"), copied(tmp_path / "b", ground_truth="of another split")]
    page, *_ = report(tmp_path, *runs)
    assert "Answers, forget set" not in page
    assert "Answers, retain set" in page
    page, _, left_out = report(tmp_path, *runs, examples=0)
    assert "Answers" not in page
    assert not any(line.startswith("answers") for line in left_out)


def test_published_figures_without_items(shared, tmp_path):
    folder = shared / "paper" / "results"
    page, suites, left_out = report(tmp_path, folder / "tofu", folder / "muse", variant="dd-paper")
    Checker(page)
    assert list(suites) == ["tofu", "muse"]
    assert all(name in page for results in suites.values() for name in results)
    assert len(suites["tofu"]) == len(list((folder / "tofu").rglob("TOFU_SUMMARY.json")))
    assert "no intervals: the folder holds figures only, no items (all)" in page
    assert sum(line.startswith("answers: ") for line in left_out) == 2
    assert {"strength", "sizes", "over-under", "leak"}.isdisjoint(line.partition(":")[0] for line in left_out)


def test_missing_references_are_named(oracle, tmp_path):
    page, _, left_out = report(tmp_path, oracle / "dd1_01", examples=0)
    assert "no Priv: no retrained model was given (--retrain) (all)" in page
    assert "tofu-scatter: no result has Mem and Utility: no target was given (--target)" in left_out


def test_comparison(tmp_path):
    trials = [{"method": method, "setting": setting, "values": {"agg": agg, "mem": agg}, "intervals": {}, "seeds": {}}
              for method, setting, agg in (("linear", "linear:1", 0.8), ("npo", "lr 1e-5", 0.6))]  # fmt: skip
    content = {"suite": "tofu", "variant": "openunlearning", "grid": trials, "leaks": {"linear": {"1": 0.1, "10": 0.5}}}
    (tmp_path / "run").mkdir()
    write_json(tmp_path / "run" / "comparison.json", content)
    page, suites, left_out = report(tmp_path, tmp_path / "run")
    assert list(suites["tofu"]) == ["Linear DD  α = 1", "NPO  lr 1e-5"]
    assert "Share of questions that leak" in page
    # Its intervals were not computed here.
    assert "TOFU, variant openunlearning</p>" in page
    assert "means over seeds, with their intervals, from run/comparison.json (all)" in page
    assert any(line.startswith("answers: TOFU's results have no items") for line in left_out)


def test_other_suites_are_refused(tmp_path):
    write_results(Results("x", "leak", {"leak@1-attack": 0.5}), tmp_path)
    with pytest.raises(UsageError, match="no results of tofu or muse"):
        report(tmp_path, tmp_path)
