"""What cannot be served by vLLM, or was not tried, is refused in one line before anything is loaded."""

import copy
import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from divdec import Steering, write_bundle
from support.tiny import tiny_model
from support.vllm_reference import environment

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TRANSFER = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
# What is asked for, and words of the line that refuses it.
OPTIONS = {
    "pipeline": ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size is 2"),
    "data parallel": ({"data_parallel_size": 2}, "--data-parallel-size is 2"),
    "pooling": ({"runner": "pooling"}, "--runner is 'pooling'"),
    "embedding": ({"convert": "embed"}, "--runner is 'pooling'"),
    "quantised": ({"quantization": "fp8"}, "--quantization is 'fp8'"),
    "adapters": ({"enable_lora": True}, "--enable-lora is"),
    "embeddings as prompts": ({"enable_prompt_embeds": True}, "--enable-prompt-embeds is True"),
    "overrides": ({"hf_overrides": {"steering": {"alpha": 0.0}}}, "--hf-overrides is"),
    "random weights": ({"load_format": "dummy"}, "--load-format is 'dummy'"),
    "keys and values elsewhere": ({"kv_transfer_config": TRANSFER}, "--kv-transfer-config is"),
    "keys and values of 8 bits": ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype is 'fp8_e5m2'"),
    "processors": ({"logits_processors": ["json:loads"]}, "--logits-processors is"),
    "worker methods": ({"worker_extension_cls": "json.JSONEncoder"}, "--worker-extension-cls is"),
    "unknown option": ({"additional_config": {"divdec": {"alpha": 0}}}, "additional_config['divdec'] is {'alpha': 0}"),
    "heads that do not divide": ({"tensor_parallel_size": 3, "distributed_executor_backend": "mp"}, "has 4 attention"),
}


def change_weight(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def lose_weight(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.self_attn.k_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.fixture
def reported(tmp_path):
    def ask(cases):
        (tmp_path / "cases.json").write_text(json.dumps(cases))
        command = [sys.executable, Path(__file__).with_name("run_refusals.py")]
        result = subprocess.run(
            [*command, tmp_path / "cases.json", tmp_path / "told.json"],
            capture_output=True, text=True, timeout=600, env=environment(VLLM_ENABLE_V1_MULTIPROCESSING="1"),
        )  # fmt: skip
        assert result.returncode == 0, result.stderr[-4000:]
        return json.loads((tmp_path / "told.json").read_text())

    return ask


def test_unsupported_vllm_options_are_rejected(
    reported, models, make_bundle, make_registry, ngrams, texts, tokenizer, tmp_path
):
    def case(bundle, environment=None, **options):
        return {"bundle": str(bundle), "options": options, "environment": environment or {}}

    plain = make_bundle()
    cases = {"plain": (case(plain), None)}
    for name, (options, words) in OPTIONS.items():
        cases[name] = case(plain, **options), words
    for variable in ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ALLOW_INSECURE_SERIALIZATION"):
        cases[variable] = case(plain, {variable: "1"}), f"{variable} is set"
    cases["another tokenizer"] = case(plain, tokenizer=str(models / "target")), "--tokenizer is"
    # Of vLLM's second model runner alone.
    second = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    cases["forced tokens"] = case(plain, second, enable_trace_replay=True), "--enable-trace-replay is True"
    masked = {"return_sampling_mask": True, "logprobs_mode": "processed_logprobs"}
    cases["candidates of sampling"] = case(plain, second, **masked), "--return-sampling-mask is True"
    longer = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    cases["longer than the models"] = case(plain, longer, max_model_len=300), "--max-model-len is 300"
    lossy = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    lossy |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}
    cases["drafts that are not checked"] = case(plain, speculative_config=lossy), "rejection_sample_method"

    registry = make_registry(texts[:3])
    following = make_bundle(registry=registry)
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    cases["registry on two ranks"] = case(following, **ranks), None
    by_variable = {"DIVDEC_REGISTRY": str(registry)}
    cases["registry by variable on two ranks"] = case(plain, by_variable, **ranks), None
    ranked = make_bundle(steering="rank:5")
    arguments = {"divdec": {"registry": str(registry)}}
    cases["registry and rank rule"] = case(ranked, additional_config=arguments), None
    other = {"divdec": {"registry": str(make_registry([]))}}
    cases["another registry"] = case(following, additional_config=other), "another registry"
    nowhere = {"divdec": {"registry": str(tmp_path / "nowhere")}}
    cases["no registry"] = case(plain, additional_config=nowhere), "is no registry"
    counted = make_bundle(ngram=ngrams, steering="linear:1:1")
    configure(counted, steering=Steering.parse("linear:1:2").to_dict())
    cases["margin that n-grams never reach"] = case(counted), "the scores of these n-grams differ by at most 1"

    def damaged(name, damage):
        copied = tmp_path / name
        for piece in ("target", "retain", "forget"):
            shutil.copytree(models / piece, copied / piece)
        options = {"target": "target", "retain_auxiliary": "retain", "forget_auxiliary": "forget"}
        options = {piece: str(copied / folder) for piece, folder in options.items()}
        bundle = write_bundle(copied / "bundle", **options, steering="linear:1.5")
        damage(copied / "forget")
        return bundle

    changed = damaged("changed", change_weight)
    cases["changed weight"] = case(changed), "model.safetensors has changed since the bundle was written"
    cases["changed weight that is meant"] = case(changed, additional_config={"divdec": {"verify": False}}), None
    lost = damaged("lost", lose_weight)
    cases["missing weight"] = case(lost, additional_config={"divdec": {"verify": False}}), "lacks the weights"
    cases["missing part"] = case(damaged("gone", shutil.rmtree)), "does not exist"

    def twin(folder):
        shutil.copyfile(folder.parent / "retain" / "model.safetensors", folder / "model.safetensors")

    def rename(folder):
        content = json.loads((folder / "tokenizer.json").read_text())
        vocabulary = content["model"]["vocab"]
        one, two = "a", "b"
        vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
        (folder / "tokenizer.json").write_text(json.dumps(content))

    unverified = {"divdec": {"verify": False}}
    cases["another tokenizer's auxiliary"] = (
        case(damaged("renamed", rename), additional_config=unverified),
        "vocabulary",
    )
    twins = damaged("twins", twin)
    config = json.loads((twins / "config.json").read_text())
    config["forget_auxiliary"]["sha256"] = config["retain_auxiliary"]["sha256"]
    (twins / "config.json").write_text(json.dumps(config))
    cases["twins"] = case(twins), "the same model"

    sliding = tmp_path / "sliding"
    layers = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    tiny_model("qwen", len(tokenizer), 9, width=128, **layers).save_pretrained(sliding)
    complete = copy.deepcopy(tokenizer)
    complete.add_special_tokens({"unk_token": tokenizer.eos_token})  # Qwen2's tokenizer would add one of its own
    complete.save_pretrained(sliding)
    windowed = make_bundle(str(sliding))
    cases["sliding window"] = case(windowed), "attends to the last 8 tokens in some layers"

    quantised = {
        "leaves 'model.layers.0.mlp": {
            "quant_method": "compressed-tensors",
            "ignore": ["model.layers.0.mlp.down_proj"],
        },
        "keys and values too": {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}},
        "quantised by gptq": {"quant_method": "gptq"},
    }
    for number, (words, how) in enumerate(quantised.items()):
        bundle = damaged(f"quantised {number}", functools.partial(configure, quantization_config=how))
        cases[words] = case(bundle, additional_config=unverified), words

    factors = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "original_max_position_embeddings": 128}
    rotary = {
        "more than 128 tokens (longrope)": {"rope_type": "longrope", "factor": 2.0} | factors,
        "of type 'dynamic'": {"rope_type": "dynamic", "factor": 2.0},
    }
    for number, (words, how) in enumerate(rotary.items()):
        change = functools.partial(configure, rope_parameters=how | {"rope_theta": 10000.0})
        cases[words] = case(damaged(f"rotary {number}", change), additional_config=unverified), words

    bounded = tmp_path / "bounded"
    tiny_model("gemma2", len(tokenizer), 9, width=128, head_dim=32, sliding_window=256).save_pretrained(bounded)
    tokenizer.save_pretrained(bounded)
    cases["bounded scores"] = case(make_bundle(str(bounded))), "attn_logit_softcapping"

    answers = dict(zip(cases, reported([arguments for arguments, _ in cases.values()]), strict=True))
    wrong = {}
    for name, (_, words) in cases.items():
        answer = answers[name]
        if words is None:
            fits = answer == "accepted"
        else:
            fits = answer.startswith("divdec: ") and words in answer and "\n" not in answer
        if not fits:
            wrong[name] = answer
    assert not wrong


def test_vllm_server_gives_one_line_errors(make_bundle):
    options = {"bundle": str(make_bundle()), "extra": ["--pipeline-parallel-size", "2", "--max-model-len", "256"]}
    command = [sys.executable, str(Path(__file__).with_name("run_server.py")), json.dumps(options)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment())
    assert result.returncode == 2, result.stderr[-4000:]
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("refused: --pipeline-parallel-size is 2")
    assert "Traceback" not in result.stderr
