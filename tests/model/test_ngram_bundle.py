"""Bundles that are steered by n-grams, or by n-grams beside a neural pair."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from divdec import DivergenceForCausalLM, UsageError, write_bundle
from divdec.cli import main
from divdec.experts.combined import CombinedExperts
from divdec.experts.ngram import NgramPair
from support.exactness import assert_same_answers


@pytest.fixture(scope="module")
def texts(tmp_path_factory, world):
    folder = tmp_path_factory.mktemp("texts")
    records = world.corpus[:200]
    for name, part in (("forget", records[:60]), ("retain", records[60:])):
        rows = [json.dumps({"text": text}) for text in part if text.strip()]
        (folder / f"{name}.jsonl").write_text("\n".join(dict.fromkeys(rows)))
    seen = set((folder / "forget.jsonl").read_text().splitlines())
    rows = [row for row in (folder / "retain.jsonl").read_text().splitlines() if row not in seen]
    (folder / "retain.jsonl").write_text("\n".join(rows))
    return folder


@pytest.fixture(scope="module")
def ngrams(tmp_path_factory, texts, checkpoints):
    output = tmp_path_factory.mktemp("ngrams") / "pair"
    code = main(["ngram", "--retain", str(texts / "retain.jsonl"), "--forget", str(texts / "forget.jsonl"),
                 "--target", str(checkpoints / "target"), "--output", str(output)])  # fmt: skip
    assert code == 0
    return output


@pytest.fixture
def own_ngrams(ngrams, tmp_path):
    return shutil.copytree(ngrams, tmp_path / "ngrams")


@pytest.fixture
def prompts(tokenizer, world):
    ids = [tokenizer(text)["input_ids"][:12] for text in world.corpus[:40] if len(text) > 60][:3]
    return torch.tensor([row[:9] for row in ids])


def test_ngram_bundle_without_auxiliaries_is_steered(ngrams, checkpoints, tmp_path, prompts):
    bundle = write_bundle(tmp_path / "b", target=str(checkpoints / "target"), ngram=ngrams, steering="linear:10")
    model = DivergenceForCausalLM.from_pretrained(bundle)
    assert isinstance(model.experts, NgramPair)
    with torch.no_grad():
        logits = model(prompts).logits
        expected = model.target(prompts).logits + 10 * model.experts.divergence(prompts)
    torch.testing.assert_close(logits, expected)
    assert (logits - model.target(prompts).logits).abs().max() > 0.1
    cached = model.generate(prompts, max_new_tokens=12, do_sample=False)
    uncached = model.generate(prompts, max_new_tokens=12, do_sample=False, use_cache=False)
    assert_same_answers(model, prompts.tolist(), cached, uncached)
    beams = model.generate(prompts, max_new_tokens=6, num_beams=3, do_sample=False)
    assert torch.equal(beams, model.generate(prompts, max_new_tokens=6, num_beams=3, do_sample=False, use_cache=False))


def test_margin_that_ngram_scores_never_reach_is_refused(ngrams, checkpoints, tmp_path):
    parts = {"target": str(checkpoints / "target"), "ngram": ngrams}
    with pytest.raises(UsageError, match=r"rank:5:3: the scores of these n-grams differ by at most 1, so no token"):
        write_bundle(tmp_path / "b", **parts, steering="rank:5:3")
    assert not (tmp_path / "b").exists()
    model = DivergenceForCausalLM.from_pretrained(write_bundle(tmp_path / "c", **parts, steering="rank:5:0.5"))
    with pytest.raises(UsageError, match="at most 1"):
        model.steering = "rank:5:1.5"
    pair = {"retain_auxiliary": str(checkpoints / "retain"), "forget_auxiliary": str(checkpoints / "forget")}
    with pytest.raises(UsageError, match=r"at most 2, .* or a larger --ngram-weight"):  # the rules that `train` writes
        write_bundle(tmp_path / "d", **parts, **pair, ngram_weight=2.0, steering="linear:1:3:full")
    both = write_bundle(tmp_path / "d", **parts, **pair, ngram_weight=2.0, steering="linear:1:1:full")
    model = DivergenceForCausalLM.from_pretrained(both)
    with pytest.raises(UsageError, match="at most 2"):  # the pair would steer, and the n-grams do nothing
        model.steering = "linear:1:3:full"
    with pytest.raises(UsageError, match="at most 2"):
        DivergenceForCausalLM.from_pretrained(both, steering="rank:5:2.5")
    write_bundle(tmp_path / "d", **parts, **pair, ngram_weight=10.0, steering="linear:1:3:full", overwrite=True)


def test_pair_and_ngram_divergences_add_up(ngrams, checkpoints, tmp_path, prompts):
    parts = {"retain_auxiliary": str(checkpoints / "retain"), "forget_auxiliary": str(checkpoints / "forget")}
    target = str(checkpoints / "target")
    both = write_bundle(tmp_path / "b", target=target, **parts, ngram=ngrams, ngram_weight=4.0, steering="linear:1.5")
    model = DivergenceForCausalLM.from_pretrained(both)
    assert isinstance(model.experts, CombinedExperts)
    pair, counted = model.experts.parts
    with torch.no_grad():
        expected = model.target(prompts).logits + 1.5 * pair.divergence(prompts) + 6 * counted.divergence(prompts)
        torch.testing.assert_close(model(prompts).logits, expected)
        cache = model.new_cache()
        model(prompts[:, :5], past_key_values=cache)
        stepwise = model(prompts[:, 5:], past_key_values=cache).logits
    torch.testing.assert_close(stepwise, expected[:, 5:], atol=1e-4, rtol=1e-4)
    assert len({p.data_ptr() for p in model.parameters()}) == len(list(model.parameters()))
    beams = model.generate(prompts, max_new_tokens=6, num_beams=3, do_sample=False)
    assert torch.equal(beams, model.generate(prompts, max_new_tokens=6, num_beams=3, do_sample=False, use_cache=False))


def test_auto_classes_cannot_leave_a_part_out(ngrams, checkpoints, tmp_path):
    """They write arguments that are fields of the configuration into it."""
    pair = {name: str(checkpoints / name.partition("_")[0]) for name in ("retain_auxiliary", "forget_auxiliary")}
    target = str(checkpoints / "target")
    bundle = write_bundle(tmp_path / "b", target=target, **pair, ngram=ngrams, steering="linear:1.5")
    nothing = dict.fromkeys((*pair, "base", "ngram", "bridge", "registry"))
    assert isinstance(AutoModelForCausalLM.from_pretrained(bundle, **nothing).experts, CombinedExperts)
    for name in ("ngram", "target", "bridge"):
        with pytest.raises(UsageError, match=rf"^{name}='other' differs from the bundle .*; accepted: what its config"):
            AutoModelForCausalLM.from_pretrained(bundle, **{name: "other"})


def test_packed_bundle_includes_ngrams(ngrams, checkpoints, tmp_path, prompts):
    options = {"target": str(checkpoints / "target"), "ngram": ngrams, "steering": "linear:10"}
    plain, packed = (write_bundle(tmp_path / str(pack), **options, pack=pack) for pack in (False, True))
    moved = tmp_path / "elsewhere"
    shutil.move(packed, moved)
    logits = [DivergenceForCausalLM.from_pretrained(bundle)(prompts).logits for bundle in (plain, moved)]
    assert torch.equal(*logits)
    assert "n-gram pair" in (moved / "README.md").read_text()


def test_changed_ngrams_are_rejected(own_ngrams, checkpoints, tmp_path):
    bundle = write_bundle(tmp_path / "b", target=str(checkpoints / "target"), ngram=own_ngrams, steering="linear:10")
    path = own_ngrams / "forget" / "counts-2.npy"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UsageError, match=r"counts-2\.npy has changed"):
        DivergenceForCausalLM.from_pretrained(bundle)
    path.write_bytes(content)
    about = json.loads((own_ngrams / "ngram.json").read_text())
    (own_ngrams / "ngram.json").write_text(json.dumps(about | {"retain": "other.jsonl"}))
    with pytest.raises(UsageError, match="changed since the bundle was written"):
        DivergenceForCausalLM.from_pretrained(bundle)
    shutil.rmtree(own_ngrams)
    with pytest.raises(UsageError, match=r"no ngram\.json"):
        DivergenceForCausalLM.from_pretrained(bundle)


def test_ngrams_of_another_tokenizer_are_rejected(own_ngrams, checkpoints, tmp_path):
    about = json.loads((own_ngrams / "ngram.json").read_text())
    (own_ngrams / "ngram.json").write_text(json.dumps(about | {"tokenizer": "0" * 64}))
    with pytest.raises(UsageError, match="another tokenizer"):
        write_bundle(tmp_path / "b", target=str(checkpoints / "target"), ngram=own_ngrams, steering="linear:10")
    assert not (tmp_path / "b").exists()


def test_bundle_without_experts_or_complete_pair_is_rejected(ngrams, checkpoints, tmp_path):
    target = str(checkpoints / "target")
    with pytest.raises(UsageError, match="nothing would steer"):
        write_bundle(tmp_path / "b", target=target, steering="linear:1")
    with pytest.raises(UsageError, match="forget auxiliary is missing"):
        write_bundle(tmp_path / "b", target=target, retain_auxiliary=str(checkpoints / "retain"), ngram=ngrams,
                     steering="linear:1")  # fmt: skip
    for weight in (0.0, -1.0, float("nan")):
        with pytest.raises(UsageError, match="weight of ngram"):
            write_bundle(tmp_path / "b", target=target, ngram=ngrams, ngram_weight=weight, steering="linear:1")
    # A bundle from which the n-grams were taken out names no experts, and must not load.
    bundle = write_bundle(tmp_path / "b", target=target, ngram=ngrams, steering="linear:10")
    config = json.loads((bundle / "config.json").read_text())
    (bundle / "config.json").write_text(json.dumps(config | {"ngram": None}))
    with pytest.raises(UsageError, match="names no retain_auxiliary"):
        DivergenceForCausalLM.from_pretrained(bundle)
    (bundle / "config.json").write_text(json.dumps(config | {"retain_auxiliary": config["target"]}))
    with pytest.raises(UsageError, match="names no forget_auxiliary"):
        DivergenceForCausalLM.from_pretrained(bundle)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"order": 6}, "order is 6"),
        ({"retain": "forget.jsonl"}, "are in the retain set too"),
        ({"forget": "empty.txt"}, "empty"),
        ({"target": "nowhere"}, "nowhere"),
    ],
)
def test_invalid_ngram_command_gives_one_line_error_and_writes_nothing(
    changed, words, texts, checkpoints, tmp_path, capsys
):
    (texts / "empty.txt").write_text("\n")
    given = {"retain": "retain.jsonl", "forget": "forget.jsonl", "target": str(checkpoints / "target")} | changed
    for name in ("retain", "forget"):
        given[name] = str(texts / given[name])
    arguments = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    assert main(["ngram", *arguments, "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert words in error[0]
    assert not (tmp_path / "out").exists()


def test_doctor_and_calibrate_support_ngram_bundles(ngrams, checkpoints, tmp_path, texts, capsys):
    bundle = write_bundle(tmp_path / "b", target=str(checkpoints / "target"), ngram=ngrams, steering="linear:10")
    assert main(["doctor", "--bundle", str(bundle), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["bundle"]
    assert found["loads"]
    assert found["experts"] == ["NgramPair"]
    sets = [part for name in ("forget", "retain", "holdout") for part in (f"--{name}", str(texts / f"{name}.jsonl"))]
    (texts / "holdout.jsonl").write_text('{"text": "nothing that anybody has seen before stands here"}')
    assert main(["calibrate", str(bundle), *sets]) == 2
    assert "calibrate measures against the retain auxiliary" in capsys.readouterr().err
    pair = {"retain_auxiliary": str(checkpoints / "retain"), "forget_auxiliary": str(checkpoints / "forget")}
    both = write_bundle(
        tmp_path / "both", target=str(checkpoints / "target"), ngram=ngrams, **pair, steering="linear:1"
    )
    assert main(["calibrate", str(both), *sets, "--sweep", "rank:5:1.5", "--write"]) == 2
    assert "the scores of these n-grams differ by at most 1" in capsys.readouterr().err
    assert str(DivergenceForCausalLM.from_pretrained(both).steering) == "linear:1"
