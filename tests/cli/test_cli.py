"""The command line as a user meets it: real processes, exit codes, one clear line."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from divdec import NeuralPair, write_bundle
from divdec.checkpoint import load_tokenizer
from divdec.cli import generate as command
from divdec.cli.loading import load
from divdec.options import ModelLoading
from divdec.report.doctor import measured_text
from divdec.steering import Steering
from support.exactness import LOGITS
from support.tiny import loads_torch

ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def divdec(*arguments, stdin="", **options):
    return subprocess.run(
        [sys.executable, "-m", "divdec.cli", *map(str, arguments)],
        input=stdin, capture_output=True, text=True, timeout=240, env=ENVIRONMENT, **options,
    )  # fmt: skip


def main(*arguments):
    """The same in this process, where nothing depends on the process itself."""
    from divdec.cli import main

    return main([str(argument) for argument in arguments])


def parts(models):
    return [
        "--target",
        models / "target",
        "--retain-auxiliary",
        models / "retain",
        "--forget-auxiliary",
        models / "forget",
    ]


def test_help_lists_commands():
    result = divdec("--help")
    assert result.returncode == 0
    assert all(verb in result.stdout for verb in ("demo", "train", "bundle", "generate", "chat", "doctor"))


def test_help_imports_no_large_library():
    """The help of every command stays fast; docs/benchmarks.md has the times."""
    code = (
        "import sys; from divdec.cli import main; from divdec.cli.app import app; main(['--help'])\n"
        "commands = [[name] for name in app if not name.startswith('-')]\n"
        "groups = 'takedown', 'results', 'baseline', 'image', 'bench'\n"
        "nested = [[group, name] for group in groups for name in app[group] if not name.startswith('-')]\n"
        "for command in commands + nested:\n"
        "    main([*command, '--help'])\n"
        "large = {'torch', 'transformers', 'numpy', 'pandas', 'matplotlib', 'datasets', 'openai', 'gradio'}\n"
        "print(sorted(large & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip().endswith("[]"), result.stderr


def test_lists_do_not_import_torch():
    assert not loads_torch(["baseline", "list"], ["results", "plot", "--list-figures"])


def test_bundle_command_writes_bundle_that_generates(own_checkpoints, tmp_path, capsys):
    options = ("--steering", "linear:1.5", "--output", tmp_path / "b", "--json")
    assert main("bundle", *parts(own_checkpoints), *options) == 0
    assert json.loads(capsys.readouterr().out)["steering"] == "linear:1.5"
    prompts = ("--prompt", "Who was born?", "Where?", "--logprobs", "--raw", "--max-new-tokens", 4)
    assert main("generate", tmp_path / "b", *prompts) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["Who was born?", "Where?"]
    assert_steered_log_probabilities(own_checkpoints, lines)


def assert_steered_log_probabilities(models, lines):
    """The printed log-probabilities are those of P + 1.5 (q − p), computed apart from our model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    P, q, p = (AutoModelForCausalLM.from_pretrained(models / name) for name in ("target", "retain", "forget"))
    tokenizer = AutoTokenizer.from_pretrained(models / "target")
    for line in lines:
        prompt, answer = tokenizer(line["prompt"])["input_ids"], [token["id"] for token in line["tokens"]]
        assert answer
        ids = torch.tensor([prompt + answer])
        with torch.no_grad():
            logits = P(ids).logits + 1.5 * (q(ids).logits - p(ids).logits)
        steered = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = [steered[position, token].item() for position, token in enumerate(answer)]
        assert [token["logprob"] for token in line["tokens"]] == pytest.approx(expected, abs=1e-4)
        assert steered.argmax(-1).tolist() == answer


def test_prompts_from_stdin_and_file_give_same_output(bundle, tmp_path, monkeypatch, capsys):
    (tmp_path / "prompts.txt").write_text("Who?\nWhere was she born?\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who?\n\nWhere was she born?\n"))
    assert main("generate", bundle, "--max-new-tokens", 3) == 0
    piped = capsys.readouterr().out
    files = ("--file", tmp_path / "prompts.txt", "--output", tmp_path / "out.txt")
    assert main("generate", bundle, "--max-new-tokens", 3, *files) == 0
    assert (tmp_path / "out.txt").read_text() == piped


def test_prompts_are_used_verbatim(bundle, capsys):
    prompts = ["[draft] one", "null", "-5 apples", "x=y"]
    assert main("generate", bundle, "--raw", "--json", "--max-new-tokens", 1, "--prompt", *prompts[:2],
                f"--prompt={prompts[2]}", f"--prompt={prompts[3]}") == 0  # fmt: skip
    assert [json.loads(line)["prompt"] for line in capsys.readouterr().out.splitlines()] == prompts


@pytest.mark.parametrize("extra", [(), ("--logprobs",), ("--temperature", "1")])
def test_speculation_gives_same_output(bundle, capsys, extra):
    options = (
        "generate",
        bundle,
        "--prompt",
        "Who?",
        "Where was she born?",
        "--max-new-tokens",
        8,
        "--batch-size",
        1,
        *extra,
    )
    answers = {}
    for speculative in ((), ("--speculative", 2), ("--speculative", "auto")):
        assert main(*options, *speculative) == 0
        answers[speculative] = capsys.readouterr().out
    plain, two, auto = answers.values()
    if "--temperature" not in extra:
        assert_same_lines(plain, two)
    assert_same_lines(two, auto)


def assert_same_lines(*outputs):
    """The same answers; log-probabilities are nearly the same, since blocks are summed in another order."""
    for one, other in zip(*(output.splitlines() for output in outputs), strict=True):
        if one[:1] != "{":
            assert one == other
            continue
        one, other = (json.loads(line)["tokens"] for line in (one, other))
        assert [token["id"] for token in one] == [token["id"] for token in other]
        logprobs = [token["logprob"] for token in other]
        assert [token["logprob"] for token in one] == pytest.approx(logprobs, abs=LOGITS)


def test_answers_end_with_the_context(bundle, capsys):
    """256 positions; a short prompt of the batch is not cut with the long one."""
    prompts = ("Who? " * 60, "Where was she born?")
    texts = []
    for some in (prompts, prompts[:1], prompts[1:]):
        options = ("--stop", "@@@", "--logprobs", "--max-new-tokens", 250, "--raw")
        assert main("generate", bundle, *options, "--prompt", *some) == 0
        texts.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    together, (long,), (short,) = texts
    assert [answer["text"] for answer in together] == [long["text"], short["text"]]
    ids = load_tokenizer(bundle)(prompts[0])["input_ids"]
    assert len(ids) + len(long["tokens"]) == 256


def test_a_stopped_run_keeps_its_answers(bundle, tmp_path, capsys, monkeypatch):
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"question": f"Who is {name}?"}) + "\n" for name in "ABC"))
    given = ("generate", bundle, "--file", tmp_path / "p.jsonl", "--batch-size", 1, "--max-new-tokens", 4)
    assert main(*given, "--output", tmp_path / "whole.txt", "--temperature", 1) == 0
    asked, answer = [], command._answers

    def stop_at_third(model, tokenizer, prompts, *rest, **options):
        asked.append(prompts)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return answer(model, tokenizer, prompts, *rest, **options)

    monkeypatch.setattr(command, "_answers", stop_at_third)
    assert main(*given, "--output", tmp_path / "out.txt", "--temperature", 1) == 130
    assert not (tmp_path / "out.txt").exists()
    assert main(*given, "--output", tmp_path / "out.txt", "--temperature", 1, "--dtype", "bfloat16") == 2
    assert "other settings" in capsys.readouterr().err
    assert main(*given, "--output", tmp_path / "out.txt", "--temperature", 1) == 0
    assert len(asked) == 4
    assert (tmp_path / "out.txt").read_text() == (tmp_path / "whole.txt").read_text()
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]


def test_tokens_after_a_stop_string_are_not_reported(bundle, capsys):
    options = ("generate", bundle, "--raw", "--logprobs", "--max-new-tokens", 12, "--prompt")
    assert main(*options, "Who?") == 0
    stop = json.loads(capsys.readouterr().out)["tokens"][2]["token"]
    found = []
    for prompts in (["Who?"], ["Who?", "Where was she born?"]):
        assert main("generate", bundle, "--stop", stop, *options[2:], *prompts) == 0
        found.append(json.loads(capsys.readouterr().out.splitlines()[0]))
    alone, together = found
    assert [token["id"] for token in together["tokens"]] == [token["id"] for token in alone["tokens"]]


def test_raw_questions_of_a_file_have_no_template(bundle, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"question": "Who?"}\n{"instruction": "Who?"}\n')
    assert main("generate", bundle, "--raw", "--json", "--max-new-tokens", 2, "--file", tmp_path / "p.jsonl") == 0
    assert main("generate", bundle, "--raw", "--json", "--max-new-tokens", 2, "--prompt", "Who?") == 0
    first, second, typed = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == second == typed
    (tmp_path / "p.jsonl").write_text('{"messages": [{"role": "user", "content": "Who?"}]}\n')
    assert main("generate", bundle, "--raw", "--file", tmp_path / "p.jsonl") == 2
    assert "leave out --raw" in capsys.readouterr().err


def test_empty_stop_text_and_unreadable_config_are_refused(bundle, tmp_path, capsys):
    assert main("generate", bundle, "--prompt", "Who?", "--stop", "") == 2
    assert "--stop is empty" in capsys.readouterr().err
    (tmp_path / "c.yaml").write_text("a: [1\n")
    assert main("generate", bundle, "--prompt", "Who?", "--config", tmp_path / "c.yaml") == 2
    assert "c.yaml is no readable YAML" in capsys.readouterr().err


def test_seed_reproduces_samples(bundle, capsys):
    options = ("generate", bundle, "--prompt", "Who?", "--temperature", 2, "--max-new-tokens", 6, "--seed")
    texts = []
    for seed in (5, 5, 6):
        assert main(*options, seed) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_command_line_overrides_config_file_options(own_checkpoints, tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text(
        f"target: {own_checkpoints}/target\nretain_auxiliary: {own_checkpoints}/retain\n"
        f"forget_auxiliary: {own_checkpoints}/forget\nsteering: rank:5\njson: true\n"
    )
    assert main("bundle", "--config", config, "--output", tmp_path / "b", "--steering", "rank:9") == 0
    assert json.loads(capsys.readouterr().out)["steering"] == "rank:9"


def test_text_that_the_terminal_cannot_show_does_not_end_a_run(own_checkpoints, tmp_path, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main("bundle", *parts(own_checkpoints), "--steering", "rank:5", "--output", tmp_path / "Köln") == 0
    stream.flush()
    assert "K\\xf6ln (rank:5)" in stream.buffer.getvalue().decode("ascii")


def test_config_file_has_options_named_like_commands_and_empty_ones(own_checkpoints, tmp_path, capsys):
    for name in ("forget", "retain"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": f"Ana Moss wrote what we {name}."}) + "\n")
    sets = ("--forget", tmp_path / "forget.jsonl", "--retain", tmp_path / "retain.jsonl")
    assert main("ngram", *sets, "--target", own_checkpoints / "target", "--output", tmp_path / "counts") == 0
    (tmp_path / "c.yaml").write_text(f"ngram: {tmp_path}/counts\nngram-weight: null\nsteering: linear:1\n")
    given = ("bundle", "--target", own_checkpoints / "target", "--output", tmp_path / "b")
    assert main(*given, "--config", tmp_path / "c.yaml") == 0
    assert json.loads((tmp_path / "b" / "config.json").read_text())["ngram"]["folder"] == "../counts"


def test_rank_vocabulary_is_preserved_when_strength_changes(own_checkpoints, tmp_path, capsys):
    names = {"target": "target", "retain_auxiliary": "retain", "forget_auxiliary": "forget"}
    checkpoints = {part: str(own_checkpoints / name) for part, name in names.items()}
    write_bundle(tmp_path / "b", **checkpoints, steering=Steering("rank", k=2, vocabulary=(5, 6, 7)))
    assert main("generate", tmp_path / "b", "--prompt", "x", "--steering", "rank:3") == 2
    assert "3 eligible tokens" in capsys.readouterr().err


def test_several_prompts_are_drafted_for(bundle, monkeypatch):
    drafts = []
    draft_logits = NeuralPair.draft_logits
    monkeypatch.setattr(NeuralPair, "draft_logits", lambda *args: drafts.append(args) or draft_logits(*args))
    given = ("generate", bundle, "--prompt", "Who?", "Where was she born?", "--max-new-tokens", 8, "--speculative", 2)
    assert main(*given, "--batch-size", 2) == 0
    assert not drafts
    assert main(*given) == 0
    assert drafts


def test_chat_speculates(bundle, monkeypatch, capsys):
    said = []
    for options in ((), ("--speculative", "auto")):
        monkeypatch.setattr(sys, "stdin", io.StringIO("Who?\nAnd then?\n/quit\n"))
        assert main("chat", bundle, "--max-new-tokens", 6, *options) == 0
        said.append(capsys.readouterr())
    assert said[0].out == said[1].out


def test_output_file_requires_overwrite(bundle, tmp_path, capsys):
    output = tmp_path / "deep" / "out.txt"
    given = ("generate", bundle, "--prompt", "Who?", "--max-new-tokens", 2, "--output", output)
    assert main(*given) == 0
    first = output.read_text()
    output.write_text("mine")
    assert main(*given) == 2
    assert "give --overwrite to replace it" in capsys.readouterr().err
    assert output.read_text() == "mine"
    assert main(*given, "--overwrite") == 0
    assert output.read_text() == first


@pytest.mark.parametrize("recorded", [True, False])
def test_chat_follows_bundle_single_turn_setting(bundle, monkeypatch, capsys, recorded):
    """A second line is answered as a first one where the models have learned single questions."""
    config = json.loads((bundle / "config.json").read_text())
    (bundle / "config.json").write_text(json.dumps(config | {"single_turn": recorded}))

    def second_answer(before):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{before}Where was she born?\n/quit\n"))
        assert main("chat", bundle, "--max-new-tokens", 8) == 0
        said = capsys.readouterr().out
        assert ("each line is asked by itself" in said) == recorded
        return said.splitlines()[-1]

    alone = second_answer("")
    assert (second_answer("Who?\n") == alone) == recorded


def test_chat_generates_changes_steering_and_shows_help(bundle, monkeypatch, capsys):
    commands = (
        "Where was Ana born?|/why|/alpha 3|/alpha much|/rule linear:2:1:full|/alpha 3|/rule rank:7|And then?|/why|"
        "/nonsense|/reset|/quit|never read|"
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO(commands.replace("|", "\n")))
    assert main("chat", bundle, "--max-new-tokens", 5) == 0
    said = capsys.readouterr().out
    assert "steering linear:1.5" in said
    assert "steering linear:3\n" in said
    assert "steering linear:3:1:full\n" in said  # another strength of the same form
    assert "'linear:much' is not a number" in said
    assert "steering rank:7" in said
    assert said.count("suppressed") == 2 + said.count("which tokens the experts suppressed")
    assert "no such command: /nonsense" in said
    assert "new conversation" in said


def test_doctor_reports_whether_bundle_loads(bundle, own_checkpoints, capsys):
    assert main("doctor", bundle, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bundle"]["loads"]
    assert found["versions"]["torch"]
    assert found["extras"]["serve"] in (True, False)
    (own_checkpoints / "retain" / "model.safetensors").unlink()
    assert main("doctor", bundle) == 1  # without the option too, as other verbs take a bundle
    assert "loads         no" in capsys.readouterr().out


class TestBadInput:
    """One line that names what was wrong and what to do, exit code 2, nothing left behind."""

    def refused(self, capsys, *arguments, says):
        before = capsys.readouterr()
        assert main(*arguments) == 2, before
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1
        return error

    @pytest.mark.parametrize(
        ("steering", "says"),
        [
            ("sideways:1", "accepted: 'linear:ALPHA'"),
            ("linear:abc", "is not a number"),
            ("linear:-1", "towards the forget set"),
            ("rank:0", "at least 1"),
            ("rank:100000", "must lie between 1 and"),
        ],
    )
    def test_steering(self, own_checkpoints, tmp_path, capsys, steering, says):
        self.refused(
            capsys,
            "bundle",
            *parts(own_checkpoints),
            "--steering",
            steering,
            "--output",
            tmp_path / "b",
            says=says,
        )
        assert not (tmp_path / "b").exists()

    def test_commands_and_options(self, capsys):
        self.refused(capsys, "unlearn", says="Unknown command")
        self.refused(capsys, "bundle", "--sterring", "linear:1", says="--help")
        self.refused(capsys, "train", "--base", "x", says="required")
        self.refused(capsys, "generate", "b", "--temperature", "warm", "--prompt", "x", says="temperature")
        self.refused(capsys, "generate", "b", "--speculative", "0", "--prompt", "x", says="speculative is '0'")
        self.refused(capsys, "generate", "b", "--top-p", "0", "--prompt", "x", says="top-p")
        self.refused(capsys, "generate", "b", "--batch-size", "0", "--prompt", "x", says="batch-size is 0")
        self.refused(capsys, "generate", "b", "--seed", "-1", "--prompt", "x", says="seed is -1")
        self.refused(capsys, "generate", "b", "--temperature", "-1", "--prompt", "x", says="temperature is -1")
        self.refused(capsys, "generate", "b", "--output", "--json", says="--output needs a value")
        self.refused(capsys, "chat", "b", "--max-new-tokens", "0", says="max-new-tokens is 0")

    def test_devices_and_output_paths(self, bundle, tmp_path, capsys):
        self.refused(capsys, "generate", bundle, "--prompt", "x", "--device", "gpu7", says="device 'gpu7'")
        self.refused(capsys, "generate", bundle, "--prompt", "x", "--device", "gpu", says="give cpu, cuda or mps")
        self.refused(capsys, "generate", bundle, "--prompt", "x", "--device", "cuda:99", says="device 'cuda:99'")
        self.refused(capsys, "generate", bundle, "--prompt", "x", "--device", "meta", says="no weights")
        (tmp_path / "file").write_text("mine")
        for output, says in ((tmp_path, "is a folder"), (tmp_path / "file" / "out.txt", "file is a file"),
                             (tmp_path / "file", "give --overwrite")):  # fmt: skip
            self.refused(capsys, "generate", "no bundle", "--prompt", "x", "--output", output, says=says)
        assert (tmp_path / "file").read_text() == "mine"

    def test_overflowing_auxiliary(self, bundle, own_checkpoints, capsys):
        from safetensors.torch import load_file, save_file

        weights = own_checkpoints / "forget" / "model.safetensors"
        tensors = load_file(weights)
        tensors["model.norm.weight"][0] = float("nan")
        save_file(tensors, weights, metadata={"format": "pt"})
        self.refused(capsys, "generate", bundle, "--prompt", "x", "--no-verify", says="nothing is answered unsteered")

    def test_prompt_exceeding_context(self, bundle, capsys):
        self.refused(capsys, "generate", bundle, "--prompt", "word " * 500, says="too many for 256 positions")

    def test_steering_without_effect_gives_warning(self, bundle, capsys):
        assert main("generate", bundle, "--prompt", "x", "--steering", "linear:0", "--max-new-tokens", 1) == 0
        assert "the answers are the target's own" in capsys.readouterr().err

    def test_non_text_input(self, bundle, tmp_path, capsys, monkeypatch):
        (tmp_path / "p.txt").write_bytes(b"Who\xff?\n")
        self.refused(capsys, "generate", bundle, "--file", tmp_path / "p.txt", says="not UTF-8")
        for verb in (("generate",), ("chat",)):
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Who\xff?\n"), encoding="utf-8"))
            main(*verb, bundle)
            said = "".join(capsys.readouterr())
            assert "not UTF-8" in said or "broken character" in said

    def test_checkpoints(self, own_checkpoints, tmp_path, capsys):
        weights = own_checkpoints / "forget" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:200])
        arguments = ("bundle", *parts(own_checkpoints), "--output", tmp_path / "b")
        self.refused(capsys, *arguments, says="corrupt")
        weights.rename(weights.with_name("pytorch_model.bin"))
        self.refused(capsys, *arguments, says="pickled weights")
        self.refused(capsys, "generate", own_checkpoints / "target", "--prompt", "x", says="not a bundle")
        self.refused(capsys, "generate", tmp_path / "none", "--prompt", "x", says="is not a folder")

    def test_changed_weights_require_no_verify(self, bundle, own_checkpoints, capsys):
        from safetensors.torch import load_file, save_file

        weights = own_checkpoints / "retain" / "model.safetensors"
        tensors = load_file(weights)
        tensors["model.norm.weight"] *= 2
        save_file(tensors, weights, metadata={"format": "pt"})
        self.refused(capsys, "generate", bundle, "--prompt", "x", says="has changed")
        self.refused(capsys, "chat", bundle, says="has changed")
        assert main("generate", bundle, "--prompt", "x", "--no-verify", "--max-new-tokens", 1) == 0

    def test_data_files(self, checkpoints, tmp_path, capsys):
        def arguments(forget):
            return (
                "train", "--base", checkpoints / "forget", "--forget", forget, "--retain", tmp_path / "good.jsonl",
                "--output", tmp_path / "run",
            )  # fmt: skip

        (tmp_path / "good.jsonl").write_text('{"question": "Q", "answer": "A"}\n')
        (tmp_path / "empty.jsonl").write_text("")
        (tmp_path / "bad.jsonl").write_text('{"question": "Q", "answer": "A"}\n{"question":\n')
        self.refused(capsys, *arguments(tmp_path / "empty.jsonl"), says="is empty")
        self.refused(capsys, *arguments(tmp_path / "bad.jsonl"), says="line 2")
        self.refused(capsys, *arguments(tmp_path / "none.jsonl"), says="does not exist")
        assert not (tmp_path / "run").exists()

    def test_non_empty_output_folder(self, own_checkpoints, tmp_path, capsys):
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "file").write_text("mine")
        arguments = ("bundle", *parts(own_checkpoints), "--output", tmp_path / "full")
        self.refused(capsys, *arguments, says="--overwrite")
        self.refused(capsys, *arguments, "--overwrite", says="not an earlier result")
        assert main("bundle", *parts(own_checkpoints), "--output", tmp_path / "b") == 0
        self.refused(capsys, "bundle", *parts(own_checkpoints), "--output", tmp_path / "b", says="--overwrite")
        assert main("bundle", *parts(own_checkpoints), "--output", tmp_path / "b", "--overwrite") == 0


@pytest.fixture
def long_training(world, checkpoints, tmp_path):
    """Arguments of a training run of some seconds."""
    for name, questions in (("forget", world.forget[:16]), ("retain", world.retain[:32])):
        rows = [json.dumps({"question": q.question, "answer": q.answer}) for q in questions]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    return [
        "train", "--base", checkpoints / "forget", "--forget", tmp_path / "forget.jsonl", "--retain",
        tmp_path / "retain.jsonl", "--target", checkpoints / "target", "--lr", "1e-3", "--epochs", "4",
        "--batch-size", "4",
    ]  # fmt: skip


def test_ctrl_c_during_training_is_resumable(long_training, tmp_path, capsys):
    arguments = [*long_training, "--output", tmp_path / "run"]
    process = subprocess.Popen(
        [sys.executable, "-m", "divdec.cli", *map(str, arguments)],
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: list((tmp_path / "run").glob("work/retain/checkpoints/checkpoint-*/trainer_state.json")))
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 2, error
    assert "interrupted at step" in error.splitlines()[-1]
    assert "the same command resumes it" in error.splitlines()[-1]
    code = main(*arguments, "--json")
    content = json.loads(capsys.readouterr().out)
    assert code == (3 if content["effects"]["faults"] else 0)
    assert content["auxiliaries"]["retain_auxiliary"]["steps"] == 4 * 12


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@pytest.mark.slow
def test_full_disk_during_training_is_resumable(long_training, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", small], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    arguments = [*long_training, "--output", small / "run"]
    try:
        result = divdec(*arguments)
        assert result.returncode == 2, result.stderr
        assert "the disk is full" in result.stderr.splitlines()[-1]
        subprocess.run(["mount", "-o", "remount,size=64m", small], check=True)
        again = divdec(*arguments)
        assert again.returncode == 3, again.stderr  # a run of this few steps does not tell p from q
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.parametrize(
    ("recipe", "rule"),
    [("matched", " --steering rank:20:3"), ("refusal", " --steering linear:1.5:2:full"), ("full-retain", "")],
)
def test_train_without_a_target_names_a_rule_that_keeps_other_answers(recipe, rule, monkeypatch, capsys):
    content = {"bundle": None, "effects": None, "separation": None}
    monkeypatch.setattr("divdec.training.auxiliaries.train_auxiliaries", lambda settings, report: content)
    files = ["--base", "b", "--forget", "f", "--retain", "r", "--output", "o"]
    assert main("train", *files, "--recipe", recipe) == 0
    assert f"next: divdec bundle --target …{rule} (see" in capsys.readouterr().out


def test_takedowns_in_force_are_no_part_of_a_bundles_measurement():
    config = SimpleNamespace(measured={"steering": "rank:5", "result": "recited 0 of 20"})
    rule = Steering(rule="rank", k=5)
    assert measured_text(config, rule, None) == "recited 0 of 20"
    assert measured_text(config, rule, object()) == "recited 0 of 20; the takedown requests in force are not part of it"


@pytest.mark.parametrize(("instructions", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_dtype_is_float32_on_a_cpu_that_emulates_bfloat16(instructions, dtype, models, tmp_path, monkeypatch):
    from divdec import checkpoint

    for name in ("target", "retain", "forget"):
        checkpoint.load_model(models / name).to(torch.bfloat16).save_pretrained(tmp_path / name)
        checkpoint.load_tokenizer(models / name).save_pretrained(tmp_path / name)
    parts = {"target": "target", "retain_auxiliary": "retain", "forget_auxiliary": "forget"}
    write_bundle(tmp_path / "bundle", **{part: str(tmp_path / name) for part, name in parts.items()}, steering="rank:5")
    monkeypatch.setattr(checkpoint, "has_bfloat16_instructions", lambda: instructions)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    model, _ = load(str(tmp_path / "bundle"), ModelLoading(device="cpu"))
    assert {part.dtype for part in (model.target, model.experts.retain, model.experts.forget)} == {dtype}
    model, _ = load(str(tmp_path / "bundle"), ModelLoading(device="cpu", dtype="bfloat16"))
    assert model.target.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["nowhere"], "device 'nowhere' cannot be used"),
        (["cpu", "nowhere"], "device 'nowhere' cannot be used"),
        (["cpu", "cpu", "cpu"], "accepted: one device, or q's and then p's"),
        ([], "--expert-devices requires at least 1 element"),
    ],
)
def test_unsupported_devices_are_rejected(bundle, devices, message, capsys):
    assert main("generate", bundle, "--prompt", "a", "--expert-devices", *devices) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_multiple_processes_are_rejected(bundle, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for arguments in (("generate", bundle, "--prompt", "a"), ("eval", "leak", bundle, "--data", "a", "--output", "b")):
        assert main(*arguments) == 2
        assert "2 processes were started" in capsys.readouterr().err
