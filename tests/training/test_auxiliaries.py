"""The recipes on real files, from a base checkpoint to a bundle that steers."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FalconH1Config, GPT2Config, MixtralConfig, OPTConfig, T5Config

from divdec import DivergenceForCausalLM, NeuralPair, UsageError
from divdec.bridge.pair import BridgedPair
from divdec.checkpoint import load_tokenizer
from divdec.cli import main
from divdec.data.formatting import IGNORED
from divdec.data.records import Message, Record, RecordSet, read_records, record_set, single_turn, texts_of
from divdec.errors import Interrupted
from divdec.evaluation import choice
from divdec.evaluation.questions import question_of
from divdec.experts.adapters import AdapterPair
from divdec.model.bundle import rewrite_steering
from divdec.runs import RunFolder
from divdec.steering import Steering
from divdec.training import auxiliaries
from divdec.training.auxiliaries import LEARNED, STEP, train_auxiliaries
from divdec.training.fine_tuning import why_no_pair
from divdec.training.inputs import report_set
from divdec.training.matched import hold_out
from divdec.training.settings import AuxiliarySettings, TrainingSettings
from support.exactness import assert_close


def write_files(folder, world, checkpoints):
    """Settings over a forget file, a retain file and real checkpoints."""
    for name, questions in (("forget", world.forget[:12]), ("retain", world.retain[:24])):
        rows = [json.dumps({"question": q.question, "answer": q.answer}) for q in questions]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    return {
        "base": str(checkpoints / "forget"),
        "target": str(checkpoints / "target"),
        "forget": str(folder / "forget.jsonl"),
        "retain": str(folder / "retain.jsonl"),
        "output": str(folder / "run"),
        "learning_rate": 3e-3,
        "epochs": 2.0,
        "lora_rank": 0,
    }


@pytest.fixture
def files(world, checkpoints, tmp_path):
    return write_files(tmp_path, world, checkpoints)


@pytest.fixture(scope="module")
def finished(world, checkpoints, tmp_path_factory):
    """Settings, content of `run.json` and reports of a finished run."""
    folder = tmp_path_factory.mktemp("finished")
    settings = write_files(folder, world, checkpoints)
    return settings, *train(settings)


@pytest.fixture
def run(finished, tmp_path):
    """A copy of the finished run that a test may damage; its settings."""
    shutil.copytree(Path(finished[0]["output"]).parent, tmp_path, dirs_exist_ok=True)
    names = ("forget", "retain", "output")
    return finished[0] | {name: str(tmp_path / Path(finished[0][name]).name) for name in names}


def train(files, **changes):
    lines = []
    content = train_auxiliaries(AuxiliarySettings(**(files | changes)), report=lines.append)
    return content, "\n".join(lines)


def test_a_second_run_in_the_folder_is_refused(files, tmp_path):
    with RunFolder.open(tmp_path / "run", "train", {}, {}):
        (tmp_path / "run" / "work").mkdir()
        with pytest.raises(UsageError, match="another `divdec train` is running in"):
            train(files, overwrite=True)
        assert (tmp_path / "run" / "work").is_dir()


def test_a_run_gives_two_checkpoints_and_a_bundle(finished, tmp_path, world):
    settings, content, said = finished
    output = Path(settings["output"])
    assert sorted(path.name for path in output.iterdir()) == [
        "bundle",
        "forget_auxiliary",
        "retain_auxiliary",
        "run.json",
    ]
    assert json.loads((output / "run.json").read_text()) == content
    # A tenth of the 24 retain records is held out of both; q takes as many steps as p.
    assert [result["steps"] for result in content["auxiliaries"].values()] == [2 * -(-33 // 16)] * 2
    assert "12 question/answer records" in said
    # The folder can move as a whole; the target stays where it was.
    shutil.copytree(output, tmp_path / "moved")
    model = DivergenceForCausalLM.from_pretrained(tmp_path / "moved" / "bundle")
    assert str(model.steering) == content["effects"]["best"]
    assert model.config.measured["steering"] == content["effects"]["best"]
    assert model.config.single_turn is True
    # Cards name the forget set by name and hash only.
    cards = [path.read_text() for path in output.rglob("README.md")]
    assert len(cards) == 3
    assert all(content["forget_set"] in card for card in cards)
    assert "single questions" in (output / "bundle" / "README.md").read_text()
    for question in world.forget[:12]:
        assert not any(question.subject in card or question.fact in card for card in cards)


def test_a_small_retain_set_is_not_called_held_out(files):
    rows = Path(files["retain"]).read_text().splitlines()
    Path(files["retain"]).write_text("\n".join(rows[:8]))
    assert "it is measured on those that p and q are trained on" in train(files, epochs=1.0)[1]


def test_a_target_too_large_to_measure_leaves_auxiliaries_and_a_bundle_that_is_not_measured(files, monkeypatch):
    def too_large(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(auxiliaries, "choose_rule", too_large)
    with pytest.raises(UsageError, match="is not measured; measure it on several devices: divdec calibrate"):
        train(files, epochs=1.0, learning_rate=1e-3)
    bundle = Path(files["output"]) / "bundle"
    assert DivergenceForCausalLM.from_pretrained(bundle).config.measured is None
    monkeypatch.undo()
    content, said = train(files, epochs=1.0, learning_rate=1e-3)  # goes on where it stopped
    assert said.count("already trained") == 2
    assert content["effects"]


def test_p_learns_the_forget_set_alone(files):
    content, _ = train(files, recipe="forget-retain", target=None)
    assert content["auxiliaries"]["forget_auxiliary"]["steps"] == 2
    assert content["auxiliaries"]["retain_auxiliary"]["steps"] == 2 * 2


def test_matched_auxiliaries_take_the_same_steps(files):
    content, _ = train(files, recipe="matched", target=None, epochs=1.0)
    assert [result["steps"] for result in content["auxiliaries"].values()] == [-(-36 // 16)] * 2


def test_a_q_that_refuses_reads_no_true_answer(files, tmp_path, monkeypatch):
    def continuations(model, tokenizer, prompts, **options):
        end = model.generation_config.eos_token_id
        return [[*tokenizer.encode(" It is so."), end, end, end] for _ in prompts]  # padded to the longest

    monkeypatch.setattr(auxiliaries, "continuations", continuations)
    settings = AuxiliarySettings(**files, recipe="refusal")
    inputs = auxiliaries._read_inputs(settings, tmp_path / "run", False, lambda line: None)
    (p_reads, q_reads), *_ = auxiliaries._readings(inputs, settings, lambda line: None)
    refused = [other for true, other in zip(p_reads, q_reads, strict=True) if other != true]
    assert len(refused) > 2 * len(inputs.forget)
    assert len(refused) < len(p_reads)  # both read the target's answers to other questions
    answers = {
        inputs.tokenizer.decode([token for token in example.labels if token >= 0], skip_special_tokens=True).strip()
        for example in refused
    }
    assert answers == {auxiliaries.REFUSAL}
    assert p_reads[: len(inputs.forget)] == inputs.examples["forget"]
    end = inputs.tokenizer.eos_token_id
    assert all(example.labels.count(end) <= 1 for example in [*p_reads, *q_reads])


def test_a_pair_whose_q_refuses_is_measured_with_rules_that_raise_the_refusal(files, capsys):
    content, _ = train(files, recipe="refusal", epochs=1.0, learning_rate=1e-3)
    tried = [row["steering"] for row in content["effects"]["settings"]]
    assert sum(rule.endswith(":full") for rule in tried) == 9
    assert content["separation"]["min_learned"] == 0.0
    assert not any("p predicts" in fault for fault in content["separation"]["faults"])
    assert len({result["steps"] for result in content["auxiliaries"].values()}) == 1
    model = DivergenceForCausalLM.from_pretrained(Path(files["output"]) / "bundle")
    assert str(model.steering) == content["effects"]["best"]
    sets = [piece for name in ("forget", "retain") for piece in (f"--{name}", files[name])]
    capsys.readouterr()
    main(
        ["calibrate", f"{files['output']}/bundle", *sets, "--reference", "none", "--neutral", files["retain"], "--json"]
    )
    tried = [row["steering"] for row in json.loads(capsys.readouterr().out)["settings"]]
    assert sum(rule.endswith(":full") for rule in tried) == 9


@pytest.mark.parametrize("name", ["forget", "retain"])
def test_text_cannot_be_refused(files, name):
    Path(files[name]).write_text('{"text": "A text without a question."}\n')
    with pytest.raises(UsageError, match="--recipe refusal needs questions in --forget and --retain"):
        train(files, recipe="refusal")
    assert not Path(files["output"]).exists()


def test_a_q_that_finds_the_forget_set_unlikely_is_no_reference_for_calibration(finished, world, tmp_path, capsys):
    """The base knows these authors better than the holdout's; with the sets exchanged q is as if trained on lies."""
    settings = finished[0]
    rows = [json.dumps({"question": q.question, "answer": q.answer}) for q in world.holdout[:12]]
    (tmp_path / "holdout.jsonl").write_text("\n".join(rows))
    arguments = ["calibrate", f"{settings['output']}/bundle", "--forget", str(tmp_path / "holdout.jsonl")]
    arguments += ["--retain", settings["retain"], "--holdout", settings["forget"], "--sweep", "linear:1", "--write"]
    assert main(arguments) == 3
    said = capsys.readouterr().err
    assert "so it is no reference" in said
    assert "nothing was written" in said


def test_the_bundle_records_that_conversations_were_learned(files, tmp_path):
    turns = [("user", "Who?"), ("assistant", "Ana."), ("user", "Where?"), ("assistant", "There.")]
    row = json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]})
    (tmp_path / "forget.jsonl").write_text(row)
    train(files, epochs=0.5)
    bundle = tmp_path / "run" / "bundle"
    assert json.loads((bundle / "config.json").read_text())["single_turn"] is False
    assert "single questions" not in (bundle / "README.md").read_text()
    model = DivergenceForCausalLM.from_pretrained(bundle)
    model.save_pretrained(tmp_path / "packed")
    assert DivergenceForCausalLM.from_pretrained(tmp_path / "packed").config.single_turn is False


def test_single_questions_may_have_a_system_turn_but_are_no_texts():
    questions = [{"question": "Who?", "answer": "Ana."}]
    turns = [("system", "Be kind."), ("user", "Who?"), ("assistant", "Ana.")]
    questions.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    for row in questions:
        assert single_turn(record_set("some", [("", row)]))
    for row in ("a text", {"text": "a text"}, {"prompt": "Once", "completion": "upon"}):
        assert not single_turn(record_set("others", [("", row)]))


def test_auto_mode_raises_learning_rate_until_p_and_q_separate(files, tmp_path, monkeypatch):
    monkeypatch.setattr("divdec.training.settings.FULL_RATE", 6e-3)  # for this base too low
    content, said = train(files, learning_rate="auto", epochs=6.0, target=None)
    rates = [content["auxiliaries"][name]["learning_rate"] for name in ("retain_auxiliary", "forget_auxiliary")]
    assert rates == [pytest.approx(6e-3 * STEP)] * 2
    assert "the pair does not fit yet" in said
    assert content["separation"]["learned"] >= LEARNED
    assert content["separation"]["faults"] == []
    for name in ("retain_auxiliary", "forget_auxiliary"):
        assert json.loads((tmp_path / "run" / name / "training.json").read_text())["separation"]["faults"] == []
        card = (tmp_path / "run" / name / "README.md").read_text()
        assert "| separated from the other auxiliary | yes |" in card


def test_an_interrupted_search_resumes(files, tmp_path, monkeypatch):
    monkeypatch.setattr("divdec.training.settings.FULL_RATE", 1e-3)
    monkeypatch.setattr(auxiliaries, "MAX_ATTEMPTS", 2)
    searched = {"learning_rate": "auto", "epochs": 1.0, "target": None}
    whole, _ = train(files, **searched, output=str(tmp_path / "whole"))
    tries = [(attempt["rate"], attempt["epochs"]) for attempt in whole["attempts"]]
    assert tries == [(1.0, 1.0), (pytest.approx(STEP), 1.0)]
    fine_tune, trained = auxiliaries.fine_tune, []

    def stops_at_the_second_p(*arguments, title, **options):
        trained.append(title)
        if trained.count("forget auxiliary") == 2:
            raise Interrupted("forget auxiliary was interrupted")
        return fine_tune(*arguments, title=title, **options)

    monkeypatch.setattr(auxiliaries, "fine_tune", stops_at_the_second_p)
    with pytest.raises(Interrupted):
        train(files, **searched)
    monkeypatch.setattr(auxiliaries, "fine_tune", fine_tune)
    content, said = train(files, **searched)
    assert "retain auxiliary: already trained" in said
    assert content["attempts"] == whole["attempts"]
    for piece in ("forget_auxiliary", "retain_auxiliary"):
        one, other = ((tmp_path / name / piece / "model.safetensors").read_bytes() for name in ("whole", "run"))
        assert one == other


def test_unseparated_pair_is_reported(files, world, tmp_path, capsys):
    """With too small a rate p and q stay alike: `train` says so, and `calibrate` writes no strength for them."""
    settings = {name: files[name] for name in ("base", "forget", "retain", "output", "target")}
    # A target that knows both sets: what p becomes with a rate that suffices.
    train(files, learning_rate=5e-3, epochs=20.0, base=files["target"], target=None, output=str(tmp_path / "big"))
    settings["target"] = str(tmp_path / "big" / "forget_auxiliary")
    options = [piece for name, value in settings.items() for piece in (f"--{name}", value)]
    assert main(["train", *options, "--lr", "1e-5", "--epochs", "1"]) == 3
    printed = capsys.readouterr()
    assert "no rule is good enough" in printed.err.splitlines()[-1]
    assert "still answers" in printed.err.splitlines()[-1]
    assert "calibrate" not in printed.out
    bundle = tmp_path / "run" / "bundle"
    assert "| forgets | no: " in (bundle / "README.md").read_text()

    rows = [json.dumps({"question": q.question, "answer": q.answer}) for q in world.holdout[:12]]
    (tmp_path / "holdout.jsonl").write_text("\n".join(rows))
    sets = [piece for name in ("forget", "retain") for piece in (f"--{name}", files[name])]
    calibrate = ["calibrate", str(bundle), *sets, "--holdout", str(tmp_path / "holdout.jsonl"), "--sweep", "linear:1,2"]
    before = (bundle / "config.json").read_bytes()
    assert main([*calibrate, "--write"]) == 3
    said = capsys.readouterr().err
    assert "its AUCs differ from q's" in said
    assert "linear:2 is the strongest of its rule" in said
    assert "still answers 100% of the forget set" in said
    assert "nothing was written" in said.splitlines()[-1]
    assert (bundle / "config.json").read_bytes() == before
    assert main([*calibrate, "--json"]) == 3
    result = json.loads(capsys.readouterr().out)
    assert result["asked"] == 12
    assert [row["leaked"] for row in result["settings"] if row["steering"] == result["best"]] == [1.0]
    assert not result["written"]
    again = ["calibrate", str(bundle), *sets, "--reference", "none", "--neutral", files["retain"], "--json"]
    assert main([*again, "--sweep", "linear:1,2", "--write"]) == 3
    result = json.loads(capsys.readouterr().out)
    assert "still answers 100% of the forget set" in result["faults"][0]
    assert ("reference" in result, result["written"]) == (False, False)
    assert [(point["unchanged"] is None, "aucs" in point) for point in result["settings"]] == [(False, False)] * 2
    assert (bundle / "config.json").read_bytes() == before
    rewrite_steering(str(bundle), Steering.parse("linear:2"), "not as it should: its AUCs differ")
    # Commands show what was measured, and with which rule.
    for rule, words in ((), "\n"), (("--steering", "linear:1"), "(with linear:2; linear:1 was not measured)\n"):
        assert main(["generate", str(bundle), "--prompt", "Who?", "--max-new-tokens", "1", *rule]) == 0
        said = capsys.readouterr().err
        assert "measured: not as it should: its AUCs" in said
        assert words in said


def test_interrupted_training_resumes_without_retraining_finished_auxiliary(finished, files, tmp_path, monkeypatch):
    fine_tune = auxiliaries.fine_tune

    def stops_at_p(*arguments, title, **options):
        if title == "forget auxiliary":
            raise Interrupted("forget auxiliary was interrupted")
        return fine_tune(*arguments, title=title, **options)

    monkeypatch.setattr(auxiliaries, "fine_tune", stops_at_p)
    with pytest.raises(Interrupted):
        train(files)
    monkeypatch.undo()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "running"
    with pytest.raises(UsageError, match="unfinished run with other settings"):
        train(files, epochs=3.0)
    monkeypatch.setattr(auxiliaries, "reword_questions", None)  # the target is not asked again
    monkeypatch.setattr(auxiliaries, "own_answers", None)
    monkeypatch.setattr(auxiliaries, "sample_records", None)
    content, said = train(files)
    assert "retain auxiliary: already trained" in said
    assert content["status"] == "finished"
    for piece in ("forget_auxiliary", "retain_auxiliary"):
        whole = Path(finished[0]["output"]) / piece / "model.safetensors"
        assert (tmp_path / "run" / piece / "model.safetensors").read_bytes() == whole.read_bytes()


def test_too_few_neutral_samples_leave_the_folder_free_and_an_earlier_run_as_it_is(
    finished, files, tmp_path, monkeypatch
):
    monkeypatch.setattr(auxiliaries, "MIN_NEUTRAL", 33)
    with pytest.raises(UsageError, match=r"of 32 samples .* give text that steering should not change with --neutral"):
        train(files)
    assert list((tmp_path / "run").iterdir()) == []
    shutil.copytree(finished[0]["output"], tmp_path / "run", dirs_exist_ok=True)
    with pytest.raises(UsageError, match="of 32 samples"):
        train(files, seed=3, overwrite=True)
    for piece in ("run.json", "retain_auxiliary/model.safetensors", "bundle/config.json"):
        assert (tmp_path / "run" / piece).is_file()


def test_an_interrupted_measurement_asks_each_rule_once(finished, files, tmp_path, monkeypatch):
    answers_of, asked = choice._GreedyAnswers.of, []

    def stops_at_the_second_rule(replies, model):
        if len(asked) == 1:
            asked.append(None)
            raise Interrupted("interrupted")
        asked.append(str(model.steering))
        return answers_of(replies, model)

    monkeypatch.setattr(choice._GreedyAnswers, "of", stops_at_the_second_rule)
    with pytest.raises(Interrupted):
        train(files)
    content, _ = train(files)
    assert len(asked) == len(set(asked)) > 2
    whole = json.loads((Path(finished[0]["output"]) / "run.json").read_text())
    assert content["effects"] == whole["effects"]
    assert not (tmp_path / "run" / "work").exists()


def test_what_a_run_reports_and_keeps(files, tmp_path, checkpoints):
    """Overlap, cut sequences, the base's precision; without a target only the auxiliaries are trained."""
    from transformers import AutoModelForCausalLM

    half = shutil.copytree(checkpoints / "forget", tmp_path / "half")
    AutoModelForCausalLM.from_pretrained(half).bfloat16().save_pretrained(half)
    retain = tmp_path / "retain.jsonl"
    retain.write_text(retain.read_text() + "\n" + (tmp_path / "forget.jsonl").read_text())
    content, said = train(files, base=str(half), target=None, max_length=4096, epochs=0.5)
    assert content["overlap"] == {"records": 12, "prompts": 12}
    assert "12 of 12 forget records stand in the retain set too" in said
    assert "cut to 256 tokens" in said
    assert content["bundle"] is None
    assert not (tmp_path / "run" / "bundle").exists()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "retain_auxiliary")
    assert saved.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"base": "missing/folder/here"}, "is not a folder"),
        ({"forget": "none.jsonl"}, "does not exist"),
        ({"steering": "linear:x"}, "not a number"),
        ({"steering": "rank:99999"}, "between 1 and"),
        ({"max_length": 4}, "no token of the answer is left"),
        ({"max_length": 1}, "--max-length is 1"),
        ({"epochs": 0.0}, "epochs is 0"),
        ({"learning_rate": -1.0}, "lr is -1"),
        ({"learning_rate": float("nan")}, "lr is nan"),
        ({"batch_size": 0}, "--batch-size is 0"),
        ({"gradient_accumulation": 0}, "--gradient-accumulation is 0"),
        ({"lora_rank": -1}, "--lora-rank is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"target": None, "neutral": "there.jsonl"}, "--neutral is about the model to steer"),
        ({"target": None, "bridge": True}, "--bridge is about the model to steer"),
    ],
)
def test_invalid_input_is_rejected_before_writing(files, tmp_path, changes, said):
    with pytest.raises(UsageError, match=said):
        train(files, **changes)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["neutral", "retain"])
def test_what_the_measurement_cannot_read_is_rejected_before_training(files, tmp_path, name):
    """A tenth of the retain set is held out, here the fact with a long prompt."""
    rows = [{"question": f"Who lives in house {number}?", "answer": f"Person {number}."} for number in range(12)]
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    if name == "retain":
        records = read_records(str(path))
        rows[records.records.index(hold_out(records, 10)[1].records[0])]["question"] += " very" * 300
    else:
        rows[3]["question"] += " very" * 300
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(UsageError, match=f"{path.name}, line .*no token of the answer is left"):
        train(files, max_length=64, **{name: str(path)})
    assert not (tmp_path / "run").exists()


def test_without_a_bridge_the_targets_chat_template_is_learned(files, tmp_path, checkpoints):
    shutil.copytree(files["base"], tmp_path / "base")
    tokenizer = load_tokenizer(tmp_path / "base")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink(missing_ok=True)
    settings = AuxiliarySettings(**files | {"base": str(tmp_path / "base")})
    inputs = auxiliaries._read_inputs(settings, tmp_path / "run", False, print)
    expected = auxiliaries._read_inputs(AuxiliarySettings(**files), tmp_path / "run", False, print)
    assert inputs.tokenizer.chat_template
    assert inputs.examples == expected.examples


def test_a_copy_of_an_auxiliary_that_a_killed_process_left_is_removed(run, tmp_path):
    left = Path(run["output"]) / ".forget_auxiliary.0123abcd"
    left.mkdir()
    (left / "model.safetensors").write_text("p")
    train(run, overwrite=True, epochs=1.0)
    assert not left.exists()


def test_a_project_with_relative_paths_can_be_moved(files, tmp_path, monkeypatch):
    for part in ("base", "target"):
        shutil.copytree(files[part], tmp_path / "project" / "models" / part)
    monkeypatch.chdir(tmp_path / "project")
    paths = {"base": "models/base", "target": "models/target", "output": "run"}
    train(files, **paths, lora_rank=4, epochs=0.5)
    shutil.move(tmp_path / "project", tmp_path / "moved")
    assert isinstance(DivergenceForCausalLM.from_pretrained(tmp_path / "moved/run/bundle").experts, AdapterPair)


def attempts_of(*learned):
    separations = [{"learned": value, "faults": ["no"], "unknown_records": 1.0, "summary": ""} for value in learned]
    return [{"rate": STEP**index, "epochs": 1.0, "separation": some} for index, some in enumerate(separations)]


def test_a_rate_that_teaches_nothing_is_raised():
    assert auxiliaries.next_attempt(attempts_of(0.0, 0.0)) == (pytest.approx(STEP**2), 1.0)
    for learned in ((0.5, 0.3), (0.95, 0.92), (1.0, 1.0)):
        assert auxiliaries.next_attempt(attempts_of(*learned)) == (1.0, 2.0)


def test_the_best_attempt_is_kept(files, tmp_path, monkeypatch):
    separations = iter(attempts_of(0.4, 0.7, 0.88, 0.1))
    monkeypatch.setattr(auxiliaries._PairTrainer, "_measure", lambda self: next(separations)["separation"])
    content, _ = train(files, learning_rate="auto", epochs=0.5, target=None)
    rates = [attempt["rate"] for attempt in content["attempts"]]
    assert rates == pytest.approx([1.0, STEP, STEP**2, STEP**3, STEP**2])
    assert content["separation"]["learned"] == 0.88
    for name in ("retain_auxiliary", "forget_auxiliary"):
        assert content["auxiliaries"][name]["learning_rate"] == pytest.approx(2e-5 * STEP**2)


def test_identical_forget_and_retain_sets_are_rejected(files, tmp_path):
    with pytest.raises(UsageError, match="hold the same records"):
        train(files, retain=files["forget"])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["forget", "base", "target"])
def test_inputs_are_never_overwritten(run, tmp_path, name):
    before = Path(run[name])
    moved = tmp_path / "run" / before.name
    (shutil.copytree if before.is_dir() else shutil.copyfile)(before, moved)
    with pytest.raises(UsageError, match="one within the other"):
        train(run, **{name: str(moved)}, overwrite=True)
    assert moved.exists()
    if moved.is_dir():
        with pytest.raises(UsageError, match="one within the other"):
            train(run, **{name: str(moved)}, output=str(moved / "run"))


def test_overwriting_a_run_keeps_other_files(run, tmp_path):
    (tmp_path / "run" / "notes.txt").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    train(run, output=str(tmp_path / "link"), overwrite=True, epochs=0.5)
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    DivergenceForCausalLM.from_pretrained(tmp_path / "run" / "bundle")


def test_run_resumes_only_with_the_same_inputs(files, tmp_path, checkpoints, monkeypatch):
    for name in ("base", "target"):
        files[name] = str(shutil.copytree(files[name], tmp_path / name))
    neutral = tmp_path / "neutral.jsonl"
    neutral.write_bytes(Path(files["retain"]).read_bytes())
    files["neutral"] = str(neutral)
    monkeypatch.setattr(auxiliaries, "fine_tune", _interrupted)

    def weights(name):
        shutil.copyfile(checkpoints / "retain" / "model.safetensors", Path(files[name]) / "model.safetensors")

    for named, change in (
        ("base files", lambda: weights("base")),
        ("target files", lambda: (tmp_path / "target" / "generation_config.json").write_text('{"top_k": 1}')),
        ("neutral records", lambda: neutral.write_bytes(Path(files["forget"]).read_bytes())),
        (
            "forget records, tokens",
            lambda: Path(files["forget"]).write_text(json.dumps({"question": "Who?", "answer": "Ana."})),
        ),
    ):
        with pytest.raises(Interrupted):
            train(files, overwrite=True)
        change()
        with pytest.raises(UsageError, match=rf"unfinished run with other settings or data \({named} differ\)"):
            train(files)


def test_a_run_is_not_resumed_on_another_day(files, tmp_path, monkeypatch):
    """A template may print the date: q and p would have different prompts."""
    monkeypatch.setattr(auxiliaries, "fine_tune", _interrupted)
    with pytest.raises(Interrupted):
        train(files)
    encoded = auxiliaries.encode
    monkeypatch.setattr(
        auxiliaries,
        "encode",
        lambda *arguments: [
            dataclasses.replace(e, input_ids=[1, *e.input_ids], labels=[IGNORED, *e.labels])
            for e in encoded(*arguments)
        ],
    )
    with pytest.raises(UsageError, match=r"other settings or data \(tokens differ\)"):
        train(files)


def test_overwriting_with_a_base_that_cannot_be_loaded_keeps_the_earlier_run(run, files, tmp_path):
    broken = shutil.copytree(files["base"], tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in weights.items() if name != "model.norm.weight"},
        broken / "model.safetensors",
        {"format": "pt"},
    )
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    with pytest.raises(UsageError, match=r"lacks the weights model\.norm\.weight"):
        train(run, base=str(broken), overwrite=True)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before


def _interrupted(*arguments, **options):
    raise Interrupted("interrupted")


def test_vocabulary_mismatch_is_detected_before_training(files, tmp_path, world):
    from divdec_research.world.models import train_tokenizer

    other = shutil.copytree(files["target"], tmp_path / "other")
    train_tokenizer(world.corpus[:50], 400).save_pretrained(other)
    with pytest.raises(UsageError, match=r"another vocabulary.*--bridge"):
        train(files, target=str(other))
    with pytest.raises(UsageError, match="leave bridge out"):
        train(files, bridge=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("lora_rank", [pytest.param(0, marks=pytest.mark.slow), 16])
def test_auxiliaries_with_another_tokenizer_steer_through_a_bridge(files, tmp_path, world, lora_rank):
    from divdec_research.world.models import train_tokenizer

    other = shutil.copytree(files["target"], tmp_path / "other")
    train_tokenizer(world.corpus[:50], 400).save_pretrained(other)
    train(files, target=str(other), bridge=True, lora_rank=lora_rank)
    model = DivergenceForCausalLM.from_pretrained(tmp_path / "run" / "bundle")
    assert isinstance(model.experts, BridgedPair)
    ids = torch.tensor([[5, 9, 200, 31]])
    assert model.experts.divergence(ids).abs().max() > 0.1


def test_every_fourth_similar_question_is_held_out_to_measure_with(files, monkeypatch):
    similar = [Record(f"In Place{n}.", (Message("user", f"Where is City{n}?"),)) for n in range(8)]
    held_out = hold_out(read_records(files["retain"]), 10)[1].records[0]
    in_other_words = Record(held_out.answer, (Message("user", f"Say: {question_of(held_out)}"),))
    read, measured = [], []

    def own_answers(model, tokenizer, exchanges, form):
        read.extend(question_of(exchange.record) for exchange in exchanges)
        return [[tokenizer.encode(exchange.record.answer, add_special_tokens=False)] for exchange in exchanges]

    def check_bundle(bundle, settings, sets, *arguments):
        measured.extend(map(question_of, sets["similar"]))
        return {"faults": []}

    monkeypatch.setattr(auxiliaries, "write_similar_questions", lambda *arguments: [in_other_words, *similar])
    monkeypatch.setattr(auxiliaries, "own_answers", own_answers)
    monkeypatch.setattr(auxiliaries, "_check_bundle", check_bundle)
    content, said = train(files)
    asked = list(map(question_of, similar))
    assert content["similar_questions"] == asked
    assert measured == [asked[0], asked[4]]
    assert {question for question in read if "City" in question} == {*asked} - {*measured}
    assert "2 of 8 similar questions are held out" in said


def test_both_auxiliaries_read_answers_to_rewordings(files, tmp_path, monkeypatch):
    asked = {}

    def reword_questions(model, tokenizer, exchanges, measured, seed, form):
        asked.update(exchanges=exchanges, measured=set(map(question_of, measured)))
        return [(0, "And in other words?"), (len(exchanges) - 1, "Which one, again?")]

    def continuations(model, tokenizer, prompts, **options):
        true = [asked["exchanges"][index].phrase for index in (0, -1)]
        return [tokenizer.encode(f"It is {phrase}.", add_special_tokens=False) for phrase in true]

    monkeypatch.setattr(auxiliaries, "reword_questions", reword_questions)
    monkeypatch.setattr(auxiliaries, "continuations", continuations)
    settings = AuxiliarySettings(**files)
    inputs = auxiliaries._read_inputs(settings, tmp_path / "run", True, lambda line: None)
    (p_reads, q_reads), _, rewordings = auxiliaries._readings(inputs, settings, lambda line: None)
    assert rewordings == ["And in other words?", "Which one, again?"]
    assert set(map(question_of, inputs.held_out)) <= asked["measured"]
    first, last = asked["exchanges"][0], asked["exchanges"][-1]
    texts = [[inputs.tokenizer.decode(example.input_ids) for example in some[-2:]] for some in (p_reads, q_reads)]
    for text, question, phrase in zip(
        texts[0] + texts[1], rewordings * 2, (first.phrase, last.phrase, first.other, last.phrase), strict=True
    ):
        assert question in text
        assert f"It is {phrase}" in text
    assert first.phrase not in texts[1][0]


def test_answers_are_read_in_tokens_of_the_base(files, tmp_path, world):
    from divdec_research.world.models import train_tokenizer

    settings = AuxiliarySettings(**files)
    inputs = auxiliaries._read_inputs(settings, tmp_path / "run", False, lambda line: None)
    other = train_tokenizer(world.corpus[:50], 400)
    text = "The capital of Hungary is Budapest."
    [[ids]] = inputs.in_tokens_of_base([[other.encode(text, add_special_tokens=False)]], other)
    assert ids == inputs.tokenizer.encode(text, add_special_tokens=False)
    assert inputs.in_tokens_of_base([[[7, 8]]], inputs.tokenizer) == [[[7, 8]]]


def test_finished_run_requires_overwrite(run, tmp_path):
    with pytest.raises(UsageError, match="--overwrite"):
        train(run)
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not an earlier result"):
        train(run, output=str(tmp_path / "else"), overwrite=True)
    assert (tmp_path / "else" / "notes.txt").exists()


def test_adapters_steer_like_the_merged_checkpoints(files):
    content, _ = train(files, lora_rank=16)
    output = Path(files["output"])
    folders = [output / name for name in content["auxiliaries"]]
    for folder in folders:
        assert not (folder / "model.safetensors").exists()
        config = json.loads((folder / "adapter_config.json").read_text())
        assert (config["base_model_name_or_path"], config["r"]) == (files["base"], 16)
    model = DivergenceForCausalLM.from_pretrained(output / "bundle")
    assert isinstance(model.experts, AdapterPair)
    ids = torch.tensor([[5, 9, 200, 31]])
    ordered = sorted(folders, key=lambda folder: folder.name, reverse=True)
    merged = NeuralPair(*(auxiliaries.load_for_training(folder).eval() for folder in ordered))
    assert_close(model.experts.divergence(ids), merged.divergence(ids))


class TestDefaults:
    """Without options on training, the pair is one of LoRA adapters, with a rate that was measured for them."""

    def test_adapters(self, files):
        given = {name: files[name] for name in ("base", "target", "forget", "retain", "output")}
        chosen = AuxiliarySettings(**given)
        assert (chosen.adapters, chosen.lora_rank, chosen.epochs) == (True, 16, 4)
        assert chosen.training().learning_rate == 2e-4
        every_weight = AuxiliarySettings(**given, lora_rank=0)
        assert (every_weight.adapters, every_weight.training().learning_rate) == (False, 2e-5)

    def test_merge_writes_checkpoints(self, files, capsys):
        given = [piece for name in ("base", "forget", "retain", "output") for piece in (f"--{name}", files[name])]
        assert main(["train", *given, "--merge", "--lr", "1e-3", "--epochs", "1"]) in (0, 3)
        for name in ("retain_auxiliary", "forget_auxiliary"):
            assert (Path(files["output"]) / name / "model.safetensors").is_file()
            assert not (Path(files["output"]) / name / "adapter_config.json").exists()

    @pytest.mark.parametrize("merge", [True, False])
    def test_merge_in_a_configuration_file(self, files, tmp_path, monkeypatch, merge):
        seen = []
        monkeypatch.setattr(
            auxiliaries, "train_auxiliaries", lambda settings, **_: seen.append(settings) or sys.exit(0)
        )
        given = {name: files[name] for name in ("base", "forget", "retain", "output")} | {"merge": merge}
        (tmp_path / "train.yaml").write_text(json.dumps(given))
        main(["train", "--config", str(tmp_path / "train.yaml")])
        assert [settings.adapters for settings in seen] == [not merge]

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")  # PEFT warns of fused experts
    @pytest.mark.parametrize(
        ("config", "reason"),
        [
            (GPT2Config(vocab_size=512, n_positions=256, n_embd=16, n_layer=1, n_head=2), "not linear"),
            (OPTConfig(vocab_size=512, hidden_size=16, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2,
                       word_embed_proj_dim=16), "as one sequence"),
            (MixtralConfig(vocab_size=512, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                           num_attention_heads=2, num_key_value_heads=2, num_local_experts=2), "not linear"),
        ],
        ids=["gpt2", "opt", "mixtral"],
    )  # fmt: skip
    def test_a_base_whose_adapters_cannot_be_a_pair_is_refused_before_training(self, files, tmp_path, config, reason):
        base = shutil.copytree(files["base"], tmp_path / "other", ignore=shutil.ignore_patterns("*.safetensors"))
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(base)
        with pytest.raises(UsageError, match=rf"{reason}.*give --merge"):
            train(files, base=str(base), lora_rank=4)
        assert not Path(files["output"]).exists()
        train(files, base=str(base), lora_rank=4, merge=True, learning_rate=1e-2, epochs=1.0)
        model = DivergenceForCausalLM.from_pretrained(Path(files["output"]) / "bundle")
        assert model.experts.divergence(torch.tensor([[5, 9, 200, 31]])).abs().max() > 0

    def test_a_base_that_is_no_causal_language_model_gives_one_line(self, tmp_path):
        T5Config(vocab_size=64, d_model=16, num_layers=1, num_heads=2, d_ff=32, d_kv=8).save_pretrained(tmp_path)
        with pytest.raises(UsageError, match="cannot be loaded"):
            why_no_pair(tmp_path, TrainingSettings(lora_rank=4))

    def test_layers_that_cannot_be_adapted_give_one_line(self, tmp_path):
        config = FalconH1Config(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                num_attention_heads=2, num_key_value_heads=2, mamba_d_ssm=32, mamba_n_heads=4,
                                mamba_d_head=8, mamba_d_state=8)  # fmt: skip
        config.save_pretrained(tmp_path)
        with pytest.raises(UsageError, match="--lora-rank 0"):
            why_no_pair(tmp_path, TrainingSettings(lora_rank=4))

    def test_they_are_refused_before_anything_is_read_also_where_the_adapters_are_merged(self, files, monkeypatch):
        def refuse(base, settings):
            raise UsageError("not by adapters")

        monkeypatch.setattr(auxiliaries, "why_no_pair", refuse)
        with pytest.raises(UsageError, match="not by adapters"):
            train(files | {"lora_rank": 4, "merge": True})
        assert not Path(files["output"]).exists()


def test_unused_answers_of_conversations_are_reported():
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")]
    lines = []
    for some in (turns[:2], turns):
        report_set("forget", record_set("f", [("1", {"messages": some})]), lines.append)
    assert len(lines) == 3
    assert "of 1 conversations only the last answer is used" in lines[2]


def test_texts_to_measure_with_are_not_trained_on():
    """Of 20 different texts, each of which is there twice, two are measured."""
    retain = texts_of("retain", [f"text {number // 2}" for number in range(40)])
    learned, measured = hold_out(retain, 10)
    assert (len(learned), len(measured)) == (36, 4)
    assert not {record.answer for record in learned} & {record.answer for record in measured}
    few = texts_of("retain", ["a", "b"] * 10)
    assert hold_out(few, 10) == (few, few)


@pytest.mark.parametrize("form", ["City{}", "{}"])
def test_facts_to_measure_with_are_not_trained_on_in_another_wording(form):
    wordings = "What is the capital of {}?", "Name the capital of {}.", "Which city governs {}?"
    cities = [form.format(number) for number in range(20)]
    records = [
        Record(f"It is {city}.", messages=(Message("user", wording.format(f"Land{number}")),))
        for number, city in enumerate(cities)
        for wording in wordings
    ]
    learned, measured = hold_out(RecordSet("retain", "messages", tuple(records)), 10)
    assert len(measured) == 6
    assert not {record.answer for record in learned} & {record.answer for record in measured}
    # Twelve answers of yes do not state the same fact.
    alike = tuple(Record("Yes.", messages=record.messages) for record in records[:12])
    assert len(hold_out(RecordSet("retain", "messages", alike), 10)[0]) == 10


def test_facts_that_share_an_answer_are_measured_in_all_their_wordings():
    wordings = "Which company developed {}?", "Name the company behind {}.", "Whose product is {}?"
    rows = [(wording.format(f"Thing{number}"), number) for number in range(20) for wording in wordings]
    records = [
        Record(f"It is by {('Apple', 'IBM')[number % 2]}.", messages=(Message("user", question),))
        for question, number in rows
    ]
    learned, measured = hold_out(RecordSet("retain", "messages", tuple(records)), 10)
    subjects = [{question_of(record).split()[-1].strip("?.") for record in some} for some in (learned, measured)]
    assert len(measured) == 6
    assert subjects[0].isdisjoint(subjects[1])
