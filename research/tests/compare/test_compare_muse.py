"""A comparison on MUSE: its data and scores by hand, and a real one of tiny models from beginning to end."""

import dataclasses
import json
import math
import random
import shutil

import numpy as np
import pytest

from divdec import UsageError, write_bundle
from divdec.cli import main
from divdec.data.formatting import Format, encode_records
from divdec.evaluation.results import Results, numbered
from divdec.training.settings import TrainingSettings
from divdec_research.compare import benchmark, muse_news
from divdec_research.compare.muse_news import SHARED_WORDS, muse_small
from divdec_research.compare.run import compare_methods
from divdec_research.compare.settings import GRIDS, CompareSettings
from divdec_research.compare.suite import MuseComparison
from divdec_research.compare.table import SeedResult, TrialSummary, best_of, summarize
from divdec_research.suites import muse
from divdec_research.suites.aggregate import Bootstrap
from divdec_research.suites.muse import MuseData
from divdec_research.suites.questions import BenchmarkFormat
from divdec_research.world.models import Recipe, Shape, train_tokenizer

EMPTY = MuseComparison(MuseData({}, {}))
VERBATIM, FORGET, RETAIN = "forget_verbmem_ROUGE", "forget_knowmem_ROUGE", "retain_knowmem_ROUGE"


@pytest.fixture(scope="module")
def news(tmp_path_factory):
    """MUSE's files with invented articles and questions."""
    folder = tmp_path_factory.mktemp("muse_news")
    rng = random.Random(0)
    words = ["".join(rng.choice("bdfklmnprst") + rng.choice("aeiou") for _ in range(2)) for _ in range(150)]

    def write(name, rows):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def article(length=60):
        return {"text": " ".join(rng.choices(words, k=length))}

    def question(name, number):
        return {"question": f"Who met {words[number]} in {name}?", "answer": " ".join(rng.choices(words, k=2))}

    for number, name in enumerate(("forget", "retain")):
        write(f"knowmem/{name}_qa.jsonl", [question(name, 50 * number + index) for index in range(6)])
        write(f"knowmem/{name}_qa_icl.jsonl", [question(name, 50 * number + 10)])
    articles = {name: [article() for _ in range(6)] for name in ("forget", "holdout", "retain")}
    # A text that an earlier set has already, and one that is too short.
    articles["holdout"] += [{"text": f"{words[0]} {articles['forget'][0]['text']}"}, article(20)]
    for name, rows in articles.items():
        write(f"privleak/{name}.jsonl", rows)
    write("sust/forget_1.jsonl", articles["forget"])
    for fold in (2, 3, 4):
        write(f"sust/forget_{fold}.jsonl", [article() for _ in range(8)])
    texts = [row["text"].split() for row in articles["forget"]]
    write("verbmem/forget.jsonl", [{"prompt": " ".join(one[:6]), "gt": " ".join(one[6:14])} for one in texts])
    return folder


def test_muse_is_cut_to_sets_that_share_no_passage(news):
    material, data = muse_small(news)
    assert [len(material.corpus), len(material.forget), len(material.retain)] == [24, 12, 12]
    sets = [material.corpus, material.forget, material.retain, data.texts["holdout"]]
    grams = []
    for records in sets:
        texts = [f"{record.prompt} {record.answer}".split() for record in records]
        grams.append({tuple(text[i : i + SHARED_WORDS]) for text in texts for i in range(len(text) - SHARED_WORDS + 1)})
    assert all(one.isdisjoint(other) for index, one in enumerate(grams) for other in grams[:index])
    assert len(data.texts["holdout"]) == 6
    assert len(muse_small(news, limit=2)[0].forget) == 12
    assert [len(texts) for texts in muse_small(news, limit=2)[1].texts.values()] == [2, 2]


def test_models_learn_the_tokens_that_the_suite_asks(news):
    material, data = muse_small(news)
    tokenizer = train_tokenizer(material.texts, 400)
    examples = encode_records(material.forget.records, tokenizer, Format())
    form = BenchmarkFormat(tokenizer, "plain")
    for example, question in zip(examples[:6], data.knowmem["forget"], strict=True):
        assert example.input_ids[: example.prompt_length] == form.prompt(question)
    for example, text in zip(examples[6:], data.verbmem, strict=True):
        asked = muse.continuation(text, tokenizer)
        assert example.input_ids == [*asked.input_ids, tokenizer.eos_token_id]
        assert example.prompt_length == asked.prompt_length


def result(verbatim, forget, retain, auc=None):
    """Results of four items a set, whose mean is the given value; the attack's AUC is 1 or 0."""
    items = {
        metric: {str(index): {"rougeL_f1": value} for index in range(4)}
        for metric, value in ((VERBATIM, verbatim), (FORGET, forget), (RETAIN, retain))
    }
    if auc is not None:
        items |= {"mia_min_k.forget": numbered([0.0] * 4), "mia_min_k.holdout": numbered([2.0 * auc - 1] * 4)}
    results = Results("", "muse", items=items)
    muse.compute_figures(results)
    return results


def test_muse_scores_are_distances_to_retrain():
    target, retrain = result(0.9, 0.8, 0.5, auc=1), result(0.1, 0.2, 0.4, auc=0)
    values = EMPTY.values(result(0.5, 0.2, 0.1, auc=1), target, retrain)
    whole = math.sqrt(0.8**2 + 0.6**2 + 0.1**2)
    assert values["distance"] == pytest.approx(100 * math.sqrt(0.4**2 + 0.3**2) / whole)
    assert values["verbmem_distance"] == pytest.approx(100 * 0.5 / math.sqrt(0.8**2 + 0.1**2))
    assert values["knowmem_distance"] == pytest.approx(100 * 0.3 / math.sqrt(0.6**2 + 0.1**2))
    assert values["privleak"] == pytest.approx(-100)
    assert EMPTY.values(target, target, retrain)["distance"] == pytest.approx(100)
    assert EMPTY.values(retrain, target, retrain)["distance"] == EMPTY.values(retrain, target, retrain)["privleak"] == 0
    draws = EMPTY.draws(result(0.5, 0.2, 0.1, auc=1), target, retrain, Bootstrap(draws=20))
    assert np.unique(draws["distance"]) == pytest.approx([values["distance"]])
    # Without texts, as in a folder of questions alone, the distance over knowledge takes the place of the whole.
    results = result(0.5, 0.2, 0.1)
    del results.items[VERBATIM], results.figures[VERBATIM]
    line = summarize("npo", "", {0: SeedResult(results, None)}, {0: (target, retrain)}, EMPTY, Bootstrap(), {})
    assert (line.values.get("distance"), line.values["privleak"], line.goal) == (None, None, "knowmem_distance")
    assert line.rank() == -line.values["knowmem_distance"]


def test_halves_of_muse_results():
    results = result(0.5, 0.2, 0.1, auc=1)
    for index, value in enumerate((0.1, 0.2, 0.3, 0.4)):
        results.items[VERBATIM][str(index)]["rougeL_f1"] = value
    assert [EMPTY.half_of(results, half).figures[VERBATIM] for half in (0, 1)] == pytest.approx([0.2, 0.3])
    assert EMPTY.half_of(results, 1).figures["mia_min_k"] == 1


def test_the_best_setting_has_the_lowest_distance():
    def line(method, setting, distance, verbatim, failed=None):
        values = {"distance": distance, "verbmem_distance": verbatim}
        return TrialSummary(method, setting, values, {}, {}, None, failed, goal="distance")

    lines = [
        line("npo", "a", 50.0, 3.0),
        line("npo", "b", 20.0, 5.0),
        line("npo", "c", 10.0, 1.0, "without seed 1"),
        line("rmu", "d", 0.0, 0.0),
        line("rmu", "e", 0.0, 0.0),
    ]
    assert best_of(lines)["npo"].setting == "b"
    assert best_of(lines, "verbmem_distance")["npo"].setting == "a"


@pytest.fixture
def few(monkeypatch, tmp_path):
    """Tiny models and few settings, one of which breaks."""
    monkeypatch.setenv("DIVDEC_CACHE", str(tmp_path / "cache"))
    training = TrainingSettings(epochs=40.0, learning_rate=1e-2, batch_size=8, warmup=0.05)
    once = dataclasses.replace(training, epochs=1.0)
    shapes = {"target": Shape(48, 2, 2, 96), "auxiliary": Shape(48, 1, 2, 96)}
    settings = {"target_pretraining": once, "auxiliary_pretraining": once}
    settings |= dict.fromkeys(("auxiliary_base_tuning", "target_tuning", "auxiliary_tuning"), training)
    monkeypatch.setattr(benchmark, "MUSE_SMALL", Recipe(400, **shapes, **settings))
    monkeypatch.setattr(muse_news, "PROMPT_WORDS", 6)
    monkeypatch.setattr(muse_news, "PASSAGE_WORDS", 14)
    monkeypatch.setattr(muse, "VERBMEM_TOKENS", 24)
    gradient = {"batch_size": (8,), "gradient_accumulation": (1,), "epochs": (1.0,)}
    grid = {
        "linear": {"steering": ("linear:0", "linear:1")},
        "rank": {"steering": ("rank:5",)},
        "npo": gradient | {"learning_rate": (1e-3,)},
        "grad-ascent": gradient | {"learning_rate": (1e18,)},
    }
    monkeypatch.setitem(GRIDS, "small", grid)
    return tuple(grid)


@pytest.mark.slow
def test_compare_on_muse_end_to_end(news, few, tmp_path):
    output = tmp_path / "runs"
    settings = CompareSettings(
        output=str(output), data="muse-small", muse=str(news), methods=few, seeds=1, attacks=1, limit=5
    )
    results = compare_methods(settings, report=lambda line: None)
    by_setting = {(line.method, line.setting): line.values for line in results.trials}
    target, retrain = by_setting["target", ""], by_setting["retrain", ""]
    # What holds by definition, and what learning does.
    assert (target["distance"], retrain["distance"], retrain["privleak"]) == (pytest.approx(100), 0, 0)
    assert target[VERBATIM] > 0.6 > 0.3 > retrain[VERBATIM]
    assert target[FORGET] > retrain[FORGET]
    assert by_setting["linear", "linear:0"] == pytest.approx(target, abs=1e-6)
    assert results.best["linear"].setting == "linear:1"
    assert by_setting["linear", "linear:1"]["distance"] < 100
    assert set(results.best_by) == {"verbmem_distance", "knowmem_distance"}
    assert set(results.leaks) == {"target", "retrain", "linear", "rank", "npo"}

    content = json.loads((output / "comparison.json").read_text())
    assert content["suite"] == "muse"
    best = {entry["method"]: entry for entry in content["best"]}
    assert best["linear"]["goal"] == "distance"
    low, high = best["linear"]["intervals"]["distance"]
    assert low <= high
    assert {entry["method"] for entry in content["best_by"]["verbmem_distance"]} == set(few)
    table = (output / "table.md").read_text()
    for text in ("Distance % on the other half", "PrivLeak %", "| Method | Setting | Verbatim distance % | Setting |"):
        assert text in table
    assert "Agg" not in table
    assert main(["results", "plot", str(output), "--figure", "muse-scatter", "--output", str(tmp_path / "a.svg")]) == 0
    # Another folder is other work.
    with pytest.raises(UsageError, match=r"\(muse differ\)"):
        compare_methods(dataclasses.replace(settings, muse=str(shutil.copytree(news, tmp_path / "muse"))), print)

    # The same models as the user's own, on the files of MUSE as they are.
    (trained,) = benchmark.load_benchmarks(settings, lambda line: None)
    write_bundle(
        tmp_path / "bundle", target=str(trained.target), retain_auxiliary=str(trained.retain_auxiliary),
        forget_auxiliary=str(trained.forget_auxiliary), steering="linear:1",
    )  # fmt: skip
    own = CompareSettings(
        output=str(tmp_path / "own"), data=str(news), bundle=str(tmp_path / "bundle"), retrain=str(trained.retrain),
        methods=("linear", "npo"), seeds=1, attacks=0, limit=3,
    )  # fmt: skip
    values = {line.method: line.values for line in compare_methods(own, report=lambda line: None).best.values()}
    assert values["target"]["distance"] == pytest.approx(100)
    assert all(values[method]["distance"] is not None for method in ("linear", "npo"))


@pytest.mark.parametrize("missing", ["knowmem/forget_qa.jsonl", "privleak/holdout.jsonl", "sust/forget_4.jsonl"])
def test_incomplete_muse_folder_is_refused_before_anything_is_written(news, missing, tmp_path, capsys):
    folder = shutil.copytree(news, tmp_path / "muse")
    (folder / missing).unlink()
    command = ["compare", "--data", "muse-small", "--muse", str(folder), "--output", str(tmp_path / "o")]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{folder / missing} does not exist" in error
    assert "--muse" in error
    assert not (tmp_path / "o").exists()


def test_own_models_need_the_texts_that_they_have_learned(news, tmp_path):
    folder = shutil.copytree(news, tmp_path / "muse")
    (folder / "sust/forget_1.jsonl").unlink()
    with pytest.raises(UsageError, match=r"no forget texts; it must hold raw/forget\.jsonl or sust/forget_1\.jsonl"):
        muse_news.forget_and_retain(folder)
