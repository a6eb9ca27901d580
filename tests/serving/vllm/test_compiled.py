"""Compiled code is the model's own: in a file of its own, since it takes as long as many other tests together."""

import pytest

from support.vllm_reference import ALONE, Reference, is_steered, requests, same_answers

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def test_compile_cache_is_not_shared_between_auxiliaries(ask, make_bundle, ngrams, prompts, tmp_path):
    """vLLM keeps compiled code by the target's shape: auxiliaries of one architecture, or of two, must not share it."""
    own_cache = {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    # Models of one and two layers: compiling takes its time by the layer.
    shallow = make_bundle("flat-target", "flat-retain", "flat-forget", steering="rank:40:0.5")
    deep = make_bundle("flat-target", ngram=ngrams, steering="rank:20")
    for bundle in (shallow, deep, shallow):
        (answers,) = ask(bundle, [requests(prompts[:8], logprobs=5)], own_cache, **ALONE)
        model = Reference(bundle)
        same_answers(model, prompts[:8], answers)
        # The rank rule moves what it does not suppress by little.
        is_steered(model, prompts[:8], answers, apart=0.1)
