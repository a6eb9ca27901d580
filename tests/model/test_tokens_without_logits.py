"""Special tokens beyond a model's logits, such as Gemma 3's `<image_soft_token>`: accepted, and refused in prompts."""

import copy
import json

import pytest
import torch

from divdec import DivergenceForCausalLM, UsageError, write_bundle
from divdec.bridge.pair import BridgedPair
from divdec.checkpoint import load_tokenizer
from divdec.cli import main
from divdec.data.formatting import encode_prompt, encode_records
from divdec.data.records import Message, Record
from divdec.model.loading import Bundle
from divdec.remote.experts import LoadedExperts, SteeringContext
from support.engines import alone, answered_tokens, greedy, run
from support.tiny import make_parts, tiny_model

TOKEN = "<image_soft_token>"
REFUSED = f"special token '{TOKEN}', for which the model has no embedding"
TEXT = f"Who wrote {TOKEN} it?"
PARTS = {"target": "target", "retain_auxiliary": "retain", "forget_auxiliary": "forget"}


@pytest.fixture(scope="module")
def extended(tokenizer):
    result = copy.deepcopy(tokenizer)
    result.add_tokens([TOKEN], special_tokens=True)
    return result


@pytest.fixture(scope="module")
def folder(extended, tokenizer, tmp_path_factory):
    """Checkpoints whose tokenizer has one id more than the models have logits."""
    folder = tmp_path_factory.mktemp("extended")
    for name, model in zip(PARTS.values(), make_parts("llama", len(tokenizer)), strict=True):
        model.save_pretrained(folder / name)
        extended.save_pretrained(folder / name)
    return folder


def bundled(folder, output, **options):
    parts = {part: str(folder / name) for part, name in PARTS.items()}
    return write_bundle(output, **parts, steering="linear:1.5", **options)


@pytest.fixture(scope="module")
def bundle(folder, tmp_path_factory):
    return bundled(folder, tmp_path_factory.mktemp("bundle") / "bundle")


@pytest.fixture(scope="module")
def model(bundle):
    return DivergenceForCausalLM.from_pretrained(bundle)


def test_the_bundle_answers_as_one_without_the_token(model, checkpoints, extended, tmp_path):
    plain = DivergenceForCausalLM.from_pretrained(bundled(checkpoints, tmp_path / "plain"))
    prompt = encode_prompt(Record("", prompt="Who wrote it?"), extended)
    assert alone(model, prompt) == alone(plain, prompt)


def test_the_library_refuses_ids_beyond_the_logits(model):
    for wrong in (model.vocab_size, -1):
        for call in (model, lambda ids: model.generate(ids, max_new_tokens=1)):
            with pytest.raises(UsageError, match=f"token id {wrong}, for which the model has no embedding"):
                call(torch.tensor([[5, wrong, 7]]))


@pytest.mark.parametrize("record", [Record("it", prompt=TEXT), Record("it", messages=(Message("user", TEXT),))])
def test_texts_with_the_token_are_refused(bundle, folder, record):
    for checkpoint in (bundle, folder / "target"):
        tokenizer = load_tokenizer(checkpoint)
        for encode in (encode_prompt, lambda record, tokenizer: encode_records([record], tokenizer)):
            with pytest.raises(UsageError, match=REFUSED):
                encode(record, tokenizer)


def test_the_engine_refuses_it_and_goes_on(model, bundle):
    async def work(engine):
        with pytest.raises(UsageError, match=REFUSED):
            await engine.encode_chat([{"role": "user", "content": TEXT}])
        with pytest.raises(UsageError, match="the prompt holds token id"):
            engine.add_request([5, model.vocab_size], greedy(4))
        return await answered_tokens(engine, [5, 6, 7], greedy(8))

    assert run(model, load_tokenizer(bundle), work) == alone(model, [5, 6, 7], 8)


def test_commands_accept_the_checkpoint_and_refuse_the_token(bundle, folder, world, tmp_path, capsys):
    def refused(*arguments):
        code = main(list(map(str, arguments)))
        message = capsys.readouterr().err
        assert code == 2, message
        return message.splitlines()[-1]

    def written(name, *texts):
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return tmp_path / name

    retain, forget, wrong = (written("retain.jsonl", *world.corpus[:40]), written("forget.jsonl", *world.corpus[40:50]),
                             written("wrong.jsonl", f"A text with {TOKEN} in it."))  # fmt: skip
    target, registry = folder / "target", tmp_path / "registry"
    assert REFUSED in refused("generate", bundle, "--prompt", TEXT)
    counted = ["ngram", "--retain", retain, "--target", target]
    assert main([*map(str, counted), "--forget", str(forget), "--output", str(tmp_path / "pair")]) == 0
    assert main(["takedown", "init", str(registry), "--target", str(target), "--retain", str(retain)]) == 0
    capsys.readouterr()
    assert REFUSED in refused(*counted, "--forget", wrong, "--output", tmp_path / "wrong")
    assert "token id" in refused("takedown", "add", registry, "--file", wrong, "--id", "wrong", "--no-measure")
    train = ["train", "--base", folder / "retain", "--retain", retain, "--output", tmp_path / "run"]
    assert REFUSED in refused(*train, "--forget", wrong)
    shrink = ["shrink", target, "--layers", "1", "--steps", "1", "--output", tmp_path / "small"]
    assert REFUSED in refused(*shrink, "--text", wrong)
    experts = {"ngram": str(tmp_path / "pair"), "registry": str(registry)}
    steered = DivergenceForCausalLM.from_pretrained(bundled(folder, tmp_path / "counted", **experts))
    assert len(alone(steered, [5, 6, 7], 4)) == 4


def test_a_provider_that_names_the_token(folder, tmp_path):
    bundle = Bundle.open(bundled(folder, tmp_path / "bundle"), target=False)
    context = SteeringContext(loaded := LoadedExperts.load(bundle), bundle.steering)
    with pytest.raises(UsageError, match="the text holds token id"):
        context.logit_shift([5, loaded.vocab_size])
    assert context.logit_shift([5, 6]).shape == (1, loaded.vocab_size)


def test_bridges_from_and_to_such_a_tokenizer(extended, tokenizer, world):
    from support.tokenizer_kinds import byte_level

    other = byte_level(world.corpus[:200], 600)
    for theirs, ours in ((extended, other), (other, extended)):
        widths = [len(tokenizer) if one is extended else len(one) for one in (theirs, ours)]
        pair = BridgedPair(
            tiny_model("llama", widths[1], seed=1), tiny_model("llama", widths[1], seed=2),
            target_tokenizer=theirs, auxiliary_tokenizer=ours, target_width=widths[0],
        )  # fmt: skip
        model = DivergenceForCausalLM.from_experts(tiny_model("llama", widths[0], seed=0), pair, steering="linear:1")
        ids = encode_prompt(Record("", prompt="Who wrote it?"), theirs)
        assert len(alone(model, ids, 4)) == 4
        with pytest.raises(UsageError, match="for which the model has no embedding"):
            alone(model, [*ids, widths[0]], 4)


def test_tokens_that_texts_hold_need_logits(tokenizer, tmp_path):
    """A model cannot read what its tokenizer writes: an ordinary added token, or the token that pads."""
    changes = {
        "ordinary": lambda one: one.add_tokens(["Hollow"]),
        "pad": lambda one: one.add_special_tokens({"pad_token": "<|padding|>"}),
    }
    for name, change in changes.items():
        other = copy.deepcopy(tokenizer)
        change(other)
        for part, model in zip(PARTS.values(), make_parts("llama", len(tokenizer)), strict=True):
            model.save_pretrained(tmp_path / name / part)
            other.save_pretrained(tmp_path / name / part)
        with pytest.raises(UsageError, match=f"its tokenizer writes token .* with id {len(tokenizer)}"):
            bundled(tmp_path / name, tmp_path / name / "bundle")
