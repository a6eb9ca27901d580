"""Shrinking a model: layers, healing, what is refused."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import tiny_model
from divdec import UsageError
from divdec.cli import main
from divdec.training.settings import ShrinkSettings
from divdec.training.shrinking import keep_layers, layer_importance, layers_of, shrink


def run(models, folder, **changes):
    options = {"target": str(models / "target"), "layers": 2, "minutes": 0.05, "samples": 40, "lr": 3e-3}
    return shrink(ShrinkSettings(output=str(folder), **(options | changes)), report=lambda line: None)


def test_healing_brings_a_pruned_model_nearer_to_its_target(models, world, tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in world.corpus[:300]))
    content = run(models, tmp_path / "small", layers=1, text=str(text), minutes=0.1)
    assert len(content["layers"]) == 1
    assert content["after"]["agreement"] > content["before"]["agreement"]
    assert content["after"]["perplexity"] < content["before"]["perplexity"]
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert small.config.num_hidden_layers == 1
    own, targets = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "small", models / "target"))
    assert own.get_vocab() == targets.get_vocab()


def test_samples_of_the_target_replace_text(models, tmp_path):
    content = run(models, tmp_path / "small")
    assert content["texts"].startswith("samples")
    assert content["steps"] >= 1
    assert json.loads((tmp_path / "small" / "run.json").read_text())["verb"] == "shrink"


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen", "mistral"])
def test_a_layer_that_does_nothing_is_the_least_important_and_changes_nothing(family):
    model = tiny_model(family, 64, seed=0, layers=4).eval()
    layer = layers_of(model)[1][2]
    for name, weight in layer.named_parameters():
        if any(part in name for part in ("o_proj", "down_proj", "c_proj")):
            weight.data.zero_()
    ids = torch.arange(2, 34).reshape(2, 16)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    importance = layer_importance(model, [batch])
    assert min(importance) == importance[2] == pytest.approx(0, abs=1e-6)
    small = keep_layers(model, [0, 1, 3])
    assert torch.allclose(small(ids).logits, model(ids).logits, atol=1e-5)
    cached = small.generate(ids[:1], max_new_tokens=8, do_sample=False, min_new_tokens=8)
    plain = small.generate(ids[:1], max_new_tokens=8, do_sample=False, min_new_tokens=8, use_cache=False)
    assert torch.equal(cached, plain)


def test_settings_of_single_layers_follow_the_layers():
    import transformers

    config = transformers.Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
        layer_types=["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    small = keep_layers(transformers.Gemma2ForCausalLM(config), [1, 3])
    assert small.config.layer_types == ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": 3}, r"accepted: 1 to 2 \(the target has 3\)"),
        ({"layers": 0}, "--layers is 0"),
        ({"minutes": -1.0}, "--minutes is -1"),
        ({"text": "none.jsonl"}, "does not exist"),
        ({"target": "missing/model/x"}, "not a folder"),
    ],
)
def test_invalid_input_is_rejected_before_writing(models, tmp_path, changes, words):
    with pytest.raises(UsageError, match=words):
        run(models, tmp_path / "small", **changes)
    assert not list(tmp_path.iterdir())


def test_a_model_without_a_list_of_layers_is_named(tmp_path):
    model = tiny_model("llama", 64, seed=0)
    model.config.num_hidden_layers = 5
    with pytest.raises(UsageError, match="the layers of LlamaForCausalLM cannot be removed"):
        layers_of(model)


def test_the_command_prints_what_to_do_next(models, tmp_path, capsys):
    options = ["--layers", "1", "--minutes", "0", "--samples", "20", "--output", str(tmp_path / "small")]
    assert main(["shrink", str(models / "target"), *options]) == 0
    printed = capsys.readouterr()
    assert "divdec train --base" in printed.out
    assert "not healed (--minutes 0)" in printed.err
