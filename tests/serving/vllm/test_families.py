"""Families of models in vLLM: each as a target, with a pair of its own family and with a pair of another.

They have the families' real layouts (heads of keys and values, windows, biases, tied embeddings, experts) at tiny
widths. An engine for each takes a few minutes together, so they run on demand: `make test-vllm-slow`.
"""

import concurrent.futures
import contextlib
import copy
import time

import httpx
import pytest
import torch
import transformers

from divdec import write_bundle
from divdec.data.records import texts_of
from divdec.takedowns.registry import Registry
from support.vllm_reference import (
    ALONE,
    EAGER,
    EXTRA,
    HEADERS,
    TOLERANCE,
    TWO_RANKS,
    Reference,
    is_steered,
    requests,
    same_answers,
    vllm_serving,
)

pytestmark = [pytest.mark.vllm_slow, pytest.mark.timeout(900)]

HEAD = {"head_dim": 64}
WINDOW = 32  # tokens; the longest prompts have 93
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = {**HEAD, "sliding_window": WINDOW, "query_pre_attn_scalar": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SCALED = {"rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
# The type of model in transformers, and after a space that of its rotary embedding where it is not the usual one.
FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": HEAD,
    "mistral": {"sliding_window": WINDOW},
    "gemma2": GEMMA | {"attn_logit_softcapping": None},  # with it vLLM on a CPU is inexact, and refused
    "gemma3_text": GEMMA,
    "phi3": {"sliding_window": WINDOW},
    "gpt2": {},
    "mixtral": {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**HEAD, **EXPERTS},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "llama llama3": {
        "rope_parameters": SCALED | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    },
    "llama yarn": {"rope_parameters": SCALED | {"rope_type": "yarn"}},
}


def tiny(family, vocab_size, seed, width, layers):
    """A random model with the layout of a family."""
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_key_value_heads": 2,
    }
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 256}
    if family == "gpt2":
        sizes = {"n_embd": width, "n_layer": layers, "n_head": 4, "n_positions": 256}
    ends = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1}
    kind = transformers.CONFIG_MAPPING[family.split()[0]]
    if family.startswith("gemma"):
        sizes["layer_types"] = LAYERS[:layers]
    config = kind(vocab_size=vocab_size, initializer_range=0.2, **sizes, **FAMILIES[family], **ends)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def make(tokenizer, tmp_path):
    """Writes a bundle of a target and a pair of another, or the same, family."""
    complete = copy.deepcopy(tokenizer)
    complete.add_special_tokens({"unk_token": tokenizer.eos_token})  # Qwen2's tokenizer would add one of its own

    def bundle(target, pair):
        shapes = {"target": (target, 256, 3), "retain": (pair, 128, 2), "forget": (pair, 128, 2)}
        for seed, (name, (family, width, layers)) in enumerate(shapes.items()):
            tiny(family, len(tokenizer), seed, width, layers).save_pretrained(tmp_path / name)
            complete.save_pretrained(tmp_path / name)
        return write_bundle(
            tmp_path / "bundle", target=str(tmp_path / "target"), retain_auxiliary=str(tmp_path / "retain"),
            forget_auxiliary=str(tmp_path / "forget"), steering="linear:1.5",
        )  # fmt: skip

    return bundle


@pytest.mark.parametrize("pair", ["own", "other"])
@pytest.mark.parametrize("family", FAMILIES)
def test_family_answers_as_in_transformers(family, pair, make, ask, prompts):
    other = "qwen2" if family.startswith("llama") else "llama"
    bundle = make(family, family if pair == "own" else other)
    asked = prompts[1::6]
    (answers,) = ask(bundle, [requests(asked, logprobs=5, prompt_logprobs=5)], **ALONE, **EAGER)
    model = Reference(bundle)
    same_answers(model, asked, answers)
    is_steered(model, asked, answers, apart=0.5)


def test_two_rotary_embeddings_by_length_within_the_shorter(make, ask, prompts, monkeypatch):
    """Phi-3's long contexts; of longer texts see test_refusals.py."""
    half = {"short_factor": [1.0 + i / 32 for i in range(32)], "long_factor": [4.0] * 32}
    long = {
        "original_max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4} | half,
    }
    monkeypatch.setitem(FAMILIES, "phi3", long)
    bundle = make("phi3", "llama")
    asked = prompts[1::6]
    (answers,) = ask(bundle, [requests(asked, logprobs=5, prompt_logprobs=5)], **ALONE, **EAGER, max_model_len=128)
    model = Reference(bundle)
    same_answers(model, asked, answers)
    is_steered(model, asked, answers, apart=0.5)


def test_windows_with_ngrams_prefix_caching_and_short_steps(make, ask, ngrams, prompts, tmp_path):
    """Blocks behind a window are freed, but the memory of tokens needs no more than the last ones."""
    make("mistral", "gemma2")
    bundle = write_bundle(
        tmp_path / "counting", target=str(tmp_path / "target"), retain_auxiliary=str(tmp_path / "retain"),
        forget_auxiliary=str(tmp_path / "forget"), ngram=ngrams, ngram_weight=4.0, steering="rank:20:3",
    )  # fmt: skip
    rounds = [requests(prompts, logprobs=5), requests(prompts[::-1], logprobs=5)]
    options = {"block_size": 32, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    together, cached = ask(bundle, rounds, **ALONE, **EAGER, **options)
    model = Reference(bundle)
    for asked, answers in ((prompts, together), (prompts[::-1], cached)):
        same_answers(model, asked, answers)
        is_steered(model, asked, answers)
    assert sum(answer["cached"] for answer in cached) > 100


def test_takedown_on_two_ranks_while_answers_run(make_bundle, make_registry, texts, tokenizer, tmp_path):
    """Both ranks sample the same tokens, also in the step in which the registry changes."""
    registry = make_registry(texts[:20])
    bundle = make_bundle(registry=registry)
    text = texts[200]
    ids = tokenizer(text)["input_ids"]
    log, extra = tmp_path / "log.txt", ["--tensor-parallel-size", "2", "--distributed-executor-backend", "mp"]
    with vllm_serving(bundle, log, TWO_RANKS, extra=[*EXTRA, *extra], logprobs="full") as url:

        def ask(prompt, **options):
            asked = {"model": "steered", "prompt": prompt, "temperature": 0, "max_tokens": 1, **options}
            response = httpx.post(f"{url}/v1/completions", json=asked, headers=HEADERS, timeout=300)
            assert response.status_code == 200, response.text
            return response.json()["choices"][0]

        def echoed():
            shown = ask(ids, echo=True, logprobs=1)["logprobs"]["token_logprobs"][1 : len(ids)]
            return torch.tensor(shown)

        def expected():
            logprobs = Reference(bundle).logprobs(ids)
            return logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]

        before = echoed()
        assert (before - expected()).abs().max() < TOLERANCE
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            long = {"max_tokens": 180, "ignore_eos": True, "logprobs": 1, "return_tokens_as_token_ids": True}
            running = [pool.submit(ask, ids[:40], seed=seed, **long) for seed in range(4)]
            time.sleep(0.5)
            Registry(registry).add("second", texts_of("texts", [text]))
            answers = [future.result() for future in running]
        # Ranks that had drawn other tokens would answer nonsense from then on.
        model = Reference(bundle)
        for answer in answers:
            tokens = [int(token.removeprefix("token_id:")) for token in answer["logprobs"]["tokens"]]
            ends = model.logprobs(ids[:40] + tokens)[-2]
            assert abs(answer["logprobs"]["token_logprobs"][-1] - ends[tokens[-1]].item()) < TOLERANCE
        after = echoed()
        assert (after - expected()).abs().max() < TOLERANCE
        assert (after - before).abs().max() > 1


def test_lost_registry_ends_answers_on_two_ranks(make_bundle, make_registry, texts, tokenizer, tmp_path):
    """The rank that looks up fails, and the other does not wait for it or go on with the target's tokens."""
    registry = make_registry(texts[:20])
    bundle = make_bundle(registry=registry)
    log, extra = tmp_path / "log.txt", ["--tensor-parallel-size", "2", "--distributed-executor-backend", "mp"]
    asked = {"model": "steered", "prompt": tokenizer(texts[200])["input_ids"], "temperature": 0, "max_tokens": 8}
    status = []
    # The server ends when its engine does.
    with contextlib.suppress(AssertionError), vllm_serving(bundle, log, TWO_RANKS, extra=[*EXTRA, *extra]) as url:
        for _ in range(2):
            with contextlib.suppress(httpx.TransportError):
                response = httpx.post(f"{url}/v1/completions", json=asked, headers=HEADERS, timeout=60)
                status.append(response.status_code)
            (registry / "registry.db").unlink(missing_ok=True)
    assert status[0] == 200
    assert not [code for code in status[1:] if code < 500]
    assert "registry.db is gone: nothing can tell what is to be forgotten" in log.read_text()
