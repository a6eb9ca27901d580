"""Bundles whose auxiliaries have another tokenizer than the target."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from divdec import DivergenceForCausalLM, UsageError, write_bundle
from divdec.bridge.pair import BridgedPair
from divdec.cli import main
from divdec.model.loading import Bundle
from support.tiny import tiny_model


@pytest.fixture(scope="module")
def models(tmp_path_factory, tokenizers):
    folder = tmp_path_factory.mktemp("models")
    for name, kind, seed in (
        ("target", "bpe", 0), ("q", "unigram", 1), ("p", "unigram", 2), ("p-small", "small", 2), ("q-same", "bpe", 3),
        ("p-same", "bpe", 4),
    ):  # fmt: skip
        tiny_model("llama", len(tokenizers[kind]), seed, width=32).save_pretrained(folder / name)
        tokenizers[kind].save_pretrained(folder / name)
    return folder


def parts(models, q="q", p="p"):
    return {
        "target": str(models / "target"), "retain_auxiliary": str(models / q), "forget_auxiliary": str(models / p),
        "steering": "linear:1.5",
    }  # fmt: skip


def test_bridged_bundle_loads_and_generates_steered_output(models, tmp_path, tokenizers):
    bundle = write_bundle(tmp_path / "b", **parts(models), bridge=True)
    model = AutoModelForCausalLM.from_pretrained(bundle)
    assert isinstance(model, DivergenceForCausalLM)
    assert isinstance(model.experts, BridgedPair)
    ids = torch.tensor([tokenizers["bpe"]("Who wrote The Hollow Orchard?", add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        plain, steered = model.target(ids).logits, model(ids).logits
        torch.testing.assert_close(steered, plain + 1.5 * model.experts.divergence(ids))
    assert (steered - plain).abs().max() > 0.1
    packed = write_bundle(tmp_path / "packed", **parts(models), bridge=True, pack=True)
    assert isinstance(DivergenceForCausalLM.from_pretrained(packed).experts, BridgedPair)
    assert "the auxiliaries have another tokenizer" in (packed / "README.md").read_text()


def test_different_tokenizer_requires_bridge_option(models, tmp_path):
    with pytest.raises(UsageError, match="--bridge"):
        write_bundle(tmp_path / "b", **parts(models))
    with pytest.raises(UsageError, match="the target's own tokenizer"):
        write_bundle(tmp_path / "b", **parts(models, "q-same", "p-same"), bridge=True)
    with pytest.raises(
        UsageError, match=r"another vocabulary than the retain_auxiliary.*both auxiliaries must have one"
    ):
        write_bundle(tmp_path / "b", **parts(models, "q", "p-small"), bridge=True)
    assert not (tmp_path / "b").exists()
    bundle = write_bundle(tmp_path / "b", **parts(models), bridge=True)
    config = json.loads((bundle / "config.json").read_text())
    (bundle / "config.json").write_text(json.dumps(config | {"bridge": None}))
    with pytest.raises(UsageError, match="write the bundle again"):
        DivergenceForCausalLM.from_pretrained(bundle)


def test_tokenizer_without_byte_information_gives_one_line_error(models, tmp_path, capsys):
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({"<unk>": 0, "a": 1, "word": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    for name, seed in (("q", 1), ("p", 2)):
        tiny_model("llama", 16, seed).save_pretrained(tmp_path / name)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(tmp_path / name)
    capsys.readouterr()
    code = main(["bundle", "--target", str(models / "target"), "--retain-auxiliary", str(tmp_path / "q"),
                 "--forget-auxiliary", str(tmp_path / "p"), "--bridge", "--output", str(tmp_path / "b")])  # fmt: skip
    error = capsys.readouterr().err.strip().splitlines()
    assert code == 2
    assert len(error) == 1
    assert "WordLevel" in error[0]
    assert not (tmp_path / "b").exists()


def test_commands_work_with_bridged_bundle(models, tmp_path, capsys):
    bundle = write_bundle(tmp_path / "b", **parts(models), bridge=True)
    assert main(["doctor", "--bundle", str(bundle), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["bundle"]
    assert found["experts"] == ["BridgedPair"]
    assert 50 < int(found["bridged"].partition("%")[0]) <= 100
    assert set(found["parameters"]) == {"target", "retain_auxiliary", "forget_auxiliary"}
    assert main(["generate", str(bundle), "--prompt", "Who wrote The Hollow Orchard?", "Who else?",
                 "--max-new-tokens", "6", "--logprobs"]) == 0  # fmt: skip
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(line["tokens"]) <= 6 for line in lines] == [True, True]
    for name, who in (("forget", "Anna"), ("retain", "Berta"), ("holdout", "Carla")):
        rows = [{"question": f"Where does {who} {k} live?", "answer": f"In house number {k}."} for k in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sets = [part for name in ("forget", "retain", "holdout") for part in (f"--{name}", str(tmp_path / f"{name}.jsonl"))]
    code = main(["calibrate", str(bundle), *sets, "--sweep", "linear:0.5,1", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == (3 if found["faults"] else 0)
    assert found["asked"] == 4
    assert found["best"].startswith("linear:")


def test_an_unknown_field_of_the_bridge_is_refused(models, tmp_path):
    """A field of another version could change what the auxiliaries read; token healing was one."""
    bundle = write_bundle(tmp_path / "b", **parts(models), bridge=True)
    config = json.loads((bundle / "config.json").read_text())
    (bundle / "config.json").write_text(json.dumps(config | {"bridge": {"token_healing": False}}))
    assert isinstance(DivergenceForCausalLM.from_pretrained(bundle).experts, BridgedPair)
    for bridge, message in (({"token_healing": True}, r"accepted: \{\}; write the bundle again"), ([], "bridge is")):
        (bundle / "config.json").write_text(json.dumps(config | {"bridge": bridge}))
        with pytest.raises(UsageError, match=message):
            DivergenceForCausalLM.from_pretrained(bundle)
        with pytest.raises(UsageError, match=message):
            Bundle.open(bundle, target=False)
