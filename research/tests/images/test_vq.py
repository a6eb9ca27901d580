"""A codec over diffusers' VQModel: codes, images, files and what it refuses."""

import json
import subprocess
import sys

import pytest
import torch

from divdec.errors import UsageError
from divdec_research.images.codecs import CONFIG, VQ_WEIGHTS, Codec, VQCodec, load_codec, vq_config, vq_model_class


def new_codec(size=(8, 16), batch=2, attention=(1,)):
    torch.manual_seed(0)
    model = vq_model_class()(**vq_config(3, (32, 64), 1, attention, 12, (20, 6)))
    model.quantize.embedding.weight.data.normal_()
    return VQCodec(model, size, batch)


@pytest.fixture(scope="module")
def codec():
    return new_codec()


@pytest.fixture
def saved(codec, tmp_path):
    codec.save(tmp_path)
    return tmp_path


def images(count, size=(8, 16)):
    return torch.rand(count, 3, *size, generator=torch.Generator().manual_seed(1))


def test_vq_codec_implements_codec_protocol(codec):
    assert isinstance(codec, Codec)
    assert (codec.codes, codec.grid, codec.channels, codec.size) == (20, (4, 8), 3, (8, 16))


def test_vq_codes_are_nearest_codebook_entries(codec):
    pixels = images(5)
    vectors = codec.model.encode(2 * pixels - 1).latents.movedim(1, -1)
    distances = (vectors[..., None, :] - codec.model.quantize.embedding.weight).norm(dim=-1)
    codes = codec.encode(pixels)
    assert torch.equal(codes, distances.argmin(-1))
    assert len(codes.unique()) > 3
    assert not codes.requires_grad


def test_vq_decode_matches_codebook_entries(codec):
    codes = torch.randint(20, (5, 4, 8), generator=torch.Generator().manual_seed(2))
    entries = codec.model.quantize.embedding(codes).movedim(-1, 1)
    pixels = codec.model.decode(entries, force_not_quantize=True).sample
    decoded = codec.decode(codes)
    torch.testing.assert_close(decoded, ((pixels + 1) / 2).clamp(0, 1))
    assert decoded.shape == (5, 3, 8, 16)
    assert not decoded.requires_grad


def test_pixels_stay_in_range(codec):
    bright = new_codec()
    bright.model.decoder.conv_out.bias.data[:] = torch.tensor([50.0, -50.0, 0.0])
    decoded = bright.decode(torch.zeros(1, 4, 8, dtype=torch.long))[0]
    assert (decoded[0] == 1).all()
    assert (decoded[1] == 0).all()


def test_batch_size_does_not_change_results(codec):
    pixels = images(5)
    one_by_one, together = VQCodec(codec.model, codec.size, 1), VQCodec(codec.model, codec.size, 64)
    assert torch.equal(one_by_one.encode(pixels), together.encode(pixels))
    codes = codec.encode(pixels)
    torch.testing.assert_close(one_by_one.decode(codes), together.decode(codes))


def test_empty_image_batch_gives_no_codes(codec):
    codes = codec.encode(images(0))
    assert codes.shape == (0, 4, 8)
    assert codec.decode(codes).shape == (0, 3, 8, 16)


def test_vq_codec_moves_to_device():
    codec = new_codec()
    assert codec.to("cpu") is codec
    assert codec.to(torch.device("meta")).model.device.type == "meta"


def test_half_precision_vq_outputs_float32(codec):
    half = new_codec()
    half.model.to(torch.bfloat16)
    decoded = half.decode(half.encode(images(2)))
    assert decoded.dtype == torch.float32


def test_vq_codec_round_trips_through_folder(codec, saved):
    loaded = load_codec(saved)
    assert isinstance(loaded, VQCodec)
    assert json.loads((saved / "codec.json").read_text()) == {"kind": "vq", "size": [8, 16]}
    codes = codec.encode(images(3))
    assert torch.equal(loaded.encode(images(3)), codes)
    torch.testing.assert_close(loaded.decode(codes), codec.decode(codes))
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert not list(saved.glob("*.bin"))


def test_diffusers_loads_saved_vq_model(codec, saved):
    loaded = vq_model_class().from_pretrained(saved, use_safetensors=True, local_files_only=True)
    assert all(torch.equal(weight, loaded.state_dict()[name]) for name, weight in codec.model.state_dict().items())


@pytest.mark.parametrize("name", ["codec.json", CONFIG, VQ_WEIGHTS])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "other"])
def test_damaged_files_are_rejected(saved, name, damage):
    file = saved / name
    content = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes({"empty": b"", "cut": content[: len(content) // 2], "other": b'{"kind": "vq"}'}[damage])
    with pytest.raises(UsageError) as caught:
        VQCodec.load(saved)
    assert "\n" not in str(caught.value)
    assert str(saved) in str(caught.value)


def test_missing_weights_are_not_initialised_at_random(saved):
    from safetensors.torch import load_file, save_file

    weights = load_file(saved / VQ_WEIGHTS)
    del weights["post_quant_conv.bias"]
    save_file(weights, saved / VQ_WEIGHTS)
    with pytest.raises(UsageError, match=r"cannot be read .*post_quant_conv\.bias"):
        VQCodec.load(saved)


def test_unsupported_vq_architecture_is_rejected(saved):
    config = json.loads((saved / CONFIG).read_text())
    (saved / CONFIG).write_text(json.dumps({**config, "_class_name": "AutoencoderKL"}))
    with pytest.raises(UsageError, match="describes AutoencoderKL, not VQModel"):
        VQCodec.load(saved)


@pytest.mark.parametrize("size", [(7, 8), (0, 8)])
def test_incompatible_image_sizes_are_rejected(codec, size):
    with pytest.raises(UsageError, match="multiples of 2"):
        VQCodec(codec.model, size)


def test_vq_models_changing_channel_count_are_rejected():
    config = {**vq_config(3, (32,), 1, (), 4, (8, 4)), "out_channels": 1}
    with pytest.raises(UsageError, match=r"reads 3 channel\(s\) and gives 1"):
        VQCodec(vq_model_class()(**config), (4, 4))


def test_missing_diffusers_error_names_install_command(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(UsageError, match=r"pip install 'divdec-research\[image\]'"):
        VQCodec.load(saved)


def test_torchvision_is_never_imported_and_diffusers_only_on_use(saved):
    code = f"""
import sys
sys.modules["torchvision"] = None  # whoever imports it fails
import divdec_research.images.taming
assert "diffusers" not in sys.modules
import pathlib, torch
from divdec_research.images.codecs import VQCodec
codec = VQCodec.load(pathlib.Path({str(saved)!r}))
assert codec.decode(codec.encode(torch.rand(1, 3, 8, 16))).shape == (1, 3, 8, 16)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
