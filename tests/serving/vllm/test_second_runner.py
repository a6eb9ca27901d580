"""The second model runner, vLLM's default on GPUs, answers as the first does. Triton's interpreter runs its kernels."""

import pytest

from support.vllm_reference import ALONE, EAGER, TWO_RANKS, Reference, furthest, is_steered, requests, same_answers

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

SECOND = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}


def test_drafts_ngrams_registry_and_prefix_cache(
    ask, make_bundle, make_registry, ngrams, models, texts, prompts, tmp_path
):
    bundle = make_bundle(ngram=ngrams, ngram_weight=4.0, registry=make_registry(texts[:40]))
    drafts = {"method": "draft_model", "model": str(models / "retain"), "num_speculative_tokens": 3}
    prompts = prompts[:24:4]
    rounds = [
        requests(prompts, logprobs=5, prompt_logprobs=5),
        requests(prompts[::-1], logprobs=5),
        requests(prompts, temperature=1.0, top_k=50, logprobs=5),
    ]
    options = ALONE | EAGER | {"block_size": 32, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    greedy, cached, sampled = ask(bundle, rounds, SECOND, **options, speculative_config=drafts)
    assert "Using V2 Model Runner" in (tmp_path / "log.txt").read_text()
    model = Reference(bundle)
    same_answers(model, prompts, greedy)
    same_answers(model, prompts[::-1], cached)
    assert sum(answer["cached"] for answer in cached) > 90
    for asked, answers in ((prompts, greedy), (prompts[::-1], cached), (prompts, sampled)):
        is_steered(model, asked, answers)
    from_pair_alone, _ = furthest(Reference(make_bundle()), prompts, greedy)
    assert from_pair_alone > 1


def test_two_ranks_with_registry(ask, make_bundle, make_registry, texts, prompts, tmp_path):
    bundle = make_bundle("gpt2", registry=make_registry(texts[:40]))
    options = EAGER | {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "max_num_batched_tokens": 64,
        "max_num_seqs": 2,
    }
    prompts = prompts[:16:8]
    (answers,) = ask(bundle, [requests(prompts, logprobs=5, prompt_logprobs=5)], SECOND | TWO_RANKS, **options)
    assert "Using V2 Model Runner" in (tmp_path / "log.txt").read_text()
    model = Reference(bundle)
    same_answers(model, prompts, answers)
    is_steered(model, prompts, answers)
