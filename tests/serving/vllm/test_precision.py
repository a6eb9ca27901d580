"""Other precisions in vLLM: the steered model is eq. 1 of what vLLM computes for the parts alone.

transformers multiplies with other kernels, which in bfloat16 and int8 round otherwise. So the reference is the parts
alone, in vLLM and in the same precision.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_reference import ALONE, EAGER, Reference, requests

pytestmark = [pytest.mark.vllm_slow, pytest.mark.timeout(900)]

ALPHA = 1.5
CHANNELS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": CHANNELS, "input_activations": TOKENS}},
}


@pytest.fixture(scope="module")
def int8(models):
    """The target with weights and activations of 8 bits, as llm-compressor writes it."""
    folder = models / "int8"
    shutil.copytree(models / "target", folder)
    weights = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        weights[name] = weight
        if name.endswith("proj.weight"):
            scale = weight.abs().amax(dim=1, keepdim=True) / 127
            weights[name] = (weight / scale).round().to(torch.int8)
            weights[f"{name}_scale"] = scale.float()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": INT8}))
    return "int8"


@pytest.fixture
def logprobs(ask, prompts):
    """All log-probabilities that vLLM gives at the tokens of some prompts: [tokens, vocab]."""

    def of(model, dtype):
        asked = requests(prompts[5::9], prompt_logprobs=-1, max_tokens=1)
        (answers,) = ask(model, [asked], **ALONE, **EAGER, max_logprobs=-1, dtype=dtype)
        return torch.cat([table(answer["prompt_logprobs"][1:]) for answer in answers])

    def table(found):
        return torch.tensor([[row[str(token)] for token in range(len(row))] for row in found])

    return of


def test_int8_target_is_steered_as_vllm_computes_it(int8, make_bundle, logprobs, models, prompts):
    bundle = make_bundle(int8, steering=f"linear:{ALPHA}")
    steered = logprobs(bundle, "float32")
    alone = {name: logprobs(models / name, "float32") for name in (int8, "retain", "forget")}
    expected = (alone[int8] + ALPHA * (alone["retain"] - alone["forget"])).log_softmax(-1)
    assert (steered - expected).abs().max() < 1e-3
    exact = make_bundle(steering=f"linear:{ALPHA}")
    model = Reference(exact)
    plain = torch.cat([model.logprobs(ids)[:-1] for ids in prompts[5::9]])
    assert (steered - plain).abs().max() > 0.1, "the target was not quantised"


def test_bfloat16_differs_from_float32_as_its_parts_do(make_bundle, logprobs, models, prompts):
    bundle = make_bundle(steering=f"linear:{ALPHA}")
    steered = logprobs(bundle, "bfloat16")
    alone = {name: logprobs(models / name, "bfloat16") for name in ("target", "retain", "forget")}
    expected = (alone["target"] + ALPHA * (alone["retain"] - alone["forget"])).log_softmax(-1)
    differences = (steered - expected).abs()
    model = Reference(bundle)
    exact = torch.cat([model.logprobs(ids)[:-1] for ids in prompts[5::9]])
    rounding = (steered - exact).abs()
    agreement = (steered.argmax(-1) == exact.argmax(-1)).float().mean()
    quantiles = torch.tensor([0.5, 0.99])
    for name, values in (("parts alone in bfloat16", differences), ("float32", rounding)):
        median, most = values.flatten().quantile(quantiles).tolist()
        print(f"difference from {name}: median {median:.4f}, 99 % below {most:.4f}, most {values.max():.4f}")
    print(f"greedy agreement with float32: {agreement:.3f}")  # -s shows it
    assert differences.max() < 0.01
    assert agreement > 0.9
