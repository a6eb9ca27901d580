"""The benchmark of a distilled SmolLM2, with tiny models: every row once, and nothing twice."""

import argparse
import json

import pytest

from divdec.data.records import write_records
from divdec.demo.facts import KINDS, Fact
from divdec.errors import UsageError
from research.studies import pretrained as benchmark
from support.served import bundle_of


@pytest.fixture
def options(models, tokenizer, tmp_path, monkeypatch):
    facts = [Fact("capitals", *item) for item in list(KINDS["capitals"]["answers"].items())[:10]]
    sets = {"forget": facts[:4], "retain": facts[4:7], "unlisted": facts[7:]}
    for name, value in (("TARGET", str(models / "target")), ("EPOCHS", 1.0), ("RATES", (1e-4,)), ("AFTER", (1, 2))):
        monkeypatch.setattr(benchmark, name, value)
    monkeypatch.setattr(benchmark, "BATCH", 3)
    monkeypatch.setattr(benchmark, "known_facts", lambda *arguments: facts)
    monkeypatch.setattr(benchmark, "split", lambda *arguments: sets)
    demo = tmp_path / "demo"
    (demo / "pair").mkdir(parents=True)
    (demo / "pair" / "run.json").write_text('{"rewordings": []}')
    for name in ("forget", "retain"):
        write_records(demo / f"{name}.jsonl", [record for fact in sets[name] for record in fact.records])
    (demo / "bundle").symlink_to(bundle_of(models, "student-teacher", "rank:5:1"))
    news = tmp_path / "news.txt"
    news.write_text("The river rose after the rain, and the bridge was closed.\n")
    return argparse.Namespace(demo=demo, news=str(news), seed=0, output=tmp_path / "out")


@pytest.mark.slow
def test_every_row_is_computed_once(options, capsys, monkeypatch):
    benchmark.StudentRun(options).run()
    assert "| student, int4 |" in capsys.readouterr().out
    rows = json.loads((options.output / "results.json").read_text())
    assert set(rows) == {
        "target", "steered", "student", "target, int8", "target, int4", "student, int8", "student, int4",
        "relearning, 0.0001", "unrelated, 0.0001",
    }  # fmt: skip
    assert rows["target"]["neutral"] == rows["target"]["perplexity"] == 1
    assert rows["student"]["perplexity"] != 1
    assert set(rows["relearning, 0.0001"]) == {"0", "2", "4"}
    for name in ("distill", "fine_tune", "measure"):
        monkeypatch.setattr(benchmark, name, None)
    benchmark.StudentRun(options).run()
    (options.demo / "retain.jsonl").replace(options.demo / "forget.jsonl")
    with pytest.raises(UsageError, match="is not a demo of this seed"):
        benchmark.StudentRun(options)
