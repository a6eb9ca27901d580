"""Gradient depth against autograd by hand, on several families, and that nothing is changed by measuring it."""

import hashlib
import json
import math
import xml.etree.ElementTree as ElementTree

import pytest
import torch
import transformers

from divdec import DivergenceForCausalLM, UsageError
from divdec.cli import main
from divdec.data.formatting import IGNORED, Example
from divdec.errors import Diverged
from divdec_research.gradient_depth import decoder_parts, gradient_depth
from divdec_research.report.gradient_depth import depth_table, peaks
from divdec_research.suites.aggregate import Bootstrap, mean_interval
from support.tiny import make_parts, tiny_model

# Three examples of different lengths; the first two begin with a prompt.
EXAMPLES = [
    Example([5, 6, 7, 8, 9, 10, 11], [IGNORED] * 3 + [8, 9, 10, 11]),
    Example([40, 41, 42], [IGNORED, IGNORED, 42]),
    Example([100, 3, 77, 5], [100, 3, 77, 5]),
]
# Where each family keeps the weights, found without the code under test.
PREFIXES = {
    "llama": ("model.layers.{}.self_attn.", "model.layers.{}.mlp."),
    "qwen": ("model.layers.{}.self_attn.", "model.layers.{}.mlp."),
    "gpt2": ("transformer.h.{}.attn.", "transformer.h.{}.mlp."),
}


def by_hand(model, example, temperature, direction, prefixes):
    """T²·KL of one example and its gradient's norms, [attention and mlp][layer], by autograd in float64."""
    target, (q, p) = model.target, (model.experts.retain, model.experts.forget)
    ids = torch.tensor([example.input_ids])
    weights = dict(target.named_parameters())
    for weight in weights.values():
        weight.requires_grad_(True)
    student = target(input_ids=ids).logits[0].double()
    with torch.no_grad():
        difference = q(input_ids=ids).logits[0] - p(input_ids=ids).logits[0]
        teacher = student + model.steering.alpha * difference.double()
    terms = []
    for index in range(len(example.input_ids) - 1):
        if example.labels[index + 1] == IGNORED:
            continue
        s, t = (torch.softmax(logits[index] / temperature, dim=-1) for logits in (student, teacher))
        first, second = (t, s) if direction == "teacher-student" else (s, t)
        terms.append(torch.sum(first * torch.log(first / second)))
    loss = temperature**2 * sum(terms) / len(terms)
    gradients = dict(zip(weights, torch.autograd.grad(loss, weights.values(), allow_unused=True), strict=True))
    layers = target.config.num_hidden_layers
    return [
        [
            math.sqrt(sum(float(g.double().square().sum()) for name, g in gradients.items() if name.startswith(start)))
            for start in (prefix.format(layer) for layer in range(layers))
        ]
        for prefix in prefixes
    ]


def table(found, set_name, place):
    """Norms of one example, [attention and mlp][layer]."""
    rows = [row for row in found if row["set"] == set_name]
    return [[row["norms"][place] for row in rows if row["part"] == piece] for piece in ("attention", "mlp")]


@pytest.mark.parametrize("direction", ["teacher-student", "student-teacher"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_gradient_norms_match_autograd(steered, family, temperature, direction, tokenizer):
    result = gradient_depth(steered, tokenizer, {"forget": EXAMPLES}, temperature=temperature, direction=direction)
    for index, example in enumerate(EXAMPLES):
        expected = by_hand(steered, example, temperature, direction, PREFIXES[family])
        for got, wanted in zip(table(result, "forget", index), expected, strict=True):
            assert got == pytest.approx(wanted, rel=2e-4)
            assert all(norm > 0 for norm in got)


def digest_of(model):
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def test_measurement_leaves_weights_and_gradients_unchanged(steered, tokenizer):
    weights = list(steered.target.parameters())
    weights[0].requires_grad_(False)
    weights[1].grad = torch.ones_like(weights[1])
    steered.target.train()
    before = digest_of(steered), [w.requires_grad for w in weights]
    gradient_depth(steered, tokenizer, {"forget": EXAMPLES})
    assert (digest_of(steered), [w.requires_grad for w in weights]) == before
    assert torch.equal(weights[1].grad, torch.ones_like(weights[1]))
    assert all(w.grad is None for w in [weights[0], *weights[2:]])
    assert not any(w._post_accumulate_grad_hooks for w in weights)


def test_dropout_is_disabled_during_measurement(tokenizer):
    target, q, p = make_parts("gpt2")
    model = DivergenceForCausalLM.from_parts(target, q, p)
    model.train()  # GPT-2 drops a tenth
    one, other = (gradient_depth(model, tokenizer, {"forget": EXAMPLES}) for _ in range(2))
    assert one == other


def test_interrupted_measurement_restores_model(steered, monkeypatch, tokenizer):
    target = steered.target
    asked = [weight.requires_grad for weight in target.parameters()]
    forward, calls = type(target).forward, []

    def interrupted(self, *arguments, **options):
        calls.append(self is target)
        if sum(calls) == 3:  # the teacher's pass and the student's are over, the next student's begins
            raise KeyboardInterrupt
        return forward(self, *arguments, **options)

    monkeypatch.setattr(type(target), "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gradient_depth(steered, tokenizer, {"forget": EXAMPLES})
    assert [weight.requires_grad for weight in target.parameters()] == asked
    assert all(weight.grad is None and not weight._post_accumulate_grad_hooks for weight in target.parameters())


def test_identical_teacher_and_student_give_zero_gradient(steered, tokenizer):
    largest = {}
    for steering in ("linear:0", "linear:1"):
        steered.steering = steering
        result = gradient_depth(steered, tokenizer, {"forget": EXAMPLES})
        largest[steering] = max(norm for row in result for norm in row["norms"])
    assert largest["linear:0"] < 1e-4 * largest["linear:1"]  # two passes of one model differ by rounding


def test_means_and_intervals_are_over_examples(steered, tokenizer):
    bootstrap = Bootstrap(seed=3, draws=200)
    result = gradient_depth(steered, tokenizer, {"forget": EXAMPLES, "retain": EXAMPLES[:2]}, bootstrap=bootstrap)
    layers = steered.target.config.num_hidden_layers
    places = [(row["set"], row["part"], row["layer"]) for row in result]
    assert places == [
        (name, piece, layer)
        for name in ("forget", "retain")
        for piece in ("attention", "mlp")
        for layer in range(layers)
    ]
    for row in result:
        assert row["mean"] == pytest.approx(sum(row["norms"]) / len(row["norms"]))
        assert (row["low"], row["high"]) == mean_interval(row["norms"], bootstrap)
        assert row["low"] <= row["mean"] <= row["high"]
        assert row["n"] == len(row["norms"]) == {"forget": 3, "retain": 2}[row["set"]]
    # An example's norms do not depend on what stands beside it.
    assert table(result, "forget", 1)[0] == pytest.approx(table(result, "retain", 1)[0], rel=1e-4)
    top = peaks(result)["forget", "attention"]
    assert result[top]["mean"] == max(row["mean"] for row in result[:layers])
    head, _, *lines = depth_table(result).splitlines()
    assert head == "| layer | forget, attention | forget, MLP | retain, attention | retain, MLP |"
    assert len(lines) == layers
    assert lines[top].split(" | ")[1].startswith("**")


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (transformers.GPTNeoXConfig(), ("attention", "mlp")),
        (transformers.FalconConfig(), ("self_attention", "mlp")),
        (transformers.GPTJConfig(n_embd=32, n_head=4, rotary_dim=4), ("attn", "mlp")),
        (transformers.Gemma2Config(), ("self_attn", "mlp")),
        (transformers.MptConfig(), ("attn", "ffn")),
        (transformers.MixtralConfig(num_local_experts=2), ("self_attn", "mlp")),
    ],
)
def test_decoder_layers_are_found_in_other_families(config, names):
    config.num_hidden_layers = 3
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    result = decoder_parts(model)
    assert len(result) == 3
    modules = dict(model.named_modules())
    for layer, parts in enumerate(result):
        for piece, name in zip(("attention", "mlp"), names, strict=True):
            (index,) = [where for where, module in modules.items() if module is parts[piece]]
            assert index.endswith(f".{layer}.{name}")


def test_nested_module_list_is_not_mistaken_for_layers():
    model = tiny_model("llama", 64, seed=0, layers=3)
    model.model.layers[0].mlp.experts = torch.nn.ModuleList([torch.nn.Identity() for _ in range(3)])
    assert [parts["mlp"] for parts in decoder_parts(model)] == [layer.mlp for layer in model.model.layers]


def test_unknown_architecture_error_lists_layer_modules():
    config = transformers.OPTConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, ffn_dim=32, num_attention_heads=2, word_embed_proj_dim=16
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(UsageError, match=r"layer 0 .*OPTDecoderLayer.* has no mlp .*its children are self_attn.*fc1"):
        decoder_parts(model)


@pytest.mark.parametrize("rule", ["rank:5", "rank:5:soft"])
def test_gradient_depth_with_rank_rule_requires_soft_fill(steered, rule, tokenizer):
    steered.steering = rule
    if rule.endswith("soft"):
        assert min(row["mean"] for row in gradient_depth(steered, tokenizer, {"forget": EXAMPLES})) > 0
    else:
        with pytest.raises(UsageError, match=r"rank:5 gives tokens the probability 0.*--steering rank:5:soft"):
            gradient_depth(steered, tokenizer, {"forget": EXAMPLES})


def test_example_without_labels_is_named_in_error(steered, tokenizer):
    blank = Example([1, 2], [1, IGNORED])
    with pytest.raises(UsageError, match="retain example 1 "):
        gradient_depth(steered, tokenizer, {"forget": EXAMPLES, "retain": [EXAMPLES[0], blank]})


def test_non_finite_gradient_error_names_example(tokenizer):
    target, q, p = (tiny_model("llama", 512, seed) for seed in range(3))
    model = DivergenceForCausalLM.from_parts(target, q, p)
    with torch.no_grad():
        target.get_input_embeddings().weight[41] = math.nan
    with pytest.raises(Diverged, match="forget example 1 "):
        gradient_depth(model, tokenizer, {"forget": EXAMPLES})


@pytest.fixture
def files(world, tmp_path):
    result = {}
    for name, questions in (("forget", world.forget[:6]), ("retain", world.retain[:9])):
        rows = [json.dumps({"question": q.question, "answer": q.answer}) for q in questions]
        result[name] = tmp_path / f"{name}.jsonl"
        result[name].write_text("\n".join(rows))
    return result


def depth(bundle, files, output, *options):
    settings = {name: f"--{name}={path}" for name, path in {**files, "output": output}.items()}
    settings |= {option.removeprefix("--").partition("=")[0]: option for option in options}
    return main(["gradient-depth", str(bundle), *settings.values()])


def test_depth_command_writes_json_plot_and_run_record(bundle, files, tmp_path, capsys):
    output = tmp_path / "out"
    assert depth(bundle, files, output, "--samples=5", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert sorted(path.name for path in output.iterdir()) == ["depth.json", "depth.svg", "run.json"]
    content = json.loads((output / "depth.json").read_text())
    assert content == printed
    assert content["steering"] == "linear:1.5"
    assert len(content["rows"]) == 2 * 2 * 3  # sets, parts, layers
    for row in content["rows"]:
        assert row["n"] == len(row["norms"]) == 5
        assert 0 < row["low"] <= row["mean"] <= row["high"]
    record = json.loads((output / "run.json").read_text())
    assert (record["verb"], record["settings"]["samples"]) == ("gradient-depth", 5)
    svg = (output / "depth.svg").read_text()
    ElementTree.fromstring(svg)
    for label in ("forget", "retain", "attention", "MLP", "layer (0", "L2 norm", "nats per token", "99 % interval"):
        assert label in svg
    # Not empty any more: only on demand, and only an earlier result.
    assert depth(bundle, files, output) == 2
    assert "is not empty" in capsys.readouterr().err
    assert depth(bundle, files, output, "--overwrite", "--steering=linear:0") == 0
    assert "steers nothing" in capsys.readouterr().err
    unsteered = json.loads((output / "depth.json").read_text())["rows"]
    assert max(row["mean"] for row in unsteered) < 1e-4 * max(row["mean"] for row in content["rows"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--forget=none.jsonl",), "does not exist"),
        (("--temperature=0",), "temperature is 0"),
        (("--samples=-1",), "samples is -1"),
        (("--seed=-1",), "seed is -1"),
        (("--steering=rank:5",), "probability 0"),
        (("--direction=sideways",), "sideways"),
    ],
)
def test_invalid_input_gives_one_line_error_and_writes_nothing(bundle, files, tmp_path, capsys, options, said):
    assert depth(bundle, files, tmp_path / "out", *options) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.strip().splitlines()[-1].startswith("divdec gradient-depth:")
    assert not (tmp_path / "out").exists()


def test_retain_set_is_required(bundle, files, tmp_path, capsys):
    assert main(["gradient-depth", str(bundle), f"--forget={files['forget']}", f"--output={tmp_path / 'out'}"]) == 2
    assert "retain" in capsys.readouterr().err
