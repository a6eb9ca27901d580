"""Experts for a target whose weights are missing."""

import shutil

import pytest
import torch

from divdec.errors import UsageError
from divdec.remote.bias import choose_bias
from divdec.remote.experts import ExpertSources, SteeringContext, load_experts, sources_from_bundle


def test_bundle_loads_without_target_weights(bundle, models, tmp_path, local, prompts):
    moved = shutil.copytree(models, tmp_path / "moved")
    shutil.rmtree(moved / "target")
    sources, steering = sources_from_bundle(str(moved / bundle.name))
    assert str(steering) == "linear:1.5"
    opened = load_experts(sources)
    ids = torch.tensor([prompts[0]])
    with torch.no_grad():
        result = opened.experts.divergence(ids, logits_to_keep=1)
        _, expected = local.components(ids, logits_to_keep=1)
    torch.testing.assert_close(result, expected)
    assert opened.eos_token_ids == (0,)
    assert opened.vocab_size == local.vocab_size


def test_bundle_with_changed_auxiliary_is_rejected(bundle, models, tmp_path):
    moved = shutil.copytree(models, tmp_path / "moved")
    with (moved / "retain" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    with pytest.raises(UsageError, match="has changed"):
        sources_from_bundle(str(moved / bundle.name))


def test_incomplete_or_incompatible_experts_are_rejected(models, tmp_path, world):
    from divdec_research.world.models import train_tokenizer

    retain, forget = str(models / "retain"), str(models / "forget")
    with pytest.raises(UsageError, match="nothing would steer the target: give a bundle, --retain-auxiliary and"):
        load_experts(ExpertSources(retain))
    with pytest.raises(UsageError, match="made of both: give --retain-auxiliary and --forget-auxiliary"):
        load_experts(ExpertSources(retain, retain=retain))
    with pytest.raises(UsageError, match="same"):
        load_experts(ExpertSources(retain, retain, retain))
    train_tokenizer(world.corpus[:100], 300).save_pretrained(tmp_path / "other")
    with pytest.raises(UsageError, match=r"tokenizer|vocabular"):
        load_experts(ExpertSources(str(tmp_path / "other"), retain, forget))
    with pytest.raises(UsageError, match="not a folder"):
        load_experts(ExpertSources(str(tmp_path / "absent here"), retain, forget))


def test_ngrams_and_registry_steer_remote_target(models, tmp_path, tokenizer, world, prompts):
    from divdec.cli import main

    for name, texts in (("retain", world.corpus[1::2]), ("forget", world.corpus[::2])):
        (tmp_path / f"{name}.txt").write_text("\n".join(texts[:40]))
    options = [f"--{name}={tmp_path / name}.txt" for name in ("retain", "forget")]
    assert main(["ngram", *options, f"--target={models / 'target'}", f"--output={tmp_path / 'counts'}"]) == 0
    opened = load_experts(ExpertSources(str(models / "target"), ngram=str(tmp_path / "counts")))
    assert opened.experts.divergence(torch.tensor([prompts[0]])).abs().max() > 0
    from divdec.data.records import texts_of
    from divdec.steering import Steering
    from divdec.takedowns.registry import Registry

    text = tokenizer.decode(prompts[0])
    known = texts_of("retain", [other for other in world.corpus[1:80:2] if text not in other])
    registry = Registry.create(tmp_path / "takedowns", known, models / "target")
    registry.add("case", texts_of("t", [text]))
    opened = load_experts(
        ExpertSources(str(models / "target"), ngram=str(tmp_path / "counts"), registry=str(registry.folder))
    )
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
    alone = load_experts(ExpertSources(str(models / "target"), registry=str(registry.folder)))
    assert not alone.experts.divergence(ids).any()
    assert torch.equal(alone.takedowns.correction(ids)[0, -2:], correction)
