"""Real training of tiny models: it learns, resumes exactly, and stops without losing anything."""

import copy
import dataclasses
import signal
from types import SimpleNamespace

import pytest
import torch

from divdec import UsageError
from divdec.data.formatting import encode_set
from divdec.data.records import record_set
from divdec.errors import Diverged, Interrupted
from divdec.training import fine_tuning
from divdec.training.distillation_loss import LabelledCrossEntropy, plain_head
from divdec.training.fine_tuning import fine_tune, mean_loss, uses_bfloat16
from divdec.training.inputs import Collator, Companion, ExampleDataset, model_inputs
from divdec.training.settings import TrainingSettings
from divdec_research.world.models import Shape, new_model
from support.stopping import stopping_at
from support.tiny import tiny_model

SETTINGS = TrainingSettings(epochs=4.0, learning_rate=3e-3, batch_size=8)


@pytest.fixture(scope="module")
def examples(world, tokenizer):
    rows = [("", {"question": question.question, "answer": question.answer}) for question in world.retain[:40]]
    return encode_set(record_set("retain", rows), tokenizer)


def model_for(tokenizer, seed=0):
    return new_model(Shape(32, 2, 2, 64), tokenizer, seed)


def weights(model):
    return torch.cat([tensor.flatten() for tensor in model.state_dict().values()])


def test_training_lowers_the_loss_and_reports_its_cost(examples, tokenizer, whole):
    model, result = whole
    assert result.loss_after < 0.9 * result.loss_before
    assert result.steps == 4 * 5
    assert result.tokens == sum(len(example.input_ids) for example in examples)
    assert not model.training
    loss = mean_loss(model, tokenizer, examples, 40)
    assert mean_loss(model, tokenizer, examples, 3) == pytest.approx(loss, rel=1e-5)
    assert mean_loss(model, tokenizer, examples, 3, head=plain_head(model)) == pytest.approx(loss, rel=1e-5)
    assert mean_loss(model, tokenizer, examples, 3, bfloat16=True) == pytest.approx(loss, rel=0.02)


def interrupted_at(step, *arguments, **options):
    with stopping_at(step), pytest.raises(Interrupted, match=f"interrupted at step {step + 1}"):
        fine_tune(*arguments, **options)


@pytest.fixture(scope="module")
def whole(examples, tokenizer, tmp_path_factory):
    """A model after an uninterrupted run, and its result."""
    folder = tmp_path_factory.mktemp("whole")
    return fine_tune(model_for(tokenizer), tokenizer, examples, SETTINGS, folder, title="whole")


@pytest.mark.parametrize("step", [2, 12])
def test_resumed_training_gives_same_weights(examples, tokenizer, tmp_path, whole, step):
    folder = tmp_path / "cut"
    interrupted_at(step, model_for(tokenizer), tokenizer, examples, SETTINGS, folder, title="cut")
    # A checkpoint that was cut off while it was written must not be taken up.
    broken = folder / "checkpoints" / "checkpoint-19"
    broken.mkdir()
    (broken / "model.safetensors").write_bytes(b"half")
    resumed, result = fine_tune(model_for(tokenizer), tokenizer, examples, SETTINGS, folder, title="resumed")
    assert result.steps == 20
    assert not broken.exists()
    torch.testing.assert_close(weights(resumed), weights(whole[0]), rtol=0, atol=1e-6)


def test_checkpoints_of_another_run_are_not_resumed(examples, tokenizer, tmp_path):
    interrupted_at(1, model_for(tokenizer), tokenizer, examples, SETTINGS, tmp_path, title="one")
    other = dataclasses.replace(SETTINGS, learning_rate=1e-3)
    with pytest.raises(UsageError, match="other settings"):
        fine_tune(model_for(tokenizer), tokenizer, examples, other, tmp_path, title="other")
    with pytest.raises(UsageError, match="other settings, data, precision or number of devices"):
        fine_tune(model_for(tokenizer), tokenizer, examples[1:], SETTINGS, tmp_path, title="other")


def test_a_run_goes_on_with_as_many_processes_and_the_same_precision(examples, tokenizer, tmp_path, monkeypatch):
    interrupted_at(1, model_for(tokenizer), tokenizer, examples, SETTINGS, tmp_path, title="one")
    two = SimpleNamespace(train_batch_size=SETTINGS.batch_size, world_size=2)
    for name, value in (("_training_arguments", lambda *_: two), ("uses_bfloat16", lambda *_: True)):
        with monkeypatch.context() as patch, pytest.raises(UsageError, match="precision or number of devices"):
            patch.setattr(fine_tuning, name, value)
            fine_tune(model_for(tokenizer), tokenizer, examples, SETTINGS, tmp_path, title="other")


@pytest.mark.parametrize(("step", "saved"), [(1, [2]), (4, [5]), (7, [5, 8])])
def test_each_checkpoint_is_written_once(examples, tokenizer, tmp_path, monkeypatch, step, saved):
    """A second signal could leave a half of the second copy, which counts as complete."""
    save, steps = fine_tuning.ObjectiveTrainer._save_checkpoint, []

    def counted(self, *arguments, **options):
        steps.append(self.state.global_step)
        return save(self, *arguments, **options)

    monkeypatch.setattr(fine_tuning.ObjectiveTrainer, "_save_checkpoint", counted)
    interrupted_at(step, model_for(tokenizer), tokenizer, examples, SETTINGS, tmp_path, title="one")
    assert steps == saved


def test_the_precision_is_not_that_of_the_launcher(examples, tokenizer, tmp_path, whole, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    settings = dataclasses.replace(SETTINGS, precision="float32")
    trained, _ = fine_tune(model_for(tokenizer), tokenizer, examples, settings, tmp_path, title="test")
    torch.testing.assert_close(weights(trained), weights(whole[0]), rtol=0, atol=1e-6)


def test_the_signal_handler_is_restored(examples, tokenizer, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    settings = dataclasses.replace(SETTINGS, epochs=0.2)
    fine_tune(model_for(tokenizer), tokenizer, examples, settings, tmp_path, title="test", resumable=False)
    assert signal.getsignal(signal.SIGINT) is before
    assert not (tmp_path / "checkpoints").exists()


def test_adapters_are_merged_into_base_model(examples, tokenizer, tmp_path):
    settings = dataclasses.replace(SETTINGS, lora_rank=8, learning_rate=1e-2, epochs=8.0)
    model = model_for(tokenizer)
    names = set(model.state_dict())
    frozen = model.get_input_embeddings().weight.clone()
    trained, result = fine_tune(model, tokenizer, examples, settings, tmp_path, title="lora")
    assert set(trained.state_dict()) == names
    assert torch.equal(trained.get_input_embeddings().weight, frozen)
    assert result.loss_after < result.loss_before - 0.1


def test_empty_training_set(tokenizer, tmp_path):
    with pytest.raises(UsageError, match="nothing to learn"):
        fine_tune(model_for(tokenizer), tokenizer, [], SETTINGS, tmp_path, title="test")


# With another objective than the cross entropy, and companions.


class CrossEntropy:
    """The default written as an objective, so that both can be compared."""

    counts_tokens = True

    def to(self, device):
        self.device = device

    def loss(self, model, batch, labelled):
        logits = model(**{name: batch[name] for name in ("input_ids", "attention_mask")}).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / labelled


@pytest.mark.parametrize("accumulation", [1, 4])
def test_explicit_default_objective_gives_same_weights(examples, tokenizer, tmp_path, accumulation):
    settings = dataclasses.replace(SETTINGS, epochs=1.0, batch_size=8 // accumulation)
    settings = dataclasses.replace(settings, gradient_accumulation=accumulation)
    results = [
        weights(
            fine_tune(
                model_for(tokenizer),
                tokenizer,
                examples,
                settings,
                tmp_path / str(index),
                title="t",
                objective=objective,
            )[0]
        )
        for index, objective in enumerate((None, CrossEntropy()))
    ]
    assert torch.allclose(*results, atol=1e-6)


def test_companion_examples_are_sampled_evenly_and_reproducibly(examples):
    rows = ExampleDataset(examples[:20], {"retain": Companion(examples[20:30])}, seed=3)
    seen = []
    for epoch in (0, 1):
        rows.set_epoch(epoch)
        drawn = [tuple(rows[index]["retain_input_ids"]) for index in range(20)]
        assert sorted(drawn) == sorted(tuple(example.input_ids) for example in examples[20:30] for _ in range(2))
        seen.append(drawn)
    assert seen[0] != seen[1]
    again = ExampleDataset(examples[:20], {"retain": Companion(examples[20:30])}, seed=3)
    again.set_epoch(1)
    assert [tuple(again[index]["retain_input_ids"]) for index in range(20)] == seen[1]
    with pytest.raises(UsageError, match="10 other examples for 20"):
        ExampleDataset(examples[:20], {"other": Companion(examples[20:30], drawn=False)}, seed=3)


class Learned:
    """Cross entropy of the companion alone; it remembers what it was shown."""

    counts_tokens = False

    def __init__(self, breaks_at=None):
        self.seen, self.breaks_at = [], breaks_at

    def to(self, device):
        pass

    def loss(self, model, batch, labelled):
        assert labelled is None
        self.seen.append(batch["retain_input_ids"].tolist())
        loss = model(**model_inputs(batch, "retain")).loss
        return loss * float("nan") if len(self.seen) == self.breaks_at else loss


def test_resumed_training_samples_same_companions(examples, tokenizer, tmp_path):
    companions = {"retain": Companion(examples[20:40])}

    def run(folder, objective):
        model = model_for(tokenizer)
        arguments = (model, tokenizer, examples[:20], SETTINGS, tmp_path / folder)
        return arguments, {"title": "t", "objective": objective, "companions": companions}

    whole = Learned()
    arguments, options = run("whole", whole)
    trained, _ = fine_tune(*arguments, **options)
    cut = Learned()
    arguments, options = run("cut", cut)
    interrupted_at(7, *arguments, **options)
    arguments, options = run("cut", cut)
    resumed, _ = fine_tune(*arguments, **options)
    assert cut.seen == whole.seen
    assert torch.equal(weights(resumed), weights(trained))


def test_non_finite_loss_stops_training_and_keeps_last_checkpoint(examples, tokenizer, tmp_path):
    companions = {"retain": Companion(examples[20:40])}
    with pytest.raises(Diverged, match=r"the loss is nan at step 5, on examples (\d+, ){7}\d+ \(counted from 0\)"):
        fine_tune(
            model_for(tokenizer), tokenizer, examples[:20], SETTINGS, tmp_path, title="t",
            objective=Learned(breaks_at=5), companions=companions,
        )  # fmt: skip
    assert (tmp_path / "checkpoints" / "checkpoint-3" / fine_tuning.COMPLETE).is_file()


def test_a_checkpoint_that_a_full_disk_cut_is_not_resumed(tmp_path):
    for step, content in ((3, "{}"), (6, "")):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / fine_tuning.COMPLETE).write_text(content)
    assert fine_tuning._last_checkpoint(tmp_path, "").name == "checkpoint-3"
    assert not (tmp_path / "checkpoint-6").exists()


def test_attention_whose_gradients_can_be_nan_is_not_used(examples, tokenizer, tmp_path):
    assert torch.backends.cuda.cudnn_sdp_enabled()
    used = []
    fine_tune(
        model_for(tokenizer), tokenizer, examples, SETTINGS, tmp_path, title="t",
        on_epoch=lambda model, epoch: used.append(torch.backends.cuda.cudnn_sdp_enabled()),
    )  # fmt: skip
    assert used
    assert not any(used)
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_on_epoch_is_called_after_each_epoch(examples, tokenizer, tmp_path):
    seen = []

    def look(model, epoch):
        assert not model.training
        seen.append((epoch, mean_loss(model, tokenizer, examples, 40)))

    _, result = fine_tune(model_for(tokenizer), tokenizer, examples, SETTINGS, tmp_path, title="t", on_epoch=look)
    assert [epoch for epoch, _ in seen] == [1, 2, 3, 4]
    assert seen[-1][1] == pytest.approx(result.loss_after, rel=1e-5)
    assert seen[-1][1] < seen[0][1]


@pytest.mark.parametrize("labelled", [None, 100])
def test_cross_entropy_of_labelled_tokens_alone_equals_the_models_own_loss(examples, tokenizer, labelled):
    batch = next(Collator(tokenizer).batches(examples, range(8), 8, torch.device("cpu")))
    own, ours = model_for(tokenizer), model_for(tokenizer)
    options = {} if labelled is None else {"num_items_in_batch": labelled}
    expected = own(**model_inputs(batch), **options).loss
    loss = LabelledCrossEntropy(plain_head(ours)).loss(ours, batch, labelled)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    expected.backward()
    loss.backward()
    for one, other in zip(ours.parameters(), own.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("settings", [{"pad_token": None}, {"padding_side": "left"}])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_batches_are_padded_on_the_right_whatever_the_tokenizer_says(examples, tokenizer, family, settings):
    other = copy.deepcopy(tokenizer)
    for name, value in settings.items():
        setattr(other, name, value)
    batch = Collator(other)([dataclasses.asdict(example) for example in (examples[0], examples[5])])
    for row, example in enumerate((examples[0], examples[5])):
        length = len(example.input_ids)
        assert batch["input_ids"][row, :length].tolist() == example.input_ids
        assert batch["labels"][row, :length].tolist() == example.labels
        assert batch["attention_mask"][row].tolist() == [int(i < length) for i in range(batch["labels"].shape[1])]
        assert set(batch["labels"][row, length:].tolist()) <= {-100}
    model = tiny_model(family, len(tokenizer), seed=0)
    assert mean_loss(model, other, examples, 7) == pytest.approx(mean_loss(model, other, examples, 1), rel=1e-5)


def test_training_without_a_padding_token_gives_same_weights(examples, tokenizer, tmp_path, whole):
    other = copy.deepcopy(tokenizer)
    other.pad_token = None
    trained, _ = fine_tune(model_for(tokenizer), other, examples, SETTINGS, tmp_path, title="unpadded")
    torch.testing.assert_close(weights(trained), weights(whole[0]), rtol=0, atol=1e-6)


def test_auto_precision_is_bfloat16_for_large_models_on_a_cpu_that_has_it(tokenizer, monkeypatch):
    model, auto = model_for(tokenizer), TrainingSettings()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for instructions, least, expected in ((True, 1, True), (True, 30_000_000, False), (False, 1, False)):
        monkeypatch.setattr(fine_tuning, "has_bfloat16_instructions", lambda instructions=instructions: instructions)
        monkeypatch.setattr(fine_tuning, "MIN_FOR_BFLOAT16", least)
        assert uses_bfloat16(auto, model) is expected
        assert uses_bfloat16(dataclasses.replace(auto, precision="bfloat16"), model)
        assert not uses_bfloat16(dataclasses.replace(auto, precision="float32"), model)


def test_training_in_bfloat16_learns_and_says_so(examples, tokenizer, tmp_path, whole):
    settings = dataclasses.replace(SETTINGS, precision="bfloat16")
    _, result = fine_tune(model_for(tokenizer), tokenizer, examples, settings, tmp_path, title="bfloat16")
    assert (result.precision, whole[1].precision) == ("bfloat16", "float32")
    assert result.loss_after == pytest.approx(whole[1].loss_after, rel=0.1)
