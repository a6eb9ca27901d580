"""Tiny checkpoints of the model families that help texts and README name.

Configurations are transformers' own classes at two layers, and chat templates are shortened from the families' own.
Tokenizers have the peculiarities of each family: no padding token, padding on the left, special tokens beyond the
logits, a padded vocabulary, several tokens that end a text.
"""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import torch
import transformers

from support.tokenizer_kinds import trained

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.05,
}  # fmt: skip
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' "
    "+ m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful "
    "assistant.<|im_end|>\n' }}{% endif %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' "
    "+ (first if loop.first else '') + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user and assistant') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
PHI4 = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '<|im_sep|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
OLMO2 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|assistant|>\n' + m['content'] "
    "+ eos_token }}{% if not loop.last %}{{ '\n' }}{% endif %}{% else %}{{ '<|' + m['role'] + '|>\n' + m['content'] "
    "+ '\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models, at two layers."""

    config: Callable[..., Any]
    """Its configuration class."""
    settings: dict[str, Any]
    """What the configuration sets beside the sizes."""
    tokenizer: dict[str, Any]
    """Kind of tokenizer, special tokens, roles and chat template; see `make_tokenizer`."""
    generation: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Sampling defaults of its generation_config.json."""
    further_ends: tuple[str, ...] = ()
    """Tokens beside the end token at which its generation config ends a text."""
    padding: int = 0
    """Logits without a token; −1: as many tokens lack a logit."""


def _llama3(**settings):
    scaled = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
    scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 256}
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    return Family(
        transformers.LlamaConfig,
        {"rope_parameters": scaled, **settings},
        {
            "kind": "byte-level", "special": special, "template": LLAMA3, "bos_token": special[0],
            "eos_token": "<|eot_id|>", "pad_token": None, "add_bos": True,
        },
        {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
        ("<|end_of_text|>",),
    )  # fmt: skip


IM = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN = {"kind": "byte-level", "special": IM, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
QWEN_DEFAULTS = {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
FAMILIES = {
    "Llama 3.2": _llama3(tie_word_embeddings=True),
    "Llama 3.1": _llama3(),
    "Qwen 2.5": Family(
        transformers.Qwen2Config, {"tie_word_embeddings": True}, {**QWEN, "template": CHATML}, QWEN_DEFAULTS,
        ("<|endoftext|>",), padding=24,
    ),
    "Qwen 3": Family(
        transformers.Qwen3Config, {"head_dim": 16}, {**QWEN, "special": [*IM, "<think>", "</think>"],
        "template": THINKING}, {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}, ("<|endoftext|>",),
        padding=24,
    ),
    "Gemma 3": Family(
        transformers.Gemma3TextConfig,
        {"head_dim": 16, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
        {
            "kind": "gemma", "special": ["<start_of_turn>", "<end_of_turn>"], "template": GEMMA, "bos_token": "<s>",
            "eos_token": "</s>", "pad_token": "<|pad|>", "padding_side": "left", "beyond": "<image_soft_token>",
            "add_bos": True,
        },
        {"do_sample": True, "top_k": 64, "top_p": 0.95, "cache_implementation": "hybrid"}, ("<end_of_turn>",),
        padding=-1,
    ),
    "Mistral": Family(
        transformers.MistralConfig, {"sliding_window": 64},
        {"kind": "llama", "special": ["[INST]", "[/INST]"], "template": MISTRAL, "bos_token": "<s>",
         "eos_token": "</s>", "pad_token": None, "add_bos": True},
    ),
    "Phi-3": Family(
        transformers.Phi3Config, {"sliding_window": 64},
        {"kind": "llama", "special": ["<|endoftext|>", "<|assistant|>", "<|user|>", "<|system|>", "<|end|>"],
         "strip": True, "template": PHI3, "bos_token": "<s>", "eos_token": "<|endoftext|>",
         "pad_token": "<|endoftext|>", "padding_side": "left"},
        further_ends=("<|end|>",), padding=16,
    ),
    "Phi-4": Family(
        transformers.Phi3Config, {},
        {"kind": "byte-level", "special": [*IM, "<|im_sep|>"], "template": PHI4, "bos_token": "<|endoftext|>",
         "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        further_ends=("<|endoftext|>",), padding=16,
    ),
    "SmolLM2": Family(
        transformers.LlamaConfig, {"tie_word_embeddings": True},
        {**QWEN, "template": CHATML, "bos_token": "<|im_start|>", "pad_token": "<|im_end|>"},
    ),
    "OLMo 2": Family(
        transformers.Olmo2Config, {},
        {"kind": "byte-level", "special": ["<|endoftext|>", "<|padding|>"], "template": OLMO2,
         "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|padding|>"},
    ),
}  # fmt: skip


def make_tokenizer(
    texts, kind, special, template, *, strip=False, beyond=None, add_bos=False, bos_token=None, padding_side="right",
    **roles,
):  # fmt: skip
    """A tokenizer of a kind with a family's special tokens, roles and template."""
    from tokenizers import AddedToken, Tokenizer, processors

    backend = Tokenizer.from_str(trained(kind, tuple(texts)).backend_tokenizer.to_str())
    names = [*special, *([] if beyond is None else [beyond])]
    backend.add_special_tokens([AddedToken(name, special=True, rstrip=strip, normalized=False) for name in names])
    start = [] if not add_bos else [(bos_token, backend.token_to_id(bos_token))]
    # Llama's and Gemma's tokenizers begin every text with this token; Qwen's do not.
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos_token} $A" if add_bos else "$A", special_tokens=start
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, padding_side=padding_side, bos_token=bos_token,
        **roles,
    )  # fmt: skip
    tokenizer.chat_template = template
    return tokenizer


def write_checkpoint(name, folder, texts, seed, tokenizer=None):
    """Write a random checkpoint of a family, with a tokenizer of the texts' or a given one."""
    family = FAMILIES[name]
    tokenizer = tokenizer or make_tokenizer(texts, **family.tokenizer)
    ends = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(list(family.further_ends))]
    roles = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": ends, "pad_token_id": tokenizer.pad_token_id}
    config = family.config(**SIZES, vocab_size=len(tokenizer) + family.padding, **family.settings, **roles)
    save(config, tokenizer, folder, seed)
    defaults = {**roles, **family.generation, "transformers_version": transformers.__version__}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    return folder


def read_vocabulary(gguf, name, template):
    """The tokenizer of a GGUF file that holds a vocabulary alone, with the end of a family's chats and a template."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    tokenizer.eos_token = FAMILIES[name].tokenizer["eos_token"]
    tokenizer.chat_template = template
    return tokenizer


def write_real_checkpoint(gguf, folder, seed):
    """Write a random checkpoint with the tokenizer and the configuration of a GGUF file, at two layers."""
    options = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **options)
    if gguf.stem.startswith("gemma"):  # which the publisher's tokenizer has and GGUF files lack
        tokenizer.add_tokens(["<image_soft_token>"], special_tokens=True)
    config = transformers.AutoConfig.from_pretrained(gguf.parent, **options)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes = SIZES | heads | {"max_position_embeddings": config.max_position_embeddings}
    for field, value in sizes.items():
        if hasattr(config, field):
            setattr(config, field, value)
    if getattr(config, "layer_types", None):
        config.layer_types = (
            ["sliding_attention", "full_attention"] if config.sliding_window else config.layer_types[:2]
        )
    save(config, tokenizer, folder, seed)
    return folder


def save(config, tokenizer, folder, seed):
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    model.generation_config = transformers.GenerationConfig.from_model_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
