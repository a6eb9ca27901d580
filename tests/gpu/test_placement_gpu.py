"""Experts on other GPUs than the target's give the same answers (make test-gpu)."""

import os

import pytest
import torch

from divdec import DivergenceForCausalLM
from support.tiny import make_parts

pytestmark = pytest.mark.gpu
DEVICE = os.environ.get("DIVDEC_TEST_DEVICE", "cuda")
PROMPTS = torch.tensor([[1, 1, 5, 9, 200, 31], [77, 8, 300, 2, 45, 6]])
MASK = (PROMPTS != 1).long()


@pytest.fixture(scope="module", autouse=True)
def cuda():
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA")
    torch.backends.cuda.matmul.allow_tf32 = False


def model_on(family, target, retain, forget):
    parts = [part.to(device) for part, device in zip(make_parts(family), (target, retain, forget), strict=True)]
    return DivergenceForCausalLM.from_parts(*parts, steering="linear:1.5")


def everything(model):
    ids, mask = PROMPTS.to(model.target.device), MASK.to(model.target.device)
    with torch.no_grad():
        yield model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    options = {"do_sample": False, "pad_token_id": 1, "eos_token_id": None, "attention_mask": mask}
    for more in ({}, {"num_beams": 3}):
        yield model.generate(ids, max_new_tokens=24, **options, **more)
    yield model.generate(ids[:1], max_new_tokens=24, speculative=3, **options | {"attention_mask": mask[:1]})


@pytest.mark.parametrize("devices", [(0, 1, 1), (0, 1, 2)])
def test_experts_on_other_gpus_give_same_output(family, devices):
    if DEVICE != "cpu" and max(devices) >= torch.cuda.device_count():
        pytest.skip(f"{max(devices) + 1} GPUs are needed")
    alone, spread = (
        model_on(family, *(DEVICE if DEVICE == "cpu" else f"{DEVICE}:{number}" for number in numbers))
        for numbers in ((0, 0, 0), devices)
    )
    for setting in ("linear:1.5", "rank:20"):
        alone.steering = spread.steering = setting
        expected = list(everything(alone))
        for _ in range(3):  # what is read too early is not always wrong
            for found, wanted in zip(everything(spread), expected, strict=True):
                torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
