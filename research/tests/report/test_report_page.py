"""What an evaluation's page shows of results: figures, plots, answers, and what it says is missing."""

import dataclasses
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from divdec.errors import UsageError
from divdec.evaluation.metrics import attack_auc
from divdec.evaluation.results import Results, write_results
from divdec_research.report.charts import shortened
from divdec_research.report.page import build_report, write_report
from divdec_research.report.scores import MEASURES, best_index, best_results, collect
from divdec_research.report.sections import question_of, roc_points
from divdec_research.suites.aggregate import Bootstrap
from divdec_research.suites.results import find_results, identify, read_results

FEW = Bootstrap(draws=50)


@pytest.fixture(scope="module")
def oracle(shared):
    return shared / "oracle" / "results"


@pytest.fixture(scope="module")
def published(shared):
    return shared / "paper" / "results"


@pytest.fixture(scope="module")
def report(oracle):
    """Two steered results with all their items, beside target and retrain."""
    runs = [str(oracle / name) for name in ("dd1_01", "rank20_01")]
    return build_report(collect(runs, str(oracle / "full01"), str(oracle / "retain01")), "openunlearning", FEW, 8)


@pytest.fixture(scope="module")
def sweep(published):
    """The paper's α and k sweeps, figures alone."""
    folder = published / "tofu"
    runs = [str(folder / "dd_linear"), *(str(path) for path in sorted((folder / "dd_rank").glob("1B-*")))]
    entries = collect(runs, str(folder / "baselines" / "target"), str(folder / "baselines" / "retrain"))
    return build_report(entries, "dd-paper", FEW)


def page_of(report, tmp_path):
    write_report(tmp_path / "report.html", report)
    return (tmp_path / "report.html").read_text()


def sections(report, kind):
    return [section for section in report.sections if section.kind == kind]


class TestCollecting:
    def own(self, folder, suite="tofu", **about):
        folder.mkdir(parents=True)
        write_results(Results(folder.name, suite, {"model_utility": 0.5}, about=about), folder)
        return folder

    def test_results_are_found_in_natural_order(self, tmp_path):
        for name in ("linear-10", "linear-2", "rank-20-soft"):
            self.own(tmp_path / "run" / "bundle" / name)
        assert [path.name for path in find_results(tmp_path / "run")] == ["linear-2", "linear-10", "rank-20-soft"]

    def test_settings(self):
        def identified(name, **about):
            identity = identify(Results("x", "tofu", about=about), Path("/runs/sweep") / name)
            return identity.rule and (identity.rule, identity.strength, identity.family)

        assert identified("1B-alpha-1.5") == ("linear", 1.5, "1B")
        assert identified("OLMo-2-0425-1B-Instruct-lr5e-5-alpha-3.0") == ("linear", 3, "OLMo-2-0425-1B-Instruct-lr5e-5")
        assert identified("3B-topk-200") == ("rank", 200, "3B")
        assert identified("linear-1.5") == ("linear", 1.5, "sweep")
        assert identified("rank-20-soft") == ("rank", 20, "sweep")
        assert identified("rank-20-hard") == ("rank", 20, "sweep hard")
        assert identified("linear-2.5-2-full") == ("linear", 2.5, "sweep full margin 2")
        assert identified("x", steering="linear:0.5", model="runs/bundle") == ("linear", 0.5, "bundle")
        assert identified("x", steering="linear:-1", model="bundle") == ("linear", -1, "bundle")
        assert identified("x", steering="linear:1", model="bundle", family="pair") == ("linear", 1, "pair")
        assert identified("x", steering="linear:2.5:2:full", model="bundle") == ("linear", 2.5, "bundle full margin 2")
        assert identified("linear-2", steering="rank:20:soft", model="bundle") == ("rank", 20, "bundle")
        for name in ("rank20_01", "lr-1e-5_str-50", "alpha-2_0", "checkpoint-39"):
            assert identified(name) is None

    def test_equal_result_names_are_disambiguated(self, tmp_path):
        runs = [str(self.own(tmp_path / run / "linear-1")) for run in ("a", "b")]
        runs.append(str(self.own(tmp_path / "c" / "target")))
        target = str(self.own(tmp_path / "d"))
        assert [e.name for e in collect(runs, target)] == ["target", "a/linear-1", "b/linear-1", "c/target"]

    def test_target_and_retrain_are_not_listed_as_results(self, tmp_path):
        target, _ = self.own(tmp_path / "run" / "target"), self.own(tmp_path / "run" / "linear-1")
        entries = collect([str(tmp_path / "run"), str(tmp_path / "run" / "linear-1")], str(target))
        assert [(entry.name, entry.role) for entry in entries] == [("target", "target"), ("linear-1", None)]
        with pytest.raises(UsageError, match="no result besides"):
            collect([str(target)], str(target))

    def test_invalid_runs_are_rejected(self, tmp_path):
        own, muse = self.own(tmp_path / "t"), self.own(tmp_path / "m", "muse")
        leak = self.own(tmp_path / "l", "leak")
        (tmp_path / "empty").mkdir()
        for runs, target, says in (
            ([tmp_path / "none"], None, "is not a folder"),
            ([tmp_path / "empty"], None, "holds no results"),
            ([own, muse], None, "give results of one suite"),
            ([leak], None, "accepted: tofu and muse"),
            ([own], tmp_path, "give one of them"),
        ):
            with pytest.raises(UsageError, match=says):
                collect([str(run) for run in runs], str(target) if target else None)


class TestFigures:
    def test_report_values_match_score_command(self, report, oracle, capsys):
        from divdec.cli import main

        arguments = [str(oracle / "rank20_01"), "--target", str(oracle / "full01"), "--retrain",
                     str(oracle / "retain01"), "--draws", "50", "--json"]  # fmt: skip
        assert main(["results", "score", "tofu", *arguments]) == 0
        (expected,) = json.loads(capsys.readouterr().out)
        row = next(row for row in report.rows if row.entry.name == "rank20_01")
        for name, interval in expected["ci"].items():
            assert row.values[name] == expected[name]
            assert row.intervals[name] == tuple(interval)

    def test_tables(self, report):
        (caption, first), *others = report.tables.items()
        assert "variant “openunlearning”" in caption
        assert "99 % percentile bootstrap" in caption
        assert first == ("agg", "agg_without_privacy", "mem", "priv", "utility")
        columns = {name for _, names in others for name in names}
        assert {"extraction_strength", "mia_loss", "forget_quality"} < columns
        assert report.bests[0].row.entry.name == "dd1_01"
        row = next(row for row in report.rows if row.entry.name == "rank20_01")
        assert re.fullmatch(r"0\.\d\d \[0\.\d\d, 0\.\d\d\]", f"{row.text('mem')} {row.interval_text('mem')}")

    def test_values_are_formatted(self):
        assert MEASURES["agg"].text(0.777) == "0.78"
        assert MEASURES["mia_loss"].text(0.0) == "0.000"
        assert MEASURES["forget_quality"].text(1.834e-21) == "1.8e-21"
        assert MEASURES["privleak"].text(-99.82) == "−99.8"
        assert MEASURES["agg"].text(None) == "–"

    def test_non_numeric_metric_is_omitted(self, tmp_path):
        figures = {"model_utility": 0.5, "mia_loss": "many", "mia_zlib": True, "mia_min_k": float("nan")}
        (tmp_path / "TOFU_SUMMARY.json").write_text(json.dumps(figures))
        (row,) = build_report(collect([str(tmp_path)]), "openunlearning", FEW).rows
        assert {name for name, value in row.values.items() if value is not None} == {"model_utility"}

    def test_unknown_variant(self, oracle):
        with pytest.raises(UsageError, match="variant"):
            build_report(collect([str(oracle / "dd1_01")]), "mine", FEW)


class TestBest:
    @pytest.mark.parametrize(
        ("values", "better", "best"),
        [
            ([0.2, 0.5, 0.3], "higher", 1),
            ([0.2, 0.5, 0.3], "lower", 0),
            ([0.5, 0.5, 0.3], "higher", None),  # a tie
            ([0.0, 0.0], "higher", None),
            ([0.0, 0.004], "higher", None),  # shown as 0.00
            ([0.0, 3.0], "lower", 0),  # no distance is the best distance
            ([None, float("nan"), 0.1], "higher", 2),
            ([None, float("nan")], "higher", None),
            ([], "higher", None),
        ],
    )
    def test_only_strictly_best_value_is_marked(self, values, better, best):
        assert best_index(values, better, digits=2) == best

    def test_tied_values_are_not_marked_best(self, oracle, tmp_path):
        for name in ("one", "other"):
            shutil.copytree(oracle / "dd1_01", tmp_path / name)
        references = str(oracle / "full01"), str(oracle / "retain01")
        result = build_report(collect([str(tmp_path)], *references), "openunlearning", FEW, 0)
        shown = MEASURES["agg"].text(result.rows[-1].values["agg"])
        assert result.bests == ()
        assert result.without_best == (f"no result is best by Agg: the highest is {shown}, of several",)
        assert not any(
            dot.best for one in sections(result, "scatter") for series in one.plots[0].series for dot in series.dots
        )
        page = page_of(result, tmp_path)
        assert f"No result is best by Agg: the highest is {shown}, of several." in page
        assert "highest Agg" not in page

    def test_agg_of_zero_is_not_marked_best(self, report):
        rows = [dataclasses.replace(row, values=row.values | {"agg": 0.0}) for row in report.rows]
        assert best_results(rows, "tofu") == ["no result is best by Agg: the highest is 0.00, of several"]
        lone = next(row for row in rows if row.entry.role is None)
        assert best_results([lone], "tofu") == ["no result is best by Agg: the highest is 0.00"]


class TestPlots:
    def test_scatter(self, report):
        (one,) = sections(report, "scatter")
        (plot,) = one.plots
        assert [series.name for series in plot.series] == ["target", "retrain", "dd1_01", "rank20_01"]
        row = next(row for row in report.rows if row.entry.name == "rank20_01")
        dot = plot.series[3].dots[0]
        assert (dot.x, dot.y) == (row.values["mem"], row.values["utility"])
        assert (dot.x_interval, dot.y_interval) == (row.intervals["mem"], row.intervals["utility"])

    def test_curves(self, sweep):
        alpha, k = sections(sweep, "curves")
        for one, count, ends in ((alpha, 16, (0.5, 4)), (k, 9, (1, 1000))):
            assert [plot.title[:4].strip() for plot in one.plots] == ["Agg", "Mem", "Priv", "Util"]
            for plot in one.plots:
                (series,) = plot.series
                xs = [dot.x for dot in series.dots]
                assert xs == sorted(xs)
                assert (xs[0], xs[-1]) == ends
                # The file of k = 10 has no AUCs.
                assert len(xs) in ((count,) if one is alpha or plot.title[0] in "MU" else (count - 1,))
                assert len(plot.levels) == 2
        assert k.plots[0].log
        assert [best.row.entry.name for best in sweep.bests] == ["1B-topk-20"]

    def test_over_and_under_forgetting(self, report, sweep):
        (one,) = sections(report, "dots")
        (plot,) = one.plots
        assert plot.rows == ("target", "dd1_01", "rank20_01")
        loss = next(series for series in plot.series if series.name == "loss")
        retrain = next(row for row in report.rows if row.entry.role == "retrain").values["mia_loss"]
        assert [dot.x for dot in loss.dots] == pytest.approx([1 - retrain, 0, 1 - retrain])
        low, high = loss.dots[1].x_interval
        assert low < 0 < high
        assert len(sections(sweep, "dots")[0].plots[0].rows) == 25  # the target, and all but k = 10

    def test_roc_encloses_the_auc(self, report, oracle):
        (one,) = sections(report, "roc")
        assert [plot.title for plot in one.plots][:2] == ["loss", "zlib"]
        results = read_results(oracle / "rank20_01")
        for attack, plot in zip(("mia_loss", "mia_zlib"), one.plots, strict=False):
            dots = next(series for series in plot.series if series.name == "rank20_01").dots
            assert (dots[0].x, dots[0].y, dots[-1].x, dots[-1].y) == (0, 0, 1, 1)
            area = np.trapezoid([dot.y for dot in dots], [dot.x for dot in dots])
            assert area == pytest.approx(results.figures[attack])

    def test_roc_with_ties(self):
        forget, holdout = np.array([0.0, 1, 1, 2]), np.array([1.0, 2, 2, 3, 3])
        points = roc_points(forget, holdout)
        area = np.trapezoid([y for _, y in points], [x for x, _ in points])
        assert area == pytest.approx(attack_auc(list(forget), list(holdout)))

    def test_memorization_is_plotted_when_mem_is_missing(self, published):
        folder = published / "tofu"
        runs = [str(folder / "dd_linear" / f"1B-alpha-{alpha}") for alpha in ("0.5", "1.5")]
        result = build_report(collect(runs), "openunlearning", FEW)
        assert sections(result, "scatter")[0].plots[0].x_label.startswith("Exact memorization")
        assert sections(result, "scatter")[0].plots[0].y_label.startswith("Model utility")
        assert result.bests == ()

    def test_muse(self, published):
        folder = published / "muse"
        entries = collect([str(folder / "dd_linear"), str(folder / "eco")], str(folder / "baselines" / "target"),
                          str(folder / "baselines" / "retrain"))  # fmt: skip
        result = build_report(entries, "openunlearning", FEW)
        assert next(iter(result.tables.values())) == ("verbmem_distance", "knowmem_distance")
        assert "variant" not in next(iter(result.tables))
        verbatim, knowledge = sections(result, "scatter")[0].plots
        assert (verbatim.x_label[:14], knowledge.x_label[:14]) == ("Forget verbmem", "Forget knowmem")
        assert [series.joined for series in verbatim.series][2:] == [True] + [False] * (len(verbatim.series) - 3)
        assert len(sections(result, "curves")[0].plots) == 6
        assert sections(result, "dots") == []

    def test_single_results_share_one_plot_style(self, published):
        folder = published / "tofu"
        result = build_report(
            collect([str(folder / name) for name in ("gradient", "eco", "uld", "whp")]), "openunlearning", FEW
        )
        assert [series.name for series in sections(result, "scatter")[0].plots[0].series] == ["other results"]

    def test_long_names(self):
        assert shortened("short") == "short"
        assert shortened("OLMo-2-0425-1B-Instruct-lr5e-5-alpha-3.0", 20) == "OLMo-2-04…alpha-3.0"


class TestExamples:
    def test_side_by_side(self, report):
        assert [example.set for example in report.examples] == ["forget set"] * 6 + ["retain set"] * 2
        for example in report.examples:
            assert [answer.name for answer in example.answers] == ["target", "dd1_01", "rank20_01", "retrain"]
        # dd1 and retrain are one model; the target's best answers come first.
        assert all(example.answers[1].text == example.answers[3].text for example in report.examples)
        rouge = [example.answers[0].rouge for example in report.examples[:6]]
        assert rouge == sorted(rouge, reverse=True)
        assert (
            report.examples[0].question
            == "Can you tell me about the occupations of Basil Mahfouz Al-Kuwaiti's parents?"
        )

    def test_questions(self):
        assert question_of("system\n\nBe kind.user\n\nWho are you, user?assistant\n\n") == "Who are you, user?"
        assert question_of("user\nWhat is\nthis?\nassistant\n<think>\n\n</think>\n\n") == "What is\nthis?"
        assert question_of("Question: a?\nAnswer: b\n\nQuestion: c?\nAnswer: ") == "c?"
        assert question_of("Once upon a time") == "Once upon a time"
        assert question_of("word " * 200).startswith("… ")

    def test_answers_to_different_questions_are_not_compared(self, oracle, tmp_path):
        results = read_results(oracle / "dd1_01")
        for item in results.items["forget_Q_A_ROUGE"].values():
            item["ground_truth"] = "of another split"
        (tmp_path / "other").mkdir()
        write_results(results, tmp_path / "other")
        result = build_report(collect([str(oracle / "dd1_01"), str(tmp_path / "other")]), "openunlearning", FEW, 4)
        assert {example.set for example in result.examples} == {"retain set"}

    def test_number_of_examples(self, oracle):
        entries = collect([str(oracle / "dd1_01")])
        for count in (0, 1, 3):
            assert len(build_report(entries, "openunlearning", FEW, count).examples) == count
        with pytest.raises(UsageError, match="examples is -1"):
            build_report(entries, "openunlearning", FEW, -1)


class TestMissingData:
    def test_missing_curves_are_reported(self, report):
        assert len(report.left_out) == 1
        assert "α or k" in report.left_out[0]

    def test_references(self, oracle):
        result = build_report(collect([str(oracle / "dd1_01")]), "openunlearning", FEW, 0)
        assert next(iter(result.tables.values())) == ("mem",)
        assert result.notes["No Priv: no retrained model was given (--retrain)"] == "all"
        assert {line.split(":")[0] for line in result.left_out} >= {"The target", "The retrained model"}
        assert sections(result, "dots") == []
        assert "retrain" not in sections(result, "roc")[0].text

    def test_items(self, sweep):
        assert sweep.notes["No intervals: the folder holds figures only, no items"] == "all"
        assert {line.split(":")[0] for line in sweep.left_out} == {
            "ROC of the membership attacks",
            "Answers side by side",
        }
        assert next(iter(sweep.tables)).endswith("Point values.")


class Checker(HTMLParser):
    """Every element is closed, and no id stands twice."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.texts = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br", "line", "link"):
            self.open.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_startendtag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


class TestPage:
    def test_report_is_self_contained(self, report, tmp_path):
        page = page_of(report, tmp_path)
        checker = Checker()
        checker.feed(page)
        assert checker.open == []
        assert len(set(checker.ids)) == len(checker.ids)
        # Names of SVG's vocabulary are no addresses that anything fetches.
        without = re.sub(r'xmlns(:xlink)?="[^"]*"', "", page)
        assert "http" not in without
        assert not re.search(r"<(script|link|img|iframe)|@import|url\((?!#)", without)
        assert page.count('role="img" aria-label=') == sum(len(one.plots) for one in report.sections)
        text = " ".join(" ".join(checker.texts).split())
        row = report.rows[3]
        assert f"{row.text('agg')} {row.interval_text('agg')}" in text

    def test_report_text_is_escaped(self, oracle, tmp_path):
        evil = "<script>alert('x')</script><img src=x onerror=alert(1)>$\\frac{1}$ --> ]]>"
        results = read_results(oracle / "dd1_01")
        results.items = {name: items for name, items in results.items.items() if name[:3] not in ("mia", "ra_", "wf_")}
        for metric in ("forget_Q_A_ROUGE", "retain_Q_A_ROUGE"):
            for item in results.items[metric].values():
                item |= {"generation": evil + " long" * 200, "ground_truth": evil, "input": f"user\n\n{evil}assistant"}
        results.figures["mia_loss"] = None
        results.split = evil
        folder = tmp_path / "<script>alert('name')<" / "$a$ <u>&"
        folder.mkdir(parents=True)
        write_results(results, folder)
        other = tmp_path / "<i>$\\x" / "$a$ <u>&"
        other.mkdir(parents=True)
        write_results(results, other)
        result = build_report(collect([str(folder), str(other)], str(oracle / "full01"), str(oracle / "retain01")),
                           "openunlearning", FEW)  # fmt: skip
        assert result.examples == ()  # no question in common with the target
        alone = build_report(collect([str(folder), str(other)]), "openunlearning", FEW)
        for one in (result, alone):
            page = page_of(one, tmp_path)
            assert not re.search(r"<(script|img|u>|i>)", page)
            checker = Checker()
            checker.feed(page)
            assert checker.open == []
        assert "&lt;script&gt;alert(&#39;x&#39;)" in page
        assert "more characters</summary>" in page

    def test_long_word_is_truncated(self, oracle, tmp_path):
        results = read_results(oracle / "dd1_01")
        for item in results.items["forget_Q_A_ROUGE"].values():
            item["generation"] = "a" * 5000
        (tmp_path / "run").mkdir()
        write_results(results, tmp_path / "run")
        result = build_report(collect([str(tmp_path / "run")]), "openunlearning", FEW, 1)
        assert f"<dd>{'a' * 300} …<details><summary>4700 more characters" in page_of(result, tmp_path)
