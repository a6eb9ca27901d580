"""Sequential requests: what the steps are made of, the distance by hand, and a tiny run from nothing."""

import dataclasses
import gc
import itertools
import json
import xml.etree.ElementTree as ElementTree

import pytest

from divdec import UsageError
from divdec.data.records import RecordSet, overlap
from divdec.errors import Interrupted
from divdec.training.settings import TrainingSettings
from divdec_research.suites.aggregate import Bootstrap
from divdec_research.world import demo as demo
from divdec_research.world.models import Questions, Recipe, Shape
from research.studies import sequential
from research.studies.sequential import (
    METHODS,
    PROTOCOLS,
    SequenceStep,
    SequentialSettings,
    SettingScores,
    choose_setting,
    demo_sequence,
    distance,
    distance_interval,
    muse_sequence,
    run_sequential,
    sequential_table,
    train_models,
)

WORLD = dataclasses.replace(
    demo.WORLD, forget_authors=2, retain_authors=1, holdout_authors=1, public_authors=4, passing_authors=4
)


def tiny_sequence(steps=2, seed=0):
    brief = TrainingSettings(epochs=0.2, learning_rate=1e-3, batch_size=32)
    stages = [field.name for field in dataclasses.fields(Recipe) if field.type == "TrainingSettings"]
    recipe = Recipe(400, Shape(32, 2, 2, 64), Shape(16, 1, 2, 32), **dict.fromkeys(stages, brief))
    sequence = demo_sequence(steps, seed, WORLD, recipe)
    asked = tuple(Questions(of.name, of.records[:6], of.facts[:6]) for of in sequence.questions)
    return dataclasses.replace(sequence, questions=asked, max_new_tokens=4)


SETTINGS = SequentialSettings(steering=("linear:0.5", "linear:5"), lr=(1e-3,), epochs=1.0)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def finished(cache, tmp_path_factory):
    """A run that was stopped before its second student and then went on: its folder, its result, and what was said."""
    output = tmp_path_factory.mktemp("runs") / "run"
    distil, lines = sequential.distill, []
    gc.freeze()  # accelerate collects garbage after every training, and looks at all that the suite has loaded

    def stops(settings, report):
        if settings.output.endswith("distilled-sustainability-2"):
            raise Interrupted("stopped")
        return distil(settings, report)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequential, "distill", stops)
        with pytest.raises(Interrupted):
            run_sequential(tiny_sequence(), SETTINGS, output, cache, report=lines.append)
    assert json.loads((output / "run.json").read_text())["status"] == "running"
    with pytest.raises(UsageError, match="unfinished run with other settings"):
        run_sequential(tiny_sequence(), dataclasses.replace(SETTINGS, epochs=2.0), output, cache)
    lines.clear()
    yield output, run_sequential(tiny_sequence(), SETTINGS, output, cache, report=lines.append), lines
    gc.unfreeze()


def test_the_authors_are_split_into_requests():
    for steps in (2, 4, 6):
        sequence = demo_sequence(steps, seed=1)
        names = [questions.name for questions in sequence.questions]
        assert names == [*(f"request {step}" for step in range(1, steps + 1)), "retain", "holdout"]
        sizes = [len(request) for request in sequence.requests]
        assert sum(sizes) == 6 * 30
        assert max(sizes) - min(sizes) <= 30  # an author more or less
        for one, other in itertools.combinations([*sequence.requests, sequence.retain], 2):
            assert overlap(one, other).prompts == 0
        for request, questions in zip(sequence.requests, sequence.questions, strict=False):
            assert questions.records == request.records
            assert all(fact in r.answer for fact, r in zip(questions.facts, questions.records, strict=True))


def test_sequential_benchmark_uses_demo_data(world):
    """The same texts, in the same order: bases that the demo has trained are not trained again."""
    from divdec_research.world.facts import build_world

    sequence, material = (
        demo_sequence(3, seed=0),
        demo.material_of(build_world(dataclasses.replace(demo.WORLD, seed=0))),
    )
    assert sequence.texts == material.texts
    assert [record for request in sequence.requests for record in request] == list(material.forget)
    assert sequence.retain == material.retain


@pytest.mark.parametrize("steps", [0, 1, 7])
def test_number_of_requests_is_limited_by_authors(steps):
    with pytest.raises(UsageError, match=f"{steps} requests of 6 authors to forget; accepted: 2 to 6"):
        demo_sequence(steps, seed=0)


def test_muse_news_is_truncated_to_size(shared):
    sequence = muse_sequence(shared / "data/muse_news", 4, articles=30, corpus=200)
    assert [len(request) for request in sequence.requests] == [130, 30, 30, 30]
    assert (len(sequence.retain), len(sequence.corpus)) == (130, 220)
    corpus = RecordSet("corpus", "prompt/completion", tuple(sequence.corpus))
    for one, other in itertools.combinations([*sequence.requests, sequence.retain, corpus], 2):
        assert overlap(one, other).records == 0
    first, retain = sequence.questions[0], sequence.questions[4]
    assert (first.name, len(first.records), retain.name, len(retain.records)) == ("request 1", 100, "retain", 100)
    question = first.records[0]
    assert question.prompt.startswith("Question: ")
    assert question.prompt.endswith("\nAnswer:")
    assert question.answer.startswith(" ")
    with pytest.raises(UsageError, match="5 requests of 4 sustainability folds"):
        muse_sequence(shared / "data/muse_news", 5)


def test_missing_muse_error_names_source(tmp_path):
    with pytest.raises(UsageError, match=r"huggingface\.co/datasets/muse-bench/MUSE-News.*--data"):
        muse_sequence(tmp_path, 2)


def test_distance_matches_hand_computed_values():
    first = {"request 1": [0.0, 0.0, 0.0, 0.4], "retain": [1.0, 0.8], "request 2": [1.0]}
    later = {"request 1": [0.0, 0.0, 0.4, 0.12], "retain": [0.9, 0.82], "request 2": [0.0]}
    # forget from 10 to 13, retain from 90 to 86 points; what is known of other requests plays no part
    assert distance(later, first) == pytest.approx(5.0)
    assert distance(first, first) == 0
    assert distance_interval(first, first, Bootstrap()) == (0, 0)
    low, high = distance_interval(later, first, Bootstrap())
    assert 0 <= low < 5 < high
    assert (low, high) == distance_interval(later, first, Bootstrap())
    # The two sets are drawn apart: drawn together, either of these would always differ where the other does not.
    assert (
        distance_interval(
            {"request 1": [1.0, 0.0], "retain": [0.0, 1.0]}, {"request 1": [0.0] * 2, "retain": [0.0] * 2}, Bootstrap()
        )[0]
        < 70
    )
    # A difference that all items share has no spread: both models are asked the same items.
    moved = {"request 1": [0.03, 0.03, 0.03, 0.43], "retain": [0.96, 0.76]}
    assert distance_interval(moved, first, Bootstrap()) == pytest.approx((5.0, 5.0))


def test_table_shows_the_choice_and_first_and_last_steps():
    scores = {"request 1": [0.0, 0.5], "request 2": [1.0], "retain": [0.75], "request 1, articles": [0.1]}
    steps = [
        SequenceStep(protocol, "npo", "0.001", step, scores, 2.5 * (step > 1), 1.0, 4.0, 3.0 + step)
        for protocol in PROTOCOLS
        for step in (1, 2, 3)
    ]
    candidates = [SettingScores("npo", "0.0005", 0.5, 1.0, 48.5), SettingScores("npo", "0.001", 0.25, 0.75, 4.0)]
    lines = sequential_table("A title", "accuracy", {"target": steps[0].means}, candidates, steps).splitlines()
    assert lines[2].startswith(
        "|  | step | request 1 | request 2 | retain | request 1, articles | distance from step 1"
    )
    assert lines[4] == "| target |  | 25.0 | 100.0 | 75.0 | 10.0 |  |  |"
    assert lines[5] == "| npo | 1 | 25.0 | (100.0) | 75.0 | 10.0 | 0 | 4.0 |"  # the second request comes later
    assert lines[6] == "| sustainability: npo | 3 | 25.0 | 100.0 | 75.0 | 10.0 | 2.5 [1.0, 4.0] | 6.0 |"
    assert lines[7] == "| scaling: npo | 3 | 25.0 | 100.0 | 75.0 | 10.0 | 2.5 [1.0, 4.0] | 6.0 |"
    assert lines[-2:] == ["| npo | 0.0005 | 50.0 | 100.0 | 48.5 |", "| npo | **0.001** | 25.0 | 75.0 | 4.0 |"]


@pytest.mark.slow
def test_sequential_run_writes_metrics_items_table_plot_and_models(finished):
    output, result, _ = finished
    assert sorted(path.name for path in output.iterdir()) == [
        "distance.svg", "items.jsonl", "models", "result.json", "run.json", "table.md",
    ]  # fmt: skip
    assert json.loads((output / "result.json").read_text()) | {"seconds": result["seconds"]} == result
    assert json.loads((output / "run.json").read_text())["status"] == "finished"
    kinds = [(row["method"], row["protocol"], row["step"]) for row in result["steps"]]
    assert kinds == list(itertools.product(METHODS, PROTOCOLS, (1, 2)))
    for row in result["steps"]:
        assert list(row["scores"]) == ["request 1", "request 2", "retain", "holdout"]
        assert row["step"] > 1 or row["distance"] == 0
    ElementTree.fromstring((output / "distance.svg").read_text())
    table = (output / "table.md").read_text()
    assert table.count("| sustainability: ") == table.count("| scaling: ") == len(METHODS)


def items_of(output):
    return [json.loads(line) for line in (output / "items.jsonl").read_text().splitlines()]


def scores_of(output):
    """Each model's scores by question set, from the items of a run."""
    found = {}
    for item in items_of(output):
        found.setdefault(item["model"], {}).setdefault(item["asked"], []).append(item["score"])
    return found


def model_name(row):
    """Name of a row's model: both protocols share the first step, which has a model for each setting."""
    end = f"{row['protocol']} {row['step']}" if row["step"] > 1 else f"step 1 {row['setting']}"
    return f"{row['method']} {end}".replace(", ", "-").replace(" ", "-").replace(":", "-")


@pytest.mark.slow
def test_metrics_match_items(finished):
    output, result, _ = finished
    found = scores_of(output)
    tried = [f"{method}-step-1-{rule}" for method in ("steered", "steered-forget-retain")
             for rule in ("linear-0.5", "linear-5")]  # fmt: skip
    assert set(found) == {"target", "retrained", *tried, *map(model_name, result["steps"])}
    first = {row["method"]: found[model_name(row)] for row in result["steps"] if row["step"] == 1}
    for row in result["steps"]:
        own = found[model_name(row)]
        assert row["scores"] == pytest.approx({name: sum(values) / len(values) for name, values in own.items()})
        assert row["distance"] == pytest.approx(distance(own, first[row["method"]]))
        assert row["distance_to_retrained"] == pytest.approx(distance(own, found["retrained"]))
    facts = {questions.name: questions.facts for questions in tiny_sequence().questions}
    for item in items_of(output):
        assert item["score"] == float(facts[item["asked"]][item["index"]] in item["answer"])


def test_setting_closest_to_retrained_on_every_second_item_is_chosen():
    retrained = {"request 1": [0.0] * 4, "retain": [1.0, 1.0], "request 2": [0.0]}
    by_setting = {
        1e-4: {"request 1": [0.5, 0.0, 0.5, 0.0], "retain": [1.0, 1.0], "request 2": [0.0]},
        2e-4: {"request 1": [0.0, 1.0, 0.3, 1.0], "retain": [0.8, 0.0], "request 2": [1.0]},
        4e-4: {"request 1": [0.0, 0.0, 0.0, 0.0], "retain": [0.6, 1.0], "request 2": [0.0]},
    }
    chosen, tried = choose_setting("npo", by_setting, retrained)
    assert chosen == 2e-4  # nearest on the first and third item, farthest on the others
    assert tried[1] == SettingScores("npo", "0.0002", pytest.approx(0.15), 0.8, pytest.approx(25.0))


@pytest.mark.slow
def test_run_chooses_the_setting_by_its_items(finished):
    output, result, _ = finished
    found = scores_of(output)
    for method in METHODS:
        tried = {one["setting"]: one["to_retrained"] for one in result["candidates"] if one["method"] == method}
        by_setting = {setting: found[model_name({"method": method, "setting": setting, "step": 1})]
                      for setting in tried}  # fmt: skip
        assert len(tried) == (2 if method.startswith("steered") else 1)
        chosen, again = choose_setting(method, by_setting, found["retrained"])
        assert [one.to_retrained for one in again] == pytest.approx(list(tried.values()))
        assert {row["setting"] for row in result["steps"] if row["method"] == method} == {chosen}


@pytest.mark.slow
def test_trained_models_and_auxiliaries_start_from_expected_checkpoints(finished):
    output, result, _ = finished
    models = output / "models"
    runs = {path.parent.name: json.loads(path.read_text()) for path in models.glob("*/run.json")}
    (target,) = {runs[f"{name}-step-1-0.001"]["settings"]["target"] for name in ("npo", "grad-diff")}
    started = {name: run["settings"].get("init_student") or run["settings"]["target"] for name, run in runs.items()}
    assert started == {
        **{f"{name}-{step}": target for name in METHODS[2:] for step in ("step-1-0.001", "scaling-2")},
        "distilled-sustainability-2": str(models / "distilled-step-1-0.001"),
        "grad-diff-sustainability-2": str(models / "grad-diff-step-1-0.001" / "model"),
        "npo-sustainability-2": str(models / "npo-step-1-0.001" / "model"),
    }
    for name, run in runs.items():
        assert ("60 records" if name.endswith("scaling-2") else "30 records") in run["forget_set"]
    chosen = next(row for row in result["steps"] if row["method"] == "steered")
    steps = (model_name(chosen).removeprefix("steered-"), "sustainability-2", "scaling-2")
    for name, teacher in zip(("step-1-0.001", *steps[1:]), steps, strict=True):
        assert runs[f"distilled-{name}"]["settings"]["bundle"] == str(models / f"steered-{teacher}")

    def digests(name):
        config = json.loads((models / name / "config.json").read_text())
        return [tuple(config[part]["sha256"].values()) for part in ("target", "retain_auxiliary", "forget_auxiliary")]

    one, onwards, scaled = (digests(f"steered-{step}") for step in steps)
    assert scaled[1] == one[1]  # q has seen the retain set alone, whatever is to be forgotten
    assert onwards[1] != one[1]  # but goes on with it beside p, so that neither knows it better
    alone = [digests(f"steered-forget-retain-{step}") for step in steps]
    assert len({q for _, q, _ in alone} | {one[1]}) == 2  # this q is trained once
    assert len({p for _, _, p in (one, onwards, scaled, *alone)}) == 6
    assert len({target for target, _, _ in (one, onwards, scaled, *alone)}) == 1


def test_forget_only_auxiliary_sees_requests_alone(cache, monkeypatch):
    """As in the paper: p continues from the previous p on the new request, or starts on all; neither sees retain."""
    sequence, trained = tiny_sequence(), []

    class Stages:
        def __init__(self, folder, tokenizer, seed, report):
            pass

        def run(self, name, start, examples, settings):
            trained.append((name, start, len(examples)))
            return f"{name} {len(trained)}"

    monkeypatch.setattr(sequential, "StageCache", Stages)
    pairs = train_models(sequence, 0, cache, lambda line: None).pairs
    sizes = {f"{name} {number}": (start, count) for number, (name, start, count) in enumerate(trained, start=1)}
    one, onwards, scaled = (pairs["steered, forget-retain", *at]
                            for at in (("scaling", 1), ("sustainability", 2), ("scaling", 2)))  # fmt: skip
    assert {pair.retain.rpartition(" ")[0] for pair in (one, onwards, scaled)} == {"auxiliary base"}
    assert [sizes[pair.forget] for pair in (one, onwards, scaled)] == [
        ("small base 4", 30), (one.forget, 30), ("small base 4", 60),
    ]  # fmt: skip
    ours = pairs["steered", "sustainability", 2]
    assert sizes[ours.forget] == (pairs["steered", "scaling", 1].forget, 30 + len(sequence.retain))


@pytest.mark.slow
def test_resumed_sequential_run_repeats_no_work(finished):
    _, _, lines = finished
    name = "distilled-step-1-0.001"
    assert {"target: already measured", f"{name}: already measured", f"{name}: already trained"} <= set(lines)
    assert "distilled-sustainability-2: already trained" not in lines
    assert "target: in the cache" in lines


@pytest.mark.slow
def test_resumed_sequential_run_matches_uninterrupted_run(finished, tmp_path):
    result = run_sequential(tiny_sequence(), SETTINGS, tmp_path / "run", tmp_path / "cache", report=lambda line: None)
    assert result | {"seconds": 0} == finished[1] | {"seconds": 0}


@pytest.mark.slow
def test_sequential_run_rejects_non_empty_output(finished, cache, tmp_path):
    with pytest.raises(UsageError, match="not empty"):
        run_sequential(tiny_sequence(), SETTINGS, finished[0], cache)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not an earlier result"):
        run_sequential(tiny_sequence(), SETTINGS, tmp_path, cache, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt"]


def test_invalid_steering_is_rejected_before_training():
    with pytest.raises(UsageError, match="steering is 'lineal:2'"):
        SequentialSettings(steering=("linear:2", "lineal:2"))
