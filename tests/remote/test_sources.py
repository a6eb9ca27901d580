"""Experts for a target whose weights are missing."""

import json
import shutil

import pytest
import torch

from divdec.data.records import texts_of
from divdec.errors import UsageError
from divdec.model.bundle import write_bundle
from divdec.model.loading import Bundle
from divdec.remote.bias import choose_bias
from divdec.remote.experts import LoadedExperts, SteeringContext
from divdec.steering import Steering
from divdec.takedowns.registry import Registry


def test_bundle_loads_without_target_weights(bundle, models, tmp_path, local, prompts):
    moved = shutil.copytree(models, tmp_path / "moved")
    shutil.rmtree(moved / "target")
    opened_bundle = Bundle.open(moved / bundle.name, target=False)
    assert str(opened_bundle.steering) == "linear:1.5"
    opened = LoadedExperts.load(opened_bundle)
    ids = torch.tensor([prompts[0]])
    with torch.no_grad():
        result = opened.experts.divergence(ids, logits_to_keep=1)
        expected = local.components(ids, logits_to_keep=1)[2]
    torch.testing.assert_close(result, expected)
    assert opened.eos_token_ids == (0,)
    assert opened.vocab_size == local.vocab_size


def test_bundle_with_changed_auxiliary_is_rejected(bundle, models, tmp_path):
    moved = shutil.copytree(models, tmp_path / "moved")
    with (moved / "retain" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    with pytest.raises(UsageError, match="has changed"):
        Bundle.open(moved / bundle.name, target=False)


def fit_ngrams(folder, models, world, count=40):
    from divdec.cli import main

    for side, texts in (("retain", world.corpus[1::2]), ("forget", world.corpus[::2])):
        (folder / f"{side}.txt").write_text("\n".join(texts[:count]))
    counts = folder / "counts"
    options = [f"--{side}={folder / side}.txt" for side in ("retain", "forget")]
    assert main(["ngram", *options, f"--target={models / 'target'}", f"--output={counts}", "--overwrite"]) == 0
    return str(counts)


def create_registry(folder, models, texts):
    return Registry.create(folder, texts_of("retain", texts), models / "target")


def test_bundle_with_other_ngrams_is_rejected(models, tmp_path, world):
    counts = fit_ngrams(tmp_path, models, world)
    bundle = write_bundle(tmp_path / "bundle", target=str(models / "target"), ngram=counts, steering="linear:1.5")
    LoadedExperts.load(Bundle.open(bundle, target=False))
    fit_ngrams(tmp_path, models, world, count=30)  # valid n-grams, which the bundle was not written for
    with pytest.raises(UsageError, match="has changed since the bundle was written"):
        LoadedExperts.load(Bundle.open(bundle, target=False))


def test_bundle_with_another_registry_is_rejected(models, tmp_path, world):
    texts = world.corpus[1:20:2]
    folder = create_registry(tmp_path / "takedowns", models, texts).folder
    bundle = write_bundle(tmp_path / "bundle", target=str(models / "target"), registry=str(folder))
    LoadedExperts.load(Bundle.open(bundle, target=False))
    shutil.rmtree(folder)
    create_registry(folder, models, texts)
    with pytest.raises(UsageError, match="another registry than the bundle's"):
        LoadedExperts.load(Bundle.open(bundle, target=False))


def test_bundle_with_wider_vocabulary_than_its_registry_is_rejected(models, tmp_path, world):
    folder = create_registry(tmp_path / "takedowns", models, world.corpus[1:20:2]).folder
    bundle = write_bundle(tmp_path / "bundle", target=str(models / "target"), registry=str(folder))
    config = json.loads((bundle / "config.json").read_text())
    size = config["vocab_size"] + 8
    (bundle / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    with pytest.raises(UsageError, match=rf"counts {size - 8} tokens, the model has {size}"):
        LoadedExperts.load(Bundle.open(bundle, target=False))


def test_ngrams_and_registry_steer_remote_target(models, tmp_path, tokenizer, world, prompts):
    counts = fit_ngrams(tmp_path, models, world)
    target = str(models / "target")

    def load(name, **experts):
        return LoadedExperts.load(Bundle.open(write_bundle(tmp_path / name, target=target, **experts), target=False))

    opened = load("ngrams", ngram=counts, steering="linear:1.5")
    assert opened.experts.divergence(torch.tensor([prompts[0]])).abs().max() > 0
    text = tokenizer.decode(prompts[0])
    known = [other for other in world.corpus[1:80:2] if text not in other]
    registry = create_registry(tmp_path / "takedowns", models, known)
    registry.add("case", texts_of("t", [text]))
    opened = load("both", ngram=counts, registry=registry.folder, steering="linear:1.5")
    ids = torch.tensor([prompts[0]])
    position = int(opened.takedowns.correction(ids)[0].amin(-1).argmin())
    assert position >= 4
    prompt, ids = prompts[0][: position + 1], ids[:, : position + 1]
    divergence = opened.experts.divergence(ids)[0, -2:]
    correction = opened.takedowns.correction(ids)[0, -2:]
    token = int(correction[-1].argmin())
    assert correction[-1, token] < -5
    for rule in ("linear:0", "linear:2", "rank:5"):
        steering = Steering.parse(rule)
        expected = steering.apply(correction, divergence)
        context = SteeringContext(opened, steering)
        context.logit_shift([*prompt[:2], 7, 8])  # another text, of which the beginning is kept
        wanted = context.logit_shift(prompt, 2)
        torch.testing.assert_close(wanted.float(), expected[:, : len(tokenizer)])
        assert choose_bias(wanted[-1], 300).entries[token] < -4, "the takedown is not sent"
    alone = load("registry", registry=registry.folder)
    assert not alone.experts.divergence(ids).any()
    assert torch.equal(alone.takedowns.correction(ids)[0, -2:], correction)
