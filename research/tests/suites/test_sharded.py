"""An evaluation on two processes: every item and figure is that of one, and one of the two writes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from divdec import UsageError, write_bundle
from divdec.cli import main
from divdec.data.records import Message, Record, write_records
from divdec.evaluation.generation import is_main, on_main, own, sharded, together
from divdec.evaluation.leak import LeakSuite
from divdec.evaluation.results import ITEMS, SUMMARY
from divdec.evaluation.run import evaluate
from divdec.evaluation.settings import LeakSettings
from divdec_research.suites import muse, tofu
from divdec_research.world.facts import WorldSettings, build_world, write_tofu

SCRIPT = Path(__file__).with_name("sharded_eval.py")
NEW_TOKENS = 8
"""Longest answers and continuations: these models end none by themselves."""
SMALL = WorldSettings(forget_authors=2, retain_authors=3, holdout_authors=2, public_authors=13, passing_authors=20)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder, world = tmp_path_factory.mktemp("data"), build_world(SMALL)
    write_tofu(world, folder / "tofu")
    questions = [json.dumps({"question": q.question, "answer": q.answer}) for q in world.forget]
    (folder / "leak.jsonl").write_text("\n".join(questions[:3]))
    texts = [text for text in world.corpus if len(text) > 60][:12]
    rows = {
        "knowmem/forget_qa": questions[:4], "knowmem/retain_qa": questions[10:13],
        "knowmem/forget_qa_icl": questions[20:21], "knowmem/retain_qa_icl": questions[21:22],
        "verbmem/forget": [json.dumps({"prompt": text[:30], "gt": text[30:]}) for text in texts[:5]],
        "privleak/forget": [json.dumps({"text": text}) for text in texts[:5]],
        "privleak/holdout": [json.dumps({"text": text}) for text in texts[6:10]],
    }  # fmt: skip
    for name, lines in rows.items():
        (folder / "muse" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "muse" / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


def commands(folder, bundle, broken, data, checkpoints):
    shared = ["--device", "cpu", "--batch-size", "3"]
    tofu = ["--data", data / "tofu", "--split", "forget01", "--holdout", data / "tofu/holdout01.json", "--limit", "2",
            "--fluency", "none", "--reference", checkpoints / "retain"]  # fmt: skip
    leak = ["--data", data / "leak.jsonl", "--attacks", "2", "--samples", "2"]
    result = [
        ["tofu", bundle, *tofu, "--sweep", "linear:1.5", "rank:5", "--output", folder / "tofu"],
        ["muse", bundle, "--data", data / "muse", "--output", folder / "muse"],
        ["leak", bundle, *leak, "--output", folder / "leak"],
        # It cannot be scored, whichever process has the item.
        ["tofu", broken, *tofu, "--output", folder / "broken"],
    ]
    return [["eval", *map(str, command), *shared] for command in result]


@pytest.mark.slow
@pytest.mark.skipif("DIVDEC_TEST_ROUNDING" in os.environ, reason="it changes the sums of this process alone")
def test_two_process_evaluation_matches_one_process(data, checkpoints, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tofu, "NEW_TOKENS", NEW_TOKENS)
    monkeypatch.setattr(muse, "VERBMEM_TOKENS", NEW_TOKENS)
    monkeypatch.setattr(muse, "KNOWMEM_TOKENS", NEW_TOKENS)
    bundle = write_bundle(
        tmp_path / "bundle", target=str(checkpoints / "target"), retain_auxiliary=str(checkpoints / "retain"),
        forget_auxiliary=str(checkpoints / "forget"), steering="linear:1.5",
    )  # fmt: skip
    broken = shutil.copytree(checkpoints / "target", tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    expected = [main(command) for command in commands(tmp_path / "one", bundle, broken, data, checkpoints)]
    assert expected == [0, 0, 0, 2]
    printed, said = capsys.readouterr()
    (tmp_path / "two").mkdir()
    list_of_commands = tmp_path / "commands.json"
    list_of_commands.write_text(json.dumps(commands(tmp_path / "two", bundle, broken, data, checkpoints)))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT,
         list_of_commands],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(torch.get_num_threads()),
             "NEW_TOKENS": str(NEW_TOKENS)},
        capture_output=True, text=True,
        timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in (0, 1):
        assert json.loads(list_of_commands.with_suffix(f".{rank}").read_text()) == expected
    assert done.stdout.replace(str(tmp_path / "two"), "") == printed.replace(str(tmp_path / "one"), "")
    assert "a token of probability 0 or NaN" in said
    assert "a token of probability 0 or NaN" in done.stderr
    files = [path.relative_to(tmp_path / "one") for path in sorted((tmp_path / "one").rglob("*")) if path.is_file()]
    assert files == [p.relative_to(tmp_path / "two") for p in sorted((tmp_path / "two").rglob("*")) if p.is_file()]
    same = [file for file in files if file.name in (SUMMARY, ITEMS)]
    assert len(same) == 2 * (2 + 1 + 1)
    for file in same:
        assert (tmp_path / "two" / file).read_text() == (tmp_path / "one" / file).read_text(), file


def test_single_process_owns_all_items():
    with sharded():
        assert is_main()
        assert list(own("abc")) == ["a", "b", "c"]
        assert together(lambda: {1: "a"}) == {1: "a"}
        assert on_main(lambda: 3) == 3


def test_device_spread_requires_single_process(monkeypatch, tmp_path):
    monkeypatch.setattr("divdec.evaluation.run.number_of_processes", lambda: 2)
    settings = LeakSettings(("model",), data=str(tmp_path / "questions.json"), output=str(tmp_path / "out"))
    write_records(tmp_path / "questions.json", [Record("yes", messages=(Message("user", "Is it?"),))])
    with pytest.raises(UsageError, match="--device spread takes all GPUs for one process"):
        evaluate(settings, LeakSuite.read(settings), "auto")
