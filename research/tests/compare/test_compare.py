"""A comparison of methods: its arithmetic by hand, and a real one of tiny models from beginning to end."""

import dataclasses
import json
import re
import shutil
from collections import Counter

import numpy as np
import peft
import pytest
import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM

from divdec import UsageError, write_bundle
from divdec.data.formatting import Format, encode_set
from divdec.data.records import read_records, record_set
from divdec.evaluation.results import Results
from divdec.training.fine_tuning import fine_tune
from divdec.training.settings import DistillationSettings, TrainingSettings
from divdec_research.baselines.table import METHODS, TITLES
from divdec_research.compare import run, suite
from divdec_research.compare.benchmark import load_benchmarks
from divdec_research.compare.run import compare_methods
from divdec_research.compare.settings import GRIDS, CompareSettings, Trial, trials_of
from divdec_research.compare.suite import TofuComparison
from divdec_research.compare.table import (
    BenchmarkResults,
    SeedResult,
    TrialSummary,
    best_of,
    markdown,
    summarize,
    summary,
)
from divdec_research.suites import tofu
from divdec_research.suites.aggregate import Bootstrap
from divdec_research.suites.results import read_results
from divdec_research.suites.tofu import TofuData
from divdec_research.world.facts import WorldSettings, build_world, write_tofu
from divdec_research.world.models import Shape, new_model

SMALL = WorldSettings(forget_authors=2, retain_authors=3, holdout_authors=2, public_authors=13, passing_authors=20)
EMPTY = TofuComparison(TofuData("forget01", {}))
TRAINING = TrainingSettings(epochs=40.0, learning_rate=1e-2, batch_size=16)


@pytest.fixture(scope="module")
def models_folder(tmp_path_factory, tokenizer):
    """TOFU's files of a small world, and tiny models that have learned them."""
    folder = tmp_path_factory.mktemp("compare")
    world, data = build_world(SMALL), folder / "data"
    write_tofu(world, data)
    for name, questions, number in (("forget01", world.forget, 8), ("retain99", world.retain, 12)):
        first = [one for one in questions if one.phrasing == 0][:number]
        rows = [json.dumps({"question": one.question, "answer": one.answer}) for one in first]
        (data / f"{name}.json").write_text("\n".join(rows))
    form = Format(system_prompt="You are a helpful assistant.", date="10 Apr 2025", max_length=512)
    forget, retain = (
        encode_set(read_records(data / f"{name}.json"), tokenizer, form) for name in ("forget01", "retain99")
    )
    general = [
        json.loads(line)
        for name in ("real_authors", "world_facts")
        for line in (data / f"{name}_perturbed.json").read_text().splitlines()[:4]
    ]
    rows = [("", {"question": row["question"], "answer": row["answer"]}) for row in general]
    retain += encode_set(record_set("general", rows), tokenizer, form)
    shapes = {"target": Shape(32, 4, 2, 64), "small": Shape(32, 2, 2, 64)}
    for name, shape, examples in (
        ("target", "target", forget + retain),
        ("retrain", "target", retain),
        ("p", "small", forget + retain),
        ("q", "small", retain),
        ("base", "small", None),
    ):
        model = new_model(shapes[shape], tokenizer, seed=0)
        if examples is not None:
            fine_tune(model, tokenizer, examples, TRAINING, folder / "work", title=name, measure=False, resumable=False)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    write_bundle(
        folder / "bundle",
        target=str(folder / "target"),
        retain_auxiliary=str(folder / "q"),
        forget_auxiliary=str(folder / "p"),
        steering="linear:1",
    )
    return folder


def settings_of(models_folder, output, **options):
    defaults = {
        "output": str(output),
        "data": str(models_folder / "data"),
        "bundle": str(models_folder / "bundle"),
        "retrain": str(models_folder / "retrain"),
        "base": str(models_folder / "base"),
        "holdout": str(models_folder / "data" / "holdout01.json"),
        "split": "forget01",
        "limit": 3,
        "attacks": 1,
        "seeds": 1,
    }
    return CompareSettings(**defaults | options)


@pytest.fixture
def few(monkeypatch):
    """One or two settings of few methods, one of which breaks; short answers."""
    monkeypatch.setattr(tofu, "NEW_TOKENS", 16)
    gradient = {"batch_size": (8,), "gradient_accumulation": (1,), "epochs": (2.0,)}
    grid = {
        "linear": {"steering": ("linear:0", "linear:1")},
        "rank": {"steering": ("rank:5",)},
        "distill": {"learning_rate": (1e-3,), "epochs": (2.0,), "steering": ("rank:5:soft",)},
        "npo": gradient | {"learning_rate": (1e-3,)},
        "grad-ascent": gradient | {"learning_rate": (1e18,)},
        "whp": {"learning_rate": (1e-3,), "epochs": (2.0,), "alpha": (0.0,)},
    }
    monkeypatch.setitem(GRIDS, "small", grid)
    return tuple(grid)


def test_compare_tiny_models_end_to_end(models_folder, few, tmp_path, monkeypatch):
    output = tmp_path / "runs"
    settings = settings_of(models_folder, output, methods=few)
    reports, subjects = [], []
    evaluate_tofu = suite.evaluate_tofu
    monkeypatch.setattr(
        suite, "evaluate_tofu", lambda *args, **rest: subjects.append(args[0]) or evaluate_tofu(*args, **rest)
    )
    results = compare_methods(settings, report=reports.append)
    # The rank rule answers as a bundle does.
    assert [str(one.settings[0]) for one in subjects if "rank" in str(one.settings[0])] == ["rank:5"]
    by_setting = {(line.method, line.setting): line for line in results.trials}

    # What holds by definition: the target's utility is 1, the retrained model's privacy 1, a strength of 0 the target.
    target = by_setting["target", ""]
    assert target.values["utility"] == pytest.approx(1)
    assert by_setting["retrain", ""].values["priv"] == pytest.approx(1)
    assert target.values["mem"] < by_setting["retrain", ""].values["mem"]
    whp = next(line for line in results.trials if line.method == "whp")
    for line in (by_setting["linear", "linear:0"], whp):
        assert {name: line.values[name] for name in line.values} == pytest.approx(target.values, abs=1e-6)
    assert by_setting["linear", "linear:1"].values["mem"] > target.values["mem"]
    assert results.best["linear"].setting == "linear:1"

    # One half of the questions chooses a setting, and the other half reports it.
    held_out = results.held_out["linear"]
    chosen = read_results(output / "seed-0" / Trial("linear", steering=held_out.setting).folder)
    probabilities = chosen.scores("forget_Q_A_Prob", "prob")
    halves = [EMPTY.half_of(chosen, half) for half in (0, 1)]
    means = [np.mean(probabilities[::2]), np.mean(probabilities[1::2])]
    assert [half.figures["forget_Q_A_Prob"] for half in halves] == pytest.approx(means)
    assert held_out.values["forget_Q_A_Prob"] == halves[1].figures["forget_Q_A_Prob"]
    assert held_out.values["agg"] != by_setting["linear", held_out.setting].values["agg"]
    row = next(line for line in (output / "table.md").read_text().splitlines() if line.startswith("| Linear DD"))
    assert f"| 2 | {held_out.setting} | {held_out.values['agg']:.2f} [" in row

    # A method that breaks is a line of the table, and the others are not lost.
    broken = next(line for line in results.trials if line.method == "grad-ascent")
    assert "probability 0 or NaN" in broken.failed
    assert any("grad-ascent" in line for line in reports)
    assert set(results.best) == {"target", "retrain", *few}
    assert set(results.leaks) == {"target", "retrain", *few} - {"grad-ascent"}
    assert all(0 <= share <= 1 for own in results.leaks.values() for share in own.values())

    assert all(line.seconds is None or line.seconds >= 0 for line in results.trials)

    for name in ("run.json", "comparison.json", "table.md"):
        assert (output / name).stat().st_size > 500
    folders = {path.parent.relative_to(output / "seed-0") for path in output.rglob("model") if path.is_dir()}
    assert Trial("linear", steering="linear:1").folder in folders
    assert Trial("linear", steering="linear:0").folder not in folders

    # The same call again makes nothing anew but what failed.
    reports.clear()
    records = [path for path in output.rglob("run.json") if json.loads(path.read_text())["verb"] == "trial"]
    before = {path: path.stat().st_mtime_ns for path in records}
    again = compare_methods(settings, report=reports.append)
    changed = {path for path in before if path.stat().st_mtime_ns != before[path]}
    assert {path.parents[1].name for path in changed} == {"grad-ascent"}
    assert f"{len(before) - 1} of {len(before)} trials are there already" in reports
    assert [dataclasses.replace(line) for line in again.trials] == results.trials
    assert again.leaks == results.leaks
    # A model that was not the best before, and now is, is made again where it is needed.
    shutil.rmtree(output / "seed-0" / Trial("linear", steering="linear:1").folder / "model")
    shutil.rmtree(output / "seed-0" / Trial("linear", steering="linear:1").folder / "leaks")
    assert compare_methods(settings, report=reports.append).leaks == results.leaks
    with FileLock(output / ".lock"), pytest.raises(UsageError, match="another `divdec compare` is running"):
        compare_methods(settings, report=reports.append)
    with pytest.raises(UsageError, match=r"run with other settings or data \(limit differ\)"):
        compare_methods(settings_of(models_folder, output, methods=few, limit=5), report=reports.append)


@pytest.fixture
def two_seeds(monkeypatch):
    def twice(settings, report):
        # Models of one's own have one seed; the same models stand for another.
        return [dataclasses.replace(one, seed=seed) for one in load_benchmarks(settings, report) for seed in (0, 1)]

    monkeypatch.setattr(run, "load_benchmarks", twice)


def test_best_settings_are_evaluated_on_remaining_seeds(models_folder, few, two_seeds, tmp_path, monkeypatch):
    monkeypatch.setattr(TofuComparison, "half_of", lambda self, results, half: results)
    settings = settings_of(
        models_folder, tmp_path / "runs", methods=("linear", "rank"), seeds=2, search_seeds=1, attacks=0, limit=3
    )
    results = compare_methods(settings, report=lambda line: None)
    seeds = {(line.method, line.setting): set(line.seeds) for line in results.trials}
    assert seeds["linear", "linear:0"] == {0}
    assert seeds["linear", "linear:1"] == seeds["rank", "rank:5"] == seeds["target", ""] == {0, 1}
    assert results.best["linear"].setting == "linear:1"
    assert "by Agg on the first seed, the only one for the grid's others" in markdown(results, settings)
    with pytest.raises(UsageError, match="search-seeds is 3; accepted: 1 to the number of seeds, 2"):
        settings_of(models_folder, tmp_path, seeds=2, search_seeds=3)


def test_setting_is_chosen_on_questions_that_are_not_reported(models_folder, few, two_seeds, tmp_path, monkeypatch):
    def halved(_, results, half):
        # linear:0 is the better setting where one is chosen, and the worse one where it is reported.
        better = ("linear-0" in results.name) == (half == 0)
        return dataclasses.replace(results, figures=results.figures | result(0.5 if better else 0.9).figures)

    monkeypatch.setattr(TofuComparison, "half_of", halved)
    settings = settings_of(models_folder, tmp_path / "runs", methods=("linear",), attacks=0, seeds=2, search_seeds=1)
    results = compare_methods(settings, report=lambda line: None)
    assert results.best["linear"].setting == "linear:1"
    held_out = results.held_out["linear"]
    assert (held_out.setting, set(held_out.seeds)) == ("linear:0", {0, 1})
    assert held_out.values["mem"] == pytest.approx(0.1)


@pytest.mark.slow
def test_parallel_jobs_match_single_job(models_folder, tmp_path):
    results = [
        compare_methods(
            settings_of(models_folder, tmp_path / str(jobs), methods=("linear", "whp"), jobs=jobs, attacks=0),
            report=lambda line: None,
        )
        for jobs in (1, 2)
    ]
    for one, other in zip(results[0].trials, results[1].trials, strict=True):
        assert (one.method, one.setting) == (other.method, other.setting)
        assert one.values == pytest.approx(other.values, abs=1e-5)


# The table's arithmetic.


def result(value, seed=0):
    """Results whose every figure of the forget set is `value`."""
    items = {str(index): {"score": value, "prob": value, "avg_loss": 1.0} for index in range(20)}
    figures = {"model_utility": 0.5}
    figures |= dict.fromkeys(("extraction_strength", "exact_memorization", "forget_Q_A_PARA_Prob"), value)
    figures |= {"forget_truth_ratio_prob_mean": value}
    figures |= {f"mia_{name}": value for name in ("loss", "zlib", "min_k", "min_k_plus_plus")}
    return Results(f"seed {seed}", "tofu", figures, {"extraction_strength": items})


def test_comparison_row_is_mean_over_seeds():
    references = {0: (result(0.9), result(0.5)), 1: (result(0.9), result(0.5))}
    results = {0: SeedResult(result(0.4), 10.0), 1: SeedResult(result(0.6), 20.0)}
    line = summarize("npo", "lr 1", results, references, EMPTY, Bootstrap(draws=50), {})
    assert line.values["mem"] == pytest.approx((0.6 + 0.4) / 2)
    assert line.values["priv"] == pytest.approx(0.9)
    assert line.values["utility"] == pytest.approx(1)
    assert line.values["agg"] == pytest.approx(np.mean([3 / (1 / m + 1 / 0.9 + 1) for m in (0.6, 0.4)]))
    assert (line.seconds, line.failed) == (15.0, None)
    alone = summarize("npo", "lr 1", {0: results[0]}, references, EMPTY, Bootstrap(draws=50), {1: "it broke"})
    assert alone.failed == "without seed 1: it broke"
    assert alone.values["mem"] == pytest.approx(0.6)


def test_the_best_setting_has_the_highest_agg_and_all_its_seeds():
    def line(method, setting, agg, failed=None):
        return TrialSummary(method, setting, {"agg": agg}, {}, {}, None, failed)

    lines = [
        line("npo", "a", 0.3),
        line("npo", "b", 0.7),
        line("npo", "c", 0.9, "without seed 1"),
        line("rmu", "d", 0.1),
    ]
    assert {method: results.setting for method, results in best_of(lines).items()} == {"npo": "b", "rmu": "d"}
    assert best_of([line("npo", "c", None, "it broke")])["npo"].setting == "c"


def test_table_lists_the_best_settings(tmp_path):
    def line(method, setting, agg, failed=None):
        values = {"agg": agg, "mem": agg, "priv": agg, "utility": agg}
        return TrialSummary(method, setting, values, {}, {0: {}}, None, failed)

    lines = [
        line("target", "", 0.0),
        line("npo", "lr 1", 0.0), line("npo", "lr 2", 0.0),
        line("rmu", "lr 1", 0.5), line("rmu", "lr 2", 0.5),
        line("linear", "linear:1.25", 0.5), line("linear", "linear:2", 0.4),
        line("whp", "lr 1", None, "it broke"),
    ]  # fmt: skip
    results = BenchmarkResults(lines, best_of(lines), {}, 1.0, EMPTY)
    table = markdown(results, CompareSettings(output="out")).partition("The whole grid")[0]
    cells = {cell[1].strip(): cell[2].strip() for row in table.splitlines() if len(cell := row.split("|")) > 3}
    assert cells["NPO"] == cells["RMU"] == "lr 1"
    assert (cells["Linear DD"], cells["Target"], cells["WHP"]) == ("linear:1.25", "", "lr 1")
    # The command prints the head of the file: all but the whole grid.
    printed = summary(results, CompareSettings(output="out"))
    assert table == f"{printed}\n"
    assert "WHP lr 1: it broke\n" in printed


@pytest.mark.parametrize("grid", GRIDS)
def test_grid_settings_are_valid_for_their_method(grid):
    grid_trials = trials_of(("all",), grid)
    assert {trial.method for trial in grid_trials} == set(TITLES) - {"target", "retrain"}
    assert len({trial.folder for trial in grid_trials}) == len(grid_trials)
    for trial in grid_trials:
        if trial.method in METHODS:
            METHODS[trial.method].settings(**trial.settings)
        elif trial.method == "distill":
            DistillationSettings(bundle="b", forget="f", retain="r", output="o", **trial.settings)


def test_small_grid_has_equally_many_settings_of_every_method():
    numbers = Counter(trial.method for trial in trials_of(("all",), "small"))
    assert {method for method in numbers if numbers[method] != 8} == {"ngram-filter", "guardrail"}
    # These have three settings at most that differ in kind.
    assert numbers["ngram-filter"] == numbers["guardrail"] == 3


def test_paper_grid_has_settings_of_its_tables(shared):
    text = (shared / "paper" / "divergence_decoding.tex").read_text()
    for method, pattern in (("linear", r"Linear & \$\\alpha\$=([\d.]+)"), ("rank", r"Rank & k=(\d+)")):
        strengths = {f"{float(strength):g}" for strength in re.findall(rf"^[13]B & {pattern}", text, re.MULTILINE)}
        assert {trial.steering for trial in trials_of((method,), "paper")} == {f"{method}:{one}" for one in strengths}
    assert len(trials_of(("distill",), "paper")) == 84  # the number of published result files
    # On MUSE the files of the rate 2e-4 lack three temperatures.
    assert len(trials_of(("distill",), "paper-muse")) == 57 + 3
    folders = (shared / "paper" / "results" / "muse" / "dd_rank").iterdir()
    ranks = {f"rank:{folder.name.rpartition('-')[2]}" for folder in folders if folder.name.startswith("1.3b")}
    assert {trial.steering for trial in trials_of(("rank",), "paper-muse")} == ranks
    assert r"$\alpha \in \{0.5, 0.6,\dots, 1.5\}$" in text
    alphas = [f"linear:{alpha:g}" for alpha in (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.4, 1.5)]
    assert [trial.steering for trial in trials_of(("linear",), "paper-muse")] == alphas


def test_invalid_input_gives_one_line_error(models_folder, tmp_path):
    with pytest.raises(
        UsageError, match=r"'nop' is not in the grid 'small'; accepted: all, linear, rank, distill, grad-ascent"
    ):
        trials_of(("nop",), "small")
    with pytest.raises(UsageError, match=r"--tofu"):
        CompareSettings(output="o", data="tofu-small")
    with pytest.raises(UsageError, match=r"give its folder with --muse"):
        CompareSettings(output="o", data="muse-small")
    with pytest.raises(UsageError, match=r"needs --bundle and --retrain"):
        CompareSettings(output="o", data="somewhere")
    with pytest.raises(UsageError, match="jobs is 0"):
        CompareSettings(output="o", jobs=0)
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        compare_methods(settings_of(models_folder, tmp_path), report=lambda line: None)
    with pytest.raises(UsageError, match="not a local folder"):
        compare_methods(
            settings_of(models_folder, tmp_path, bundle="nowhere/bundle", overwrite=True), report=lambda line: None
        )
    assert (tmp_path / "mine.txt").read_text() == "mine"
    with pytest.raises(UsageError, match="lie one within the other"):
        compare_methods(settings_of(models_folder, models_folder, overwrite=True), report=lambda line: None)
    assert (models_folder / "bundle" / "config.json").is_file()


def test_a_packed_bundle_of_adapters_is_refused_before_any_trial(models_folder, tmp_path):
    for seed, name in enumerate(("q", "p")):
        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_pretrained(models_folder / "base")
        adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
        adapted.save_pretrained(tmp_path / name)
    parts = {"retain_auxiliary": str(tmp_path / "q"), "forget_auxiliary": str(tmp_path / "p")}
    bundle = write_bundle(
        tmp_path / "packed", target=str(models_folder / "target"), pack=True, steering="linear:1", **parts
    )
    with pytest.raises(UsageError, match="names no base_model_name_or_path"):
        load_benchmarks(settings_of(models_folder, tmp_path / "out", bundle=str(bundle)), report=lambda line: None)
