"""The measured compute on tiny shapes: what is measured, what is kept, what is refused, and that figures are right."""

import json

import pytest
import torch

from divdec.costs.model_size import measure_size
from divdec.errors import UsageError
from divdec.runs import RunFolder, read_record
from divdec_research.bench import settings as bench_settings
from divdec_research.bench.results import compute_deviation, compute_table
from divdec_research.bench.run import (
    BenchDevice,
    Combination,
    bench_compute,
    combinations,
    compute_figures,
    time_passes,
)
from divdec_research.bench.settings import SHAPES, BenchSettings, DecoderShape, find_shape

TINY = {
    "tiny": DecoderShape("tiny", 32, 128, 16, 2, 2, 1),
    "small": DecoderShape("small", 64, 256, 16, 4, 4, 3),
    "llama-small": DecoderShape("llama-small", 64, 192, 16, 4, 2, 3),
}
FAST = {"rounds": 1, "tokens": 4, "prompt": 8, "device": "cpu", "auxiliaries": ("tiny",)}


@pytest.fixture(autouse=True)
def shapes(monkeypatch):
    for name, shape in TINY.items():
        monkeypatch.setitem(bench_settings.SHAPES, name, shape)


def compute_settings(folder, **more):
    options = FAST | {"targets": ("small", "llama-small"), "vocabularies": (256, 512)} | more
    return BenchSettings(output=str(folder), **options)


def models_of(settings, device):
    (one, *_) = combinations(settings, device)
    return one, one.create(settings, device)


def silent(line):
    pass


def test_table_a9_shapes_match_published_sizes():
    assert len(bench_settings.TABLE_A9) == 50
    for millions, hidden, heads, layers in bench_settings.TABLE_A9:
        shape = SHAPES[f"chinchilla-{millions}M"]
        inner = heads * shape.head
        # Attention, its projection of relative positions, feed-forward; 32,000 tied embeddings (Gopher's vocabulary).
        counted = layers * (5 * hidden * inner + 2 * hidden * shape.mlp) + 32_000 * hidden
        assert counted / 1e6 == pytest.approx(millions, rel=0.02), shape


@pytest.mark.parametrize(("name", "billions"), [("llama-1B", 1.236), ("llama-3B", 3.213), ("llama-8B", 8.030),
                                                 ("llama-70B", 70.554)])  # fmt: skip
def test_llama_shapes_match_published_sizes(name, billions):
    size = measure_size(find_shape(name).config(128_256), name)
    assert size.parameters / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize("name", ["llama-19B", "llama-31B", "llama-48B"])
def test_custom_shapes_match_size_in_name(name):
    size = measure_size(find_shape(name).config(128_256), name)
    assert size.parameters / 1e9 == pytest.approx(float(name.removeprefix("llama-").removesuffix("B")), rel=0.06)


def test_auxiliaries_larger_than_half_the_target_are_skipped(tmp_path):
    device = BenchDevice.of(compute_settings(tmp_path))
    result = combinations(compute_settings(tmp_path, auxiliaries=("tiny", "small"), targets=("small",)), device)
    assert {one.auxiliary.name for one in result} == {"tiny"}
    assert {one.vocabulary for one in result} == {256, 512}
    with pytest.raises(UsageError, match="no pair of target and auxiliary has 2n ≤ N"):
        combinations(compute_settings(tmp_path, auxiliaries=("small",), targets=("small",)), device)


def test_compute_benchmark_writes_results_and_reuses_them(tmp_path):
    reports = []
    result = bench_compute(compute_settings(tmp_path / "c"), reports.append)
    assert len(result["rows"]) == 4
    for row in result["rows"]:
        for part in ("prefill", "decode"):
            assert all(row["seconds"][part][name] > 0 for name in "Ppq")
            assert row["ratio"][part] > 1
        assert row["theory"] == pytest.approx(1 + 2 * row["n"] / row["N"])
    written = (tmp_path / "c" / "results.jsonl").read_text()
    assert [json.loads(line)["key"] for line in written.splitlines()] == [row["key"] for row in result["rows"]]
    assert "<svg" in (tmp_path / "c" / "compute.svg").read_text()
    assert (tmp_path / "c" / "table.md").read_text().count("\n") == 2 + 4
    record = read_record(tmp_path / "c")
    assert (record["verb"], record["status"], record["measured"]) == ("bench compute", "finished", 4)
    again = bench_compute(compute_settings(tmp_path / "c"), reports.append)
    assert again["rows"] == result["rows"]
    assert "4 of them measured before" in reports[-1]
    assert (tmp_path / "c" / "results.jsonl").read_text() == written
    # Another setting is another measurement, beside the first.
    bench_compute(compute_settings(tmp_path / "c", tokens=3, targets=("small",)), silent)
    assert (tmp_path / "c" / "results.jsonl").read_text().startswith(written)


def test_benchmark_resumes_after_partially_written_line(tmp_path):
    first = bench_compute(compute_settings(tmp_path / "c", vocabularies=(256,)), silent)
    assert len(first["rows"]) == 2
    with (tmp_path / "c" / "results.jsonl").open("a") as file:
        file.write('{"key": "abc", "targ')
    rest = bench_compute(compute_settings(tmp_path / "c"), silent)
    assert len(rest["rows"]) == 4
    assert rest["rows"][:2] == first["rows"]
    lines = (tmp_path / "c" / "results.jsonl").read_text().splitlines()
    assert len([json.loads(line) for line in lines]) == 4


def test_benchmark_rejects_folder_with_other_files(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        bench_compute(compute_settings(tmp_path / "mine"), silent)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    settings = compute_settings(tmp_path / "c")
    bench_compute(settings, silent)
    run = RunFolder.open(tmp_path / "c", "bench compute", settings, "bench compute", extend=True)
    with run, pytest.raises(UsageError, match="another `divdec bench compute` is running"):
        bench_compute(settings, silent)
    with pytest.raises(UsageError, match="is a file"):
        bench_compute(compute_settings(tmp_path / "mine" / "notes.txt" / "x"), silent)
    (tmp_path / "c" / "results.jsonl").write_text("no row\n{}\n")
    with pytest.raises(UsageError, match="line 1 cannot be read"):
        bench_compute(settings, silent)


def test_models_exceeding_memory_are_reported_and_skipped(tmp_path, monkeypatch):
    def create(*_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(Combination, "create", create)
    reports = []
    result = bench_compute(compute_settings(tmp_path / "c"), reports.append)
    assert result["rows"] == []
    assert len(result["left_out"]) == len(read_record(tmp_path / "c")["left_out"]) == 4
    assert "does not fit (out of memory)" in reports[-1]


def test_cuda_device_without_gpu_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="has no GPU that PyTorch can use; give --device cpu"):
        bench_compute(compute_settings(tmp_path, device="cuda"), silent)
    assert list(tmp_path.iterdir()) == []


def test_every_model_processes_every_token_in_each_round(tmp_path):
    settings = compute_settings(tmp_path, rounds=2)
    device = BenchDevice.of(settings)
    one, models = models_of(settings, device)
    read = {name: [] for name in models}
    for name, model in models.items():
        model.register_forward_pre_hook(
            lambda module, args, kwargs, name=name: read[name].append(args[0].shape[1]), with_kwargs=True
        )
    times = time_passes(models, one.vocabulary, settings)
    assert all(tokens == [8, 1, 1, 1, 1] * 3 for tokens in read.values())  # the first of the rounds warms up
    assert all(len(own) == 2 for by in times.values() for own in by.values())


def test_ratios_are_computed_from_times():
    times = {
        "prefill": {"P": [1.0, 2.0, 4.0], "p": [0.1, 0.2, 0.4], "q": [0.1, 0.2, 0.4]},
        "decode": {"P": [1.0, 1.0, 10.0], "p": [0.5, 0.25, 5.0], "q": [0.25, 0.25, 5.0]},
    }
    sizes = {"N": 100, "n": 10}
    result = compute_figures(times, sizes)
    assert result["ratio"] == pytest.approx({"prefill": 1.2, "decode": 1.75})
    assert result["seconds"]["decode"] == {"P": 1.0, "p": 0.5, "q": 0.25}
    assert result["theory"] == pytest.approx(1.2)
    assert result["deviation"]["decode"] == pytest.approx(1.75 / 1.2 - 1)
    row = {**sizes, **result, "target": "a", "auxiliary": "b", "vocabulary": 7}
    over = compute_deviation([row])["decode"]
    assert over["median"] == over["largest_size"] == pytest.approx(1.75 / 1.2 - 1)
    assert compute_table([row]).splitlines()[2].endswith(" 1.750 | +45.8% |")
    assert compute_deviation([]) == {}


def test_p_and_q_have_different_weights(tmp_path):
    settings = compute_settings(tmp_path)
    _, models = models_of(settings, BenchDevice.of(settings))
    assert not torch.equal(*(models[name].get_input_embeddings().weight for name in "pq"))


@pytest.mark.gpu
def test_benchmark_runs_on_gpu(tmp_path):
    more = {"device": "cuda", "targets": ("chinchilla-489M",), "auxiliaries": ("chinchilla-44M",)}
    assert bench_compute(compute_settings(tmp_path, **more), silent)["rows"]
