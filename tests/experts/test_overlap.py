"""Experts that run while the target runs: the same answers, and errors of either."""

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
class TestThreadOverlap:
    """Experts in a thread."""

    def test_overlap_gives_same_output(self, steered):
        def everything():
            with torch.no_grad():
                yield steered(input_ids=PROMPTS, use_cache=False).logits
                yield steered.components(PROMPTS)[1]
            for options in ({}, {"num_beams": 2}, {"speculative": 2}):
                yield steered.generate(
                    PROMPTS, attention_mask=torch.ones_like(PROMPTS), max_new_tokens=6, do_sample=False,
                    pad_token_id=1, eos_token_id=None, **options,
                )  # fmt: skip

        for setting in ("linear:1.5", "rank:20"):
            steered.steering = setting
            steered.overlap = False
            expected = list(everything())
            steered.overlap = True
            assert steered.overlap
            assert all(torch.equal(one, other) for one, other in zip(everything(), expected, strict=True))

    def test_experts_run_concurrently_with_target(self, steered):
        import threading

        steered.overlap = True
        both = threading.Barrier(2)

        def meet(*_):
            both.wait(timeout=60)

        hooks = [steered.target.register_forward_pre_hook(meet), steered.experts.forget.register_forward_hook(meet)]
        with torch.no_grad():
            steered(input_ids=PROMPTS, use_cache=False)
        for hook in hooks:
            hook.remove()
        assert not both.broken

    def test_target_and_expert_errors_propagate(self, steered):
        steered.overlap = True
        with torch.no_grad():
            fails = steered.target.register_forward_pre_hook(lambda *_: [][0])
            with pytest.raises(IndexError):
                steered(input_ids=PROMPTS)
            fails.remove()
            steered.experts.forget.get_output_embeddings().weight[3] = float("nan")
            with pytest.raises(RuntimeError, match="not finite"):
                steered(input_ids=PROMPTS)
            steered.experts.forget.forward = None
            with pytest.raises(TypeError):
                steered(input_ids=PROMPTS)

    def test_gradients_reach_experts_with_overlap(self, steered):
        steered.overlap = True
        steered(input_ids=PROMPTS).logits.sum().backward()
        assert all(weight.grad is not None for weight in steered.experts.retain.lm_head.parameters())

    def test_overlapped_model_can_be_copied(self, steered):
        import copy

        steered.overlap = True
        with torch.no_grad():
            expected = steered(input_ids=PROMPTS).logits
            other = copy.deepcopy(steered)
            assert other.overlap
            assert torch.equal(other(input_ids=PROMPTS).logits, expected)
