"""Sizes counted on the meta device, against real models."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from divdec.costs.model_size import measure_size, read_size
from divdec.errors import UsageError

ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
COMMON = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, **ENDS,
}  # fmt: skip
CONFIGS = {
    "llama": transformers.LlamaConfig(**COMMON),
    "llama, tied": transformers.LlamaConfig(**COMMON, tie_word_embeddings=True),
    "gpt2": transformers.GPT2Config(vocab_size=128, n_embd=64, n_layer=3, n_head=4, **ENDS),
    "qwen2": transformers.Qwen2Config(**COMMON),
    "mistral, window": transformers.MistralConfig(**COMMON, head_dim=16, sliding_window=8),
    "gemma3, some windows": transformers.Gemma3TextConfig(
        **(COMMON | {"num_hidden_layers": 7}), head_dim=16, sliding_window=8
    ),
    "falcon, one head of keys": transformers.FalconConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, **ENDS
    ),
    "starcoder2": transformers.Starcoder2Config(**COMMON, head_dim=24),
    "mixtral, experts": transformers.MixtralConfig(**COMMON),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameter_count_matches_real_model(name):
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    assert measure_size(CONFIGS[name], name).parameters == sum(parameter.numel() for parameter in model.parameters())


def test_tied_embeddings_are_counted_once():
    tied, apart = (measure_size(CONFIGS[name], name) for name in ("llama, tied", "llama"))
    assert apart.parameters - tied.parameters == 128 * 64


def test_llama_3_8b_size_matches_published_numbers():
    config = transformers.LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8,
    )  # fmt: skip
    assert measure_size(config, "8b").parameters == 8_030_261_248


def test_model_size_needs_no_weights(tmp_path):
    CONFIGS["llama"].save_pretrained(tmp_path / "8B")
    size = read_size(str(tmp_path / "8B"), "target")
    assert size.parameters == measure_size(CONFIGS["llama"], "x").parameters
    assert not torch.nn.Linear(1, 1).weight.is_meta  # nothing of the meta device stays behind


def test_bare_number_is_a_size_unless_folder_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_size("8B", "target").name == "a model of 8B"
    CONFIGS["llama"].save_pretrained("8B")
    assert read_size("8B", "target").name == "8B"


def test_non_causal_model_is_rejected(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"target .*empty has no config.json"):
        read_size(str(tmp_path / "empty"), "target")
    transformers.ViTConfig().save_pretrained(tmp_path / "vit")
    with pytest.raises(UsageError, match="gives no causal language model"):
        read_size(str(tmp_path / "vit"), "target")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    with pytest.raises(UsageError, match="neither a number nor a model"):
        read_size(str(tmp_path / "broken"), "target")
    with pytest.raises(UsageError, match=r"target is '8Q'; accepted"):
        read_size("8Q", "target")


def test_bundle_is_rejected_as_model_size(tmp_path):
    from divdec.configuration import DivergenceConfig

    DivergenceConfig().save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="gives no causal language model"):
        read_size(str(tmp_path), "target")
