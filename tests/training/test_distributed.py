"""`divdec train` on two processes, as torchrun and accelerate launch start them."""

import json
import os
import subprocess
import sys

import pytest
import torch

ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
        [
            "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
            "--mixed_precision", "no", "--dynamo_backend", "no", "--num_cpu_threads_per_process", "1",
        ],
    ],
    ids=["torchrun", "accelerate"],
)  # fmt: skip
def test_two_processes_learn_what_one_does(launcher, world, checkpoints, tmp_path):
    for name, questions in (("forget", world.forget[:16]), ("retain", world.retain[:32])):
        rows = [json.dumps({"question": q.question, "answer": q.answer}) for q in questions]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    results = {}
    for name, command, batch_size in (
        ("one", [sys.executable, "-m", "divdec.cli"], 16),
        ("two", [sys.executable, "-m", *launcher, "-m", "divdec.cli"], 8),
    ):
        arguments = [
            "train", "--base", checkpoints / "forget", "--forget", tmp_path / "forget.jsonl",
            "--retain", tmp_path / "retain.jsonl", "--target", checkpoints / "target", "--lr", "1e-3", "--epochs", "4",
            "--batch-size", batch_size, "--output", tmp_path / name,
        ]  # fmt: skip
        run = subprocess.run(
            [*command, *map(str, arguments)], env=ENVIRONMENT, capture_output=True, text=True, timeout=600
        )
        assert run.returncode == 0, run.stderr[-3000:]
        results[name] = json.loads((tmp_path / name / "run.json").read_text())
        assert (tmp_path / name / "bundle" / "config.json").is_file()
    for part in ("retain_auxiliary", "forget_auxiliary"):
        one, two = (results[name]["auxiliaries"][part] for name in ("one", "two"))
        assert two["steps"] == one["steps"]
        assert two["loss_after"] == pytest.approx(one["loss_after"], rel=0.1)
        assert two["loss_after"] < two["loss_before"]
    assert torch.distributed.is_available()
