"""The benchmark of --on-suppressed: shares of replies to each set."""

import pytest

from benchmarks.attacks import difference as benchmark
from divdec import DivergenceForCausalLM
from divdec.data.formatting import encode_prompts
from divdec.data.records import Message, Record, read_records, write_records
from divdec.evaluation.generation import continuations, without_padding
from support.served import bundle_of


@pytest.fixture(scope="module")
def demo(models, world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    for name, facts in (("forget", world.forget), ("retain", world.retain), ("unlisted", world.holdout)):
        records = [Record(one.answer, messages=(Message("user", one.question),)) for one in facts[:4]]
        write_records(folder / f"{name}.jsonl", [record for record in records for _ in range(2)])
    (folder / "bundle").symlink_to(bundle_of(models, "suppression", "linear:3"))
    return folder


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(benchmark, "NEUTRAL", benchmark.NEUTRAL[:3])


def test_table_has_every_set_once_for_each_fact(demo, tokenizer):
    lines = benchmark.suppression(demo).splitlines()
    rows = {cells[0]: cells[1:] for cells in ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:6])}
    assert {name: row[0] for name, row in rows.items()} == {
        "forget": "4",
        "retain": "4",
        "unlisted": "4",
        "neutral": "3",
    }
    model = DivergenceForCausalLM.from_pretrained(demo / "bundle")
    records = list(dict.fromkeys(read_records(demo / "forget.jsonl")))
    prompts = encode_prompts(records, tokenizer)
    shares = []
    for prompt, ids in zip(prompts, continuations(model, tokenizer, prompts, max_new_tokens=32), strict=True):
        tokens = [*prompt, *without_padding(model, ids)]
        shares.append(benchmark.suppressed_share(model, tokens, len(prompt)))
    assert rows["forget"][2:] == [f"{min(shares):.2f}–{max(shares):.2f}", str(sum(share >= 0.2 for share in shares))]
    assert max(shares) > 0


def test_another_rule_is_measured(demo):
    text = benchmark.suppression(demo, "linear:0")
    assert text.startswith("| linear:0 |")
    assert "0.00–0.00" in text
