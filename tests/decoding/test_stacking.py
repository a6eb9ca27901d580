"""Plain decoding runs a pair of one architecture as one; who could notice gets the two apart."""

import copy

import pytest
import torch

from conftest import make_parts, tiny_model
from divdec import DivergenceForCausalLM
from divdec.experts.neural import NeuralPair, PairCache
from divdec.experts.stacked import StackedCache, StackedPair
from exactness import assert_same_answers

PROMPT = torch.tensor([[5, 9, 200, 31]])
OPTIONS = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 1}


@pytest.fixture
def passes(monkeypatch):
    """How many passes were made as one."""
    made = []
    original = StackedPair.logits

    def counted(self, *args, **kwargs):
        made.append(1)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(StackedPair, "logits", counted)
    return made


def test_a_pair_decodes_as_one_and_answers_the_same(steered, passes, monkeypatch):
    found = steered.generate(PROMPT, **OPTIONS)
    assert len(passes) == found.shape[1] - PROMPT.shape[1]
    monkeypatch.setattr(NeuralPair, "new_decoding_cache", NeuralPair.new_cache)
    assert_same_answers(steered, PROMPT.tolist(), found, steered.generate(PROMPT, **OPTIONS))
    assert len(passes) == found.shape[1] - PROMPT.shape[1]


def test_whoever_gets_the_cache_back_gets_the_two_apart(steered, passes):
    output = steered.generate(PROMPT, return_dict_in_generate=True, **OPTIONS)
    assert isinstance(output.past_key_values.experts, PairCache)
    steered.generate(PROMPT, speculative=2, **OPTIONS)
    assert isinstance(steered.new_cache().experts, PairCache)
    assert not passes


def test_hooks_and_other_architectures_run_apart(passes):
    model = DivergenceForCausalLM.from_parts(*make_parts("llama"), "linear:1")
    heard = []
    handle = model.experts.retain.register_forward_hook(lambda *_: heard.append(1))
    model.generate(PROMPT, **OPTIONS)
    assert heard
    assert not passes
    handle.remove()
    target, retain, _ = make_parts("llama")
    other = DivergenceForCausalLM.from_parts(target, retain, tiny_model("gpt2", 512, seed=2), "linear:1")
    assert isinstance(other.experts.new_decoding_cache(), PairCache)
    assert other.generate(PROMPT, **OPTIONS).shape[1] > PROMPT.shape[1]


def test_weights_changed_moved_and_copied_afterwards_are_the_ones_that_answer(passes):
    model = DivergenceForCausalLM.from_parts(*make_parts("llama"), "linear:3")
    model.generate(PROMPT, **OPTIONS)
    assert isinstance(model.experts.new_decoding_cache(), StackedCache)
    with torch.no_grad():
        for parameter in model.experts.forget.parameters():
            parameter.mul_(0.3)
    replaced = copy.deepcopy(model)
    replaced.experts.retain = tiny_model("llama", 512, seed=9)
    for changed in (model, copy.deepcopy(model), copy.deepcopy(model).double(), replaced):
        before = len(passes)
        found = changed.generate(PROMPT, **OPTIONS)
        parts = (changed.target, changed.experts.retain, changed.experts.forget)
        fresh = DivergenceForCausalLM.from_parts(*(copy.deepcopy(part) for part in parts), "linear:3")
        expected = fresh.generate(PROMPT, return_dict_in_generate=True, **OPTIONS).sequences
        assert_same_answers(fresh, PROMPT.tolist(), found, expected)
        assert len(passes) > before


def test_a_pair_that_can_no_longer_be_stacked_runs_apart(passes):
    model = DivergenceForCausalLM.from_parts(*make_parts("llama"), "linear:1")
    model.generate(PROMPT, **OPTIONS)
    before = len(passes)
    model.experts.retain.bfloat16()
    assert model.generate(PROMPT, **OPTIONS).shape[1] > PROMPT.shape[1]
    model.experts.retain.float()
    retain = model.experts.retain
    original, heard = retain.forward, []

    def forward(*args, **kwargs):
        heard.append(1)
        return original(*args, **kwargs)

    retain.forward = forward
    model.generate(PROMPT, **OPTIONS)
    assert heard
    assert len(passes) == before


def test_pairs_that_are_stacked_at_once_see_every_later_change():
    import threading

    for _ in range(2):
        model = DivergenceForCausalLM.from_parts(*make_parts("llama"), "linear:3")
        threads = [threading.Thread(target=model.generate, args=(PROMPT,), kwargs=OPTIONS) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with torch.no_grad():
            for parameter in model.experts.forget.parameters():
                parameter.mul_(0.3)
        found = model.generate(PROMPT, **OPTIONS)
        apart = model.generate(PROMPT, return_dict_in_generate=True, **OPTIONS).sequences
        assert_same_answers(model, PROMPT.tolist(), found, apart)
