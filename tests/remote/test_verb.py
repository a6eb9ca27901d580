"""`divdec remote`: answers, resuming a stopped run, and errors of one line."""

import json
import shutil
import signal
import threading
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from divdec import Steering, write_bundle
from divdec.cli import main
from divdec.data.records import texts_of
from divdec.model.bundle import rewrite_steering
from divdec.runs import lock_file, unlock_file
from divdec.takedowns.registry import Registry
from support.served import bundle_of

TEXTS = ("Question: Who is", "The author was born")


@pytest.fixture
def verb(url, bundle):
    def run(*options, at=url):
        endpoint = ["--endpoint", f"{at}/v1", "--model", "plain", "--retries", "0"]
        return main(["remote", "--bundle", str(bundle), *endpoint, "--tries", "60", "--raw", *options])

    return run


@pytest.fixture
def expected(local, tokenizer):
    """What the steered model itself answers."""

    def answer(text, tokens=6):
        local.steering = "linear:1.5"
        ids = torch.tensor([tokenizer(text).input_ids])
        generated = local.generate(ids, max_new_tokens=tokens, do_sample=False)[0, ids.shape[1] :]
        return tokenizer.decode(generated, skip_special_tokens=True)

    return answer


def test_remote_command_matches_steered_model(verb, expected, capsys):
    assert verb("--prompt", *TEXTS, "--max-new-tokens", "6", "--json") == 0
    printed = capsys.readouterr()
    rows = [json.loads(line) for line in printed.out.splitlines()]
    assert [row["text"] for row in rows] == [expected(text) for text in TEXTS]
    assert all(row["exact_tokens"] == len(row["tokens"]) and row["steering"] == "linear:1.5" for row in rows)
    assert "proved to be the steered model's" in printed.err


def test_single_prompt_is_streamed(verb, expected, capsys):
    assert verb("--prompt", TEXTS[0], "--max-new-tokens", "6", "--block", "4") == 0
    assert capsys.readouterr().out == expected(TEXTS[0]) + "\n"


def test_what_was_measured_is_said_and_that_another_rule_was_not(url, models, capsys):
    """A bundle with a full rule is always steered by another one here."""
    bundle = bundle_of(models, "measured", "linear:1.5")
    rewrite_steering(bundle, Steering.parse("linear:1:1:full"), "it forgets")
    endpoint = ["--endpoint", f"{url}/v1", "--model", "plain", "--raw", "--prompt", TEXTS[0], "--max-new-tokens", "2"]
    assert main(["remote", "--bundle", str(bundle), *endpoint, "--steering", "linear:1:1"]) == 0
    said = "measured on the bundle's target: it forgets "
    said += "(with linear:1:1:full; linear:1:1 was not measured)"
    assert said in capsys.readouterr().err.splitlines()


def test_interrupted_evaluation_is_resumed(verb, provider, expected, tokenizer, tmp_path):
    output = tmp_path / "answers.jsonl"
    options = ["--prompt", *TEXTS, "--max-new-tokens", "6", "--json", "--output", str(output), "--concurrency", "1"]
    first, second = (tokenizer(text).input_ids for text in TEXTS)

    def fail(body):
        return (503, "gone") if broken and body["prompt"][: len(second)] == second else None

    broken = True
    there = provider(request=fail)
    assert verb(*options, at=there.url) == 2
    assert not output.exists()
    partial = (tmp_path / "answers.jsonl.partial").read_text().splitlines()
    assert len(partial) == 2  # the settings, and one answer
    broken = False
    there.seen.clear()
    assert verb(*options, at=there.url) == 0
    assert not any(body["prompt"][: len(first)] == first for _, body in there.seen)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert rows[0] == json.loads(partial[1])["row"]
    assert [row["text"] for row in rows] == [expected(text) for text in TEXTS]
    assert not (tmp_path / "answers.jsonl.partial").exists()
    written = output.read_bytes()
    there.seen.clear()
    assert verb(*options, at=there.url) == 2  # a finished output is not replaced
    assert (output.read_bytes(), there.seen) == (written, [])
    assert verb(*options, "--overwrite", at=there.url) == 0
    assert output.read_bytes() == written


def test_evaluation_resumes_only_with_the_same_experts_and_requests(
    models, provider, tokenizer, world, tmp_path, capsys
):
    registry = Registry.create(tmp_path / "registry", texts_of("retain", world.corpus[1:80:2]), models / "target")
    parts = {name: shutil.copytree(models / name, tmp_path / name) for name in ("target", "retain", "forget")}
    second = tokenizer(TEXTS[1]).input_ids
    there = provider(request=lambda body: (503, "gone") if body["prompt"][: len(second)] == second else None)
    pair = {f"{name}_auxiliary": str(parts[name]) for name in ("retain", "forget")}
    bundle = {"target": str(parts["target"]), **pair, "registry": registry.folder, "steering": "linear:1.5"}
    write_bundle(tmp_path / "bundle", **bundle)
    command = [
        "remote", "--bundle", tmp_path / "bundle", "--endpoint", f"{there.url}/v1", "--model", "plain", "--retries",
        "0", "--tries", "60", "--raw", "--concurrency", "1", "--max-new-tokens", "4", "--output",
        tmp_path / "answers.txt", "--prompt", *TEXTS,
    ]  # fmt: skip
    command = list(map(str, command))

    def run():
        assert main(command) == 2
        return capsys.readouterr().err

    assert "gone" in run()
    assert "gone" in run()  # nothing has changed: it resumes
    lock = lock_file(tmp_path / ".answers.txt.lock", "locked")
    assert "another process is writing" in run()
    unlock_file(lock)
    weights = (parts["forget"] / "model.safetensors").read_bytes()
    retrained = {name: 1.1 * weight for name, weight in load_file(parts["forget"] / "model.safetensors").items()}
    save_file(retrained, parts["forget"] / "model.safetensors", metadata={"format": "pt"})
    assert "has changed since the bundle was written" in run()
    write_bundle(tmp_path / "bundle", **bundle, overwrite=True)
    assert "other settings, models or takedown requests" in run()
    (parts["forget"] / "model.safetensors").write_bytes(weights)
    write_bundle(tmp_path / "bundle", **bundle, overwrite=True)
    assert "gone" in run()
    registry.add("case", texts_of("t", [world.corpus[0]]))
    assert "other settings, models or takedown requests" in run()


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals come to the main thread")
def test_ctrl_c_does_not_wait_for_running_requests(monkeypatch):
    from divdec.options import Decoding
    from divdec.remote.target import RemoteTarget, answer_prompts
    from divdec.runs import ResumableOutput

    def endless(self, prompt, tokens, **options):
        for number in range(2000):
            if number == 10 and prompt == [1]:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.01)
            numbers.append(number)
            yield "more"

    numbers = []
    monkeypatch.setattr(RemoteTarget, "stream", endless)
    with pytest.raises(KeyboardInterrupt):
        list(
            answer_prompts(
                RemoteTarget.__new__(RemoteTarget), [[0], [1]], ["a", "b"], Decoding(), 2, ResumableOutput(None)
            )
        )
    assert len(numbers) < 1000


def test_outputs_of_other_settings_are_not_reused(verb, tmp_path, capsys):
    (tmp_path / "answers.txt.partial").write_text('{"key": "settings", "fingerprint": "others"}\n')
    assert verb("--prompt", "x", "--output", str(tmp_path / "answers.txt")) == 2
    assert "other settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--extra", "[1]"], "accepted: a JSON object"),
        (["--extra", "[" * 100_000], "accepted: a JSON object"),
        (["--block", "0"], "--block is 0"),
        (["--bias-entries", "0"], "--bias-entries is 0"),
        (["--steering", "rank:20:soft"], "soft needs"),
        (["--steering", "linear:x"], "not a number"),
        (["--api-key-env", "NO_SUCH_KEY_HERE"], "NO_SUCH_KEY_HERE is not set"),
        (["--temperature", "-1"], "--temperature is -1; accepted: 0"),
        (["--timeout", "-1"], "accepted: a timeout above 0"),
        (["--extra", '{"temperature": 1}'], "extra holds temperature"),
        (["--extra", '{"x": NaN}'], "written as JSON"),
    ],
)
def test_invalid_input_gives_one_line_error(verb, capsys, options, says):
    assert verb("--prompt", "x", "--max-new-tokens", "2", *options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_unreachable_network_gives_one_line_error(verb, capsys):
    assert verb("--prompt", "x", at="http://127.0.0.1:9") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be reached" in line


def test_provider_without_logit_bias_gives_one_line_error(verb, provider, capsys):
    there = provider(request=lambda body: (400, "unknown field logit_bias") if "logit_bias" in body else None)
    assert verb("--prompt", "x", at=there.url) == 2
    assert "logit_bias is not accepted" in capsys.readouterr().err
