"""A small Llama checkpoint and its byte-level BPE tokenizer as llama.cpp reads them, in float32."""

import json
from pathlib import Path

import torch


def write_gguf(folder, file, blocks=None):
    """Write a checkpoint's folder as one GGUF file."""
    from gguf import GGUFWriter, TokenType
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = model.config
    writer = GGUFWriter(str(file), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(blocks or config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    _write_tokenizer(writer, Path(folder), config, TokenType)
    for name, tensor in model.state_dict().items():
        writer.add_tensor(_name(name), _laid_out(name, tensor, config).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_tokenizer(writer, folder, config, kinds):
    content = json.loads((folder / "tokenizer.json").read_text())
    special = {token["id"] for token in content["added_tokens"] if token["special"]}
    vocabulary = sorted(content["model"]["vocab"].items(), key=lambda entry: entry[1])
    assert [place for _, place in vocabulary] == list(range(config.vocab_size))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([kinds.CONTROL if place in special else kinds.NORMAL for _, place in vocabulary])
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    )
    writer.add_bos_token_id(config.eos_token_id)  # it would be 11 otherwise
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)


def _name(name):
    for ours, theirs in (
        ("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output"),
        ("model.layers.", "blk."), ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"), ("self_attn.o_proj", "attn_output"), ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down"), ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
    ):  # fmt: skip
        name = name.replace(ours, theirs)
    return name


def _laid_out(name, tensor, config):
    """llama.cpp turns neighbouring dimensions against each other, transformers the two halves of a head."""
    if ".q_proj" not in name and ".k_proj" not in name:
        return tensor.contiguous()
    heads = config.num_attention_heads if ".q_proj" in name else config.num_key_value_heads
    rows, columns = tensor.shape
    return tensor.reshape(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns).contiguous()
