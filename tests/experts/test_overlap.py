"""Experts that run while the target runs, and where they run."""

import copy

import pytest
import torch

from divdec import DivergenceForCausalLM
from divdec.cli import main

PROMPTS = torch.tensor([[5, 9, 200, 31], [77, 8, 300, 2]])


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["nowhere"], "device 'nowhere' cannot be used"),
        (["cpu", "nowhere"], "device 'nowhere' cannot be used"),
        (["cpu", "cpu", "cpu"], "accepted: one device, or q's and then p's"),
        ([], "--expert-devices requires at least 1 element"),
    ],
)
def test_unsupported_devices_are_rejected(bundle, devices, message, capsys):
    assert main(["generate", str(bundle), "--prompt", "a", "--expert-devices", *devices]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_multiple_processes_are_rejected(bundle, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["generate", str(bundle), "--prompt", "a"]) == 2
    assert "2 processes were started" in capsys.readouterr().err


def test_bundle_loads_with_overlap(bundle):
    assert DivergenceForCausalLM.from_pretrained(bundle, overlap=True).overlap
    assert not DivergenceForCausalLM.from_pretrained(bundle).overlap


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_overlap_changes_nothing_on_a_processor(steered):
    with torch.no_grad():
        expected = steered(input_ids=PROMPTS).logits
        steered.overlap = True
        for model in (steered, copy.deepcopy(steered)):
            assert model.overlap
            assert torch.equal(model(input_ids=PROMPTS).logits, expected)
