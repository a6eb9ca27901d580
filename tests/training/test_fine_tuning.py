"""Real training of tiny models: it learns, resumes exactly, and stops without losing anything."""

import dataclasses
import os
import signal

import pytest
import torch
from transformers import TrainerCallback

from divdec import UsageError
from divdec.data.formatting import encode_set
from divdec.data.records import record_set
from divdec.experiments.small_models import Shape, new_model
from divdec.training import fine_tuning
from divdec.training.fine_tuning import fine_tune, mean_loss
from divdec.training.progress import Interrupted
from divdec.training.settings import TrainingSettings

SETTINGS = TrainingSettings(epochs=4.0, learning_rate=3e-3, batch_size=8)


@pytest.fixture(scope="module")
def examples(world, tokenizer):
    rows = [("", {"question": question.question, "answer": question.answer}) for question in world.retain[:40]]
    return encode_set(record_set("retain", rows), tokenizer)


def model_for(tokenizer, seed=0):
    return new_model(Shape(32, 2, 2, 64), tokenizer, seed)


def weights(model):
    return torch.cat([tensor.flatten() for tensor in model.state_dict().values()])


def test_it_learns_and_says_what_it_cost(examples, tokenizer, tmp_path):
    model, result = fine_tune(model_for(tokenizer), tokenizer, examples, SETTINGS, tmp_path, title="test")
    assert result.loss_after < 0.9 * result.loss_before
    assert result.steps == 4 * 5
    assert result.tokens == sum(len(example.input_ids) for example in examples)
    assert not model.training
    collator = fine_tuning.DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100)
    assert mean_loss(model, collator, examples, 3) == pytest.approx(mean_loss(model, collator, examples, 40), rel=1e-5)


class StopAt(TrainerCallback):
    """Sends the process a real Ctrl-C at a step."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


def interrupted_at(step, monkeypatch, *arguments, **options):
    trainer = fine_tuning._Trainer
    with monkeypatch.context() as patch:
        patch.setattr(
            fine_tuning,
            "_Trainer",
            lambda **given: trainer(**{**given, "callbacks": [*given["callbacks"], StopAt(step)]}),
        )
        with pytest.raises(Interrupted, match=f"interrupted at step {step + 1}"):
            fine_tune(*arguments, **options)


@pytest.mark.parametrize("step", [2, 7, 12])
def test_an_interrupted_run_goes_on_to_the_same_weights(examples, tokenizer, tmp_path, monkeypatch, step):
    whole, _ = fine_tune(model_for(tokenizer), tokenizer, examples, SETTINGS, tmp_path / "whole", title="whole")
    folder = tmp_path / "cut"
    interrupted_at(step, monkeypatch, model_for(tokenizer), tokenizer, examples, SETTINGS, folder, title="cut")
    # A checkpoint that was cut off while it was written must not be taken up.
    broken = folder / "checkpoints" / "checkpoint-19"
    broken.mkdir()
    (broken / "model.safetensors").write_bytes(b"half")
    resumed, result = fine_tune(model_for(tokenizer), tokenizer, examples, SETTINGS, folder, title="resumed")
    assert result.steps == 20
    assert not broken.exists()
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=1e-6)


def test_checkpoints_of_another_run_are_not_taken_up(examples, tokenizer, tmp_path, monkeypatch):
    interrupted_at(3, monkeypatch, model_for(tokenizer), tokenizer, examples, SETTINGS, tmp_path, title="one")
    other = dataclasses.replace(SETTINGS, learning_rate=1e-3)
    with pytest.raises(UsageError, match="other settings"):
        fine_tune(model_for(tokenizer), tokenizer, examples, other, tmp_path, title="other")
    with pytest.raises(UsageError, match="other settings or data"):
        fine_tune(model_for(tokenizer), tokenizer, examples[1:], SETTINGS, tmp_path, title="other")


def test_ctrl_c_is_the_programs_own_again_afterwards(examples, tokenizer, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    fine_tune(model_for(tokenizer), tokenizer, examples, SETTINGS, tmp_path, title="test", resumable=False)
    assert signal.getsignal(signal.SIGINT) is before
    assert not (tmp_path / "checkpoints").exists()


def test_adapters_are_merged_into_an_ordinary_model(examples, tokenizer, tmp_path):
    settings = dataclasses.replace(SETTINGS, lora_rank=8, learning_rate=1e-2, epochs=8.0)
    model = model_for(tokenizer)
    names = set(model.state_dict())
    frozen = model.get_input_embeddings().weight.clone()
    trained, result = fine_tune(model, tokenizer, examples, settings, tmp_path, title="lora")
    assert set(trained.state_dict()) == names
    assert torch.equal(trained.get_input_embeddings().weight, frozen)
    assert result.loss_after < result.loss_before - 0.1


def test_nothing_to_learn(tokenizer, tmp_path):
    with pytest.raises(UsageError, match="nothing to learn"):
        fine_tune(model_for(tokenizer), tokenizer, [], SETTINGS, tmp_path, title="test")
