"""Parts as accelerate and training leave them: offloaded, saved over an earlier save, with gradient checkpointing."""

import copy
import shutil
import threading
import warnings
from pathlib import Path

import jaxtyping
import pytest
import torch
from accelerate import cpu_offload, disk_offload
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from divdec import DivergenceForCausalLM, UsageError
from divdec.checkpoint import load_model
from divdec.cli.loading import load_in_thread
from divdec.passes import same_weights
from support.tiny import make_parts

IDS = torch.tensor([[5, 9, 200, 31], [77, 8, 300, 2]])
GREEDY = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 4, "do_sample": False, "pad_token_id": 1}


@pytest.fixture(scope="module")
def plain():
    return DivergenceForCausalLM.from_parts(*make_parts("llama"), steering="linear:1.5")


@pytest.fixture
def unchecked_shapes(monkeypatch):
    """Tests check the shapes in signatures, and would refuse these inputs before the model could."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(params=["cpu", "disk"])
def offload(request, tmp_path_factory):
    def change(model):
        if request.param == "cpu":
            return cpu_offload(model, torch.device("cpu"))
        return disk_offload(model, tmp_path_factory.mktemp("offloaded"), torch.device("cpu"))

    return change


def logits_of(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("chosen", [(0,), (1, 2)])
def test_offloaded_models_give_same_output(plain, offload, chosen):
    parts = [offload(part) if place in chosen else part for place, part in enumerate(make_parts("llama"))]
    model = DivergenceForCausalLM.from_parts(*parts, steering="linear:1.5")
    assert all(weight.is_meta for place in chosen for weight in parts[place].parameters())
    assert model.device == torch.device("cpu")
    assert torch.equal(logits_of(model), logits_of(plain))
    expected = plain.generate(IDS, **GREEDY)
    for options in ({}, {"use_cache": False}, {"speculative": 2}, {"num_beams": 2}):
        wanted = plain.generate(IDS, **GREEDY, **options) if "num_beams" in options else expected
        assert torch.equal(model.generate(IDS, **GREEDY, **options), wanted), options


def test_identical_offloaded_auxiliaries_are_rejected(offload):
    """Two auxiliaries that are one would forget nothing."""
    target, retain, forget = make_parts("llama")
    assert not same_weights(offload(copy.deepcopy(retain)), offload(forget))
    with pytest.raises(UsageError, match="the same model"):
        DivergenceForCausalLM.from_parts(target, offload(copy.deepcopy(retain)), retain)
    with pytest.raises(UsageError, match="the same model"):
        DivergenceForCausalLM.from_parts(target, offload(copy.deepcopy(retain)), offload(retain))


def test_offloaded_models_are_saved(plain, offload, tmp_path):
    model = DivergenceForCausalLM.from_parts(*map(offload, make_parts("llama")), steering="linear:1.5")
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), logits_of(plain))


def test_bundle_loads_with_offloading(bundle, tmp_path):
    expected = logits_of(AutoModelForCausalLM.from_pretrained(bundle))
    model = AutoModelForCausalLM.from_pretrained(bundle, device_map={"": "disk"}, offload_folder=tmp_path / "offloaded")
    assert model.target.get_input_embeddings().weight.is_meta
    assert torch.equal(logits_of(model), expected)
    with pytest.warns(UserWarning, match="offloaded modules"):  # of transformers: they pass through memory
        model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), expected)


@pytest.mark.parametrize("sizes", [("10KB", "5GB"), ("5GB", "10KB"), ("10KB", "20KB")])
def test_repeated_save_removes_stale_shards(sizes, tmp_path):
    """Other numbers of shards leave nothing behind, also where the weights in memory came from that folder."""
    model = DivergenceForCausalLM.from_parts(*make_parts("llama"), steering="linear:1.5")
    for size in sizes:
        with torch.no_grad():
            model.experts.forget.get_output_embeddings().weight.mul_(1.5)
        expected = logits_of(model)
        model.save_pretrained(tmp_path / "saved", max_shard_size=size)
        assert list((tmp_path / "saved").glob("*.safetensors")) == []
        for part in ("target", "retain_auxiliary", "forget_auxiliary"):
            files = {file.name for file in (tmp_path / "saved" / part).glob("*.safetensors*")}
            assert (files == {"model.safetensors"}) == (size == "5GB")
        model = DivergenceForCausalLM.from_pretrained(tmp_path / "saved")
        assert torch.equal(logits_of(model), expected)


@pytest.mark.parametrize("deprecated", [False, True])
def test_gradient_checkpointing_gives_same_gradients(deprecated):
    gradients = []
    for checkpointing in (False, True):
        model = DivergenceForCausalLM.from_parts(*make_parts("llama"), steering="linear:1.5").train()
        if checkpointing and (deprecated or not hasattr(model, "activation_checkpointing_enable")):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                model.gradient_checkpointing_enable()
        elif checkpointing:
            model.activation_checkpointing_enable()
        output = model(IDS, labels=IDS)
        assert (output.past_key_values is None) == checkpointing
        output.loss.backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(gradient is not None for gradient in gradients[0].values())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)
    assert torch.equal(model.eval().generate(IDS, **GREEDY), model.generate(IDS, **GREEDY, use_cache=False))


ONE = torch.tensor([[5, 9, 200]])
MASK = torch.ones_like(ONE)


@pytest.mark.parametrize(
    "given",
    [
        {"attention_mask": {"mask": MASK}}, {"attention_mask": [[1, 1, 1]]}, {"attention_mask": MASK.float()},
        {"attention_mask": torch.ones(1, 3, dtype=torch.complex64)}, {"input_ids": {"input_ids": ONE}},
        {"input_ids": [[5, 9, 200]]}, {"input_ids": ONE.float()}, {"input_ids": ONE.bool()}, {"input_ids": ONE[0]},
        {"input_ids": ONE[None]}, {"attention_mask": MASK[:, :2]}, {"attention_mask": MASK[0]},
    ],
)  # fmt: skip
def test_invalid_input_types_give_one_line_error(plain, given, unchecked_shapes):
    for call in (plain, plain.components, plain.generate):
        with pytest.raises(UsageError, match=f"^{next(iter(given))}") as error:
            call(**{"input_ids": ONE, "attention_mask": MASK, **given})
        assert "\n" not in str(error.value)


def test_masks_and_tokens_of_other_integer_types_are_accepted(plain, unchecked_shapes):
    expected = plain(ONE.int(), attention_mask=MASK).logits
    assert torch.equal(plain(ONE, attention_mask=MASK.bool()).logits, expected)
    assert plain.generate(ONE, attention_mask=MASK.bool(), max_new_tokens=2).shape == (1, 5)


def test_loading_thread_ends_before_its_models_are_used():
    assert not load_in_thread(threading.current_thread).is_alive()


@pytest.mark.parametrize("error", [UsageError("no such bundle"), SystemExit(2)])
def test_error_of_the_loading_thread_reaches_the_caller(error):
    def fail():
        raise error

    with pytest.raises(type(error)) as caught:
        load_in_thread(fail)
    assert caught.value is error


@pytest.mark.parametrize("value", [2, -1])
def test_masks_of_other_values_are_refused(plain, value):
    """Their sums would be other positions."""
    with pytest.raises(UsageError, match="other values than 1 for a token and 0 for padding"):
        plain(IDS, attention_mask=torch.full_like(IDS, value))


def test_quantized_weights_that_transformers_ignores_are_refused(models, tmp_path):
    """ModelOpt's layout: weights of float8, and a scale that transformers drops."""
    folder = Path(shutil.copytree(models / "target", tmp_path / "quantized"))
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("q_proj.weight"))
    scale = weights[name].abs().max() / 448
    weights |= {name: (weights[name] / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"ignores \(.*q_proj.weight_scale\); give the unquantized checkpoint"):
        load_model(folder)
