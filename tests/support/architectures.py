"""A tiny random model of any architecture that transformers has a causal language model for.

transformers ships no tiny configurations. Every size that an architecture's configuration knows by a usual name is made
small; those that need something else are listed.
"""

import inspect

import torch
import transformers

VOCABULARY = 96
LAYERS, WIDTH, HEADS, PLACES = 4, 32, 4, 128
SIZES = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim_model", "embedding_size", "lru_width"), WIDTH),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("dim_ff", "ffn_hidden_size", "block_ff_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "linear_num_value_heads"), HEADS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), PLACES),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads", "linear_num_key_heads", "n_mamba_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "linear_key_head_dim", "linear_value_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "kv_lora_rank", "index_head_dim", "d_kv"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "encoder_layers", "index_n_heads", "mamba_expand"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "moe_num_shared_experts", "mamba_n_groups"), 1),
    **dict.fromkeys(("n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("q_lora_rank", "qk_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "mamba_n_heads", "mamba_d_head", "mamba_num_heads", "mamba_head_dim"), 8),
    **dict.fromkeys(("ssm_state_size", "mamba_headdim", "mamba_chunk_size", "chunk_size", "state_size"), 8),
    **dict.fromkeys(("sliding_window", "attention_window_size", "block_size", "hidden_size_per_layer_input"), 8),
    **{"word_embed_proj_dim": WIDTH, "attention_dim": WIDTH},
    **{"mamba_d_ssm": 64, "mamba_dt_rank": 4, "rotary_dim": 4, "conv_L_cache": 3},
    "index_topk": PLACES,  # fewer are chosen by scores, whose near ties rounding decides
    **{"moe_layer_start_index": 0, "block_auto_adjust_ff_dim": False, "is_decoder": True},
}  # fmt: skip
HALF = ["linear_attention", "full_attention"] * (LAYERS // 2)
LATENT = {"num_key_value_heads": HEADS}  # attention to latents has as many heads for keys
OTHERWISE = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * (LAYERS // 2)},
    "cwm": {"bos_token_id": 2},
    "modernbert-decoder": {"bos_token_id": 2},
    "bailing_hybrid": {"layer_types": HALF, **LATENT},
    "kimi_linear": {"layer_types": HALF, **LATENT},
    **dict.fromkeys(("deepseek_v32", "axk2", "glm_moe_dsa", "longcat_flash", "minicpm3", "dots3_note_text"), LATENT),
}
MAX_PARAMETERS = 4_000_000  # parameters; more has a size by a name that is not listed


def tiny_architecture(model_type, seed=0, **settings):
    """A random float32 model of an architecture; raises whatever transformers does where it cannot be so small."""
    kind = transformers.CONFIG_MAPPING[model_type]
    names = {*getattr(kind, "__dataclass_fields__", ()), *inspect.signature(kind.__init__).parameters}
    names |= {*getattr(kind, "attribute_map", ())}
    sizes = {name: value for name, value in SIZES.items() if name in names}
    ends = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1}
    config = kind(**{**sizes, **ends, **OTHERWISE.get(model_type, {}), **settings})
    with torch.device("meta"):
        size = sum(weight.numel() for weight in transformers.AutoModelForCausalLM.from_config(config).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"{model_type} has {size} parameters")
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    # Weights large enough that preferences are not all alike.
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.2, generator=generator)
    return model
