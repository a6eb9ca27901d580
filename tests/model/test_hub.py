"""A packed bundle loads from the hub; the model itself does not push."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from divdec import DivergenceForCausalLM, UsageError, write_bundle
from divdec.configuration import PARTS
from support.hub import hub

IDS = torch.tensor([[5, 9, 200, 31]])
TOKEN = "a-token-of-the-owner"


def load(url, cache, logits):
    """Load the hub's bundle in a process whose hub is a server, and save its logits."""
    code = (
        "import torch; from divdec import DivergenceForCausalLM as M; model = M.from_pretrained('me/bundle'); "
        f"torch.save(model(input_ids=torch.tensor({IDS.tolist()})).logits.detach(), {str(logits)!r})"
    )
    variables = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(cache)}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables, "HF_TOKEN": TOKEN},
        capture_output=True,
        text=True,
    )


def test_packed_bundle_loads_from_the_hub(own_checkpoints, tmp_path):
    """Over HTTP, by the real client; nothing of the repository names this machine."""
    parts = {part: str(own_checkpoints / part.removesuffix("_auxiliary")) for part in PARTS}
    bundle = write_bundle(tmp_path / "bundle", **parts, steering="linear:1.5", pack=True)
    with torch.no_grad():
        expected = DivergenceForCausalLM.from_pretrained(bundle)(input_ids=IDS).logits
    files = {path.relative_to(bundle).as_posix(): path.read_bytes() for path in bundle.rglob("*") if path.is_file()}
    assert not [name for name, content in files.items() if str(tmp_path).encode() in content]
    shutil.rmtree(own_checkpoints)
    with hub(TOKEN, files) as url:
        loaded = load(url, tmp_path / "cache", tmp_path / "logits.pt")
    assert loaded.returncode == 0, loaded.stderr
    assert torch.equal(torch.load(tmp_path / "logits.pt"), expected)


def test_a_hub_that_cannot_be_reached_gives_one_line(tmp_path):
    result = load("http://127.0.0.1:9", tmp_path / "cache", tmp_path / "logits.pt")
    assert result.stderr.splitlines()[-1].startswith("divdec.errors.UsageError: ")


def test_model_is_not_pushed(steered):
    """transformers' own method would create a public repository."""
    with pytest.raises(UsageError, match="hf upload me/bundle BUNDLE --private"):
        steered.push_to_hub("me/bundle")
