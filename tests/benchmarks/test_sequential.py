"""Sequential requests: what the steps are made of, the distance by hand, and a tiny run from nothing."""

import dataclasses
import gc
import itertools
import json
import xml.etree.ElementTree as ElementTree

import pytest

import sequential
from divdec import UsageError
from divdec.data.records import RecordSet, overlap
from divdec.demo import run as demo
from divdec.demo.models import Questions, Recipe, Shape
from divdec.evaluation.aggregate import Bootstrap
from divdec.training.fine_tuning import Interrupted
from divdec.training.settings import TrainingSettings
from sequential import (
    SequenceStep,
    SequentialSettings,
    distance,
    distance_interval,
    run_sequential,
    sequential_table,
    train_models,
)
from sequential_data import demo_sequence, muse_sequence

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


SETTINGS = SequentialSettings(epochs=1.0)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def finished(cache, tmp_path_factory):
    """A run that was stopped before its second student and then went on: its folder, its result, and what was said."""
    output = tmp_path_factory.mktemp("runs") / "run"
    distil, lines = sequential.distill_step, []
    gc.freeze()  # accelerate collects garbage after every training, and looks at all that the suite has loaded

    def stops(folder, *arguments):
        if folder.name == "sustainability-2":
            raise Interrupted("stopped")
        return distil(folder, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequential, "distill_step", stops)
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


def test_sequential_benchmark_uses_demo_models(world):
    """The same texts, in the same order: what the demo has trained is not trained again."""
    from divdec.data.world import build_world

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


def test_table_brackets_future_requests():
    scores = {"request 1": [0.0, 0.5], "request 2": [1.0], "retain": [0.75], "request 1, articles": [0.1]}
    steps = [
        SequenceStep("scaling", "steered", 1, scores, 0.0, 0.0, 0.0, 3.0),
        SequenceStep("scaling", "steered", 2, scores, 2.5, 1.0, 4.0, 7.0),
    ]
    lines = sequential_table("A title", "accuracy", {"target": steps[0].means}, steps).splitlines()
    assert lines[2].startswith(
        "|  | step | request 1 | request 2 | retain | request 1, articles | distance from step 1"
    )
    assert lines[4] == "| target |  | 25.0 | 100.0 | 75.0 | 10.0 |  |  |"
    assert lines[5] == "| scaling, steered | 1 | 25.0 | (100.0) | 75.0 | 10.0 | 0 | 3.0 |"
    assert lines[6] == "| scaling, steered | 2 | 25.0 | 100.0 | 75.0 | 10.0 | 2.5 [1.0, 4.0] | 7.0 |"


def test_sequential_run_writes_metrics_items_table_plot_and_models(finished):
    output, result, _ = finished
    assert sorted(path.name for path in output.iterdir()) == [
        "bundles", "distance.svg", "items.jsonl", "result.json", "run.json", "students", "table.md",
    ]  # fmt: skip
    assert json.loads((output / "result.json").read_text()) | {"seconds": result["seconds"]} == result
    assert json.loads((output / "run.json").read_text())["status"] == "finished"
    kinds = [(row["protocol"], row["method"], row["step"]) for row in result["steps"]]
    assert kinds == [
        (protocol, method, step)
        for protocol in ("sustainability", "scaling")
        for step in (1, 2)
        for method in ("steered", "distilled")
    ]
    for row in result["steps"]:
        assert list(row["scores"]) == ["request 1", "request 2", "retain", "holdout"]
        assert row["step"] > 1 or row["distance"] == 0
    ElementTree.fromstring((output / "distance.svg").read_text())
    table = (output / "table.md").read_text()
    assert table.count("| sustainability, ") == table.count("| scaling, ") == 4


def test_metrics_match_items(finished):
    output, result, _ = finished
    items = [json.loads(line) for line in (output / "items.jsonl").read_text().splitlines()]
    assert {item["model"] for item in items} == {
        "target", "retrained", "step-1-steered", "step-1-distilled", "sustainability-2-steered",
        "sustainability-2-distilled", "scaling-2-steered", "scaling-2-distilled",
    }  # fmt: skip

    def scores(model):
        found = {}
        for item in items:
            if item["model"] == model:
                found.setdefault(item["asked"], []).append(item["score"])
        return found

    for row in result["steps"]:
        own, first = (
            scores(f"{row['protocol']}-{step}-{row['method']}" if step > 1 else f"step-1-{row['method']}")
            for step in (row["step"], 1)
        )
        assert row["scores"] == pytest.approx({name: sum(values) / len(values) for name, values in own.items()})
        assert row["distance"] == pytest.approx(distance(own, first))
        assert row["distance_to_retrained"] == pytest.approx(distance(own, scores("retrained")))
    facts = {questions.name: questions.facts for questions in tiny_sequence().questions}
    for item in items:
        assert item["score"] == float(facts[item["asked"]][item["index"]] in item["answer"])


def test_students_and_auxiliaries_start_from_expected_checkpoints(finished, cache):
    output, _, _ = finished
    runs = {path.parent.name: json.loads(path.read_text()) for path in output.glob("students/*/run.json")}
    started = {name: run["settings"]["init_student"] for name, run in runs.items()}
    assert started == {
        "step-1": None,
        "sustainability-2": str(output / "students" / "step-1"),
        "scaling-2": None,
    }
    sizes = {name: run["forget_set"] for name, run in runs.items()}
    assert "30 records" in sizes["step-1"]
    assert "30 records" in sizes["sustainability-2"]
    assert "60 records" in sizes["scaling-2"]
    for name, run in runs.items():
        assert run["settings"]["bundle"] == str(output / "bundles" / name)

    parts = {path.parent.name: json.loads(path.read_text()) for path in output.glob("bundles/*/config.json")}
    digests = {
        name: [tuple(config[part]["sha256"].values()) for part in ("target", "retain_auxiliary", "forget_auxiliary")]
        for name, config in parts.items()
    }
    assert len({target for target, _, _ in digests.values()}) == 1
    one, onwards, scaled = (digests[name] for name in ("step-1", "sustainability-2", "scaling-2"))
    assert scaled[1] == one[1]  # q has seen the retain set alone, whatever is to be forgotten
    assert onwards[1] != one[1]  # but goes on with it beside p, so that neither knows it better
    assert len({one[2], onwards[2], scaled[2]}) == 3
    anew = train_models(tiny_sequence(), dataclasses.replace(SETTINGS, auxiliaries="anew"), cache, lambda line: None)
    assert anew.pairs["sustainability", 2] == anew.pairs["scaling", 2]


def test_resumed_sequential_run_repeats_no_work(finished):
    _, _, lines = finished
    assert {"target: already measured", "step-1-distilled: already measured", "step-1: already distilled"} <= set(lines)
    assert "sustainability-2: already distilled" not in lines
    assert "target: in the cache" in lines


@pytest.mark.slow
def test_resumed_sequential_run_matches_uninterrupted_run(finished, tmp_path):
    result = run_sequential(tiny_sequence(), SETTINGS, tmp_path / "run", tmp_path / "cache", report=lambda line: None)
    assert result | {"seconds": 0} == finished[1] | {"seconds": 0}


def test_sequential_run_rejects_non_empty_output(finished, cache, tmp_path):
    with pytest.raises(UsageError, match="not empty"):
        run_sequential(tiny_sequence(), SETTINGS, finished[0], cache)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not an earlier result"):
        run_sequential(tiny_sequence(), SETTINGS, tmp_path, cache, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt"]


def test_invalid_steering_is_rejected_before_training():
    with pytest.raises(UsageError, match="steering is 'lineal:2'"):
        SequentialSettings(steering="lineal:2")
