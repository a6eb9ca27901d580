"""Tiny random models of several families, and processes of divdec."""

import os
import subprocess
import sys
from pathlib import Path

SHARED = Path(os.environ.get("DIVDEC_SHARED", Path(__file__).parents[3] / "shared"))

FAMILIES = ("llama", "gpt2", "qwen")


def tiny_model(family, vocab_size, seed, width=32, layers=2, **settings):
    """A random model of a family; weights large enough that its preferences are not all alike."""
    import torch
    import transformers

    torch.manual_seed(seed)
    ends = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1}
    if family == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=vocab_size,
            n_embd=width,
            n_layer=layers,
            n_head=4,
            n_positions=256,
            initializer_range=0.2,
            **ends,
        )
    else:
        kind = {
            "llama": transformers.LlamaConfig,
            "qwen": transformers.Qwen2Config,
            "mistral": transformers.MistralConfig,
            "gemma2": transformers.Gemma2Config,
        }
        config = kind[family](
            vocab_size=vocab_size,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.2,
            **({"sliding_window": 8} if family == "mistral" else {}),
            **ends,
            **settings,
        )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def make_parts(family, vocab_size=512):
    """Target, retain auxiliary and forget auxiliary, which differ in width and depth."""
    return (
        tiny_model(family, vocab_size, seed=0, width=64, layers=3),
        tiny_model(family, vocab_size, seed=1),
        tiny_model(family, vocab_size, seed=2),
    )


def loads_torch(*commands):
    """Whether one of several commands of divdec, in a process of their own, loads torch."""
    code = (
        f"import sys; from divdec.cli import main; print(all([main(one) == 0 for one in {list(commands)!r}]), "
        "'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    answer = result.stdout.strip().splitlines()[-1:]
    assert answer in (["True True"], ["True False"]), result.stderr
    return answer == ["True True"]
