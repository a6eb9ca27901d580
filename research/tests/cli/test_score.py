"""`divdec results score`: the paper's tables from its published files, what is printed, and what is refused."""

import json
import math
import re

import pytest

from divdec.cli import main
from support.tiny import loads_torch

COLUMNS = ("agg", "mem", "priv", "utility")
# The main table's rows and the folders that hold their figures.
MAIN = {
    "Target": "baselines/target",
    "Retrain": "baselines/retrain",
    "Linear DD": "dd_linear/1B-alpha-1.5",
    "Rank DD": "dd_rank/1B-topk-20",
    "GradAscent": "gradient/grad_ascent_2e-6/checkpoint-39",
    "GradDiff/GA-GDR": "gradient/graddiff_2e-6/checkpoint-39",
    "NPO": "gradient/npo_4e-6/checkpoint-26",
    "RMU": "gradient/rmu_8e-7/checkpoint-52",
    "SimNPO": "gradient/simnpo_3e-6/checkpoint-39",
    "UNDIAL": "gradient/undial_4e-6/checkpoint-130",
    "LUNAR": "lunar/lr-1e-4",
    r"$\delta$-Unlearning": "offset/lr-7e-6",
    "ULD": "uld/lr-2e-3",
    "WHP": "whp/lr-1e-5_alpha-3_0",
    "GUARD": "guard/lr-1e-3_delta-0_3",
    "ECO": "eco/lr-1e-5_str-50",
}
CROSS_TOKENIZER = {
    "OLMo Linear CT-DD": "cross_tok/OLMo-2-0425-1B-Instruct-lr5e-5-alpha-3.0",
    "OLMo Rank CT-DD": "cross_tok/OLMo-2-0425-1B-Instruct-lr1e-5-topk-1000",
    "Gemma Linear CT-DD": "cross_tok/gemma-3-1b-it-lr3e-5-alpha-2.4",
    "Gemma Rank CT-DD": "cross_tok/gemma-3-1b-it-lr1e-5-topk-1",
    "Qwen Linear CT-DD": "cross_tok/Qwen3-1.7B-lr3e-5-alpha-2.9",
    "Qwen Rank CT-DD": "cross_tok/Qwen3-1.7B-lr1e-5-topk-1000",
}
# The rows that differ by more than 0.01, in which columns, and why; docs/paper.md lists them too.
BOOTSTRAP_MEAN, FILE_DISAGREES = "bootstrap mean", "the file disagrees"
DIFFERENT = {
    "Retrain": (("priv",), BOOTSTRAP_MEAN),
    "GradAscent": (("utility",), BOOTSTRAP_MEAN),
    "RMU": (("utility",), BOOTSTRAP_MEAN),
    "SimNPO": (("utility",), BOOTSTRAP_MEAN),
    r"$\delta$-Unlearning": (("agg", "mem", "priv", "utility"), FILE_DISAGREES),
    "ULD": (("agg", "mem", "utility"), FILE_DISAGREES),
    "GUARD": (("utility",), FILE_DISAGREES),
}


@pytest.fixture(scope="module")
def paper(shared):
    return shared / "paper"


@pytest.fixture(scope="module")
def oracle(shared):
    return shared / "oracle" / "results"


def score(capsys, suite, *arguments, target, retrain):
    assert (
        main(["results", "score", suite, *map(str, arguments), "--target", str(target), "--retrain", str(retrain)]) == 0
    )
    return capsys.readouterr().out


def table(paper, label):
    """Rows of a table of the paper: its leading cells, and its numbers without their intervals."""
    text = (paper / "divergence_decoding.tex").read_text()
    body = text[text.index(rf"\label{{{label}}}") :]
    body = body[: body.index(r"\end{tabular}")]
    result = {}
    for line in re.findall(r"^(.*&.*)\\\\$", body, flags=re.MULTILINE):
        cells = [re.sub(r"\\textbf\{(.*)\}", r"\1", cell.strip()) for cell in line.split("&")]
        numbers = [float(cell.split()[0]) for cell in cells if re.match(r"\d\.\d\d( |$)", cell)]
        if numbers:
            result[tuple(cells[: -len(numbers)])] = numbers
    return result


def reproduced(paper, capsys, folders, columns, rows):
    """How each row's scores differ from the table: by row, the columns that are off by more than 0.01."""
    results = paper / "results" / "tofu"
    printed = score(
        capsys, "tofu", *(results / folder for folder in folders.values()), "--variant", "dd-paper", "--json",
        target=results / "baselines" / "target", retrain=results / "baselines" / "retrain",
    )  # fmt: skip
    result = dict(zip(folders, json.loads(printed), strict=True))
    return {
        row: off
        for row, content in result.items()
        if (
            off := tuple(
                column
                for column, number in zip(columns, rows[row], strict=True)
                if abs(content[column] - number) > 0.01 + 1e-9
            )
        )
    }


class TestPaperTables:
    def test_main(self, paper, capsys):
        rows = {cells[0]: numbers for cells, numbers in table(paper, "tab:TOFU").items()}
        assert len(rows) == 17
        assert rows.keys() - MAIN.keys() == {"Distill DD"}  # its file is not in the test data
        assert reproduced(paper, capsys, MAIN, COLUMNS, rows) == {row: off for row, (off, _) in DIFFERENT.items()}

    def test_cross_tokenizer(self, paper, capsys):
        rows = {cells[0]: numbers for cells, numbers in table(paper, "tab:TOFU_cross_tok").items()}
        assert rows.keys() == CROSS_TOKENIZER.keys()
        assert reproduced(paper, capsys, CROSS_TOKENIZER, COLUMNS, rows) == {}

    def test_all_divergence_decoding_rows(self, paper, capsys):
        rows = table(paper, "table:all-tofu-results")
        assert len(rows) == 50
        kinds = {"Linear": ("dd_linear", "alpha"), "Rank": ("dd_rank", "topk")}
        folders = {
            (size, rule, setting): f"{kinds[rule][0]}/{size}-{kinds[rule][1]}-{setting.split('=')[1]}"
            for size, rule, setting in rows
            if (size, rule) != ("3B", "Linear")  # their files are not in the test data
        }
        assert len(folders) == 32
        columns = ("agg", "agg_without_privacy", "mem", "priv", "utility")
        assert reproduced(paper, capsys, folders, columns, rows) == {}

    def test_docs_list_differing_values(self):
        from pathlib import Path

        page = (Path(__file__).parents[3] / "docs" / "paper.md").read_text()
        for row, (_, reason) in DIFFERENT.items():
            name = row.replace(r"$\delta$", "δ")
            assert re.search(rf"^\| {re.escape(name)} .*{reason}", page, flags=re.MULTILINE), row


def test_muse_distances_match_published_files(paper, capsys):
    folder = paper / "results" / "muse"
    own = folder / "dd_linear" / "1.3b-alpha-1.5"
    references = {"target": folder / "baselines" / "target", "retrain": folder / "baselines" / "retrain"}
    result = json.loads(score(capsys, "muse", own, *references.values(), "--json", **references))
    figures, target, retrain = (
        json.loads((folder / "MUSE_SUMMARY.json").read_text()) for folder in (own, *references.values())
    )

    def distance(of, forgotten):
        return math.dist(*([model[forgotten], model["retain_knowmem_ROUGE"]] for model in (of, retrain)))

    assert [content["name"] for content in result] == ["1.3b-alpha-1.5", "target", "retrain"]
    for kind in ("verbmem", "knowmem"):
        expected = 100 * distance(figures, f"forget_{kind}_ROUGE") / distance(target, f"forget_{kind}_ROUGE")
        assert [content[f"{kind}_distance"] for content in result] == pytest.approx([expected, 100, 0])
    assert all(content["ci"] is None and "no items" in content["reason"]["ci"] for content in result)
    assert "Verbatim distance" in score(capsys, "muse", own, **references)


def test_muse_intervals_need_items_of_each_metric(tmp_path, capsys):
    metrics = ("forget_verbmem_ROUGE", "forget_knowmem_ROUGE", "retain_knowmem_ROUGE")

    def write(name, values, folder):
        content = {
            metric: {
                "agg_value": value,
                "value_by_index": {str(index): {"rougeL_f1": value + (-1) ** index / 10} for index in range(50)},
            }
            for metric, value in values.items()
        }
        (tmp_path / name).mkdir()
        (tmp_path / name / "MUSE_EVAL.json").write_text(json.dumps(content | folder))
        return tmp_path / name

    target = write("target", dict(zip(metrics, (0.6, 0.7, 0.5), strict=True)), {})
    retrain = write("retrain", dict(zip(metrics, (0.2, 0.3, 0.5), strict=True)), {})
    own = write("own", dict(zip(metrics, (0.4, 0.4, 0.4), strict=True)), {})
    partial = write("part", dict(zip(metrics, (0.4, 0.4, 0.4), strict=True)), {metrics[1]: {"agg_value": 0.4}})
    references = {"target": target, "retrain": retrain}
    whole, lacking = json.loads(score(capsys, "muse", own, partial, "--json", **references))
    for kind, expected in (("verbmem", math.hypot(0.2, 0.1)), ("knowmem", math.hypot(0.1, 0.1))):
        assert whole[f"{kind}_distance"] == pytest.approx(100 * expected / 0.4)
        low, high = whole["ci"][f"{kind}_distance"]
        # The standard error of each mean is 0.1 / √50, about 3.5 % of the target's distance.
        assert low < whole[f"{kind}_distance"] < high
        assert 10 < high - low < 20
    assert whole["reason"] == {}
    assert lacking["ci"] == {"verbmem_distance": whole["ci"]["verbmem_distance"], "knowmem_distance": None}
    assert lacking["reason"] == {"ci": f"there are no items of {metrics[1]}"}
    assert re.search(r"own +\d\d\.\d \[\d\d\.\d, \d\d\.\d\]", score(capsys, "muse", own, **references))


class TestOutput:
    @pytest.fixture
    def references(self, oracle):
        return {"target": oracle / "full01", "retrain": oracle / "retain01"}

    def test_json_with_intervals(self, oracle, references, capsys):
        arguments = (oracle / "rank20_01", oracle / "dd1_01", "--draws", "200", "--json")
        printed = score(capsys, "tofu", *arguments, **references)
        assert printed == score(capsys, "tofu", *arguments, **references)
        assert printed != score(capsys, "tofu", *arguments, "--seed", "1", **references)
        rank, linear = json.loads(printed)
        assert rank["name"] == "rank20_01"
        assert rank["variant"] == "openunlearning"
        assert rank["reason"] == {}
        for name in ("agg", "agg_without_privacy", "mem", "priv", "utility"):
            low, high = rank["ci"][name]
            assert low <= rank[name] <= high
        assert linear["priv"] == 1
        narrow = json.loads(score(capsys, "tofu", *arguments, "--level", "0.5", **references))
        assert rank["ci"]["mem"][0] < narrow[0]["ci"]["mem"][0] < narrow[0]["ci"]["mem"][1] < rank["ci"]["mem"][1]

    def test_scores_without_required_metrics_are_explained(self, paper, capsys):
        folder = paper / "results" / "tofu"
        references = {name: folder / "baselines" / name for name in ("target", "retrain")}
        results = (folder / "dd_linear" / "1B-alpha-1.5", folder / "dd_rank" / "1B-topk-10")
        linear, rank = json.loads(score(capsys, "tofu", *results, "--json", **references))
        assert linear["mem"] is linear["agg"] is None
        assert "forget_truth_ratio_prob_mean" in linear["reason"]["mem"]
        assert linear["reason"]["agg"] == "it needs mem"
        assert linear["priv"] == pytest.approx(0.9484, abs=1e-4)
        assert "mia_loss" in rank["reason"]["priv"]
        assert rank["ci"] is None
        text = score(capsys, "tofu", *results, **references)
        assert "variant openunlearning" in text
        assert "no Priv: the result's mia_loss" in text

    def test_every_aggregate_notes_missing_fluency(self, paper, tmp_path, capsys):
        figures = json.loads((paper / "results/tofu/dd_rank/1B-topk-20/TOFU_SUMMARY.json").read_text())
        del figures["forget_Q_A_gibberish"]
        (tmp_path / "TOFU_SUMMARY.json").write_text(json.dumps(figures))
        folder = paper / "results" / "tofu" / "baselines"
        references = {name: folder / name for name in ("target", "retrain")}
        (result,) = json.loads(score(capsys, "tofu", tmp_path, "--json", "--variant", "dd-paper", **references))
        target = json.loads((folder / "target" / "TOFU_SUMMARY.json").read_text())
        assert result["utility"] == pytest.approx(figures["model_utility"] / target["model_utility"])
        assert "without fluency" in result["notes"][0]
        assert "without fluency" in score(capsys, "tofu", tmp_path, "--variant", "dd-paper", **references)

    @pytest.mark.parametrize("variant", ["openunlearning", "dd-paper", "relative"])
    def test_every_output_format_names_variant(self, oracle, references, capsys, variant):
        arguments = (oracle / "rank20_01", "--variant", variant, "--draws", "50")
        assert json.loads(score(capsys, "tofu", *arguments, "--json", **references))[0]["variant"] == variant
        text = score(capsys, "tofu", *arguments, **references)
        assert f"variant {variant}" in text
        assert re.search(r"rank20_01 +\d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\]", text)

    def test_similar_result_names_are_disambiguated(self, oracle, references, tmp_path, capsys):
        (tmp_path / "rank20_01").symlink_to(oracle / "rank20_01")
        text = score(capsys, "tofu", oracle / "rank20_01", tmp_path / "rank20_01", "--draws", "10", **references)
        assert str(tmp_path / "rank20_01") in text

    def test_options_between_result_paths(self, oracle, references, capsys):
        assert main(["results", "score", "tofu", str(oracle / "full01"), "--draws", "10",
                     "--target", str(references["target"]),
                     str(oracle / "dd1_01"), "--retrain", str(references["retrain"]), "--json"]) == 0  # fmt: skip
        assert [content["name"] for content in json.loads(capsys.readouterr().out)] == ["full01", "dd1_01"]

    def test_scores_of_divdec_written_results_match_oracle(self, oracle, references, tmp_path, capsys):
        from divdec.evaluation.results import write_results
        from divdec_research.suites.results import read_results

        (tmp_path / "ours").mkdir()
        write_results(read_results(oracle / "rank20_01"), tmp_path / "ours")
        theirs, ours = (
            json.loads(score(capsys, "tofu", folder, "--draws", "50", "--json", **references))[0]
            for folder in (oracle / "rank20_01", tmp_path / "ours")
        )
        assert ours["name"] == "ours"
        assert {**ours, "name": "", "folder": ""} == {**theirs, "name": "", "folder": ""}


class TestBadInput:
    """One line that names what was wrong, exit code 2."""

    @pytest.fixture
    def summary(self, tmp_path):
        def write(name, suite, **figures):
            (tmp_path / name).mkdir()
            (tmp_path / name / f"{suite.upper()}_SUMMARY.json").write_text(json.dumps(figures))
            return tmp_path / name

        return write

    def refused(self, capsys, *arguments, says):
        assert main(["results", "score", *map(str, arguments)]) == 2
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1

    def test_folders(self, summary, tmp_path, capsys):
        tofu, muse = summary("t", "tofu", model_utility=0.5), summary("m", "muse", forget_verbmem_ROUGE=0.5)
        references = ("--target", tofu, "--retrain", tofu)
        self.refused(capsys, "tofu", tmp_path, *references, says="holds no results")
        self.refused(capsys, "tofu", tmp_path / "none", *references, says="is not a folder")
        self.refused(capsys, "tofu", tofu, "--target", tmp_path, "--retrain", tofu, says="holds no results")
        self.refused(capsys, "muse", tofu, "--target", muse, "--retrain", muse, says="but muse was asked for")
        self.refused(capsys, "tofu", muse, *references, says="but tofu was asked for")
        self.refused(capsys, "tofu", tofu, "--target", tofu, "--retrain", muse, says="but tofu was asked for")

    def test_figures(self, summary, capsys):
        tofu, empty = summary("t", "tofu", model_utility=0.5), summary("e", "tofu")
        muse = summary("m", "muse", forget_verbmem_ROUGE=0.5, retain_knowmem_ROUGE=0.5)
        self.refused(capsys, "tofu", empty, "--target", tofu, "--retrain", tofu, says="no figures that can be scored")
        self.refused(capsys, "tofu", tofu, "--target", empty, "--retrain", tofu, says="has no model_utility")
        self.refused(capsys, "muse", muse, "--target", muse, "--retrain", muse, says="does not differ")
        for wrong in ("many", float("nan"), -1, 7, True, []):
            odd = summary(f"odd {wrong}", "tofu", model_utility=wrong)
            self.refused(capsys, "tofu", odd, "--target", tofu, "--retrain", tofu, says="a number from 0 to 1")

    def test_settings(self, summary, capsys):
        tofu = summary("t", "tofu", model_utility=0.5)
        references = (tofu, "--target", tofu, "--retrain", tofu)
        self.refused(capsys, "tofu", *references[1:], says="results is required")
        self.refused(capsys, "tofu", tofu, "--target", tofu, says="required")
        self.refused(capsys, "leak", *references, says="suite")
        self.refused(capsys, "tofu", *references, "--variant", "mine", says="variant")
        self.refused(capsys, "tofu", *references, "--level", "99", says="level is 99")
        self.refused(capsys, "tofu", *references, "--draws", "0", says="draws is 0")
        self.refused(capsys, "tofu", *references, "--draws", "1000000", says="draws is 1000000")
        self.refused(capsys, "tofu", *references, "--seed", "-1", says="seed is -1")


def test_score_command_does_not_import_torch(oracle):
    references = ["--target", str(oracle / "full01"), "--retrain", str(oracle / "retain01")]
    arguments = ["results", "score", "tofu", str(oracle / "dd1_01"), *references, "--draws", "20"]
    assert not loads_torch(arguments)


def test_score_settings_from_config_file(oracle, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(
        f"target: {oracle / 'full01'}\nretrain: {oracle / 'retain01'}\nvariant: relative\njson: true\n"
    )
    assert main(["results", "score", "tofu", str(oracle / "dd1_01"), "--config", str(tmp_path / "run.yaml")]) == 0
    assert json.loads(capsys.readouterr().out)[0]["variant"] == "relative"
