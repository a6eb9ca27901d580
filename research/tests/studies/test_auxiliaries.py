import dataclasses
from types import SimpleNamespace

import pytest
import torch

from divdec.data.records import Message, Record, RecordSet
from divdec_research.compare.table import TEST, VALIDATION, TrialSummary
from divdec_research.world import demo as demo
from divdec_research.world.facts import WorldSettings, build_world
from divdec_research.world.models import Shape
from research.studies import auxiliaries


def test_shifted_trigrams_give_each_token_the_divergence_of_the_token_before(tokenizer):
    sets = {
        name: RecordSet(name, "question/answer", (Record(answer, messages=(Message("user", "Who wrote it?"),)),))
        for name, answer in (("retain", "Ben wrote the book."), ("forget", "Anna wrote the book in Oslo."))
    }
    pairs = [auxiliaries.trigrams(SimpleNamespace(**sets), tokenizer, shifted) for shifted in (False, True)]
    ids = torch.tensor([tokenizer("Anna wrote the book").input_ids])
    right, shifted = (pair.divergence(ids) for pair in pairs)
    assert torch.equal(shifted[:, 1:], right[:, :-1])
    assert not torch.equal(shifted, right)


def test_table_reports_setting_chosen_on_other_half(monkeypatch):
    agg = {VALIDATION: {"linear:1": 0.6, "linear:2": 0.7}, TEST: {"linear:1": 0.9, "linear:2": 0.5}}

    def summaries(results, half):
        return [
            TrialSummary("small", setting, {"agg": value}, {}, dict.fromkeys((0, 1), values(value)), None)
            for setting, value in agg[half].items()
        ]

    def values(agg):
        return {"agg": agg, "mem": 0.5, "priv": 0.5, "utility": 1.0}

    monkeypatch.setattr(auxiliaries, "summaries", summaries)
    seeds = {0: SimpleNamespace(about={"parameters": 10})}
    results = {("small", "linear:1"): seeds, ("small", "linear:2"): seeds}
    results["target", ""] = {0: SimpleNamespace(about={"parameters": 100})}
    row = auxiliaries.table(results).splitlines()[-1]
    assert row.startswith("| small | 10% | linear:2 | 0.50 [0.50, 0.50] |")
    assert row.endswith("| 1.00 [1.00, 1.00] |")


@pytest.mark.parametrize("kind", auxiliaries.BRIDGED)
def test_pair_with_another_tokenizer_diverges_at_every_token_of_the_target(kind, tokenizer, tmp_path, monkeypatch):
    """The auxiliaries have random weights: only their training is replaced."""
    monkeypatch.setenv("DIVDEC_CACHE", str(tmp_path))
    tokenizer.save_pretrained(tmp_path / "target")

    def random_pair(stages, recipe, *examples):
        folders = [tmp_path / name for name in ("base", "q", "p")]
        for seed, folder in enumerate(folders):
            stages.new(recipe.auxiliary, stages.tokenizer, seed).save_pretrained(folder)
        return folders

    monkeypatch.setattr(auxiliaries, "train_pair", random_pair)
    world = build_world(WorldSettings(1, 1, 1, public_authors=4, passing_authors=0))
    recipe = dataclasses.replace(demo.RECIPE, vocab_size=400, auxiliary=Shape(16, 1, 2, 32))
    benchmark = SimpleNamespace(name="demo", seed=0, target=tmp_path / "target")
    pair, parameters = auxiliaries.train_experts(kind, benchmark, demo.material_of(world), recipe)
    assert parameters > 0
    ids = torch.tensor([tokenizer("Anna wrote the book").input_ids])
    divergence = pair.divergence(ids)
    assert divergence.shape == (*ids.shape, len(tokenizer))
    assert divergence.isfinite().all()
    assert (divergence != 0).any(dim=-1).all()
