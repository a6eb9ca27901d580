"""Shrinking a model: layers, healing, what is refused."""

import copy
import json
import os
import signal

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from divdec import UsageError
from divdec.checkpoint import load_model, load_tokenizer
from divdec.cli import main
from divdec.data.formatting import Format, encode_set
from divdec.data.records import read_records
from divdec.training import fine_tuning, shrinking
from divdec.training.inputs import Collator
from divdec.training.settings import ShrinkSettings
from divdec.training.shrinking import (
    check_removable,
    compare_with_target,
    keep_layers,
    layer_importance,
    layers_of,
    shrink,
)
from support.tiny import tiny_model


def run(models, folder, **changes):
    options = {"target": str(models / "target"), "layers": 2, "minutes": 0.05, "samples": 40, "learning_rate": 3e-3}
    return shrink(ShrinkSettings(output=str(folder), **(options | changes)), report=lambda line: None)


def test_healing_brings_a_pruned_model_nearer_to_its_target(models, world, tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in world.corpus[:300]))
    content = run(models, tmp_path / "small", layers=1, text=str(text), steps=6)
    assert content["steps"] == 6
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
        ({"steps": -1}, "--steps is -1"),
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
    assert "not healed" in printed.err


SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
WITH_MLP = SIZES | {"intermediate_size": 64, "num_key_value_heads": 2}
GPT = {"n_embd": 32, "n_layer": 4, "n_head": 4}
FAMILIES = {
    "Bloom": {"hidden_size": 32, "n_layer": 4, "n_head": 4},
    "Falcon": SIZES,
    "GPTNeoX": SIZES | {"intermediate_size": 64},
    "Gemma2": WITH_MLP | {"head_dim": 8},
    "Gemma3Text": WITH_MLP | {"head_dim": 8},
    "Mamba": {"hidden_size": 32, "num_hidden_layers": 4, "state_size": 8},
    "Mixtral": WITH_MLP | {"num_local_experts": 4},
    "OPT": SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "OpenAIGPT": GPT,
    "Phi3": WITH_MLP,
}
UNEVEN = {
    "Bart": {
        "d_model": 32, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "is_decoder": True,
    },
    "DeepseekV3": WITH_MLP | {
        "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
        "num_experts_per_tok": 2, "first_k_dense_replace": 2, "kv_lora_rank": 8, "q_lora_rank": 8,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    },
    "Jamba": WITH_MLP | {
        "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "use_mamba_kernels": False,
        "mamba_d_state": 8,
    },
    "Qwen3Moe": WITH_MLP | {
        "num_experts": 8, "moe_intermediate_size": 32, "decoder_sparse_step": 2, "head_dim": 8,
    },
}  # fmt: skip


def random_model(family, sizes):
    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1}
    config = getattr(transformers, f"{family}Config")(vocab_size=64, **ends, **sizes)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pruned_model_computes_its_remaining_layers(family, tmp_path):
    model = random_model(family, FAMILIES[family])
    check_removable(model, 2)
    keep_layers(model, [1, 2]).save_pretrained(tmp_path)
    small = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    by_hand = copy.deepcopy(model)
    name, layers = layers_of(by_hand)
    by_hand.set_submodule(name, nn.ModuleList([layers[1], layers[2]]))
    ids = torch.arange(2, 34).reshape(2, 16)
    with torch.no_grad():
        assert torch.allclose(small(ids).logits, by_hand(ids).logits, atol=1e-6)
    shrinking.check_decoding(small)


@pytest.mark.parametrize("family", UNEVEN)
def test_layers_that_cannot_take_each_others_place_are_refused_in_one_line(family):
    with pytest.raises(UsageError, match=r"cannot be removed.*give a smaller checkpoint") as caught:
        check_removable(random_model(family, UNEVEN[family]), 2)
    assert "\n" not in str(caught.value)


def test_layers_are_tried_before_anything_is_sampled(models, tmp_path, monkeypatch):
    def refuse(*arguments):
        raise UsageError("refused")

    monkeypatch.setattr(shrinking, "sample_records", lambda *arguments, **options: pytest.fail("sampled"))
    monkeypatch.setattr(shrinking, "keep_layers", refuse)
    with pytest.raises(UsageError, match="refused"):
        run(models, tmp_path / "small")


def test_a_single_layer_is_named():
    with pytest.raises(UsageError, match="it has only one layer"):
        layers_of(tiny_model("llama", 64, seed=0, layers=1))


def test_lists_of_token_ids_are_not_settings_of_layers():
    model = tiny_model("llama", 64, seed=0, layers=4)
    model.config.eos_token_id = [0, 1, 2, 3]
    model.config.architectures = ["a", "b", "c", "d"]
    small = keep_layers(model, [1, 3])
    assert small.config.eos_token_id == [0, 1, 2, 3]
    assert len(small.config.architectures) == 4


def test_the_figures_are_those_of_the_model_as_saved(models, world, tmp_path):
    target, text = tmp_path / "target", tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in world.corpus[:100]))
    load_model(models / "target").to(torch.bfloat16).save_pretrained(target)
    tokenizer = load_tokenizer(models / "target")
    tokenizer.save_pretrained(target)
    content = run(models, tmp_path / "small", target=str(target), text=str(text), precision="float32", max_length=64)
    small = load_model(tmp_path / "small")
    assert small.dtype == torch.bfloat16
    examples = encode_set(read_records(str(text)), tokenizer, Format(max_length=64))[::10]
    batches = list(Collator(tokenizer).batches(examples, range(len(examples)), 16, small.device))
    assert compare_with_target(small, load_model(target, dtype=torch.float32), batches).perplexity == pytest.approx(
        content["after"]["perplexity"], rel=1e-6
    )


def test_an_interruption_promises_no_resumption_and_leaves_nothing(models, tmp_path, monkeypatch, capsys):
    start = fine_tuning.StopOnSignal.__enter__

    def interrupt(self):
        start(self)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(fine_tuning.StopOnSignal, "__enter__", interrupt)
    options = ["--layers", "1", "--samples", "20", "--output", str(tmp_path / "small")]
    assert main(["shrink", str(models / "target"), *options]) == 130
    assert "resumes" not in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_several_processes_are_refused(models, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="2 processes were started"):
        run(models, tmp_path / "small")


def test_a_target_that_samples_only_end_tokens_is_refused(models, tmp_path, monkeypatch):
    monkeypatch.setattr("divdec.evaluation.generation.samples", lambda *arguments, **options: [[""] * arguments[3]])
    with pytest.raises(UsageError, match=r"only 0 of 40 samples.*pass text"):
        run(models, tmp_path / "small")
    assert not list(tmp_path.iterdir())


def test_emulated_bfloat16_of_a_gpu_is_not_used(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert not fine_tuning.uses_bfloat16(ShrinkSettings(target="", output="", layers=1).training(), nn.Linear(1, 1))
