"""Distillation: the loss in pieces is the plain one, students learn from steered models, runs resume, caches belong."""

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM, AutoTokenizer

from divdec import DivergenceForCausalLM, UsageError, write_bundle
from divdec.bridge.pair import BridgedPair
from divdec.checkpoint import vocabulary_sha256
from divdec.cli import main
from divdec.data.formatting import encode_set
from divdec.data.records import record_set
from divdec.errors import Diverged, Interrupted
from divdec.evaluation.scoring import score
from divdec.experts.ngram_fit import write_pair
from divdec.training import distillation
from divdec.training.distillation import distill, prepare
from divdec.training.distillation_loss import (
    PIECE_LOGITS,
    Distillation,
    LabelledCrossEntropy,
    SteeredTeacher,
    divergence,
    plain_head,
    predicting,
)
from divdec.training.fine_tuning import Objective, fine_tune
from divdec.training.inputs import Collator
from divdec.training.settings import DistillationSettings, TrainingSettings
from divdec_research.world.models import Shape, new_model, train_tokenizer
from support.exactness import LOSSES
from support.stopping import stopping_at
from support.tiny import make_parts, tiny_model

DIRECTIONS = ["teacher-student", "student-teacher"]


def rows(questions):
    return [{"question": question.question, "answer": question.answer} for question in questions]


def write_rows(path, questions):
    path.write_text("\n".join(map(json.dumps, rows(questions))))
    return path


def examples_of(questions, tokenizer):
    return encode_set(record_set("set", [("", row) for row in rows(questions)]), tokenizer)


def collated(examples, tokenizer):
    return Collator(tokenizer)(
        [{"index": index, **dataclasses.asdict(example)} for index, example in enumerate(examples)]
    )


def naive(student, teacher, batch, temperature, direction):
    """The loss as it is usually written, from whole logits of all positions."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        theirs = teacher(**inputs).logits[:, :-1] / temperature
    ours = student(**inputs).logits[:, :-1, : theirs.shape[-1]] / temperature
    p, q = (theirs, ours) if direction == "teacher-student" else (ours, theirs)
    each = kl_div(q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    chosen = batch["labels"][:, 1:] != -100
    return temperature**2 * each[chosen].sum() / chosen.sum()


def gradients(student, loss):
    student.zero_grad()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in student.named_parameters() if weight.grad is not None}


def same_gradients(found, wanted):
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


@pytest.fixture(scope="module")
def examples(world, tokenizer):
    return examples_of(world.forget[:7], tokenizer)


@pytest.fixture(scope="module")
def batch(examples, tokenizer):
    return collated(examples, tokenizer)


@pytest.fixture(scope="module")
def text_batch(world, tokenizer):
    rows = [("", {"text": text}) for text in world.corpus[:3]]
    return collated(encode_set(record_set("texts", rows), tokenizer), tokenizer)


# The loss.


def test_distillation_metrics_match_hand_computed_values():
    """T = 2, logits 2·log of probabilities: KL((½, ½) ‖ (¼, ¾)) = ½ log 2 + ½ log ⅔ = ½ log 4/3."""
    teacher, student = 2 * torch.tensor([[0.5, 0.5]]).log(), 2 * torch.tensor([[0.25, 0.75]]).log()
    result = divergence(student, teacher, 2.0, "teacher-student")
    assert result.item() == pytest.approx(4 * 0.5 * math.log(4 / 3), abs=1e-6)
    result = divergence(student, teacher, 2.0, "student-teacher")
    assert result.item() == pytest.approx(4 * (0.25 * math.log(0.5) + 0.75 * math.log(1.5)), abs=1e-6)


def test_only_student_teacher_loss_measures_a_memorised_token():
    """The teacher gives it 1e-8, the students 1e-2 and 1e-4; other tokens have equal shares of the rest."""

    def logits(memorised, width=50):
        return torch.tensor([[memorised, *[(1 - memorised) / (width - 1)] * (width - 1)]]).log()

    teacher, weak, strong = logits(1e-8), logits(1e-2), logits(1e-4)

    def difference(direction):
        losses = [divergence(student, teacher, 1.0, direction) for student in (weak, strong)]
        return (losses[0] - losses[1]).item()

    # Σ p_S log p_S/p_T: the memorised token's term is 1e-2·log 1e6, and all others together lose about 1e-2.
    assert difference("student-teacher") == pytest.approx(1e-2 * math.log(1e6) - 1e-2, rel=0.02)
    assert difference("teacher-student") == pytest.approx(1e-2, rel=0.02)


@pytest.mark.parametrize(
    ("family", "direction", "positions"),
    [
        ("llama", "teacher-student", 1),
        ("llama", "student-teacher", 20),
        ("gpt2", "teacher-student", 64),
        ("gpt2", "student-teacher", None),
        ("qwen", "teacher-student", None),
        ("qwen", "student-teacher", 7),
    ],
)
def test_chunked_loss_matches_plain_loss(steered, batch, direction, positions):
    student = steered.target
    head = plain_head(student)
    assert head is not None
    teacher = SteeredTeacher(frozen_copy(steered), 1.7, direction, positions)
    objective = Distillation(teacher, head)
    assert isinstance(objective, Objective)
    wanted = naive(student, teacher.model, batch, 1.7, direction)
    result = objective.loss(student, batch, None)
    assert result.item() == pytest.approx(wanted.item(), rel=LOSSES)
    assert result.item() > 0.01
    same_gradients(gradients(student, result), gradients(student, wanted))
    assert "forward" not in vars(head)


def frozen_copy(steered):
    """The teacher must not move with the student that its target begins as."""
    import copy

    return copy.deepcopy(steered).requires_grad_(False)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_plain_text_loss_covers_every_token(text_batch, direction):
    parts = make_parts("llama")
    teacher = DivergenceForCausalLM.from_parts(*parts, steering="rank:20:soft")
    student = tiny_model("llama", 512, seed=5)
    wanted = naive(student, teacher, text_batch, 0.8, direction)
    result = Distillation(SteeredTeacher(teacher, 0.8, direction, 50), plain_head(student)).loss(
        student, text_batch, None
    )
    assert result.item() == pytest.approx(wanted.item(), rel=LOSSES)
    same_gradients(gradients(student, result), gradients(student, wanted))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gradient_accumulation_matches_single_batch(batch, direction):
    teacher = SteeredTeacher(DivergenceForCausalLM.from_parts(*make_parts("qwen")), 1.5, direction)
    student = tiny_model("qwen", 512, seed=5)
    objective = Distillation(teacher, plain_head(student))
    labelled = predicting(batch["labels"]).sum()
    whole = gradients(student, objective.loss(student, batch, labelled))
    student.zero_grad()
    for piece in (slice(0, 3), slice(3, 7)):
        objective.loss(student, {name: tensor[piece] for name, tensor in batch.items()}, labelled).backward()
    same_gradients({name: weight.grad for name, weight in student.named_parameters()}, whole)


def test_a_student_may_have_a_larger_vocabulary(batch):
    teacher = DivergenceForCausalLM.from_parts(
        tiny_model("llama", 520, 0), tiny_model("llama", 512, 1), tiny_model("llama", 512, 2)
    )
    student = tiny_model("llama", 520, 5)
    wanted = naive(student, teacher, batch, 1.0, "teacher-student")
    result = Distillation(SteeredTeacher(teacher, 1.0, "teacher-student"), plain_head(student)).loss(
        student, batch, None
    )
    assert result.item() == pytest.approx(wanted.item(), rel=LOSSES)
    same_gradients(gradients(student, result), gradients(student, wanted))


def capped(kind, **settings):
    import transformers

    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2, pad_token_id=1, **settings,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("Gemma2", {"head_dim": 8, "final_logit_softcapping": 3.0}), ("Granite", {"logits_scaling": 4.0}), ("Cohere", {})],
)
def test_students_with_logit_postprocessing_are_detected(kind, settings, batch):
    student = capped(kind, **settings)
    assert plain_head(student) is None
    teacher = DivergenceForCausalLM.from_parts(*make_parts("llama"))
    result = Distillation(SteeredTeacher(teacher, 1.5, "teacher-student", 20), None).loss(student, batch, None)
    wanted = naive(student, teacher, batch, 1.5, "teacher-student")
    assert result.item() == pytest.approx(wanted.item(), rel=LOSSES)
    same_gradients(gradients(student, result), gradients(student, wanted))


def test_student_with_nonstandard_head_raises(batch):
    teacher = SteeredTeacher(DivergenceForCausalLM.from_parts(*make_parts("llama")), 1.5, "teacher-student")
    student, other = tiny_model("llama", 512, 5), tiny_model("llama", 512, 6)
    with pytest.raises(RuntimeError, match="ran 0 times"):
        Distillation(teacher, plain_head(other)).loss(student, batch, None)


def test_distillation_with_adapters_checkpointing_and_autocast(batch):
    from peft import LoraConfig, get_peft_model

    teacher = DivergenceForCausalLM.from_parts(*make_parts("llama"))
    student = tiny_model("llama", 512, 5)
    head = plain_head(student)
    objective = Distillation(SteeredTeacher(teacher, 1.5, "teacher-student", 30), head)
    torch.manual_seed(0)
    wrapped = get_peft_model(student, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    wrapped.enable_input_require_grads()
    # transformers 5.2x renamed it and warns of the old name.
    enable = getattr(wrapped, "activation_checkpointing_enable", None) or wrapped.gradient_checkpointing_enable
    enable()
    wrapped.train()
    wanted = gradients(wrapped, naive(wrapped, teacher, batch, 1.5, "teacher-student"))
    result = gradients(wrapped, objective.loss(wrapped, batch, None))
    assert all("lora" in name for name in result)
    same_gradients(result, wanted)
    with torch.autocast("cpu", torch.bfloat16):
        seen = []
        handle = teacher.target.lm_head.register_forward_hook(lambda *arguments: seen.append(arguments[2].dtype))
        rough = objective.loss(wrapped, batch, None)
        list(objective.teacher.logits(batch))
        handle.remove()
    assert set(seen) == {torch.float32}  # the teacher answers as it always does
    assert rough.dtype == torch.float32
    exact = objective.loss(wrapped, batch, None)
    assert rough.item() != exact.item()
    assert rough.item() == pytest.approx(exact.item(), rel=0.05)


# Teachers of other kinds, whose columns are read a few at a time.


@pytest.fixture(scope="module")
def ngram_bundle(world, tokenizer, checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ngram")
    sets = {
        "retain": [example.input_ids for example in examples_of(world.retain[:40], tokenizer)],
        "forget": [example.input_ids for example in examples_of(world.forget[:20], tokenizer)],
    }
    (folder / "pair").mkdir()
    write_pair(
        folder / "pair", sets, len(tokenizer), order=3, tokenizer=vocabulary_sha256(tokenizer),
        retain_set="r", forget_set="f", forget_counts="forget",
    )  # fmt: skip
    return write_bundle(
        folder / "bundle", target=str(checkpoints / "target"), ngram=folder / "pair", steering="linear:10",
        retain_auxiliary=str(checkpoints / "retain"), forget_auxiliary=str(checkpoints / "forget"), ngram_weight=2.0,
    )  # fmt: skip


def bridged(tokenizer, world):
    other = train_tokenizer(world.corpus[500:900], 400)
    shape = Shape(32, 2, 2, 64)
    pair = BridgedPair(
        new_model(shape, other, 1), new_model(shape, other, 2), target_tokenizer=tokenizer, auxiliary_tokenizer=other,
        target_width=len(tokenizer),
    )  # fmt: skip
    return DivergenceForCausalLM.from_experts(tiny_model("llama", len(tokenizer), 0), pair, "linear:1.5")


@pytest.mark.parametrize("kind", ["combined with n-grams", "bridged"])
@pytest.mark.parametrize("positions", [1, 24])
def test_every_teacher_kind_is_supported(kind, positions, batch, tokenizer, world, ngram_bundle):
    model = bridged(tokenizer, world) if kind == "bridged" else DivergenceForCausalLM.from_pretrained(ngram_bundle)
    student = tiny_model("llama", len(tokenizer), 5)
    objective = Distillation(SteeredTeacher(model, 1.5, "teacher-student", positions), plain_head(student))
    wanted = naive(student, model, batch, 1.5, "teacher-student")
    assert objective.loss(student, batch, None).item() == pytest.approx(wanted.item(), rel=LOSSES)


def test_cross_entropy_in_pieces_is_that_of_the_whole(batch, monkeypatch):
    student = tiny_model("llama", 512, 5)
    objective = LabelledCrossEntropy(plain_head(student))
    whole = objective.loss(student, batch, None)
    expected = gradients(student, whole)
    monkeypatch.setitem(PIECE_LOGITS, "cuda", 7 * 512)
    result = objective.loss(student, batch, None)
    assert result.item() == pytest.approx(whole.item(), rel=LOSSES)
    same_gradients(gradients(student, result), expected)


# The whole run, on models that have learned something.


LEARNING = TrainingSettings(learning_rate=1e-2, batch_size=12)


@pytest.fixture(scope="module")
def data(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return write_rows(folder / "forget.jsonl", world.forget[:12]), write_rows(
        folder / "retain.jsonl", world.retain[:24]
    )


@pytest.fixture(scope="module")
def learned(world, tokenizer, tmp_path_factory):
    """A bundle of a target and a p that know the forget set, and a q that does not."""
    folder = tmp_path_factory.mktemp("learned")
    forget, retain = examples_of(world.forget[:12], tokenizer), examples_of(world.retain[:24], tokenizer)
    for name, shape, taught, epochs in (
        ("target", Shape(48, 2, 2, 96), forget + retain, 25.0),
        ("retain", Shape(32, 1, 2, 64), retain, 10.0),
        ("forget", Shape(32, 1, 2, 64), forget + retain, 10.0),
    ):
        settings = dataclasses.replace(LEARNING, epochs=epochs)
        model, _ = fine_tune(
            new_model(shape, tokenizer, 0), tokenizer, taught, settings, folder / "work", title=name, resumable=False,
            measure=False,
        )  # fmt: skip
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return write_bundle(
        folder / "bundle", target=str(folder / "target"), retain_auxiliary=str(folder / "retain"),
        forget_auxiliary=str(folder / "forget"), steering="linear:1.5",
    )  # fmt: skip


def mean(values):
    return sum(values) / len(values)


@pytest.mark.parametrize(
    ("before", "after", "code", "words"),
    [(0.5, 0.1, 0, "measure it"), (0.5, 0.4, 3, "closed 20%"), (0.0, 0.0, 3, "nothing was shown"),
     (5e-4, 0.0, 3, "nothing was shown")],
)  # fmt: skip
def test_a_student_that_equalled_its_teacher_before_shows_nothing(monkeypatch, capsys, before, after, code, words):
    content = {"before": {"forget": {"kl": before}}, "after": {"forget": {"kl": after}}}
    monkeypatch.setattr(distillation, "distill", lambda *_, **__: content)
    given = ["distill", "bundle", "--forget", "f", "--retain", "r", "--output", "o"]
    assert main(given) == code
    said = capsys.readouterr()
    assert words in said.out + said.err


def test_student_learns_steered_output(learned, data, world, tokenizer, tmp_path, capsys):
    output = tmp_path / "student"
    arguments = [
        "distill", learned, "--forget", data[0], "--retain", data[1], "--output", output, "--lr", "6e-3", "--epochs",
        "15", "--batch-size", "4", "--json",
    ]  # fmt: skip
    assert main(list(map(str, arguments))) == 0
    content = json.loads(capsys.readouterr().out)
    assert content == json.loads((output / "run.json").read_text())
    before, after = content["before"]["forget"], content["after"]["forget"]
    # The target remembers and the teacher does not; the student comes to be surprised as the teacher is.
    assert before["cross_entropy"] < before["teacher_cross_entropy"] - 1
    assert after["kl"] < 0.2 * before["kl"]
    gap = before["teacher_cross_entropy"] - before["cross_entropy"]
    assert abs(after["cross_entropy"] - after["teacher_cross_entropy"]) < 0.25 * gap
    assert content["after"]["retain"]["kl"] > content["before"]["retain"]["kl"]  # nothing in this loss holds it
    assert content["output_layer"] == "in pieces"

    # What was written is an ordinary model, and other code measures the same of it.
    student, steered = AutoModelForCausalLM.from_pretrained(output), DivergenceForCausalLM.from_pretrained(learned)
    assert type(student).__name__ == "LlamaForCausalLM"
    assert AutoTokenizer.from_pretrained(output).get_vocab() == tokenizer.get_vocab()
    forget = examples_of(world.forget[:12], tokenizer)
    scores = {name: score(model, forget) for name, model in
              {"student": student, "steered": steered, "target": steered.target}.items()}  # fmt: skip
    accuracy = {name: mean([item.token_accuracy for item in result]) for name, result in scores.items()}
    assert accuracy["target"] > accuracy["steered"] + 0.2
    assert abs(accuracy["student"] - accuracy["steered"]) < 0.5 * (accuracy["target"] - accuracy["steered"])
    tokens = [log_p for item in scores["student"] for log_p in item.log_probabilities]
    assert -mean(tokens) == pytest.approx(after["cross_entropy"], rel=1e-4)
    card = (output / "README.md").read_text()
    for fact in ("linear:1.5", "T = 1.5", "teacher-student", content["forget_set"], str(learned), "does not claim"):
        assert fact in card
    assert not any(question.answer in card or question.question in card for question in world.forget[:12])
    assert not output.with_name("student.work").exists()


QUICK = {"learning_rate": 1e-3, "epochs": 1.0, "batch_size": 8}


def settings_for(bundle, data, output, **more):
    return DistillationSettings(bundle=str(bundle), forget=str(data[0]), output=str(output), **{**QUICK, **more})


def quiet(settings):
    return distill(settings, report=lambda line: None)


def test_rehearsal_preserves_retain_set(learned, data, tmp_path):
    """Without it the student ends farther from its teacher on the retain set than it began (the test above)."""
    options = {"retain": str(data[1]), "learning_rate": 6e-3, "epochs": 8.0, "batch_size": 6}
    result = quiet(settings_for(learned, data, tmp_path / "student", rehearse=20, **options))
    assert result["after"]["retain"]["kl"] < 0.7 * result["before"]["retain"]["kl"]
    assert result["after"]["forget"]["kl"] < 0.5 * result["before"]["forget"]["kl"]
    assert result["training"]["steps"] == 8 * math.ceil((12 + 20) / 6)
    assert "20 examples of the retain set" in (tmp_path / "student" / "README.md").read_text()
    with pytest.raises(UsageError, match=r"--rehearse 5 needs the retain set: give it with --retain"):
        settings_for(learned, data, tmp_path / "other", rehearse=5)


def weights_of(folder):
    return torch.cat(
        [tensor.flatten().float() for _, tensor in sorted(load_file(folder / "model.safetensors").items())]
    )


def stopped_at(step, settings):
    with stopping_at(step), pytest.raises(Interrupted, match="student was interrupted"):
        quiet(settings)


def test_resumed_distillation_gives_same_student(bundle, data, tmp_path, monkeypatch):
    whole = quiet(settings_for(bundle, data, tmp_path / "whole", epochs=3.0))
    settings = settings_for(bundle, data, tmp_path / "cut", epochs=3.0)
    stopped_at(3, settings)
    assert not (tmp_path / "cut").exists()
    assert (tmp_path / "cut.work").is_dir()
    with pytest.raises(UsageError, match="unfinished run with other settings"):
        quiet(dataclasses.replace(settings, learning_rate=2e-3))
    resumed = quiet(settings)
    torch.testing.assert_close(weights_of(tmp_path / "cut"), weights_of(tmp_path / "whole"), rtol=0, atol=1e-6)
    assert resumed["before"] == whole["before"]
    assert resumed["after"]["forget"] == pytest.approx(whole["after"]["forget"], rel=1e-5)
    assert resumed["training"]["steps"] == 6
    assert not (tmp_path / "cut.work").exists()


def test_distillation_depends_on_the_bundles_template(bundle, data, tmp_path):
    copied = Path(shutil.copytree(bundle, bundle.parent / "copied"))
    settings = settings_for(copied, data, tmp_path / "student")
    decides = prepare(settings, print).decides
    assert prepare(settings, print).decides == decides
    (copied / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    changed = prepare(settings, print).decides
    assert {name for name in decides if decides[name] != changed[name]} == {"tokens"}
    shutil.rmtree(copied)


def test_non_finite_distillation_loss_keeps_last_epoch_without_student(bundle, data, tmp_path, monkeypatch):
    class Breaks(Distillation):
        calls = 0

        def loss(self, *arguments):
            Breaks.calls += 1
            return super().loss(*arguments) * (float("nan") if Breaks.calls == 4 else 1.0)

    monkeypatch.setattr(distillation, "Distillation", Breaks)
    with pytest.raises(Diverged, match=r"the loss is nan at step 4, on examples"):
        quiet(settings_for(bundle, data, tmp_path / "s", epochs=3.0))
    assert not (tmp_path / "s").exists()
    assert (tmp_path / "s.work" / "checkpoints" / "checkpoint-2" / "trainer_state.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "models", "s.work"]


def test_distillation_leaves_target_unchanged_and_preserves_student_dtype(own_checkpoints, data, tmp_path):
    target = AutoModelForCausalLM.from_pretrained(own_checkpoints / "target").to(torch.bfloat16)
    target.save_pretrained(own_checkpoints / "target")
    bundle = write_bundle(
        tmp_path / "bundle", target=str(own_checkpoints / "target"), retain_auxiliary=str(own_checkpoints / "retain"),
        forget_auxiliary=str(own_checkpoints / "forget"), steering="rank:20",
    )  # fmt: skip
    with pytest.raises(UsageError, match=r"distil from rank:20:soft"):
        quiet(settings_for(bundle, data, tmp_path / "student", steering="rank:20"))
    first = settings_for(
        bundle, data, tmp_path / "first", lora_rank=2, gradient_checkpointing=True, gradient_accumulation=2
    )
    assert quiet(first)["teacher"]["steering"] == "rank:20:soft"  # the bundle's rule, with a fill that can be learned
    stored = load_file(tmp_path / "first" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert stored.keys() == load_file(own_checkpoints / "target" / "model.safetensors").keys()
    # The next request begins with what the first has left.
    second = quiet(
        dataclasses.replace(
            first, output=str(tmp_path / "second"), init_student=str(tmp_path / "first"), direction="student-teacher"
        )
    )
    assert second["before"]["forget"]["kl"] > 0
    assert str(tmp_path / "first") in (tmp_path / "second" / "README.md").read_text()
    DivergenceForCausalLM.from_pretrained(bundle)  # and its digests still fit


class TestBadInput:
    @pytest.fixture(autouse=True)
    def nothing_is_trained(self, monkeypatch):
        monkeypatch.setattr(distillation, "fine_tune", lambda *arguments, **more: pytest.fail("training began"))

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"temperature": 0.0}, "temperature is 0"),
            ({"temperature": -1.0}, "temperature is -1"),
            ({"temperature": math.inf}, "temperature is inf"),
            ({"temperature": math.nan}, "temperature is nan"),
            ({"learning_rate": 0.0}, "lr is 0"),
            ({"learning_rate": 1e38}, r"lr is 1e\+38; accepted: a number above 0, at most 1e\+35"),
            ({"epochs": 0.0}, "epochs is 0"),
        ],
    )
    def test_settings(self, options, says):
        with pytest.raises(UsageError, match=says):
            DistillationSettings(bundle="b", forget="f", output="o", **options)

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"steering": "rank:5"}, "rank:5:soft"),
            ({"steering": "linear:0"}, "steers nothing"),
            ({"steering": "linear:-1"}, "towards the forget set"),
            ({"steering": "rank:9999:soft"}, "k is 9999"),
            ({"forget": "missing.jsonl"}, "missing.jsonl"),
            ({"bundle": "missing"}, "missing"),
            ({"init_student": "missing/er/folder"}, "missing/er/folder"),
        ],
    )
    def test_invalid_settings_give_one_line_error(self, bundle, data, tmp_path, options, says, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(UsageError) as error:
            quiet(dataclasses.replace(settings_for(bundle, data, tmp_path / "out"), **options))
        assert says in str(error.value)
        assert "\n" not in str(error.value)
        assert not list(tmp_path.glob("out*"))

    def test_an_empty_forget_set(self, bundle, tmp_path):
        (tmp_path / "empty.jsonl").write_text("")
        with pytest.raises(UsageError, match="empty"):
            quiet(settings_for(bundle, [tmp_path / "empty.jsonl"], tmp_path / "out"))

    def test_incompatible_students(self, bundle, data, world, tmp_path):
        other = train_tokenizer(world.corpus[500:900], 400)
        new_model(Shape(32, 1, 2, 64), other, 0).save_pretrained(tmp_path / "other")
        other.save_pretrained(tmp_path / "other")
        with pytest.raises(UsageError, match=r"has another vocabulary \(\d+ tokens, \d+ logits\) than the teacher"):
            quiet(settings_for(bundle, data, tmp_path / "out", init_student=str(tmp_path / "other")))
        with pytest.raises(UsageError, match=r"is made of several checkpoints \(divergence\)"):
            quiet(settings_for(bundle, data, tmp_path / "out", init_student=str(bundle)))

    def test_output_folder_in_use_is_rejected(self, bundle, data, tmp_path, capsys):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("years of work")
        for overwrite, says in ((False, "not empty"), (True, "not an earlier result")):
            with pytest.raises(UsageError, match=says):
                quiet(settings_for(bundle, data, tmp_path / "out", overwrite=overwrite))
        with pytest.raises(UsageError, match="lie one within the other"):
            quiet(settings_for(bundle, data, bundle))
        arguments = ["distill", bundle, "--forget", data[0], "--output", tmp_path / "new", "--temperature", "-2"]
        assert main(list(map(str, arguments))) == 2
        assert capsys.readouterr().err.startswith("divdec distill: --temperature is -2; accepted: a number above 0")


# On two processes.


SHARDED = """
import sys, torch
from pathlib import Path
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
sys.path.insert(0, sys.argv[1])
from support.tiny import make_parts, tiny_model
from divdec import DivergenceForCausalLM
from divdec.training.distillation_loss import Distillation, SteeredTeacher, plain_head

torch.distributed.init_process_group("gloo")
batch = torch.load(sys.argv[2])
teacher = SteeredTeacher(DivergenceForCausalLM.from_parts(*make_parts("llama")), 1.5, "teacher-student", 40)
whole, student = tiny_model("llama", 512, 5), tiny_model("llama", 512, 5)
Distillation(teacher, plain_head(whole)).loss(whole, batch, None).backward()
head = plain_head(student)
mesh = init_device_mesh("cpu", (2,))
for layer in student.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(student, mesh=mesh)
Distillation(teacher, head).loss(student, batch, None).backward()
for (name, wanted), found in zip(whole.named_parameters(), student.parameters(), strict=True):
    torch.testing.assert_close(found.grad.full_tensor(), wanted.grad, rtol=1e-4, atol=1e-5, msg=name)
if dist.get_rank() == 0:
    print("equal")
dist.destroy_process_group()
"""
LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def python(*arguments):
    run = subprocess.run(
        [sys.executable, *map(str, arguments)], env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    # A student of four epochs may be far from its teacher: 3, which torchrun turns into 1.
    assert run.returncode in (0, 1, 3), run.stderr[-3000:]
    return run.stdout


@pytest.mark.slow
def test_the_loss_of_a_sharded_student(batch, tmp_path):
    torch.save(batch, tmp_path / "batch.pt")
    (tmp_path / "sharded.py").write_text(SHARDED)
    result = python(*LAUNCH, tmp_path / "sharded.py", Path(__file__).parents[1], tmp_path / "batch.pt")
    assert result.strip() == "equal"


@pytest.mark.slow
def test_two_process_distillation_matches_one_process(bundle, world, tmp_path):
    # As many as fill every batch: accelerate fills the last one up with others.
    forget = write_rows(tmp_path / "forget.jsonl", world.forget[:16])
    for name, launcher, batch_size in (("one", [], 8), ("two", LAUNCH, 4)):
        python(
            *launcher, "-m", "divdec.cli", "distill", bundle, "--forget", forget, "--output", tmp_path / name, "--lr",
            "1e-3", "--epochs", "4", "--batch-size", batch_size,
        )  # fmt: skip
    one, two = (json.loads((tmp_path / name / "run.json").read_text()) for name in ("one", "two"))
    assert one["training"]["steps"] == two["training"]["steps"] == 8
    assert two["after"]["forget"] == pytest.approx(one["after"]["forget"], rel=1e-3)
    torch.testing.assert_close(weights_of(tmp_path / "two"), weights_of(tmp_path / "one"), rtol=0, atol=1e-4)
