"""Other programs load bundles with `trust_remote_code=True`, and divdec never executes a bundle's own code."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from divdec import DivergenceForCausalLM, write_bundle
from divdec.configuration import REMOTE_FILE
from divdec.model.loading import read_config
from divdec.serving.vllm.configuration import EngineOptions, read_parts

LOAD = """
import json, sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline

assert not any(name.partition(".")[0] == "divdec" for name in sys.modules)
bundle, copy, tampered, saved = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(bundle, trust_remote_code=True)
logits = model(input_ids=torch.tensor([[5, 9, 2]])).logits
half = AutoModelForCausalLM.from_pretrained(copy, trust_remote_code=True, dtype=torch.bfloat16, device_map="cpu")
tokenizer = AutoTokenizer.from_pretrained(bundle)
ask = pipeline("text-generation", model=bundle, trust_remote_code=True)
text = ask("Who wrote it?", max_new_tokens=3, do_sample=False, return_full_text=False)[0]["generated_text"]
model.save_pretrained(saved)
try:
    AutoModelForCausalLM.from_pretrained(tampered, trust_remote_code=True)
    refused = None
except Exception as error:
    refused = f"{type(error).__name__}: {error}"
print(json.dumps({
    "type": AutoConfig.from_pretrained(bundle, trust_remote_code=True).model_type,
    "class": f"{type(model).__module__}.{type(model).__name__}", "logits": logits.tolist(), "text": text,
    "dtype": str(half.target.dtype), "tokens": len(tokenizer), "refused": refused,
}))
"""


@pytest.fixture
def tampered(bundle, tmp_path):
    """A packed copy of the bundle with another weight file than the one it was written with."""
    config = json.loads((bundle / "config.json").read_text())
    folder = write_bundle(
        tmp_path / "tampered",
        target=str(bundle / config["target"]["folder"]),
        retain_auxiliary=str(bundle / config["retain_auxiliary"]["folder"]),
        forget_auxiliary=str(bundle / config["forget_auxiliary"]["folder"]),
        steering="linear:1.5",
        pack=True,
    )
    shutil.copyfile(folder / "retain_auxiliary/model.safetensors", folder / "forget_auxiliary/model.safetensors")
    return folder


def test_bundle_loads_in_transformers_with_remote_code(bundle, tampered, tmp_path):
    # Relative references: the bundle and its checkpoints move together.
    copy = tmp_path / "elsewhere" / "bundle"
    shutil.copytree(tmp_path / "models", tmp_path / "elsewhere" / "models")
    shutil.copytree(bundle, copy)
    assert json.loads((copy / "config.json").read_text())["target"]["folder"] == "../models/target"
    folders = [bundle, copy, tampered, tmp_path / "saved"]
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "cache")}
    result = subprocess.run(
        [sys.executable, "-c", LOAD, *map(str, folders)],
        capture_output=True, text=True, timeout=240, env=environment, cwd=tmp_path / "elsewhere",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    loaded = json.loads(result.stdout.splitlines()[-1])
    assert loaded["type"] == "divergence"
    assert loaded["class"] == "divdec.model.modeling.DivergenceForCausalLM"
    model = DivergenceForCausalLM.from_pretrained(bundle)
    torch.testing.assert_close(torch.tensor(loaded["logits"]), model(input_ids=torch.tensor([[5, 9, 2]])).logits)
    assert loaded["text"]
    assert loaded["dtype"] == "torch.bfloat16"
    assert loaded["tokens"] == 512
    assert loaded["refused"].startswith("UsageError")
    assert "has changed since the bundle was written" in loaded["refused"]
    for folder in (bundle, tampered, tmp_path / "saved"):
        assert "from divdec.model import DivergenceConfig, DivergenceForCausalLM" in (folder / REMOTE_FILE).read_text()
        assert json.loads((folder / "config.json").read_text())["auto_map"] == {
            "AutoConfig": "modeling_divdec.DivergenceConfig",
            "AutoModelForCausalLM": "modeling_divdec.DivergenceForCausalLM",
        }
        assert [path.name for path in folder.glob("*.py")] == [REMOTE_FILE]


@pytest.mark.parametrize("trusted", [None, True])
def test_divdec_does_not_execute_bundle_code(bundle, tmp_path, trusted):
    from transformers import AutoModelForCausalLM

    from divdec.cli import main

    trace = tmp_path / "executed"
    (bundle / REMOTE_FILE).write_text(f"open({str(trace)!r}, 'w')\nraise RuntimeError('executed')\n")
    DivergenceForCausalLM.from_pretrained(bundle, **({} if trusted is None else {"trust_remote_code": trusted}))
    # In a process that has imported divdec.model, the Auto classes know the model type themselves.
    AutoModelForCausalLM.from_pretrained(bundle, trust_remote_code=trusted)
    assert str(AutoModelForCausalLM.from_pretrained(bundle, steering="rank:5").steering) == "rank:5"
    read_config(bundle)
    read_parts(str(bundle), None, EngineOptions())
    if trusted is None:
        assert main(["generate", str(bundle), "--prompt", "Who?", "--max-new-tokens", "1"]) == 0
    assert not trace.exists()
