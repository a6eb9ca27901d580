"""The benchmark of TOFU on a pretrained model, with tiny models: every stage once, and nothing twice."""

import argparse
import dataclasses
import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.attacks import recovery as attacks
from benchmarks.attacks import shadow_models
from divdec.checkpoint import load_tokenizer
from divdec.data.formatting import encode_set
from divdec.data.records import RecordSet, read_records
from divdec.errors import UsageError
from divdec.evaluation.scoring import score
from divdec.steering import Steering
from divdec.training.auxiliaries import load_for_training
from divdec.training.settings import DistillationSettings
from divdec_research.baselines.table import METHODS
from divdec_research.compare import run as compare
from divdec_research.compare.settings import GRIDS
from divdec_research.suites import tofu
from divdec_research.world.facts import WorldSettings, build_world, write_tofu
from divdec_research.world.models import Shape, new_model
from research.studies import tofu as benchmark

WORLD = WorldSettings(forget_authors=2, retain_authors=3, holdout_authors=2, public_authors=13, passing_authors=20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """TOFU's files of a small world, and two models that have learned nothing."""
    folder = tmp_path_factory.mktemp("tofu-study")
    data = folder / "data"
    write_tofu(build_world(WORLD), data)
    (data / "forget01_perturbed.json").rename(data / "forget05_perturbed.json")
    forget = (data / "forget05_perturbed.json").read_text()
    retain, others = ((data / f"{name}.json").read_text() for name in ("retain_perturbed", "holdout01"))
    (data / "forget05.json").write_text(forget)
    (data / "retain95.json").write_text(retain + others)
    for name, layers in (("original", 4), ("base", 2)):
        new_model(Shape(32, layers, 2, 64), tokenizer, seed=0).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture
def small(monkeypatch, folder):
    """Few methods and short answers."""
    rows = (folder / "data" / "retain_perturbed.json").read_text().splitlines()
    tuning = dataclasses.replace(benchmark.TUNING, epochs=2.0, learning_rate=1e-2)
    size = dataclasses.replace(benchmark.SIZES["forget05"], kept=len(rows), tuning=tuning, shown=4, asked=5)
    monkeypatch.setitem(benchmark.SIZES, "forget05", size)
    monkeypatch.setattr(benchmark, "GROUPS", (("linear", "ngram-filter"),))
    monkeypatch.setattr(benchmark, "LORA_GROUP", ("npo",))
    monkeypatch.setattr(benchmark, "RELEARNED", ("retrain", "npo"))
    monkeypatch.setattr(benchmark, "EPOCHS", (1, 2))
    monkeypatch.setattr(benchmark, "RELEARNING", dataclasses.replace(benchmark.RELEARNING, epochs=2.0))
    for name, value in (("PAIR_EPOCHS", 2.0), ("ANSWER", 8)):
        monkeypatch.setattr(benchmark, name, value)
    monkeypatch.setattr(tofu, "NEW_TOKENS", 8)
    grid = {
        "linear": {"steering": ("linear:1",)},
        "ngram-filter": {"ngram_size": (3,)},
        "npo": {"learning_rate": (1e-3,), "epochs": (1.0,), "batch_size": (8,), "gradient_accumulation": (1,)},
    }
    monkeypatch.setitem(GRIDS, "pretrained", grid)
    monkeypatch.setattr(benchmark, "grid_of", lambda lora_rank: grid)
    monkeypatch.setattr(benchmark, "SWEEP", ("linear:1", "rank:5"))


@pytest.mark.slow
def test_every_stage_runs_once(folder, small, tmp_path, capsys, monkeypatch):
    options = argparse.Namespace(
        data=folder / "data", output=tmp_path / "run", target=str(folder / "original"), base=str(folder / "base"),
        split="forget05", limit=4, lora_rank=2, recipe="full-retain", methods=None, jobs=1,
        forget=None, attacks=1,
    )  # fmt: skip

    def run(**changed):
        benchmark.run(argparse.Namespace(**vars(options) | changed))

    run()
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert [row["method"] for row in results["rows"]] == ["target", "retrain", "linear", "npo", "ngram-filter"]
    assert all(row["best"] and 0 <= row["leak"]["1"] <= 1 for row in results["rows"])
    retrain = results["rows"][1]
    assert [retrain[variant]["priv"] for variant in ("openunlearning", "dd-paper", "relative")] == pytest.approx(
        [1, 1, 1]
    )
    relearned = results["relearning"]
    assert [point["step"] for point in relearned["npo"]["curve"]] == [0, 1, 2]
    assert set(relearned) == {"target", "retrain", "npo"}
    assert "| **NPO** |" in printed
    swept = json.loads((tmp_path / "run" / "sweep.json").read_text())
    assert [row["rule"] for row in swept] == ["linear:1", "rank:5"]
    assert all(0 <= value <= 1 for row in swept for name, value in row.items() if name != "rule")
    assert "| Relearning |" in printed

    # The attacks on the same models; each cell is computed once.
    given = argparse.Namespace(
        run=tmp_path / "run", methods=None, attacks=attacks.ATTACKS, questions=2, samples=2, sampled=1
    )
    attacks.run_pretrained(given)
    cells = json.loads((tmp_path / "run" / "attacks.json").read_text())["results"]
    assert set(cells) == {"target", "retrain", "linear", "npo", "ngram-filter"}
    for method, own in cells.items():
        assert set(own) == set(attacks.ATTACKS)
        assert (own["unrelated"] is None) == (method in ("linear", "ngram-filter"))
        assert all(0 <= value <= 1 for value in own.values() if value is not None)
    monkeypatch.setattr(attacks, "cell", None)
    attacks.run_pretrained(given)
    with pytest.raises(UsageError, match="has cells with"):
        attacks.run_pretrained(argparse.Namespace(**vars(given) | {"questions": 3}))
    with pytest.raises(UsageError, match=r"--methods rmu: .* has target, retrain, linear"):
        attacks.run_pretrained(argparse.Namespace(**vars(given) | {"methods": ["rmu"]}))

    # Membership by shadow models: their losses are measured as the comparison measures those of the methods.
    shadows = argparse.Namespace(
        run=tmp_path / "run", output=tmp_path / "shadows", target=str(folder / "original"), shadows=4
    )
    shadow_models.run_pretrained(shadows)
    rows = json.loads((tmp_path / "shadows" / "results.json").read_text())["methods"]
    assert set(rows) == set(cells)
    assert "| NPO |" in capsys.readouterr().out
    forget, holdout = (
        read_records(tmp_path / "run" / "tofu" / f"{name}.json") for name in ("forget05_perturbed", "holdout05")
    )
    examples = encode_set(
        RecordSet("asked", "question/answer", (*forget, *holdout)), load_tokenizer(folder / "original"), benchmark.FORM
    )
    retrained = score(load_for_training(tmp_path / "run" / "retrain").eval(), examples)
    best = benchmark.best_trials(tmp_path / "run", benchmark.SIZES["forget05"])
    folders = {trial.method: own for trial, own in best.items()}
    kept = shadow_models.losses(folders["retrain"])
    assert kept == pytest.approx([item.loss for item in retrained], rel=1e-4)
    with pytest.raises(UsageError, match="has no comparison"):
        benchmark.best_trials(tmp_path, benchmark.SIZES["forget05"])
    with pytest.raises(UsageError, match="has no questions"):
        shadow_models.run_pretrained(argparse.Namespace(**vars(shadows) | {"run": tmp_path}))
    with pytest.raises(UsageError, match="--shadows is 5; accepted: even numbers from 4 on"):
        shadow_models.run_pretrained(argparse.Namespace(**vars(shadows) | {"shadows": 5}))

    # No questions are in two of the sets.
    def questions(name):
        rows = (tmp_path / "run" / "tofu" / f"{name}.json").read_text().splitlines()
        return {json.loads(row)["question"] for row in rows}

    sets = [questions(name) for name in ("forget05", "retain95", "holdout05")]
    assert len(sets[0] | sets[1] | sets[2]) == sum(map(len, sets))
    assert questions("forget05_perturbed") <= sets[0]
    assert questions("retain_perturbed") <= sets[1]

    def trained_again(*given, **options):
        raise AssertionError("a finished stage ran again")

    for name in ("fine_tune", "train_auxiliaries", "shrink", "score_settings"):
        monkeypatch.setattr(benchmark, name, trained_again)
    monkeypatch.setattr(compare, "build_model", trained_again)
    run()
    shadow_models.run_pretrained(shadows)
    again = json.loads((tmp_path / "run" / "results.json").read_text())
    assert again["relearning"] == relearned
    with pytest.raises(UsageError, match="was begun with --limit 4, not 5"):
        run(limit=5)
    with pytest.raises(UsageError, match="was begun with another --split than forget01"):
        run(limit=1, split="forget01")
    with pytest.raises(UsageError, match="--methods: nothing is not known; accepted: linear, ngram-filter, npo"):
        run(methods=["nothing"])
    with pytest.raises(UsageError, match=r"was begun with .*'lora_rank': 2.* not .*'lora_rank': 0"):
        run(lora_rank=0)


def test_files_that_do_not_fit_give_one_line_error(folder, tmp_path):
    with pytest.raises(UsageError, match="does not hold the first 400 questions"):
        benchmark.assemble(folder / "data", tmp_path, 3, "forget05")
    with pytest.raises(UsageError, match="--limit is 5000; accepted: 1 to"):
        benchmark.assemble(folder / "data", tmp_path, 5000, "forget05")
    with pytest.raises(UsageError, match=r"Hugging Face dataset locuslab/TOFU"):
        benchmark.assemble(tmp_path, tmp_path, 3, "forget05")


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights_are_rounded(bits):
    model = new_model_of_one_layer()
    before = {name: weights.clone() for name, weights in model.named_parameters()}
    attacks.quantise(model, bits)
    after = dict(model.named_parameters())
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "proj" in name}
    for name in changed:
        groups, old = after[name].view(-1, attacks.GROUP), before[name].view(-1, attacks.GROUP)
        step = old.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
        assert ((groups - old).abs() <= step / 2 * 1.001).all()
        assert torch.allclose(groups / step, (groups / step).round(), atol=1e-3)
        assert all(len(group.unique()) <= 2**bits - 1 for group in groups)


def new_model_of_one_layer():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128, vocab_size=99)
    )


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_every_setting_of_the_grid_is_accepted(lora_rank, monkeypatch):
    grid = benchmark.grid_of(lora_rank)
    monkeypatch.setitem(GRIDS, "pretrained", grid)
    for trial in compare.trials_of(
        [name for group in (*benchmark.GROUPS, benchmark.LORA_GROUP) for name in group], "pretrained"
    ):
        if trial.steering is not None:
            Steering.parse(trial.steering)
        elif trial.method == "distill":
            options = {"steering": "linear:1"} | trial.settings
            DistillationSettings(bundle="b", forget="f", retain="r", output="o", **options)
        else:
            settings = METHODS[trial.method].settings(**trial.settings)
            assert getattr(settings, "lora_rank", lora_rank) == lora_rank
