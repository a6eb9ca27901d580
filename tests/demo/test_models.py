"""The stages from texts to models: what each of them learns."""

import dataclasses
import json
from pathlib import Path

import pytest

from divdec.data.formatting import encode_records
from divdec.data.world import WorldSettings, build_world
from divdec.demo import run as demo
from divdec.demo.models import Recipe, Shape, TrainedModels, train_all
from divdec.model.checkpoint import load_model, load_tokenizer
from divdec.research.compare import benchmark
from divdec.research.compare.settings import CompareSettings
from divdec.training.fine_tuning import mean_loss
from divdec.training.settings import TrainingSettings

WORLD = WorldSettings(forget_authors=1, retain_authors=1, holdout_authors=1, public_authors=4, passing_authors=0)
BRIEF = TrainingSettings(epochs=1.0, learning_rate=3e-3, batch_size=8)
STAGES = [field.name for field in dataclasses.fields(Recipe) if field.type == "TrainingSettings"]
RECIPE = Recipe(400, Shape(32, 2, 2, 64), Shape(16, 1, 2, 32), **dict.fromkeys(STAGES, BRIEF))


def test_target_reference_and_base_rehearse_general_facts(tmp_path):
    recipe = dataclasses.replace(RECIPE, target_tuning=dataclasses.replace(BRIEF, epochs=6.0))
    plain = dataclasses.replace(demo.material_of(build_world(WORLD)), general=())
    general = [record for record in plain.corpus if record.messages and "known for?" in record.messages[0].content]
    assert general
    rehearsed = dataclasses.replace(plain, general=general)
    without, found = (train_all(material, recipe, 0, tmp_path, print) for material in (plain, rehearsed))
    assert found.small_base == without.small_base
    for name in ("target", "retrain", "retain_auxiliary", "forget_auxiliary"):
        assert getattr(found, name) != getattr(without, name)
    tokenizer = load_tokenizer(found.target)
    examples = encode_records(general, tokenizer, plain.form)
    for name in ("target", "retrain"):
        losses = [mean_loss(load_model(getattr(run, name)), tokenizer, examples, 8) for run in (without, found)]
        assert losses[1] < losses[0] - 1


@pytest.mark.parametrize("data", ["demo", "tofu-small"])
def test_comparison_models_rehearse_real_author_and_world_fact_questions(data, monkeypatch, tmp_path, request):
    monkeypatch.setenv("DIVDEC_CACHE", str(tmp_path))
    seen = []

    def train_nothing(material, *_):
        seen.append(material)
        stages = ("auxiliary base", "retain auxiliary", "forget auxiliary", "retrain reference")
        return TrainedModels(*[tmp_path] * 5, dict.fromkeys(stages, 1.0))

    monkeypatch.setattr(benchmark, "train_all", train_nothing)
    tofu = str(request.getfixturevalue("shared") / "data/tofu") if data == "tofu-small" else None
    settings = CompareSettings(output="out", data=data, tofu=tofu, limit=1, seeds=1)
    (loaded,) = benchmark.load_benchmarks(settings, print)
    asked = {(record.messages[0].content, record.answer) for record in seen[0].general}
    # Every method may rehearse what the target was tuned on besides the forget set.
    assert list(loaded.retain) == [*seen[0].retain, *seen[0].general]
    assert loaded.forget == seen[0].forget
    folder = tmp_path / "demo" / "seed-0" / "tofu" if tofu is None else Path(tofu)
    rows = [
        json.loads(line)
        for name in ("real_authors_perturbed", "world_facts_perturbed")
        for line in (folder / f"{name}.json").read_text().splitlines()
    ]
    assert len(rows) > 100
    assert asked == {(row["question"], row["answer"]) for row in rows}
    told = {(record.messages[0].content, record.answer) for record in seen[0].corpus if record.messages}
    assert asked <= told
