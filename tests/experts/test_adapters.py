"""A pair of adapters on one base computes what the merged checkpoints compute."""

import copy
import itertools
import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import httpx
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from divdec import DivergenceForCausalLM, NeuralPair, UsageError, write_bundle
from divdec.checkpoint import CheckpointReference, portable_adapter_config
from divdec.cli import main
from divdec.errors import FailedClosed
from divdec.experts.adapters import AdapterPair, read_adapter
from divdec.experts.protocol import Inputs
from divdec.model.loading import Bundle, load_parts
from divdec.serving.vllm.configuration import EngineOptions, read_parts
from divdec.steering import Steering
from support.exactness import assert_close, assert_same_answers
from support.served import serving
from support.tiny import tiny_model

VOCAB = 512
PROMPTS = ([5, 9, 200, 31], [7, 8], [44, 13, 90, 71, 6, 300])
# q and p have other ranks and other layers.
ADAPTERS = {
    "retain": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "forget": {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "down_proj"], "use_rslora": True},
}


def adapt(base, folder, seed, **settings):
    """Write an adapter of random weights, and return the merged model."""
    torch.manual_seed(seed)
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    return model.merge_and_unload().eval()


@pytest.fixture(params=["llama", "qwen", "mistral"])
def parts(request, tmp_path, tokenizer):
    """Target, base and adapters in folders, and the merged auxiliaries."""
    return make_parts(request.param, tmp_path, tokenizer)


@pytest.fixture
def llama(tmp_path, tokenizer):
    return make_parts("llama", tmp_path, tokenizer)


def make_parts(family, folder, tokenizer):
    models = {"target": tiny_model(family, VOCAB, 0, width=64, layers=3), "base": tiny_model(family, VOCAB, 1)}
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    merged = {}
    for seed, (name, settings) in enumerate(ADAPTERS.items()):
        merged[name] = adapt(models["base"], folder / name, seed, **settings)
        name_base(folder / name, folder / "base")
    return folder, models, merged


def name_base(folder, base):
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(base)}))


def write(folder, output="bundle", steering="linear:1.5", **options):
    return write_bundle(
        folder / output, target=str(folder / "target"), retain_auxiliary=str(folder / "retain"),
        forget_auxiliary=str(folder / "forget"), steering=steering, **options,
    )  # fmt: skip


def padded(prompts):
    longest = max(map(len, prompts))
    ids = torch.tensor([[1] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    return ids, torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])


@torch.no_grad()
def test_divergence_is_that_of_the_merged_pair(parts):
    folder, models, merged = parts
    pair = AdapterPair.load(models["base"], folder / "retain", folder / "forget")
    ids, mask = padded(PROMPTS)
    expected = NeuralPair(merged["retain"], merged["forget"]).divergence(ids, mask)
    assert pair.joint is not None
    assert_close(pair.divergence(ids, mask)[mask.bool()], expected[mask.bool()])
    cache = pair.new_cache()  # in pieces: the cache is that of two models
    pieces = [pair.divergence(ids[:, part], mask[:, : part.stop], cache=cache) for part in (slice(0, 3), slice(3, 6))]
    assert_close(torch.cat(pieces, dim=1)[mask.bool()], expected[mask.bool()])
    assert cache.lengths == [6, 6]


@torch.no_grad()
def test_remote_target_is_steered_by_adapters(llama):
    from divdec.remote.experts import LoadedExperts

    folder, _, merged = llama
    ids = torch.tensor([PROMPTS[0]])
    expected = NeuralPair(merged["retain"], merged["forget"]).divergence(ids)
    loaded = LoadedExperts.load(Bundle.open(write(folder), target=False))
    assert isinstance(loaded.experts, AdapterPair)
    assert_close(loaded.experts.divergence(ids), expected)


@pytest.mark.parametrize("rule", ["linear:1.5", "rank:20", "linear:1:0.5", "linear:1:0.5:full"])
@pytest.mark.parametrize(
    "options", [{}, {"use_cache": False}, {"speculative": True}, {"speculative": 3}, {"num_beams": 3}], ids=str
)
def test_answers_are_those_of_the_merged_pair(llama, rule, options):
    folder, models, merged = llama
    model = DivergenceForCausalLM.from_pretrained(write(folder, steering=rule))
    reference = DivergenceForCausalLM.from_parts(models["target"], *merged.values(), rule)
    ids, mask = padded(PROMPTS)
    plain = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 1}
    beams = {"num_beams": options["num_beams"]} if "num_beams" in options else {}
    expected = reference.generate(ids, **plain, **beams)
    if beams:
        assert torch.equal(model.generate(ids, **plain, **options), expected)
    else:
        assert_same_answers(reference, PROMPTS, model.generate(ids, **plain, **options), expected)


def test_weights_of_the_base_are_held_once(llama):
    folder, models, _ = llama
    pair = AdapterPair.load(models["base"], folder / "retain", folder / "forget")
    own = {id(weight) for weight in models["base"].parameters()}
    added = sum(weight.numel() for weight in pair.parameters() if id(weight) not in own)
    assert own <= {id(weight) for weight in pair.parameters()}
    assert added < 0.4 * models["base"].num_parameters()


def write_pairs(folder, models, number):
    """Bundles of one target and one base, each with its own pair of adapters."""
    bundles = []
    for index in range(number):
        options = {}
        for side, (name, settings) in enumerate(ADAPTERS.items()):
            adapter = folder / f"{name}-{index}"
            adapt(models["base"], adapter, 100 + 2 * index + side, **settings)
            name_base(adapter, folder / "base")
            options[f"{name}_auxiliary"] = str(adapter)
        output = folder / f"bundle-{index}"
        bundles.append(write_bundle(output, target=str(folder / "target"), steering="linear:1.5", **options))
    return bundles


def count_stored(modules):
    """Number of values that the parameters of all modules take, where shared ones count once."""
    weights = [weight for module in modules for weight in module.parameters()]
    storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in weights}
    return sum(storages.values()) // weights[0].element_size()


def test_ten_bundles_of_one_target_and_base_take_the_memory_of_ten_adapter_pairs_more(llama):
    folder, models, _ = llama
    bundles, loaded = write_pairs(folder, models, 10), {}
    sharing = [DivergenceForCausalLM.from_pretrained(bundle, loaded=loaded) for bundle in bundles]
    assert len(loaded) == 2
    pairs = 0
    for index in range(len(bundles)):
        weights = [load_file(folder / f"{name}-{index}" / "adapter_model.safetensors") for name in ADAPTERS]
        sizes = [sum(weight.numel() for weight in adapter.values()) for adapter in weights]
        # The pass of both has a copy, in which the smaller adapter has the layers and the rank of the larger.
        pairs += sum(sizes) + 2 * max(sizes)
    assert count_stored(sharing) == count_stored(models.values()) + pairs
    ids = torch.tensor([PROMPTS[0]])
    logits = [model(ids).logits for model in sharing]
    for bundle, own_logits in zip(bundles, logits, strict=True):
        assert torch.equal(own_logits, DivergenceForCausalLM.from_pretrained(bundle)(ids).logits)
    for first, second in itertools.combinations(logits, 2):
        assert (first - second).abs().max() > 0.1


def test_changed_adapter_is_refused_on_a_base_that_is_loaded(llama):
    folder, models, _ = llama
    first, second = write_pairs(folder, models, 2)
    loaded = {}
    load_parts(second, loaded=loaded)
    shutil.copytree(folder / "forget-1", folder / "forget-0", dirs_exist_ok=True)
    with pytest.raises(UsageError, match="has changed"):
        load_parts(first, loaded=loaded)


def test_server_of_two_bundles_on_one_base_answers_each_by_its_own_adapters(llama, tokenizer, monkeypatch):
    folder, models, _ = llama
    bundles = dict(zip(("first", "second"), write_pairs(folder, models, 2), strict=True))
    engines = {}
    monkeypatch.setattr("divdec.serving.server.serve", lambda built, port, settings: engines.update(built))
    extra = ["--name", "first", "--extra-bundle", f"second={bundles['second']}", "--port", "0"]
    assert main(["serve", str(bundles["first"]), *extra]) == 0
    sharing = [engine.scheduler._model for engine in engines.values()]
    assert count_stored(sharing) - count_stored(sharing[:1]) < 0.5 * models["base"].num_parameters()
    expected = {}
    for name, bundle in bundles.items():
        model = DivergenceForCausalLM.from_pretrained(bundle)
        ids = torch.tensor([PROMPTS[0]])
        output = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=1)
        expected[name] = tokenizer.decode(output[0, ids.shape[1] :])
    assert expected["first"] != expected["second"]
    body = {"prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0, "ignore_eos": True}

    def ask(name):
        reply = httpx.post(f"{url}/v1/completions", json=body | {"model": name}, timeout=60).json()
        return reply["choices"][0]["text"]

    with serving(engines.values(), shutdown_timeout=0.0) as url, ThreadPoolExecutor(4) as clients:
        assert list(clients.map(ask, [*expected] * 4)) == [*expected.values()] * 4


def test_merged_and_packed_bundles_answer_alike(llama):
    folder, _, _ = llama
    bundle, merged, packed = write(folder), write(folder, "merged", merge=True), write(folder, "packed", pack=True)
    assert json.loads((bundle / "config.json").read_text())["base"]["folder"] == "../base"
    assert json.loads((merged / "config.json").read_text())["base"] is None
    assert (packed / "retain_auxiliary" / "adapter_model.safetensors").is_file()
    ids = torch.tensor([PROMPTS[0]])
    logits = [DivergenceForCausalLM.from_pretrained(one)(ids).logits for one in (bundle, merged, packed)]
    assert_close(logits[1], logits[0])
    assert torch.equal(logits[2], logits[0])
    read_parts(str(merged), None, EngineOptions())
    with pytest.raises(UsageError, match=r"cannot be served by vLLM; merge them"):
        read_parts(str(bundle), None, EngineOptions())


def test_packed_adapters_name_no_folder_of_this_machine(llama, tmp_path):
    folder, models, merged = llama
    bundle = write(folder, pack=True)
    ids = torch.tensor([PROMPTS[0]])
    expected = DivergenceForCausalLM.from_pretrained(bundle)(ids).logits
    texts = {path: path.read_text() for path in [*bundle.rglob("*.json"), bundle / "README.md"]}
    assert not [path for path, text in texts.items() if str(tmp_path) in text]
    for part in ("retain", "forget"):
        adapter = bundle / f"{part}_auxiliary"
        assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] is None
        # PEFT takes the base from its caller.
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(models["base"]), adapter).merge_and_unload()
        assert_close(loaded(ids).logits, merged[part](ids).logits)
    for name in ("target", "base", "retain", "forget"):
        shutil.rmtree(folder / name)
    assert torch.equal(DivergenceForCausalLM.from_pretrained(bundle)(ids).logits, expected)


def test_portable_adapter_names_a_base_of_the_hub_at_its_commit(llama):
    folder, _, _ = llama
    base = CheckpointReference(hub_id="org/small", revision="abc")
    adapter = json.loads(portable_adapter_config(folder / "retain", base))
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == ("org/small", "abc")


class TestRefused:
    def refused(self, folder, message, **options):
        with pytest.raises(UsageError, match=message):
            write(folder, **options)
        assert not (folder / "bundle").exists()

    def test_adapters_of_two_bases(self, llama):
        folder, _, _ = llama
        name_base(folder / "forget", folder / "target")
        self.refused(folder, "adapt different bases")

    def test_one_adapter_and_one_checkpoint(self, llama):
        folder, _, merged = llama
        merged["forget"].save_pretrained(folder / "forget")
        (folder / "forget" / "adapter_config.json").unlink()
        self.refused(folder, "the other auxiliary a whole checkpoint")

    def test_base_with_other_shapes_or_without_a_layer(self, llama):
        folder, _, _ = llama
        for name in ("retain", "forget"):
            name_base(folder / name, folder / "target")
        self.refused(folder, "the adapter's own base")
        tiny_model("gpt2", VOCAB, 0).save_pretrained(folder / "base")
        for name in ("retain", "forget"):
            name_base(folder / name, folder / "base")
        self.refused(folder, "the base lacks it")

    def test_base_with_other_weights_than_in_training(self, llama):
        folder, _, _ = llama
        (folder / "retain" / "training.json").write_text(json.dumps({"base": {"model.safetensors": "0" * 64}}))
        self.refused(folder, "trained on other weights")

    def test_two_devices_for_adapters_of_one_base(self, llama, monkeypatch):
        from divdec.cli import loading

        monkeypatch.setattr(loading, "device_map", str)
        with pytest.raises(UsageError, match="adapters of one base; give one device for both"):
            loading.load(str(write(llama[0])), experts=loading.ExpertDevices(expert_devices=("cpu", "cuda:1")))
        model, _ = loading.load(str(write(llama[0], "again")), experts=loading.ExpertDevices(expert_devices=("cpu",)))
        assert isinstance(model.experts, AdapterPair)

    def test_other_kinds_of_adapters(self, llama):
        folder, models, _ = llama
        adapt(models["base"], folder / "retain", 0, r=2, target_modules=["q_proj"], use_dora=True)
        name_base(folder / "retain", folder / "base")
        self.refused(folder, "use_dora is True")

    def test_adapters_that_change_the_base_too(self, llama):
        folder, _, _ = llama
        config = json.loads((folder / "retain" / "adapter_config.json").read_text())
        (folder / "retain" / "adapter_config.json").write_text(json.dumps(config | {"init_lora_weights": "pissa"}))
        self.refused(folder, "init_lora_weights is 'pissa'")

    def test_untrained_adapters(self, llama):
        """Their matrices A differ, but their products are 0: the target would answer unsteered."""
        folder, models, _ = llama
        for seed, name in enumerate(("retain", "forget")):
            torch.manual_seed(seed)
            settings = peft.LoraConfig(task_type="CAUSAL_LM", **ADAPTERS[name])
            peft.get_peft_model(copy.deepcopy(models["base"]), settings).save_pretrained(folder / name)
            name_base(folder / name, folder / "base")
        self.refused(folder, "adapters with equal products")
        with pytest.raises(UsageError, match="adapters with equal products"):
            AdapterPair.load(models["base"], folder / "retain", folder / "forget")

    def test_equal_adapters(self, llama):
        folder, models, _ = llama
        for name in ("retain", "forget"):
            adapt(models["base"], folder / name, 0, **ADAPTERS["retain"])
            name_base(folder / name, folder / "base")
        self.refused(folder, "same model")

    def test_offloaded_base(self, llama):
        """Its weights are on no device until a layer runs: adapters made there would hold no values."""
        folder, _, _ = llama
        bundle = write(folder)
        offload = {"device_map": {"": "disk"}, "offload_folder": str(folder / "offloaded")}
        with pytest.raises(UsageError, match="offloaded to CPU or disk"):
            DivergenceForCausalLM.from_pretrained(bundle, **offload)

    def test_adapters_that_are_equal_in_the_bases_precision(self, llama):
        folder, models, _ = llama
        file = folder / "retain" / "adapter_model.safetensors"
        weights = {name: weight.bfloat16().float() for name, weight in load_file(file).items()}
        save_file(weights, file)
        shutil.copytree(folder / "retain", folder / "forget", dirs_exist_ok=True)
        nearly = {name: weight * (1 + 1e-3) for name, weight in weights.items()}
        save_file(nearly, folder / "forget" / "adapter_model.safetensors")
        pair = AdapterPair.load(models["base"], folder / "retain", folder / "forget")
        assert pair.forget is not None
        with pytest.raises(UsageError, match="same model"):
            AdapterPair.load(models["base"].to(torch.bfloat16), folder / "retain", folder / "forget")

    @pytest.mark.parametrize(
        ("config", "message"), [([], "it holds a list"), ({"lora_alpha": 0}, "accepted: a number, not 0")]
    )
    def test_damaged_configuration(self, llama, config, message):
        folder, models, _ = llama
        file = folder / "retain" / "adapter_config.json"
        changed = json.loads(file.read_text()) | config if isinstance(config, dict) else config
        file.write_text(json.dumps(changed))
        with pytest.raises(UsageError, match=message):
            AdapterPair.load(models["base"], folder / "retain", folder / "forget")

    @pytest.mark.parametrize("shape", [(4,), (0, 32), (3, 32)], ids=["vector", "rank 0", "A and B of different rank"])
    def test_factors_that_are_no_matrices_of_one_rank(self, llama, shape):
        folder, models, _ = llama
        file = folder / "retain" / "adapter_model.safetensors"
        weights = load_file(file)
        name = next(name for name in weights if name.endswith("q_proj.lora_A.weight"))
        weights[name] = torch.ones(shape)
        save_file(weights, file)
        shapes = rf"have the shapes {re.escape(str(shape))} and \(32, 4\); accepted: .* same rank, 1 or more"
        with pytest.raises(UsageError, match=shapes):
            read_adapter(folder / "retain", models["base"])

    def test_saving_from_memory(self, llama):
        folder, _, _ = llama
        model = DivergenceForCausalLM.from_pretrained(write(folder))
        with pytest.raises(UsageError, match="divdec bundle --pack"):
            model.save_pretrained(folder / "saved")

    def test_merging_checkpoints(self, llama):
        folder, _, _ = llama
        for name in ("retain", "forget"):
            name_base(folder / name, folder / "base")
        write(folder, merge=True)
        config = json.loads((folder / "bundle" / "config.json").read_text())
        with pytest.raises(UsageError, match="merge is for auxiliaries that are LoRA adapters"):
            write_bundle(
                folder / "again", target=str(folder / "target"), steering="rank:5", merge=True,
                retain_auxiliary=str(folder / "bundle" / config["retain_auxiliary"]["folder"]),
                forget_auxiliary=str(folder / "bundle" / config["forget_auxiliary"]["folder"]),
            )  # fmt: skip

    def test_changed_base_and_changed_adapter_when_loading(self, llama):
        folder, _, _ = llama
        bundle = write(folder)
        tiny_model("llama", VOCAB, 7).save_pretrained(folder / "base")
        with pytest.raises(UsageError, match=r"base: .*model\.safetensors has changed"):
            DivergenceForCausalLM.from_pretrained(bundle)
        (folder / "retain" / "adapter_model.safetensors").write_bytes(b"no tensors")
        with pytest.raises(UsageError, match="missing or corrupt"):
            DivergenceForCausalLM.from_pretrained(bundle, verify=False)

    def test_states_whose_rows_cannot_be_told_apart(self, llama):
        folder, models, _ = llama
        pair = AdapterPair.load(models["base"], folder / "retain", folder / "forget")
        layer = pair.joint.model.layers[0].mlp.down_proj
        with pytest.raises(FailedClosed, match="cannot be told apart"):
            layer(torch.zeros(6, 64))


def test_drafts_of_adapters_are_steered_and_read_once_by_both(llama, monkeypatch):
    folder, models, _ = llama
    pair = AdapterPair.load(models["base"], folder / "retain", folder / "forget")
    steering = Steering(rule="rank", k=20, vocabulary=tuple(range(50, 300)))
    model = DivergenceForCausalLM.from_experts(models["target"], pair, steering)
    monkeypatch.setattr(Steering, "eligible", None)  # takes longer than a draft, where the vocabulary is large
    ids, cache = torch.tensor([PROMPTS[0]]), model.new_cache()
    with torch.no_grad():
        model(ids, past_key_values=cache)
        passes = []
        pair.joint.register_forward_hook(lambda *_: passes.append("both"))
        for side in (pair.retain, pair.forget):
            side.register_forward_hook(lambda *_: passes.append("one"))
        draft = pair.draft_logits(Inputs(torch.tensor([[6]]), None, None), cache.experts, model.steer)
        expected = model(torch.tensor([[6]]), past_key_values=cache).logits
        assert passes == ["both"]
        assert (draft == -torch.inf).sum() == 20
        assert torch.equal(draft == -torch.inf, expected == -torch.inf)


@pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers.")
def test_adapters_of_the_output_layer_load(tmp_path, tokenizer):
    folder, models, merged = make_parts("llama", tmp_path, tokenizer)
    for seed, name in enumerate(ADAPTERS):
        merged[name] = adapt(models["base"], folder / name, seed, r=2, target_modules=["q_proj", "lm_head"])
        name_base(folder / name, folder / "base")
        file = folder / name / "adapter_model.safetensors"
        save_file({key: value for key, value in load_file(file).items() if "lora_" in key}, file)
    model = DivergenceForCausalLM.from_pretrained(write(folder))
    ids = torch.tensor([PROMPTS[0]])
    reference = DivergenceForCausalLM.from_parts(
        models["target"], merged["retain"], merged["forget"], steering="linear:1.5"
    )
    assert_close(model(ids).logits, reference(ids).logits)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    base.config.tie_word_embeddings = True
    base.tie_weights()
    base.save_pretrained(folder / "base")
    with pytest.raises(UsageError, match="the adapter changes lm_head, whose weights are the input embeddings too"):
        write(folder, "merged", merge=True)


@pytest.mark.parametrize(
    "layers", [lambda model: model.experts.joint.model.layers, lambda model: model.target.model.layers]
)
def test_cache_of_an_interrupted_pass_is_refused(llama, layers):
    folder, _, _ = llama
    model = DivergenceForCausalLM.from_pretrained(write(folder))
    cache, ids = model.new_cache(), torch.tensor([PROMPTS[0]])

    def stop(*_):
        raise KeyboardInterrupt

    with torch.no_grad():
        model(ids, past_key_values=cache)
        hook = layers(model)[1].register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, :1], past_key_values=cache)
        hook.remove()
        with pytest.raises(FailedClosed, match="begin with a new one"):
            model(ids[:, :1], past_key_values=cache)
        cache.reset()
        assert torch.equal(
            model(ids, past_key_values=cache).logits, model(ids, past_key_values=model.new_cache()).logits
        )
