"""The k-means codec: nearest patches, images of one size, what it has learned is kept."""

import time

import pytest
import torch

from divdec import UsageError
from divdec_research.images.codecs import Codec, PatchCodec, load_codec


def test_codes_are_the_nearest_patches(digits):
    images = digits[0][:30]
    codec = PatchCodec.fit(images, 2, 16)
    assert isinstance(codec, Codec)
    codes = codec.encode(images)
    assert codes.shape == (30, 4, 4)
    for row in range(4):
        for column in range(4):
            patch = images[:, 0, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].reshape(30, 1, 4)
            distances = (patch - codec.patches.reshape(1, 16, 4)).square().sum(-1)
            assert torch.equal(codes[:, row, column], distances.argmin(-1))
    decoded = codec.decode(codes)
    assert torch.equal(codec.encode(decoded), codes)
    one = decoded[0, 0, 2:4, 4:6]
    assert torch.equal(one, codec.patches[codes[0, 1, 2], 0])


def test_reconstruction_improves_with_the_codebook(digits):
    images = digits[0]
    errors = []
    for codes in (4, 16, 64):
        codec = PatchCodec.fit(images, 2, codes)
        errors.append(float((codec.decode(codec.encode(images)) - images).square().mean()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.01
    exact = PatchCodec.fit(images, 1, 17)  # the pixels of digits have 17 values
    assert torch.allclose(exact.decode(exact.encode(images)), images, atol=1e-6)


def test_codebook_fit_is_reproducible_and_fast(digits):
    started = time.perf_counter()
    one = PatchCodec.fit(digits[0], 2, 64, seed=3)
    assert time.perf_counter() - started < 20  # of a machine that does other things too
    assert torch.equal(one.patches, PatchCodec.fit(digits[0], 2, 64, seed=3).patches)


def test_patch_codec_supports_colour(digits):
    images = torch.cat([digits[0][:20], digits[0][20:40], digits[0][40:60]], dim=1)
    codec = PatchCodec.fit(images, 4, 8)
    assert codec.decode(codec.encode(images)).shape == images.shape


def test_patch_codec_round_trips_through_folder(digits, tmp_path):
    codec = PatchCodec.fit(digits[0], 2, 16)
    with pytest.raises(UsageError, match="holds no codec"):
        load_codec(tmp_path)
    codec.save(tmp_path)
    loaded = load_codec(tmp_path)
    assert (loaded.size, loaded.grid, loaded.codes) == ((8, 8), (4, 4), 16)
    assert torch.equal(loaded.encode(digits[0]), codec.encode(digits[0]))
    (tmp_path / "patches.safetensors").write_bytes(b"half")
    with pytest.raises(UsageError, match="cannot be read"):
        load_codec(tmp_path)
    codec.save(tmp_path)
    (tmp_path / "codec.json").write_text('{"kind": "patches", "size": [9, 9]}')
    with pytest.raises(UsageError, match="patches of 1×2×2 for images of 9×9"):
        load_codec(tmp_path)
    (tmp_path / "codec.json").write_text("[]")
    with pytest.raises(UsageError, match="of kind"):
        load_codec(tmp_path)
    (tmp_path / "codec.json").write_text('{"kind": "magic"}')
    with pytest.raises(UsageError, match="of kind 'magic'; accepted: 'patches', 'vq'"):
        load_codec(tmp_path)


def test_images_that_no_codebook_fits_raise(digits):
    images = digits[0]
    with pytest.raises(UsageError, match="do not tile"):
        PatchCodec.fit(images, 3, 16)
    with pytest.raises(UsageError, match="18 codes are requested, but the images have only 17 different patches"):
        PatchCodec.fit(images, 1, 18)
