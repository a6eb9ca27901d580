"""Experts beside the target on GPUs, and in processes of their own, answer as they do after it (make test-gpu)."""

import os
import subprocess
import sys

import pytest
import torch

from conftest import make_parts
from divdec import DivergenceForCausalLM, write_bundle
from divdec.cli import main

pytestmark = pytest.mark.gpu
PROMPTS = torch.tensor([[1, 1, 5, 9, 200, 31], [77, 8, 300, 2, 45, 6]])
MASK = (PROMPTS != 1).long()


@pytest.fixture(scope="module", autouse=True)
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA")
    torch.backends.cuda.matmul.allow_tf32 = False


def model_on(family, target, retain, forget):
    parts = [part.to(device) for part, device in zip(make_parts(family), (target, retain, forget), strict=True)]
    return DivergenceForCausalLM.from_parts(*parts, steering="linear:1.5")


def everything(model):
    ids, mask = PROMPTS.to("cuda:0"), MASK.to("cuda:0")
    with torch.no_grad():
        yield model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    options = {"do_sample": False, "pad_token_id": 1, "eos_token_id": None, "attention_mask": mask}
    for more in ({}, {"num_beams": 3}, {"speculative": 3}, {"cache_implementation": "static"}):
        yield model.generate(ids, max_new_tokens=24, **options, **more)


@pytest.mark.parametrize("devices", [(0, 0, 0), (0, 1, 1), (0, 1, 2)])
def test_streams_of_their_own_change_nothing(family, devices):
    if max(devices) >= torch.cuda.device_count():
        pytest.skip(f"{max(devices) + 1} GPUs are needed")
    model = model_on(family, *(f"cuda:{number}" for number in devices))
    for setting in ("linear:1.5", "rank:20"):
        model.steering = setting
        model.overlap = False
        expected = list(everything(model))
        model.overlap = True
        for _ in range(3):  # what is read too early is not always wrong
            for found, wanted in zip(everything(model), expected, strict=True):
                torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("number", [2, 3])
def test_processes_on_gpus_answer_as_one(checkpoints, tmp_path, number):
    bundle = write_bundle(
        tmp_path / "bundle", target=str(checkpoints / "target"), retain_auxiliary=str(checkpoints / "retain"),
        forget_auxiliary=str(checkpoints / "forget"), steering="linear:1.5",
    )  # fmt: skip
    command = ["generate", str(bundle), "--device", "cuda", "--prompt", "Who wrote", "The old", "--max-new-tokens", "8"]
    assert main([*command, "--output", str(tmp_path / "one")]) == 0
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number), "-m",
         "divdec.cli", *command, "--place", "experts=processes", "--output", str(tmp_path / "several")],
        env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "several").read_text() == (tmp_path / "one").read_text()


NCCL = """
import sys
import torch
from divdec import DivergenceForCausalLM
from divdec.experts.placed import Placement
ids = torch.tensor([[5, 9, 200, 31]], device="cuda")
torch.cuda.set_device(0)
local = DivergenceForCausalLM.from_pretrained(sys.argv[1], device_map="cuda")
placement = Placement("processes", backend="nccl")
model = DivergenceForCausalLM.from_pretrained(sys.argv[1], device_map="cuda", experts_placement=placement)
with torch.no_grad():
    torch.testing.assert_close(model(ids).logits, local(ids).logits, rtol=0, atol=1e-5)
"""


@pytest.mark.parametrize("number", [2, 3])
def test_nccl_carries_logits_and_divergences(checkpoints, tmp_path, number):
    if torch.cuda.device_count() < number:
        pytest.skip(f"{number} GPUs are needed")
    bundle = write_bundle(
        tmp_path / "bundle", target=str(checkpoints / "target"), retain_auxiliary=str(checkpoints / "retain"),
        forget_auxiliary=str(checkpoints / "forget"), steering="linear:1.5",
    )  # fmt: skip
    (tmp_path / "script.py").write_text(NCCL)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number),
         tmp_path / "script.py", bundle],
        env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
