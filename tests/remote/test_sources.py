"""Experts for a target that is not at hand."""

import shutil

import pytest
import torch

from divdec.errors import UsageError
from divdec.remote.sources import Sources, of_bundle, open_sources


def test_a_bundle_without_its_targets_weights(bundle, models, tmp_path, local, prompts):
    moved = shutil.copytree(models, tmp_path / "moved")
    shutil.rmtree(moved / "target")
    sources, steering = of_bundle(str(moved / "steered"))
    assert str(steering) == "linear:1.5"
    opened = open_sources(sources)
    ids = torch.tensor([prompts[0]])
    with torch.no_grad():
        found = opened.experts.divergence(ids, logits_to_keep=1)
        _, expected = local.components(ids, logits_to_keep=1)
    torch.testing.assert_close(found, expected)
    assert opened.ends == (0,)
    assert opened.vocab_size == local.vocab_size


def test_a_bundle_whose_auxiliary_has_changed(models, tmp_path):
    moved = shutil.copytree(models, tmp_path / "moved")
    with (moved / "retain" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    with pytest.raises(UsageError, match="has changed"):
        of_bundle(str(moved / "steered"))


def test_parts_must_be_whole_and_fit(models, tmp_path, world):
    from divdec.experiments.small_models import train_tokenizer

    retain, forget = str(models / "retain"), str(models / "forget")
    with pytest.raises(UsageError, match="nothing would steer"):
        open_sources(Sources(retain))
    with pytest.raises(UsageError, match="made of both"):
        open_sources(Sources(retain, retain=retain))
    with pytest.raises(UsageError, match="same"):
        open_sources(Sources(retain, retain, retain))
    train_tokenizer(world.corpus[:100], 300).save_pretrained(tmp_path / "other")
    with pytest.raises(UsageError, match=r"tokenizer|vocabular"):
        open_sources(Sources(str(tmp_path / "other"), retain, forget))
    with pytest.raises(UsageError, match="not a folder"):
        open_sources(Sources(str(tmp_path / "absent here"), retain, forget))


def test_ngrams_and_registry_steer_too(models, tmp_path, tokenizer, world, prompts):
    from divdec.cli import main

    for name, texts in (("retain", world.corpus[1::2]), ("forget", world.corpus[::2])):
        (tmp_path / f"{name}.txt").write_text("\n".join(texts[:40]))
    given = [f"--{name}={tmp_path / name}.txt" for name in ("retain", "forget")]
    assert main(["ngram", *given, f"--target={models / 'target'}", f"--output={tmp_path / 'counts'}"]) == 0
    opened = open_sources(Sources(str(models / "target"), ngram=str(tmp_path / "counts")))
    assert opened.experts.divergence(torch.tensor([prompts[0]])).abs().max() > 0
