"""Real prompts, and small trained models whose drafts are right sometimes."""

import pytest
import torch

FORGET, RETAIN = 100, 100  # questions of TOFU
ASKED = 25  # of the fictitious world, on either side


@pytest.fixture(scope="session")
def tofu(shared):
    """A steered model of trained TOFU models, its tokenizer and 200 questions, half of them on what is forgotten."""
    from divdec import DivergenceForCausalLM
    from divdec.checkpoint import load_model, load_tokenizer
    from divdec.data.formatting import encode_prompts
    from divdec.data.records import read_records

    names = ("full", "retain90", "full")
    parts = [load_model(shared / "oracle/models" / name, dtype=torch.float32).eval() for name in names]
    tokenizer = load_tokenizer(shared / "oracle/models/full")
    asked = [("forget10", FORGET), ("retain90", RETAIN)]
    sets = [read_records(shared / f"data/tofu/{name}.json", limit=limit) for name, limit in asked]
    records = [record for found in sets for record in found.records]
    return DivergenceForCausalLM.from_parts(*parts, "linear:1"), tokenizer, encode_prompts(records, tokenizer)


@pytest.fixture(scope="session")
def world_model(world, tokenizer, tmp_path_factory):
    """A steered model trained for seconds on the fictitious world, its tokenizer and 50 of the world's questions."""
    from divdec import DivergenceForCausalLM
    from divdec.data.formatting import encode_prompts, encode_set
    from divdec.training.fine_tuning import fine_tune
    from divdec.training.settings import TrainingSettings
    from divdec_research.world.demo import material_of
    from divdec_research.world.models import Shape, new_model

    material = material_of(world)
    forget, retain = (
        encode_set(records, tokenizer)[:count] for records, count in ((material.forget, 90), (material.retain, 210))
    )
    settings = TrainingSettings(epochs=2.0, learning_rate=4e-3, batch_size=16)
    recipes = {
        "target": (Shape(64, 2, 4, 128), [*retain, *forget]),
        "retain": (Shape(32, 1, 2, 64), retain),
        "forget": (Shape(32, 1, 2, 64), [*retain, *forget]),
    }
    parts = []
    for seed, (name, (shape, examples)) in enumerate(recipes.items()):
        folder = tmp_path_factory.mktemp(name)
        model, _ = fine_tune(
            new_model(shape, tokenizer, seed), tokenizer, examples, settings, folder,
            title=name, measure=False, resumable=False,
        )  # fmt: skip
        parts.append(model)
    records = [*material.forget.records[:ASKED], *material.retain.records[:ASKED]]
    return DivergenceForCausalLM.from_parts(*parts, "linear:1"), tokenizer, encode_prompts(records, tokenizer)
