"""The benchmark of a decoding step runs, and finds its parts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.vllm_slow, pytest.mark.timeout(600)]


def test_parts_of_a_step_add_up():
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "benchmarks.serving.vllm_steps", "--toy", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    row = json.loads(done.stdout.splitlines()[-1])["rows"]["2"]
    parts = row["parts"]
    assert min(row["target"], row["steered"], *parts.values()) > 0
    together = sum(parts[name] for name in ("target", "auxiliaries", "steering", "vLLM"))
    assert together == pytest.approx(parts["step"], rel=0.01)
    assert parts["target"] > parts["auxiliaries"]
