"""Other precisions in vLLM: the steered model is eq. 1 of what vLLM computes for the parts alone.

transformers multiplies with other kernels, which in bfloat16 and int8 round otherwise. So the reference is the parts
alone, in vLLM and in the same precision.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from divdec import DivergenceForCausalLM
from support.vllm_reference import ALONE, EAGER, Reference, requests

pytestmark = [pytest.mark.vllm_slow, pytest.mark.timeout(900)]

ALPHA = 1.5
CHANNELS = {"num_bits": 8, "symmetric": True, "strategy": "channel"}
TOKENS = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
GROUPS = {"num_bits": 4, "symmetric": True, "strategy": "group", "group_size": 32}


def int8(weight):
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return {"": (weight / scale).round().to(torch.int8), "_scale": scale.float()}


def fp8(weight):
    scale = weight.abs().amax(dim=1, keepdim=True) / 448
    return {"": (weight / scale).to(torch.float8_e4m3fn), "_scale": scale.float()}


def int4(weight):
    groups = weight.unflatten(1, (-1, 32))
    scale = groups.abs().amax(dim=-1) / 7
    numbers = (groups / scale[..., None]).round().to(torch.int32).flatten(1) + 8
    # Eight numbers in one of 32 bits, the first in the lowest.
    packed = (numbers.unflatten(1, (-1, 8)) << torch.arange(0, 32, 4, dtype=torch.int32)).sum(-1, dtype=torch.int32)
    return {"_packed": packed, "_scale": scale, "_shape": torch.tensor(weight.shape)}


# What llm-compressor writes: format, weights, activations, and the dtype that vLLM runs it with on a CPU.
FORMATS = {
    "int8": (int8, "int-quantized", CHANNELS | {"type": "int"}, TOKENS | {"type": "int"}, "float32"),
    "fp8": (fp8, "float-quantized", CHANNELS | {"type": "float"}, TOKENS | {"type": "float"}, "float32"),
    "int4": (int4, "pack-quantized", GROUPS | {"type": "int"}, None, "bfloat16"),
}


def quantise(folder, quantised, kind, weights, activations):
    """Quantise the layers of a checkpoint."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    scheme = {
        "quant_method": "compressed-tensors", "format": kind, "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": group},
    }  # fmt: skip
    tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        parts = quantised(weight) if name.endswith("proj.weight") else {"": weight}
        tensors |= {name + suffix: part for suffix, part in parts.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}))


@pytest.fixture
def logprobs(ask, prompts):
    """All log-probabilities that vLLM gives at the tokens of some prompts: [tokens, vocab]."""

    def of(model, dtype, **options):
        asked = requests(prompts[5::9], prompt_logprobs=-1, max_tokens=1)
        (answers,) = ask(model, [asked], **ALONE, **EAGER, max_logprobs=-1, dtype=dtype, **options)
        return torch.cat([table(answer["prompt_logprobs"][1:]) for answer in answers])

    def table(found):
        return torch.tensor([[row[str(token)] for token in range(len(row))] for row in found])

    return of


def exact_parts(bundle, prompts):
    """Steered log-probabilities and divergence of transformers in float32: [tokens, vocab] each."""
    model = Reference(bundle)
    with torch.no_grad():
        divergence = [model.model.components(torch.tensor([ids]))[2][0, :-1] for ids in prompts[5::9]]
    return torch.cat([model.logprobs(ids)[:-1] for ids in prompts[5::9]]), torch.cat(divergence)


@pytest.mark.parametrize("name", FORMATS)
def test_quantised_target_is_steered_as_vllm_computes_it(name, make_bundle, logprobs, models, prompts):
    *how, dtype = FORMATS[name]
    shutil.copytree(models / "target", models / name)
    quantise(models / name, *how)
    steered = logprobs(make_bundle(name, steering=f"linear:{ALPHA}"), dtype)
    alone = {part: logprobs(models / part, dtype) for part in (name, "retain", "forget")}
    expected = (alone[name] + ALPHA * (alone["retain"] - alone["forget"])).log_softmax(-1)
    assert (steered - expected).abs().max() < 1e-3
    plain, _ = exact_parts(make_bundle(steering=f"linear:{ALPHA}"), prompts)
    assert (steered - plain).abs().max() > 0.1, "the target was not quantised"


@pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM needs AVX-512 for 8-bit keys and values on a CPU"
)
@pytest.mark.parametrize("kind", ["pair", "ngrams"])
def test_8_bit_keys_and_values_change_only_what_the_parts_compute(kind, make_bundle, logprobs, models, ngrams, prompts):
    eight = {"dtype": "float32", "kv_cache_dtype": "fp8"}
    options = {} if kind == "pair" else {"retain": None, "forget": None, "ngram": str(ngrams)}
    bundle = make_bundle(steering=f"linear:{ALPHA}", **options)
    steered, target = logprobs(bundle, **eight), logprobs(models / "target", **eight)
    plain, divergence = exact_parts(bundle, prompts)
    if kind == "pair":
        divergence = logprobs(models / "retain", **eight) - logprobs(models / "forget", **eight)
    # n-grams read exact tokens from the same memory of keys and values.
    assert (steered - (target + ALPHA * divergence).log_softmax(-1)).abs().max() < 1e-3
    assert (steered - plain).abs().max() > 0.1, "keys and values were not quantised"


def test_bfloat16_differs_from_float32_as_its_parts_do(make_bundle, logprobs, models, prompts):
    bundle = make_bundle(steering=f"linear:{ALPHA}")
    steered = logprobs(bundle, "bfloat16")
    alone = {name: logprobs(models / name, "bfloat16") for name in ("target", "retain", "forget")}
    expected = (alone["target"] + ALPHA * (alone["retain"] - alone["forget"])).log_softmax(-1)
    differences = (steered - expected).abs()
    exact, _ = exact_parts(bundle, prompts)
    rounding = (steered - exact).abs()
    agreement = (steered.argmax(-1) == exact.argmax(-1)).float().mean()
    quantiles = torch.tensor([0.5, 0.99])
    for name, values in (("parts alone in bfloat16", differences), ("float32", rounding)):
        median, most = values.flatten().quantile(quantiles).tolist()
        print(f"difference from {name}: median {median:.4f}, 99 % below {most:.4f}, most {values.max():.4f}")
    print(f"greedy agreement with float32: {agreement:.3f}")  # -s shows it
    other = DivergenceForCausalLM.from_pretrained(bundle, dtype=torch.bfloat16)
    with torch.no_grad():
        theirs = [other(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1) for ids in prompts[5::9]]
    theirs = torch.cat(theirs)
    apart = (steered - theirs).abs()
    alike = (steered.argmax(-1) == theirs.argmax(-1)).float().mean()
    print(f"transformers in bfloat16: {apart.flatten().quantile(quantiles).tolist()}, greedy agreement {alike:.3f}")
    assert differences.max() < 0.01
    assert agreement > 0.85
    assert alike > 0.9
    assert apart.median() < 0.2
    assert apart.flatten().quantile(0.99) < 1.0
