"""vLLM answers as the steered model in transformers does, however it batches, caches, splits or drafts."""

import copy
import shutil

import pytest

from divdec import write_bundle
from support.vllm_reference import ALONE, EAGER, TWO_RANKS, Reference, furthest, is_steered, requests, same_answers

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

# Only whole blocks are kept for other requests; the smallest that vLLM has on a CPU.
BLOCKS = {"block_size": 32}


def test_mixed_batch_with_prefix_caching(ask, make_bundle, prompts):
    bundle = make_bundle()
    # vLLM takes no higher temperature.
    wild = {"temperature": 2.0, "seed": 7, "logprobs": 5, "logit_bias": {"7": 50.0}}
    wild |= {"presence_penalty": 2.0, "top_k": 3, "min_p": 0.2}
    rounds = [
        requests(prompts, logprobs=5, prompt_logprobs=5),
        requests(prompts[::-1], logprobs=5),
        requests(prompts, **wild),
    ]
    together, cached, heated = ask(bundle, rounds, **ALONE, **EAGER, **BLOCKS)
    model = Reference(bundle)
    same_answers(model, prompts, together)
    same_answers(model, prompts[::-1], cached)
    assert sum(answer["cached"] for answer in cached) > 500
    for asked, answers in ((prompts, together), (prompts[::-1], cached), (prompts, heated)):
        is_steered(model, asked, answers)


def test_tensor_parallel_with_two_families_ngrams_and_registry(ask, make_bundle, make_registry, ngrams, texts, prompts):
    bundle = make_bundle("gpt2", ngram=ngrams, ngram_weight=4.0, registry=make_registry(texts[:40]))
    rounds = [requests(prompts, logprobs=5, prompt_logprobs=5)]
    options = EAGER | {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    (answers,) = ask(bundle, rounds, TWO_RANKS, **options)
    model = Reference(bundle)
    same_answers(model, prompts, answers)
    is_steered(model, prompts, answers)
    without, _ = furthest(Reference(make_bundle("gpt2", ngram=ngrams, ngram_weight=4.0)), prompts, answers)
    assert without > 1, "the registry changes nothing"


def test_q_drafts_with_ngrams_and_registry(ask, make_bundle, make_registry, ngrams, models, texts, prompts):
    """Prompts are read in pieces of 32 tokens, and drafts are rejected in the middle; five sequences have one each."""
    registry = make_registry(texts[:40])
    bundle = make_bundle(ngram=ngrams, ngram_weight=4.0, registry=registry)
    drafts = {"method": "draft_model", "model": str(models / "retain"), "num_speculative_tokens": 3}
    drafts |= {"num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 5, 1]]}
    rounds = [requests(prompts, logprobs=5, prompt_logprobs=5), requests(prompts, temperature=1.0, logprobs=5)]
    options = ALONE | EAGER | {"max_num_batched_tokens": 64, "max_num_seqs": 8, "speculative_config": drafts}
    greedy, sampled = ask(bundle, rounds, **options)
    model = Reference(bundle)
    same_answers(model, prompts, greedy)
    for answers in (greedy, sampled):
        is_steered(model, prompts, answers)
    # The test would hold without the counting experts if they changed nothing.
    from_pair_alone, _ = furthest(Reference(make_bundle()), prompts, greedy)
    assert from_pair_alone > 1


def test_ngram_bundle_with_prompt_lookup_drafts(ask, make_bundle, ngrams, prompts):
    bundle = make_bundle("gpt2", None, None, "linear:20", ngram=ngrams)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    rounds = [requests(prompts, logprobs=5), requests(prompts, logprobs=5)]
    answers, cached = ask(bundle, rounds, **ALONE, **EAGER, **BLOCKS, speculative_config=drafts)
    model = Reference(bundle)
    assert sum(answer["cached"] for answer in cached) > 500
    for result in (answers, cached):
        same_answers(model, prompts, result)
        is_steered(model, prompts, result, apart=0.05)  # a score moves a logit by 20 at most, and most by nothing


def test_tokens_without_embeddings_are_refused_and_the_engine_goes_on(ask, models, tokenizer, prompts, tmp_path):
    extended = copy.deepcopy(tokenizer)
    extended.add_tokens(["<image_soft_token>"], special_tokens=True)
    parts = {"target": "target", "retain_auxiliary": "retain", "forget_auxiliary": "forget"}
    for name in parts.values():
        shutil.copytree(models / name, tmp_path / name)
        extended.save_pretrained(tmp_path / name)
    folders = {part: str(tmp_path / name) for part, name in parts.items()}
    bundle = write_bundle(tmp_path / "bundle", **folders, steering="linear:2:0.5:full")
    holding = [[*prompts[1], len(tokenizer), 5]]
    refused, answers = ask(bundle, [requests(holding), requests(prompts[:4])], **ALONE, **EAGER)
    assert f"the prompt holds token id {len(tokenizer)}, for which the model has no embedding" in refused
    same_answers(Reference(bundle), prompts[:4], answers)
