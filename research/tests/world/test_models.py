"""The stages from texts to models: what each of them learns."""

import dataclasses
import json
from pathlib import Path
from typing import ClassVar

import pytest

from divdec.training.settings import TrainingSettings
from divdec_research.compare import benchmark
from divdec_research.compare.settings import CompareSettings
from divdec_research.world import demo as demo
from divdec_research.world import models
from divdec_research.world.facts import WorldSettings, build_world
from divdec_research.world.models import Recipe, Shape, TrainedModels

WORLD = WorldSettings(forget_authors=1, retain_authors=1, holdout_authors=1, public_authors=4, passing_authors=0)
BRIEF = TrainingSettings(epochs=1.0, learning_rate=3e-3, batch_size=8)
STAGES = [field.name for field in dataclasses.fields(Recipe) if field.type == "TrainingSettings"]
RECIPE = Recipe(400, Shape(32, 2, 2, 64), Shape(16, 1, 2, 32), **dict.fromkeys(STAGES, BRIEF))


def test_target_reference_and_base_rehearse_general_facts(tmp_path, monkeypatch):
    learned = {}

    class Stages:
        seconds: ClassVar = {}

        def __init__(self, folder, tokenizer, seed, report):
            self.tokenizer = tokenizer

        def run(self, name, start, examples, settings):
            learned[name] = [self.tokenizer.decode(example.input_ids) for example in examples]
            return Path(name)

    monkeypatch.setattr(models, "StageCache", Stages)
    material = demo.material_of(build_world(WORLD))
    models.train_all(material, RECIPE, 0, tmp_path, print)
    # The corpus tells the general facts too; their place behind the retain set is what counts here.
    sizes = {name: len(records) for name, records in learned.items()}
    forget, retain, general = len(material.forget), len(material.retain), len(material.general)
    assert min(forget, retain, general) > 0
    corpus = len(material.corpus)
    assert sizes == {
        "large base": corpus, "target": forget + retain + general, "retrain reference": retain + general,
        "small base": corpus, "auxiliary base": retain + general, "retain auxiliary": retain,
        "forget auxiliary": forget + retain,
    }  # fmt: skip
    asked = [record.messages[0].content for record in material.general]
    for name in ("target", "retrain reference", "auxiliary base"):
        assert all(question in text for question, text in zip(asked, learned[name][-general:], strict=True))


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
