"""Bundles on disk: what they hold, where they find their parts, and all that they refuse."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, pipeline

from divdec import DivergenceForCausalLM, Steering, UsageError, write_bundle
from divdec.checkpoint import adapter_base, load_model, load_tokenizer, weight_files
from divdec.data.records import texts_of
from divdec.serving.vllm.configuration import EngineOptions, read_parts
from divdec.takedowns.registry import Registry
from support.exactness import assert_close
from support.tiny import tiny_model

IDS = torch.tensor([[5, 9, 200, 31]])


def write(models, output, steering="linear:1.5", **options):
    return write_bundle(
        output,
        target=str(models / "target"),
        retain_auxiliary=str(models / "retain"),
        forget_auxiliary=str(models / "forget"),
        steering=steering,
        **options,
    )


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def size_of(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.suffix != ".json" or "token" not in file.name)


def change_weight(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_bundle_loads_with_auto_model(bundle, checkpoints):
    model = AutoModelForCausalLM.from_pretrained(bundle)
    assert isinstance(model, DivergenceForCausalLM)
    target, retain, forget = (
        AutoModelForCausalLM.from_pretrained(checkpoints / name) for name in ("target", "retain", "forget")
    )
    expected = logits_of(target) + 1.5 * (logits_of(retain).log_softmax(-1) - logits_of(forget).log_softmax(-1))
    assert_close(logits_of(model), expected)
    assert AutoConfig.from_pretrained(bundle).model_type == "divergence"
    tokenizer = AutoTokenizer.from_pretrained(bundle)
    answer = pipeline("text-generation", model=str(bundle), device="cpu")(
        "Who wrote it?", max_new_tokens=3, do_sample=False
    )
    ids = tokenizer("Who wrote it?", return_tensors="pt")
    expected = model.generate(**ids, max_new_tokens=3, do_sample=False)
    assert answer[0]["generated_text"] == tokenizer.decode(expected[0], skip_special_tokens=True)


def test_bundle_references_checkpoints_without_weights(bundle):
    assert not list(bundle.rglob("*.safetensors"))
    assert size_of(bundle) < 8_000
    config = json.loads((bundle / "config.json").read_text())
    assert config["target"]["folder"] == "../models/target"  # they lie side by side and can move together
    assert set(config["target"]["sha256"]) == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
    }  # fmt: skip
    card = (bundle / "README.md").read_text()
    assert "linear:1.5" in card
    assert "| forgets | not measured" in card


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_changed_tokenizer_of_the_bundle_is_refused(bundle, file):
    (bundle / file).write_text((bundle / file).read_text().replace("assistant", "Assistant") + " ")
    with pytest.raises(UsageError, match="the bundle's tokenizer or chat template has changed"):
        DivergenceForCausalLM.from_pretrained(bundle)
    DivergenceForCausalLM.from_pretrained(bundle, verify=False)


def test_bundle_and_checkpoints_can_be_moved_together(bundle, tmp_path):
    before = logits_of(DivergenceForCausalLM.from_pretrained(bundle))
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    shutil.move(tmp_path / "models", moved / "models")
    shutil.move(bundle, moved / "bundle")
    assert torch.equal(logits_of(DivergenceForCausalLM.from_pretrained(moved / "bundle")), before)


def test_external_checkpoint_path_is_absolute_unless_given_relative(own_checkpoints, tmp_path, monkeypatch):
    far = tmp_path / "a" / "b"
    bundle = write(own_checkpoints, far / "bundle")
    assert json.loads((bundle / "config.json").read_text())["target"]["folder"] == str(own_checkpoints / "target")
    monkeypatch.chdir(tmp_path)
    bundle = write(Path("models"), far / "other")
    assert json.loads((bundle / "config.json").read_text())["target"]["folder"] == "../../../models/target"
    DivergenceForCausalLM.from_pretrained(bundle)


def test_packed_bundle_is_self_contained(own_checkpoints, tmp_path):
    bundle = write(own_checkpoints, tmp_path / "packed", pack=True)
    before = logits_of(DivergenceForCausalLM.from_pretrained(bundle))
    shutil.rmtree(own_checkpoints)
    moved = Path(shutil.move(bundle, tmp_path / "moved"))
    assert torch.equal(logits_of(DivergenceForCausalLM.from_pretrained(moved)), before)


def test_stale_shard_index_is_ignored(own_checkpoints, tmp_path):
    """transformers leaves it behind where a model is saved in shards and then as one file."""
    model = tiny_model("llama", 512, 9)
    for size in ("20KB", "5GB"):
        (own_checkpoints / "retain/model.safetensors").unlink(missing_ok=True)
        model.save_pretrained(own_checkpoints / "retain", max_shard_size=size)
    assert (own_checkpoints / "retain/model.safetensors.index.json").is_file()
    expected = logits_of(DivergenceForCausalLM.from_pretrained(write(own_checkpoints, tmp_path / "again")))
    packed = write(own_checkpoints, tmp_path / "packed", pack=True)
    assert not (packed / "retain_auxiliary/model.safetensors.index.json").exists()
    assert torch.equal(logits_of(DivergenceForCausalLM.from_pretrained(packed)), expected)


def test_weights_are_those_that_transformers_reads(own_checkpoints, tmp_path):
    target = own_checkpoints / "target"
    shutil.copyfile(own_checkpoints / "forget" / "model.safetensors", target / "model_1.safetensors")
    assert [file.name for file in weight_files(target)] == ["model.safetensors"]
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"transformers_weights": "sub/w.safetensors"}))
    with pytest.raises(UsageError, match=r"names the weights sub/w\.safetensors"):
        write(own_checkpoints, tmp_path / "bundle")
    (target / "config.json").write_text(json.dumps(config | {"hidden_act": "foo"}))
    with pytest.raises(UsageError, match="cannot be loaded"):
        load_model(target)


def test_an_adapter_names_its_base_with_the_revision(tmp_path):
    names = {"base_model_name_or_path": "org/base", "revision": "a" * 40}
    (tmp_path / "adapter_config.json").write_text(json.dumps(names))
    assert adapter_base(tmp_path) == "org/base@" + "a" * 40


def test_a_mistral_tokenizer_is_read_from_tokenizer_json(own_checkpoints, monkeypatch):
    given = []
    real = AutoTokenizer.from_pretrained
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *a, **k: given.append(k) or real(*a, **k))
    load_tokenizer(own_checkpoints / "target")
    assert given[0]["mistral_format"] is False


def test_save_pretrained_writes_current_weights(bundle, tmp_path):
    model = DivergenceForCausalLM.from_pretrained(bundle)
    with torch.no_grad():
        model.experts.retain.get_output_embeddings().weight.mul_(1.1)
    model.steering = Steering("rank", k=3, vocabulary=(1, 5, 7, 9, 200))
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.steering == model.steering
    assert torch.equal(logits_of(loaded), logits_of(model))


def test_save_pretrained_that_fails_leaves_the_earlier_bundle(bundle, tmp_path, monkeypatch):
    model, saved = DivergenceForCausalLM.from_pretrained(bundle), []
    model.save_pretrained(tmp_path / "saved")
    before = {path: path.read_bytes() for path in (tmp_path / "saved").rglob("*") if path.is_file()}

    def fail_third(*arguments, **options):
        saved.append(arguments)
        if len(saved) == 3:
            raise OSError(28, "No space left on device")
        save_pretrained(*arguments, **options)

    save_pretrained = PreTrainedModel.save_pretrained
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", fail_third)
    with torch.no_grad():
        next(model.target.parameters()).add_(1.0)
    with pytest.raises(OSError, match="No space left"):
        model.save_pretrained(tmp_path / "saved")
    assert {path: path.read_bytes() for path in (tmp_path / "saved").rglob("*") if path.is_file()} == before
    monkeypatch.undo()
    model.save_pretrained(tmp_path / "saved")
    DivergenceForCausalLM.from_pretrained(tmp_path / "saved")


def test_save_pretrained_accepts_trainer_arguments(bundle, tmp_path):
    """Trainer saves a state dict of the whole model, on the main process of several only."""
    model = DivergenceForCausalLM.from_pretrained(bundle)
    state = {name: 2 * tensor for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "other", is_main_process=False)
    assert not (tmp_path / "other").exists()
    model.save_pretrained(tmp_path / "saved", state_dict=state)
    model.load_state_dict(state)
    assert torch.equal(logits_of(DivergenceForCausalLM.from_pretrained(tmp_path / "saved")), logits_of(model))
    for option in ({"push_to_hub": True}, {"safe_serialization": False}):
        with pytest.raises(UsageError):
            model.save_pretrained(tmp_path / "refused", **option)
    assert not (tmp_path / "refused").exists()


def test_dtype_and_device_per_model(bundle):
    model = DivergenceForCausalLM.from_pretrained(
        bundle,
        dtype={"target": torch.bfloat16, "experts": torch.float32},
        device_map={"target": "cpu", "experts": "cpu"},
    )
    assert model.target.dtype == torch.bfloat16
    assert model.experts.retain.dtype == model.experts.forget.dtype == torch.float32
    model = AutoModelForCausalLM.from_pretrained(bundle, dtype=torch.bfloat16)
    assert {part.dtype for part in (model.target, model.experts.retain, model.experts.forget)} == {torch.bfloat16}
    assert logits_of(model).dtype == torch.float32


def test_steering_can_be_overridden_when_loading(bundle):
    assert str(DivergenceForCausalLM.from_pretrained(bundle, steering="rank:9").steering) == "rank:9"


def as_hub_repository(cache, name, commit, source):
    """Lay a checkpoint out as the hub's own cache would, so that the real lookup finds it offline."""
    repository = cache / ("models--" + name.replace("/", "--"))
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(source, repository / "snapshots" / commit)


def test_hub_ids_are_pinned_to_commit_and_load_offline(own_checkpoints, tmp_path, monkeypatch):
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    commit = "0123456789abcdef0123456789abcdef01234567"
    for name in ("target", "retain"):
        as_hub_repository(cache, f"somebody/{name}", commit, own_checkpoints / name)
    bundle = write_bundle(
        tmp_path / "bundle",
        target="somebody/target",
        retain_auxiliary="somebody/retain@main",
        forget_auxiliary=str(own_checkpoints / "forget"),
        steering="linear:1.5",
    )
    config = json.loads((bundle / "config.json").read_text())
    assert config["target"] == {"hub_id": "somebody/target", "revision": commit}
    assert config["retain_auxiliary"]["revision"] == commit
    local = DivergenceForCausalLM.from_pretrained(write(own_checkpoints, tmp_path / "local"))
    assert torch.equal(logits_of(DivergenceForCausalLM.from_pretrained(bundle)), logits_of(local))
    registry = Registry.create(tmp_path / "registry", texts_of("retain", ["A text."]), "somebody/target@main")
    assert registry.description["target"] == config["target"]
    for moving in ({"hub_id": "somebody/target"}, config["target"] | {"revision": "main"}):
        (bundle / "config.json").write_text(json.dumps(config | {"target": moving}))
        with pytest.raises(
            UsageError, match=r"target: somebody/target at (no revision|main), which may change.*registry give --target"
        ):
            DivergenceForCausalLM.from_pretrained(bundle)
    as_hub_repository(cache, "somebody/steered", commit, write(own_checkpoints, tmp_path / "packed", pack=True))
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained("somebody/steered")), logits_of(local))


class TestRejectsInvalidInput:
    """Fail closed: an error that names what is wrong, and nothing written."""

    def refused(self, models, tmp_path, said, **options):
        output = tmp_path / "refused"
        with pytest.raises(UsageError, match=said):
            write(models, output, **options)
        assert not output.exists()
        assert not [name for name in os.listdir(tmp_path) if name.startswith(".refused")]

    def test_a_missing_checkpoint(self, own_checkpoints, tmp_path):
        shutil.rmtree(own_checkpoints / "retain")
        self.refused(own_checkpoints, tmp_path, "is not a folder, nor a GGUF file, nor a hub id")

    def test_a_truncated_weight_file(self, own_checkpoints, tmp_path):
        weights = own_checkpoints / "forget" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        self.refused(own_checkpoints, tmp_path, r"model\.safetensors is missing or corrupt")

    @pytest.mark.parametrize(
        ("file", "content", "said"),
        [
            ("config.json", "[]", r"config\.json is not readable JSON \(it holds a list, not a dict\)"),
            ("model.safetensors.index.json", "[]", "it holds a list"),
            ("model.safetensors.index.json", '{"weight_map": [1]}', r"weight_map is \[1\]; copy or download it again"),
            ("model.safetensors.index.json", '{"weight_map": {"a": 3}}', "names no shards"),
        ],
    )
    def test_damaged_json(self, own_checkpoints, tmp_path, file, content, said):
        (own_checkpoints / "forget" / file).write_text(content)
        self.refused(own_checkpoints, tmp_path, said)

    @pytest.mark.parametrize("ids", ["text", [[1]]])
    def test_end_tokens_that_are_no_ids(self, own_checkpoints, tmp_path, ids):
        bundle = write(own_checkpoints, tmp_path / "steered")
        (bundle / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        with pytest.raises(UsageError, match=r"generation_config\.json: eos_token_id is .*; accepted: token ids"):
            DivergenceForCausalLM.from_pretrained(bundle)

    def test_pickled_weights(self, own_checkpoints, tmp_path):
        weights = own_checkpoints / "forget" / "model.safetensors"
        torch.save(load_file(weights), own_checkpoints / "forget" / "pytorch_model.bin")
        weights.unlink()
        self.refused(own_checkpoints, tmp_path, "pickled weights")

    def test_unmerged_adapter(self, own_checkpoints, tmp_path):
        (own_checkpoints / "forget" / "config.json").rename(own_checkpoints / "forget" / "adapter_config.json")
        self.refused(own_checkpoints, tmp_path, "LoRA adapter")

    def test_auxiliary_with_different_vocabulary(self, own_checkpoints, tmp_path, world):
        from divdec_research.world.models import train_tokenizer

        other = train_tokenizer([text[::-1] for text in world.corpus[:100]], 512)
        other.save_pretrained(own_checkpoints / "forget")
        self.refused(own_checkpoints, tmp_path, "forget_auxiliary .* has another vocabulary than the target")

    def test_additional_tokens_of_one_auxiliary(self, own_checkpoints, tmp_path):
        """A bridge would be refused too, so the error does not suggest it."""
        from divdec.checkpoint import load_tokenizer

        tokenizer = load_tokenizer(own_checkpoints / "forget")
        tokenizer.add_tokens(["<|extra|>"], special_tokens=True)
        tokenizer.save_pretrained(own_checkpoints / "forget")
        advice = (
            "'<|extra|>' is .* against None; both auxiliaries must have one vocabulary: train forget_auxiliary again"
        )
        self.refused(own_checkpoints, tmp_path, advice.replace("|", "[|]"))

    def test_an_auxiliary_without_a_tokenizer(self, own_checkpoints, tmp_path):
        for file in (own_checkpoints / "retain").glob("token*"):
            file.unlink()
        self.refused(own_checkpoints, tmp_path, "has no tokenizer")

    def test_auxiliary_with_fewer_logits_than_tokens(self, own_checkpoints, tmp_path):
        tiny_model("llama", 500, 1).save_pretrained(own_checkpoints / "retain")
        self.refused(own_checkpoints, tmp_path, "500 logits, but its tokenizer writes token .* with id 511")

    @pytest.mark.parametrize(
        ("steering", "said"),
        [("rank:512", "between 1 and 511"), ("up:3", "accepted"), ("linear:-2", "negative")],
    )
    def test_incompatible_steering(self, own_checkpoints, tmp_path, steering, said):
        self.refused(own_checkpoints, tmp_path, said, steering=steering)

    def test_an_output_folder_in_use(self, own_checkpoints, tmp_path):
        output = tmp_path / "mine"
        output.mkdir()
        (output / "thesis.txt").write_text("years of work")
        for overwrite, said in ((False, "--overwrite"), (True, "not an earlier result")):
            with pytest.raises(UsageError, match=said):
                write(own_checkpoints, output, overwrite=overwrite)
        assert (output / "thesis.txt").read_text() == "years of work"

    def test_output_folder_containing_a_checkpoint(self, own_checkpoints, tmp_path):
        write(own_checkpoints, tmp_path / "bundle")
        shutil.move(own_checkpoints, tmp_path / "bundle" / "models")
        with pytest.raises(UsageError, match="one within the other"):
            write(tmp_path / "bundle" / "models", tmp_path / "bundle", overwrite=True)
        with pytest.raises(UsageError, match="one within the other"):
            write(tmp_path / "bundle" / "models", tmp_path / "bundle" / "models" / "target" / "bundle")
        assert (tmp_path / "bundle" / "models" / "target" / "model.safetensors").is_file()
        assert not (tmp_path / "bundle" / "models" / "target" / "bundle").exists()

    def test_overwrite_does_not_replace_checkpoint(self, own_checkpoints, tmp_path):
        shutil.copytree(own_checkpoints / "target", tmp_path / "precious")
        with pytest.raises(UsageError, match="not an earlier result"):
            write(own_checkpoints, tmp_path / "precious", overwrite=True)
        assert (tmp_path / "precious" / "model.safetensors").is_file()

    def test_one_model_as_both_auxiliaries(self, own_checkpoints, tmp_path):
        shutil.rmtree(own_checkpoints / "forget")
        shutil.copytree(own_checkpoints / "retain", own_checkpoints / "forget")
        self.refused(own_checkpoints, tmp_path, "their divergence is zero")

    def test_overwrite_replaces_existing_bundle(self, own_checkpoints, tmp_path):
        write(own_checkpoints, tmp_path / "bundle")
        with pytest.raises(UsageError, match="--overwrite"):
            write(own_checkpoints, tmp_path / "bundle", steering="rank:5")
        bundle = write(own_checkpoints, tmp_path / "bundle", steering="rank:5", overwrite=True)
        assert str(DivergenceForCausalLM.from_pretrained(bundle).steering) == "rank:5"
        assert sorted(os.listdir(tmp_path)) == ["bundle", "models"]


class TestLoadingRejects:
    """A bundle whose parts have changed, gone or been tampered with is never loaded as something less."""

    @pytest.mark.parametrize("part", ["target", "retain", "forget"])
    def test_changed_weights(self, bundle, own_checkpoints, part):
        change_weight(own_checkpoints / part)
        with pytest.raises(UsageError, match=r"model\.safetensors has changed .*--no-verify"):
            AutoModelForCausalLM.from_pretrained(bundle)
        DivergenceForCausalLM.from_pretrained(bundle, verify=False)

    def test_added_or_missing_file(self, bundle, own_checkpoints):
        (own_checkpoints / "retain" / "vocab.json").write_text("{}")
        with pytest.raises(UsageError, match=r"vocab\.json is new"):
            DivergenceForCausalLM.from_pretrained(bundle)
        (own_checkpoints / "retain" / "vocab.json").unlink()
        (own_checkpoints / "retain" / "tokenizer.json").unlink()
        with pytest.raises(UsageError, match=r"tokenizer\.json is missing"):
            DivergenceForCausalLM.from_pretrained(bundle)

    @pytest.mark.parametrize("part", ["target", "retain", "forget"])
    def test_deleted_checkpoint(self, bundle, own_checkpoints, part):
        shutil.rmtree(own_checkpoints / part)
        for verify in (True, False):
            with pytest.raises(UsageError, match="does not exist"):
                DivergenceForCausalLM.from_pretrained(bundle, verify=verify)

    @pytest.mark.parametrize("part", ["target", "retain_auxiliary", "forget_auxiliary"])
    def test_config_without_checkpoint_reference(self, bundle, part):
        config = json.loads((bundle / "config.json").read_text())
        del config[part]
        (bundle / "config.json").write_text(json.dumps(config))
        with pytest.raises(UsageError, match=f"names no {part}"):
            AutoModelForCausalLM.from_pretrained(bundle)

    @pytest.mark.parametrize(
        ("steering", "said"),
        [
            ({"rule": "none"}, "unknown steering rule"),
            ({"rule": "linear", "alpha": -1.0}, "negative"),
            ({"rule": "rank", "k": 9999}, "between 1 and"),
        ],
    )
    def test_config_with_invalid_steering(self, bundle, steering, said):
        config = json.loads((bundle / "config.json").read_text())
        config["steering"] = steering
        (bundle / "config.json").write_text(json.dumps(config))
        with pytest.raises(UsageError, match=said):
            DivergenceForCausalLM.from_pretrained(bundle)

    def test_config_without_steering(self, bundle):
        config = json.loads((bundle / "config.json").read_text())
        del config["steering"]
        (bundle / "config.json").write_text(json.dumps(config))
        with pytest.raises(UsageError, match="names no steering"):
            DivergenceForCausalLM.from_pretrained(bundle)

    def test_a_narrower_auxiliary_without_verification(self, bundle, own_checkpoints):
        tiny_model("llama", 500, 1).save_pretrained(own_checkpoints / "retain")
        with pytest.raises(UsageError, match="512 tokens, that of its parts 500"):
            DivergenceForCausalLM.from_pretrained(bundle, verify=False)

    def test_removed_digests(self, bundle):
        config = json.loads((bundle / "config.json").read_text())
        del config["forget_auxiliary"]["sha256"]
        (bundle / "config.json").write_text(json.dumps(config))
        with pytest.raises(UsageError, match="holds no digests"):
            DivergenceForCausalLM.from_pretrained(bundle)

    @pytest.mark.parametrize("size", [511, 0, True])
    def test_different_vocabulary_size(self, bundle, size):
        config = json.loads((bundle / "config.json").read_text())
        config["vocab_size"] = size
        (bundle / "config.json").write_text(json.dumps(config))
        with pytest.raises(UsageError, match="write the bundle again"):
            DivergenceForCausalLM.from_pretrained(bundle)

    def test_same_auxiliary_referenced_twice(self, bundle):
        config = json.loads((bundle / "config.json").read_text())
        config["forget_auxiliary"] = config["retain_auxiliary"]
        (bundle / "config.json").write_text(json.dumps(config))
        for verify in (True, False):
            with pytest.raises(UsageError, match="nothing would be forgotten"):
                DivergenceForCausalLM.from_pretrained(bundle, verify=verify)

    def test_identical_auxiliaries_without_verification(self, bundle, own_checkpoints):
        shutil.copyfile(own_checkpoints / "retain/model.safetensors", own_checkpoints / "forget/model.safetensors")
        with pytest.raises(UsageError, match="nothing would be forgotten"):
            DivergenceForCausalLM.from_pretrained(bundle, verify=False)

    @pytest.mark.parametrize("part", ["target", "retain", "forget"])
    def test_missing_weights(self, bundle, own_checkpoints, part):
        weights = own_checkpoints / part / "model.safetensors"
        tensors = load_file(weights)
        del tensors["model.norm.weight"]
        save_file(tensors, weights, metadata={"format": "pt"})
        with pytest.raises(UsageError, match=r"lacks the weights model\.norm\.weight"):
            DivergenceForCausalLM.from_pretrained(bundle, verify=False)

    def test_weights_of_wrong_shape(self, bundle, own_checkpoints):
        weights = own_checkpoints / "retain" / "model.safetensors"
        tensors = load_file(weights)
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
        save_file(tensors, weights, metadata={"format": "pt"})
        with pytest.raises(UsageError, match="retain_auxiliary"):
            DivergenceForCausalLM.from_pretrained(bundle, verify=False)

    def test_shards_outside_checkpoint_folder(self, bundle, own_checkpoints):
        index = {"weight_map": {"model.norm.weight": "../target/model.safetensors"}}
        (own_checkpoints / "retain" / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(UsageError, match="outside the folder"):
            DivergenceForCausalLM.from_pretrained(bundle, verify=False)

    def test_duplicate_weight_files(self, bundle, own_checkpoints):
        """transformers would load the single file, though the shards were saved after it."""
        tiny_model("llama", 512, 1).save_pretrained(own_checkpoints / "retain", max_shard_size="20KB")
        for verify in (True, False):
            with pytest.raises(UsageError, match="two sets of weights"):
                DivergenceForCausalLM.from_pretrained(bundle, verify=verify)
        with pytest.raises(UsageError, match="two sets of weights"):
            write(own_checkpoints, bundle.parent / "another")

    @pytest.mark.parametrize("part", ["target", "retain", "forget"])
    @pytest.mark.parametrize(
        "name", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja", "tokenizer_config.json"]
    )
    def test_changed_tokenizer_files(self, bundle, own_checkpoints, part, name):
        """What stands around a message decides what a part reads."""
        file = own_checkpoints / part / name
        text = file.read_text() if file.is_file() else ""
        file.parent.mkdir(exist_ok=True)
        file.write_text(text + "\n")
        with pytest.raises(UsageError, match=rf"{part}.*{name} (has changed|is new) .*--no-verify"):
            DivergenceForCausalLM.from_pretrained(bundle)
        with pytest.raises(UsageError, match=name):
            read_parts(str(bundle), None, EngineOptions())
        DivergenceForCausalLM.from_pretrained(bundle, verify=False)
        again = write(own_checkpoints, bundle.parent / "again", pack=True)
        DivergenceForCausalLM.from_pretrained(again)
        assert (again / part if part == "target" else again / f"{part}_auxiliary").joinpath(name).is_file()

    @pytest.mark.parametrize("option", [{"subfolder": "target"}, {"output_loading_info": True}])
    def test_options_of_a_single_checkpoint(self, bundle, option):
        with pytest.raises(UsageError, match="no meaning for a bundle"):
            DivergenceForCausalLM.from_pretrained(bundle, **option)

    def test_plain_checkpoint_is_not_a_bundle(self, checkpoints):
        with pytest.raises(UsageError, match="plain llama checkpoint"):
            DivergenceForCausalLM.from_pretrained(checkpoints / "target")

    def test_missing_bundle(self, tmp_path):
        with pytest.raises(UsageError, match=r"no config\.json"):
            DivergenceForCausalLM.from_pretrained(tmp_path)
        with pytest.raises(
            UsageError, match=r"not a local folder, and not in the local Hugging Face cache.*check the path"
        ):
            DivergenceForCausalLM.from_pretrained("nobody/nothing", local_files_only=True)
        with pytest.raises(UsageError, match="not a folder"):
            DivergenceForCausalLM.from_pretrained(tmp_path / "missing")
