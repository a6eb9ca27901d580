"""Tiny random models of many architectures, and experts of every kind for them."""

import atexit
import copy
import dataclasses
import functools
import random
import shutil
import tempfile
import zlib
from pathlib import Path

import torch
import transformers

from divdec.bridge.pair import BridgedPair
from divdec.data.records import texts_of
from divdec.experts.adapters import AdapterPair, merge_adapter
from divdec.experts.combined import CombinedExperts
from divdec.experts.neural import NeuralPair
from divdec.experts.ngram import NgramPair
from divdec.experts.ngram_fit import count
from divdec.takedowns.correction import TakedownCorrection
from divdec.takedowns.registry import Registry
from divdec_research.world.models import train_tokenizer
from support.reference import SlowNgrams, last_logits

VOCAB, WIDE, AUXILIARY_VOCAB = 320, 336, 300  # tokens of the tokenizer, of a padded target, of another tokenizer
WINDOW = 4
END, PAD = 0, 1
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
MIXTURE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
OLD = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Configuration of a tiny model: its class in transformers, and what differs from the common sizes."""

    config: str
    options: dict = dataclasses.field(default_factory=dict)
    half: bool = True
    """Whether bfloat16 is tried. Rounding changes which experts a mixture of experts chooses, and so its logits."""
    recurrent: bool = False

    def __hash__(self):
        return hash(self.config)


ARCHITECTURES = {
    "llama": Architecture("LlamaConfig"),
    "mistral": Architecture("MistralConfig", {"sliding_window": WINDOW}),
    "qwen2": Architecture("Qwen2Config"),
    "qwen3": Architecture("Qwen3Config", {"head_dim": 8}),
    "gemma2": Architecture("Gemma2Config", {**WINDOWS, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "gemma3": Architecture("Gemma3TextConfig", {**WINDOWS, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "phi3": Architecture("Phi3Config"),
    "gpt2": Architecture("GPT2Config", OLD),
    "gpt_neox": Architecture("GPTNeoXConfig"),
    "gptj": Architecture("GPTJConfig", {**OLD, "rotary_dim": 4}),
    "opt": Architecture("OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "olmo2": Architecture("Olmo2Config"),
    "stablelm": Architecture("StableLmConfig"),
    "cohere2": Architecture("Cohere2Config", {**WINDOWS, "logit_scale": 1.0}),
    "bloom": Architecture("BloomConfig", {"n_layer": 2, "n_head": 4}),
    "mpt": Architecture(
        "MptConfig", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, "use_cache": True}
    ),
    "falcon_alibi": Architecture("FalconConfig", {"alibi": True, "new_decoder_architecture": False}),
    "deepseek_v3": Architecture(
        "DeepseekV3Config",
        {
            **MIXTURE,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
        },
        half=False,
    ),
    "mixtral": Architecture("MixtralConfig", MIXTURE, half=False),
    "qwen3_moe": Architecture("Qwen3MoeConfig", {**MIXTURE, "head_dim": 8}, half=False),
    "gpt_oss": Architecture("GptOssConfig", {**MIXTURE, **WINDOWS, "head_dim": 8}, half=False),
    "qwen3_next": Architecture(
        "Qwen3NextConfig",
        {**MIXTURE, **HYBRID, **LINEAR, "head_dim": 8, "shared_expert_intermediate_size": 16},
        half=False,
        recurrent=True,
    ),
    "olmo_hybrid": Architecture("OlmoHybridConfig", {**HYBRID, **LINEAR}, half=False, recurrent=True),
    "recurrent_gemma": Architecture(
        "RecurrentGemmaConfig",
        {"block_types": ("recurrent", "attention"), "lru_width": 32, "attention_window_size": 16, "head_dim": 8},
        half=False,
        recurrent=True,
    ),
    "lfm2": Architecture("Lfm2Config", {"layer_types": ["conv", "full_attention"]}, half=False, recurrent=True),
    "falcon_h1": Architecture(
        "FalconH1Config",
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1},
        half=False,
        recurrent=True,
    ),
}


@functools.cache
def model_of(name, seed, dtype=torch.float32, vocab_size=VOCAB):
    """A random model of an architecture; weights large enough that its preferences are not all alike."""
    architecture = ARCHITECTURES[name]
    torch.manual_seed(zlib.crc32(f"{name} {seed}".encode()))
    options = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "bos_token_id": 3,
        "eos_token_id": END,
        "pad_token_id": PAD,
        **architecture.options,
    }
    config = getattr(transformers, architecture.config)(**options)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


KINDS = {
    "pair": 9,
    "pair of another architecture": 4,
    "two architectures": 2,
    "n-grams": 2,
    "registry": 1,
    "pair and registry": 2,
    "bridged": 2,
    "combined": 2,
    "adapters": 3,
}
ORDER = 3
FEW = list(range(40, 52))  # tokens of texts that repeat themselves


def _words(seed, number):
    chance = random.Random(seed)
    words = ["".join(chance.choices("abcdefghij ", k=chance.randint(2, 6))) for _ in range(40)]
    return [" ".join(chance.choices(words, k=12)) for _ in range(number)]


@functools.cache
def tokenizer():
    return train_tokenizer(_words(0, 60), VOCAB)


@functools.cache
def auxiliary_tokenizer():
    return train_tokenizer(_words(1, 60), AUXILIARY_VOCAB)


@functools.cache
def folder():
    path = Path(tempfile.mkdtemp(prefix="divdec-fuzz-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@functools.cache
def documents():
    """Texts of q and texts of p; of few tokens, so that contexts occur again."""
    chance = random.Random(2)
    texts = [chance.choices(FEW, k=30) for _ in range(12)]
    return texts[:8], texts


@functools.cache
def ngrams():
    counts = [count(texts, VOCAB, ORDER) for texts in documents()]
    slow = [SlowNgrams(texts, VOCAB, ORDER) for texts in documents()]

    def divergence(ids):
        retain, forget = (torch.from_numpy(one.scores(ids[-ORDER + 1 :])) for one in slow)
        return retain - forget

    return NgramPair(*counts), divergence


@functools.cache
def takedowns():
    checkpoint = folder() / "checkpoint"
    model_of("llama", 0).save_pretrained(checkpoint)
    tokenizer().save_pretrained(checkpoint)
    retain, taken_down = ([tokenizer().decode(text) for text in texts] for texts in documents())
    made = Registry.create(folder() / "registry", texts_of("retain", retain), checkpoint, order=ORDER)
    made.add("first", texts_of("first", taken_down[8:]))
    return TakedownCorrection(made.folder)


def _pair(retain, forget):
    return NeuralPair(retain, forget), lambda ids: _difference(last_logits(retain, ids), last_logits(forget, ids))


def _adapters(base):
    """Two adapters of random ranks on some layers of a base; the reference is the merged pair."""
    embeddings = base.get_input_embeddings().weight
    linears = {
        name: part
        for name, part in base.named_modules()
        if isinstance(part, torch.nn.Linear) and part.weight is not embeddings
    }
    if not linears:  # as in GPT-2, whose layers are no nn.Linear
        return None
    chance, factors, merged = random.Random(0), [], []
    for rank in (2, 3):
        names = chance.sample(sorted(linears), max(1, 2 * len(linears) // 3))
        shapes = {name: (linears[name].in_features, linears[name].out_features) for name in names}
        factors.append(
            {name: (torch.randn(rank, ins) / 8, torch.randn(outs, rank) / 2) for name, (ins, outs) in shapes.items()}
        )
        merged.append(copy.deepcopy(base))
        merge_adapter(merged[-1], factors[-1])
    return AdapterPair(base, *factors), *merged


def _difference(retain, forget):
    width = min(len(retain), len(forget))
    return retain[:width].log_softmax(-1) - forget[:width].log_softmax(-1)


@functools.cache
def experts_of(kind, architecture, others, dtype):
    """Experts, a slow reference of their divergence, and q where it has the target's tokens, else None.

    There are no experts where a registry steers alone.

    Args:
        kind: a key of `KINDS`.
        architecture: the target's.
        others: two architectures that are not the target's.
        dtype: of neural experts.
    """
    if "pair" in kind or kind == "two architectures":
        names = {"pair of another architecture": others[:1] * 2, "two architectures": others}.get(
            kind, (architecture,) * 2
        )
        retain, forget = (model_of(name, seed, dtype) for seed, name in enumerate(names, start=1))
        return *_pair(retain, forget), retain
    if kind == "adapters" and (adapted := _adapters(model_of(architecture, 1))):
        pair, retain, forget = adapted
        return pair, _pair(retain, forget)[1], retain
    if kind == "adapters":
        return experts_of("pair", architecture, others, dtype)
    if kind == "n-grams":
        return *ngrams(), None
    if kind == "registry":
        return None, lambda ids: torch.zeros(VOCAB), None
    if kind == "bridged":
        pair = BridgedPair(
            *(model_of(others[0], seed, dtype, AUXILIARY_VOCAB) for seed in (1, 2)),
            target_tokenizer=tokenizer(),
            auxiliary_tokenizer=auxiliary_tokenizer(),
            target_width=VOCAB,
        )
        # Without cache, batch and padding. The pair's own tests compare that with another reference.
        return pair, lambda ids: pair.divergence(torch.tensor([ids]))[0, -1], None
    parts = [experts_of(name, architecture, others, dtype) for name in ("pair", "n-grams")]
    weights = (0.75, 2.0)

    def divergence(ids):
        found = [weight * part[1](ids) for weight, part in zip(weights, parts, strict=True)]
        return found[0] + found[1]

    joined = CombinedExperts([(part[0], weight) for part, weight in zip(parts, weights, strict=True)])
    return joined, divergence, parts[0][2]
