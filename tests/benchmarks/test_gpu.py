"""The measurements for GPUs at toy size on a CPU: every piece runs, and a piece that fails says so."""

import dataclasses
import json

import pytest
import torch

from benchmarks.decoding import gpu

TOY = ["gpu.py", "--shape", "tiny", "--device", "cpu", "--dtype", "float32"]


@pytest.mark.slow
def test_every_piece_runs_at_toy_size(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [*TOY, "--output", str(tmp_path)])
    assert gpu.main() == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results["pieces"]) == list(gpu.PIECES)
    assert all(found["figures"] for found in results["pieces"].values())
    assert results["pieces"]["equality"]["figures"]["passed"] > 10
    for measured in results["pieces"]["decoding-8b"]["figures"]["measured"]:
        assert measured["rows"]["steered, adapters"]["over_target"] > 0
    # Compiled passes compute what eager ones do.
    assert all(row["difference"] < 1e-4 for row in results["pieces"]["passes"]["figures"]["rows"])
    assert (tmp_path / "results.md").read_text() in capsys.readouterr().out
    assert not (tmp_path / "serving").exists()

    def run_again(*arguments):
        raise AssertionError("a finished piece ran again")

    monkeypatch.setattr(gpu, "run_piece", run_again)
    assert gpu.main() == 0


def test_failed_piece_is_reported_and_run_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [*TOY, "--output", str(tmp_path), "--only", "passes"])
    monkeypatch.setattr(gpu, "command", lambda *_: gpu.module("decoding.gpu", "--piece", "passes", "--batch", "none"))
    assert gpu.main() == 1
    assert "**Failed**: exit code 2" in (tmp_path / "results.md").read_text()
    assert "invalid int value: 'none'" in capsys.readouterr().out
    monkeypatch.setattr(gpu, "run_piece", lambda *_: {"failed": "asked again"})
    assert gpu.main() == 1
    assert "asked again" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["gpu.py", "--device", "cpu", "--output", str(tmp_path)])
    assert gpu.main() == 2
    assert "was begun with" in capsys.readouterr().err


def test_piece_ends_at_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", [*TOY, "--output", str(tmp_path), "--only", "passes"])
    monkeypatch.setattr(gpu, "command", lambda *_: ["sleep", "60"])
    monkeypatch.setattr(gpu, "LIMIT", 0.2)
    assert gpu.main() == 1
    assert "ended after the limit" in (tmp_path / "results.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("piece", [[], ["--piece", "decoding"]])
def test_machine_without_cuda_gets_one_line(piece, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu", "--output", str(tmp_path), *piece])
    assert gpu.main() == 2
    assert "no CUDA here; accepted: --device cpu" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_layers_are_cut_to_the_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * 2**30, 80 * 2**30))
    (target, auxiliary), device = gpu.SHAPES["70b"], torch.device("cuda")
    cut = gpu.fitted(target, auxiliary, device, torch.bfloat16)
    assert 0 < cut.layers < 80

    def weights(layers):
        shapes = (dataclasses.replace(target, layers=layers), auxiliary, auxiliary)
        return sum(gpu.measure_size(shape.config(gpu.VOCABULARY), shape.name).parameters for shape in shapes)

    assert weights(cut.layers) * 2 <= gpu.ROOM * 80 * 2**30 < weights(cut.layers + 1) * 2
    assert gpu.fitted(*gpu.SHAPES["8b"], device, torch.bfloat16) == gpu.SHAPES["8b"][0]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**30))
    with pytest.raises(SystemExit):
        gpu.fitted(target, auxiliary, device, torch.bfloat16)
