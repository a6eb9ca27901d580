"""The gradient methods on a tiny target that has learned what it is to forget: real training, in seconds."""

import dataclasses
import importlib
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, CTRLConfig, CTRLLMHeadModel

from divdec import UsageError
from divdec.data.formatting import encode_records, encode_set
from divdec.data.records import record_set, texts_of
from divdec.errors import Interrupted
from divdec.training.fine_tuning import fine_tune, mean_loss
from divdec.training.inputs import Collator, Companion, ExampleDataset, model_inputs
from divdec.training.settings import TrainingSettings
from divdec_research.baselines.job import Job
from divdec_research.baselines.methods.grad_diff import GradDiff, GradDiffSettings
from divdec_research.baselines.methods.idk_dpo import (
    IDK_ANSWERS,
    IdkDPO,
    IdkDPOSettings,
    draw_idk_answers,
    idk_dpo,
)
from divdec_research.baselines.methods.npo import NPO, NPOSettings, npo
from divdec_research.baselines.methods.rmu import RMU, RMUSettings, control_vector, freeze_others, misdirection
from divdec_research.baselines.methods.simnpo import SimNPO, SimNPOSettings
from divdec_research.baselines.methods.undial import UNDIAL, UNDIALSettings
from divdec_research.baselines.objective import log_probabilities_of
from divdec_research.baselines.run import build_method
from divdec_research.baselines.table import METHODS
from divdec_research.world.models import Shape, new_model
from support.stopping import stopping_at
from support.tiny import tiny_model

LAYERS = 3
# What moves a model of this size; published rates are for billions of weights.
COMMON = {"epochs": 5.0, "batch_size": 4, "gradient_accumulation": 1, "warmup": 0.0, "precision": "float32"}
OPTIONS = {
    "grad-ascent": {"learning_rate": 3e-3},
    "grad-diff": {"learning_rate": 3e-3},
    "npo": {"learning_rate": 3e-3},
    "simnpo": {"learning_rate": 3e-3, "gamma": 1.0},
    "rmu": {"learning_rate": 1e-2, "layer": 1, "coefficient": 20.0, "alpha": 10.0},
    "undial": {"learning_rate": 3e-3},
    "idk-dpo": {"learning_rate": 5e-3},
}
WITH_RETAIN_TERM = ("grad-diff", "npo", "simnpo", "rmu", "idk-dpo")


def questions(name, some):
    return record_set(name, [("", {"question": one.question, "answer": one.answer}) for one in some])


@pytest.fixture(scope="module")
def target(world, tokenizer, tmp_path_factory):
    """A model that knows eight forget and sixteen retain answers by heart."""
    folder = tmp_path_factory.mktemp("target")
    sets = questions("forget", world.forget[:8]), questions("retain", world.retain[:16])
    examples = [example for records in sets for example in encode_set(records, tokenizer)]
    settings = TrainingSettings(epochs=40.0, learning_rate=1e-2, batch_size=8)
    model = new_model(Shape(32, LAYERS, 2, 64), tokenizer, seed=0)
    model, _ = fine_tune(model, tokenizer, examples, settings, folder, title="target", measure=False, resumable=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def job(target, world, tokenizer, tmp_path):
    forget, retain = questions("forget", world.forget[:8]), questions("retain", world.retain[:16])
    return Job(target, tokenizer, forget, retain, tmp_path / "work")


def settings_of(name, **options):
    return METHODS[name].settings(**{**COMMON, **OPTIONS.get(name, {}), **options})


def make(job, name, output, **options):
    output.mkdir(parents=True)
    built = build_method(job, settings_of(name, **options), output)
    return built, AutoModelForCausalLM.from_pretrained(output)


def weights(model):
    return torch.cat([weight.flatten() for weight in model.state_dict().values()])


def probability(model, examples, tokenizer):
    """Geometric mean of the labelled tokens' probabilities."""
    return math.exp(-mean_loss(model.eval(), tokenizer, examples, 8))


@pytest.fixture(scope="module")
def models(target, world, tokenizer, tmp_path_factory):
    """The target, and what each method makes of it."""
    folder = tmp_path_factory.mktemp("methods")
    forget, retain = questions("forget", world.forget[:8]), questions("retain", world.retain[:16])
    job = Job(target, tokenizer, forget, retain, folder / "work")
    built = {name: make(job, name, folder / name)[1].eval() for name in OPTIONS}
    return {"target": AutoModelForCausalLM.from_pretrained(target).eval(), **built}


@pytest.fixture(scope="module")
def probabilities(models, world, tokenizer):
    """Probability of forget and retain answers, by model."""
    sets = {"forget": questions("forget", world.forget[:8]), "retain": questions("retain", world.retain[:16])}
    examples = {name: encode_set(records, tokenizer) for name, records in sets.items()}
    return {
        model: {name: probability(models[model], some, tokenizer) for name, some in examples.items()}
        for model in models
    }


def test_every_gradient_method_is_tested():
    assert {name for name, method in METHODS.items() if method.kind == "gradient"} == set(OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_method_lowers_forget_answer_probability(probabilities, name):
    assert probabilities["target"]["forget"] > 0.7
    assert probabilities["target"]["retain"] > 0.7
    assert probabilities[name]["forget"] < 0.6 * probabilities["target"]["forget"]


@pytest.mark.parametrize("name", WITH_RETAIN_TERM)
def test_retain_term_preserves_more_than_gradient_ascent(probabilities, name):
    assert probabilities[name]["retain"] > 2 * probabilities["grad-ascent"]["retain"]
    assert probabilities[name]["retain"] > 1.2 * probabilities[name]["forget"]


def test_result_is_plain_checkpoint_in_target_dtype(job, target, tokenizer, tmp_path):
    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).save_pretrained(half)
    tokenizer.save_pretrained(half)
    built, _ = make(dataclasses.replace(job, target=half), "grad-diff", tmp_path / "out", epochs=1.0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert type(model).__name__ == "LlamaForCausalLM"
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == tokenizer.get_vocab()
    assert built.seconds > 0
    assert built.notes == ()
    card = (tmp_path / "out" / "README.md").read_text()
    assert job.forget.label in card
    assert "Liu et al. 2022" in card
    assert "| alpha | 1.0 |" in card
    assert job.forget.records[0].answer not in card
    assert not list(job.work.iterdir())  # the trainer's checkpoints are gone


# What is computed of the frozen target.


def batches(job, companions=None, size=4):
    """The forget set's batches as training sees them."""
    rows = ExampleDataset(job.forget_examples, companions or {"retain": Companion(job.retain_examples)}, seed=0)
    collator = Collator(job.tokenizer, tuple(companions or ("retain",)))
    return [collator([rows[index] for index in range(start, start + size)]) for start in range(0, len(rows), size)]


@pytest.fixture(scope="module")
def other(tokenizer):
    return new_model(Shape(32, LAYERS, 2, 64), tokenizer, seed=5).eval()


def test_precomputed_reference_log_probs_match_reference_model(job, target, other):
    frozen = AutoModelForCausalLM.from_pretrained(target).eval()
    settings = settings_of("npo")
    objective = NPO(job, settings)
    objective.prepare(frozen)
    for batch in batches(job):
        slow = log_probabilities_of(frozen, model_inputs(batch)).detach()
        expected = npo(log_probabilities_of(other, model_inputs(batch)), slow, settings.beta)
        torch.testing.assert_close(objective.forget_loss(other, batch), expected)
        # The policy that is still the reference.
        start = objective.forget_loss(frozen, batch).item()
        assert start == pytest.approx(2 / settings.beta * math.log(2), rel=1e-5)


def test_idk_dpo_pairs_each_question_with_idk_answer(job, target, other, tokenizer):
    frozen = AutoModelForCausalLM.from_pretrained(target).eval()
    settings = settings_of("idk-dpo")
    idk = encode_records(draw_idk_answers(job.forget, IDK_ANSWERS, 0).records, tokenizer)
    objective = IdkDPO(job, settings)
    objective.prepare(frozen)
    assert objective.companions == {"idk": idk}
    companions = {"retain": Companion(job.retain_examples), "idk": Companion(idk, drawn=False)}
    for batch in batches(job, companions):
        chosen, rejected = model_inputs(batch, "idk"), model_inputs(batch)
        with torch.no_grad():
            expected = idk_dpo(
                *(log_probabilities_of(model, some) for model in (other, frozen) for some in (chosen, rejected)),
                settings.beta,
            )
        torch.testing.assert_close(objective.forget_loss(other, batch), expected)


def test_idk_dpo_raises_idk_answer_probability(job, models):
    idk = encode_records(draw_idk_answers(job.forget, IDK_ANSWERS, 0).records, job.tokenizer)
    before, after = (probability(models[name], idk, job.tokenizer) for name in ("target", "idk-dpo"))
    assert after > 3 * before


def test_retain_terms_are_weighted(job, target, other):
    frozen = AutoModelForCausalLM.from_pretrained(target).eval()
    batch = batches(job)[0]
    kl = GradDiff(job, GradDiffSettings(retain_loss="kl"))
    kl.prepare(other)
    retain = model_inputs(batch, "retain")
    assert kl.retain_loss(frozen, retain).item() == pytest.approx(0, abs=1e-6)
    assert kl.retain_loss(other, retain).item() > 1
    weighted = GradDiff(job, GradDiffSettings(gamma=2.0, alpha=3.0))
    nll = other(**retain).loss
    expected = -2 * other(**model_inputs(batch)).loss + 3 * nll
    torch.testing.assert_close(weighted.loss(other, batch, None), expected)
    torch.testing.assert_close(weighted.retain_loss(other, retain), nll)


def test_simnpo_normalizes_by_answer_length(job, other):
    batch = batches(job)[0]
    settings = SimNPOSettings(beta=2.0, delta=0.5)
    terms = [
        -torch.nn.functional.logsigmoid(
            2.0 * other(**{k: v[row : row + 1] for k, v in model_inputs(batch).items()}).loss - 0.5
        )
        for row in range(4)
    ]
    torch.testing.assert_close(SimNPO(job, settings).forget_loss(other, batch), torch.stack(terms).mean())


def test_undial_without_retain_term_skips_retain_set(job, target, other):
    batch = batches(job)[0]
    objective = UNDIAL(job, UNDIALSettings())
    objective.prepare(other)
    torch.testing.assert_close(objective.loss(other, model_inputs(batch), None), objective.forget_loss(other, batch))


# How it is trained.


@pytest.mark.slow  # tests/cli/test_baseline.py does this with rmu
@pytest.mark.parametrize("name", ["npo", "idk-dpo"])
def test_killed_run_resumes_to_same_weights(job, tmp_path, monkeypatch, name):
    _, whole = make(dataclasses.replace(job, work=tmp_path / "other"), name, tmp_path / "whole", epochs=2.0)
    with stopping_at(2), pytest.raises(Interrupted):
        make(job, name, tmp_path / "cut", epochs=2.0)
    assert not list((tmp_path / "cut").iterdir())
    built, resumed = make(job, name, tmp_path / "resumed", epochs=2.0)
    assert "resumed" in built.notes[0]
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "options"), [("grad-ascent", {}), pytest.param("npo", {"alpha": 0.0}, marks=pytest.mark.slow)]
)
def test_accumulated_gradients_match_single_batch(job, tmp_path, name, options):
    _, one = make(job, name, tmp_path / "one", epochs=1.0, **options)
    _, two = make(job, name, tmp_path / "two", epochs=1.0, batch_size=2, gradient_accumulation=2, **options)
    # Adam's steps are as long where a gradient is rounding and no more: few weights go another way.
    assert (weights(one) - weights(two)).abs().mean() < 1e-6


@pytest.mark.parametrize("name", [pytest.param("npo", marks=pytest.mark.slow), "rmu"])
def test_gradient_checkpointing_gives_same_weights(job, tmp_path, name):
    _, plain = make(job, name, tmp_path / "plain", epochs=1.0)
    _, saved = make(job, name, tmp_path / "saved", epochs=1.0, gradient_checkpointing=True)
    torch.testing.assert_close(weights(plain), weights(saved), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"), [("npo", {}), pytest.param("rmu", {"trainable": "all"}, marks=pytest.mark.slow)]
)
def test_adapters_are_trained_and_merged(job, target, tmp_path, name, options):
    before = AutoModelForCausalLM.from_pretrained(target)
    _, model = make(job, name, tmp_path / "out", lora_rank=4, learning_rate=2e-2, **options)
    assert set(model.state_dict()) == set(before.state_dict())
    assert torch.equal(model.get_input_embeddings().weight, before.get_input_embeddings().weight)
    some = [probability(one, job.forget_examples, job.tokenizer) for one in (before, model)]
    assert some[1] < 0.9 * some[0]


@pytest.mark.slow
def test_different_seeds_and_settings_give_different_weights(job, tmp_path):
    runs = {
        "first": (job, {}),
        "seed": (dataclasses.replace(job, seed=1), {}),
        "beta": (job, {"beta": 1.0}),
        "kl": (job, {"retain_loss": "kl"}),
        "again": (job, {}),
    }
    result = {
        name: weights(make(one, "npo", tmp_path / name, epochs=1.0, **some)[1]) for name, (one, some) in runs.items()
    }
    assert torch.equal(result["first"], result["again"])
    for name in ("seed", "beta", "kl"):
        assert not torch.equal(result["first"], result[name])


# A new method.


def test_method_of_the_example_is_one_file(job, target, tmp_path, monkeypatch):
    folder = Path(__file__).parents[3] / "examples" / "research"
    monkeypatch.syspath_prepend(folder)
    try:
        importlib.import_module("min_likelihood")
        built, model = make(job, "min-likelihood", tmp_path / "out", learning_rate=3e-3)
    finally:
        METHODS.pop("min-likelihood", None)
        sys.modules.pop("min_likelihood", None)
    before = AutoModelForCausalLM.from_pretrained(target)
    forget, retain = (
        [probability(one, examples, job.tokenizer) for one in (before, model)]
        for examples in (job.forget_examples, job.retain_examples)
    )
    assert forget[1] < 0.8 * forget[0]
    assert retain[1] / retain[0] > forget[1] / forget[0]
    assert "MinLikelihood" in (built.folder / "README.md").read_text()
    # The command line has the method and its options, without torch.
    command = "import sys, min_likelihood; from divdec.cli import main; main(['baseline', 'min-likelihood', '--help'])"
    result = subprocess.run(
        [sys.executable, "-c", f"{command}; print('torch' in sys.modules)"],
        env=os.environ | {"PYTHONPATH": str(folder)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert result.stdout.rstrip().endswith("False"), result.stderr
    assert "--retain-loss" in result.stdout


# RMU.


def test_rmu_reads_output_of_its_layer(job, target):
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    batch = batches(job)[0]
    seen = []
    handle = model.model.layers[1].register_forward_hook(lambda module, inputs, output: seen.append(output))
    objective = RMU(job, RMUSettings(layer=1))
    objective.prepare(model)
    result = objective.hidden_states(model, model_inputs(batch))
    handle.remove()
    hidden = seen[0] if isinstance(seen[0], torch.Tensor) else seen[0][0]
    assert torch.equal(result, hidden)


def test_rmu_moves_forget_activations_and_preserves_retain_activations(job, models):
    settings, before = settings_of("rmu"), models["target"]
    control = control_vector(32, settings.coefficient, job.seed)
    batch = batches(job)[0]
    objective = RMU(job, settings)
    objective.prepare(AutoModelForCausalLM.from_pretrained(job.target))
    assert torch.equal(objective.control, control)
    with torch.no_grad():
        hidden = {
            name: [objective.hidden_states(one, model_inputs(batch, name)) for one in (before, models["rmu"])]
            for name in ("", "retain")
        }
    labels = batch["labels"]
    aim = control.view(1, 1, -1)
    to_aim = [misdirection(some, aim, labels).item() for some in hidden[""]]
    assert to_aim[1] < 0.85 * to_aim[0]
    moved = misdirection(hidden[""][1], hidden[""][0], labels).item()
    held = misdirection(hidden["retain"][1], hidden["retain"][0], batch["retain_labels"]).item()
    assert held < 0.5 * moved


def test_rmu_vector_has_given_norm_and_positive_entries():
    vector = control_vector(64, 20.0, seed=3)
    assert vector.norm().item() == pytest.approx(20)
    assert (vector >= 0).all()
    assert torch.equal(vector, control_vector(64, 20.0, seed=3))
    assert not torch.equal(vector, control_vector(64, 20.0, seed=4))


def test_rmu_changes_only_trainable_weights(models):
    before = models["target"].state_dict()
    changed = {name for name, weight in models["rmu"].state_dict().items() if not torch.equal(weight, before[name])}
    assert changed == {"model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"}


@pytest.mark.parametrize("trainable", ["layers", "all"])
def test_rmu_trains_named_weights(tokenizer, trainable):
    model = new_model(Shape(32, 6, 2, 64), tokenizer, seed=0)
    freeze_others(model, RMUSettings(layer=3, trainable=trainable))
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    named = {name for name, _ in model.named_parameters()}
    near = {name for name in named if name.startswith(("model.layers.1.", "model.layers.2.", "model.layers.3."))}
    above = {name for name in named if name.startswith(("model.layers.4.", "model.layers.5."))}
    assert trained == (near if trainable == "layers" else named - above)


def test_down_projections_are_found_in_other_architectures(job):
    model = tiny_model("gpt2", 64, seed=0, layers=4)
    freeze_others(model, RMUSettings(layer=2))
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained == {f"transformer.h.{layer}.mlp.c_proj.weight" for layer in (0, 1, 2)}
    strange = CTRLLMHeadModel(CTRLConfig(vocab_size=20, n_embd=8, dff=8, n_layer=3, n_head=2))
    with pytest.raises(UsageError, match=r"no weight of CTRLLMHeadModel .* --trainable all"):
        freeze_others(strange, RMUSettings(layer=1))


@pytest.mark.parametrize("layer", [2, 7])
def test_missing_layer_raises(job, tmp_path, layer):
    with pytest.raises(UsageError, match=f"layer is {layer}, but the target has 3 layers; accepted: 0 to 1"):
        make(job, "rmu", tmp_path / "out", layer=layer)


# "I don't know".


def test_builtin_idk_answers_are_distinct():
    assert len(set(IDK_ANSWERS)) == len(IDK_ANSWERS) >= 20
    assert all(answer[-1] == "." for answer in IDK_ANSWERS)


def test_idk_answers_are_sampled_by_seed_for_unchanged_questions(job):
    first = draw_idk_answers(job.forget, IDK_ANSWERS, 0)
    assert first == draw_idk_answers(job.forget, IDK_ANSWERS, 0) != draw_idk_answers(job.forget, IDK_ANSWERS, 1)
    assert [record.messages for record in first] == [record.messages for record in job.forget]
    assert {record.answer for record in first} <= set(IDK_ANSWERS)
    assert len({record.answer for record in first}) > 3


def test_idk_dpo_rejects_plain_text(job, tmp_path):
    texts = texts_of("novel", ["It was a dark night.", "Nothing was asked."])
    with pytest.raises(UsageError, match=r"novel is plain text.*give questions"):
        make(dataclasses.replace(job, forget=texts), "idk-dpo", tmp_path / "out")


def test_other_methods_accept_plain_text(job, tmp_path):
    texts = texts_of("novel", [record.answer for record in job.forget])
    built, _ = make(dataclasses.replace(job, forget=texts), "simnpo", tmp_path / "out", epochs=1.0)
    assert built.seconds > 0


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        (NPOSettings, {"beta": -1.0}, "beta is -1; accepted: a number above 0"),
        (SimNPOSettings, {"delta": math.inf}, "delta is inf; accepted: a finite number"),
        (UNDIALSettings, {"beta": 0.0}, "beta is 0"),
        (IdkDPOSettings, {"alpha": -0.5}, "alpha is -0.5; accepted: a finite number of at least 0"),
        (GradDiffSettings, {"gamma": math.nan}, "gamma is nan"),
        (GradDiffSettings, {"learning_rate": 0.0}, "--lr is 0; accepted: a number above 0"),
        (GradDiffSettings, {"batch_size": 0}, "--batch-size is 0"),
        (GradDiffSettings, {"warmup": 1.0}, "warmup is 1; accepted: a share"),
        (GradDiffSettings, {"weight_decay": -1.0}, "--weight-decay is -1"),
        (RMUSettings, {"layer": -1}, "layer is -1"),
        (RMUSettings, {"coefficient": 0.0}, "coefficient is 0"),
        (RMUSettings, {"lora_rank": 4}, "give --trainable all"),
    ],
)
def test_invalid_settings_error_lists_accepted_values(settings, options, message):
    with pytest.raises(UsageError, match=message):
        settings(**options)
