"""Training and distillation on two processes, as torchrun and accelerate launch start them, and under FSDP."""

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from divdec.cli import main
from divdec.training import inputs

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
def test_two_process_training_matches_one_process(launcher, world, checkpoints, tmp_path):
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
            "--batch-size", batch_size, "--lora-rank", "0", "--output", tmp_path / name,
        ]  # fmt: skip
        run = subprocess.run(
            [*command, *map(str, arguments)], env=ENVIRONMENT, capture_output=True, text=True, timeout=600
        )
        # Nothing was shown, because the target does not answer these questions. The launchers make 1 of that.
        assert run.returncode == (3 if name == "one" else 1), run.stderr[-3000:]
        assert "no rule is good enough" in run.stderr
        results[name] = json.loads((tmp_path / name / "run.json").read_text())
        assert (tmp_path / name / "bundle" / "config.json").is_file()
    for piece in ("retain_auxiliary", "forget_auxiliary"):
        one, two = (results[name]["auxiliaries"][piece] for name in ("one", "two"))
        assert two["steps"] == one["steps"]
        assert two["loss_after"] == pytest.approx(one["loss_after"], rel=0.1)
        assert two["loss_after"] < two["loss_before"]
    assert torch.distributed.is_available()


FSDP = Path(__file__).with_name("sharded_fsdp.py")


def write_sets(folder, world):
    # As many as fill every batch: accelerate fills the last one up with others.
    for name, questions in (("forget", world.forget[:16]), ("retain", world.retain[:16])):
        rows = [json.dumps({"question": q.question, "answer": q.answer}) for q in questions]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))


def commands(folder, bundle, checkpoints, output, batch_size):
    sets = ["--forget", folder / "forget.jsonl", "--retain", folder / "retain.jsonl", "--batch-size", batch_size]
    rate = ["--lr", "1e-3", "--epochs", "2"]
    train = ["train", "--base", checkpoints / "forget", *sets, *rate, "--output", output / "pair"]
    distill = ["distill", bundle, *sets, *rate, "--output"]
    return [
        list(map(str, command))
        for command in (train, [*distill, output / "student"], [*distill, output / "adapted", "--lora-rank", "2"])
    ]


def under_fsdp(folder, version, commands):
    options = folder / f"fsdp{version}.json"
    options.write_text(json.dumps({"version": version, "commands": commands}))
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", FSDP, options],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(options.with_suffix(f".{rank}").read_text()) for rank in (0, 1)], run.stderr


@pytest.mark.slow
def test_fsdp_training_matches_one_process(world, bundle, checkpoints, tmp_path):
    """Training and distillation, with and without adapters, under FSDP: the weights are those of one process."""
    write_sets(tmp_path, world)
    codes = [main(command) for command in commands(tmp_path, bundle, checkpoints, tmp_path / "one", 8)]
    assert set(codes) <= {0, 3}  # 3: two epochs do not suffice
    reports, _ = under_fsdp(tmp_path, "2", commands(tmp_path, bundle, checkpoints, tmp_path / "two", 4))
    for report in reports:
        assert report == {"codes": codes, "steps": 24, "pieces": True}
    for name in ("pair/retain_auxiliary", "pair/forget_auxiliary", "student", "adapted"):
        weights = "adapter_model.safetensors" if name.startswith("pair") else "model.safetensors"
        one, two = (load_file(tmp_path / number / name / weights) for number in ("one", "two"))
        assert one.keys() == two.keys()
        for weight, values in one.items():
            torch.testing.assert_close(two[weight], values, rtol=0, atol=1e-4, msg=f"{name}: {weight}")
    for name in ("student", "adapted"):
        one, two = (json.loads((tmp_path / number / name / "run.json").read_text()) for number in ("one", "two"))
        for when in ("before", "after"):
            assert two[when]["forget"] == pytest.approx(one[when]["forget"], rel=1e-3)


@pytest.mark.slow
def test_fsdp_version_1_is_rejected(world, bundle, checkpoints, tmp_path):
    write_sets(tmp_path, world)
    command = commands(tmp_path, bundle, checkpoints, tmp_path / "out", 4)[1]
    reports, said = under_fsdp(tmp_path, "1", [command])
    assert [report["codes"] for report in reports] == [[2], [2]]
    assert "--fsdp_version 2" in said


def test_processes_wait_for_days_while_the_main_one_measures(monkeypatch):
    options = {}
    monkeypatch.setattr(
        inputs, "PartialState", lambda **chosen: options.update(chosen) or SimpleNamespace(is_main_process=True)
    )
    inputs.join_processes(print)
    assert options["timeout"] > timedelta(days=1)


def test_an_error_of_the_main_process_reaches_all_and_stays_itself_there(tmp_path):
    """Ctrl-C in the main process says that the run can be resumed; the other process does not wait for ever."""
    script = tmp_path / "script.py"
    script.write_text(
        "from accelerate import PartialState\n"
        "from divdec.errors import Interrupted\n"
        "from divdec.training.inputs import on_main\n"
        "def work(): raise Interrupted('stopped')\n"
        "state = PartialState(cpu=True)\n"
        "try: on_main(work)\n"
        "except Exception as error: print(f'{state.process_index}: {error!r}\\n', end='', flush=True)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", script]
    result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert sorted(result.stdout.split("\n"))[1:] == [
        "0: Interrupted('stopped')", "1: RuntimeError(\"Interrupted('stopped')\")",
    ], result.stderr  # fmt: skip
