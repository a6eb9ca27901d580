"""Answers that are stopped, cut short or constrained: what is left in caches, counts and texts."""

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from divdec import DivergenceForCausalLM, UsageError
from divdec.decoding.speculative import Speculation, SpeculationStatistics
from support.exactness import assert_same_answers
from support.tiny import make_parts

OPTIONS = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 1}


class Cancelled(Exception):
    pass


class Impatient(BaseStreamer):
    """Stops an answer after some tokens, the prompt counted as one."""

    def __init__(self, limit):
        self.limit, self.heard = limit, []

    def put(self, value):
        self.heard += value.flatten().tolist()
        self.limit -= 1
        if not self.limit:
            raise Cancelled

    def end(self):
        raise AssertionError


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_cancelled_generation_leaves_no_drafts_in_cache(world_model, limit):
    model, _, prompts = world_model
    cache, streamer = model.new_cache(), Impatient(limit)
    ids = torch.tensor([prompts[0]])
    with pytest.raises(Cancelled):
        model.generate(ids, past_key_values=cache, streamer=streamer, speculative=4, **OPTIONS)
    longer = torch.tensor([[*streamer.heard, *prompts[1]]])
    expected = model.generate(longer, **OPTIONS)
    for speculative in (None, 3):
        found = model.generate(longer, past_key_values=cache, speculative=speculative, **OPTIONS)
        assert_same_answers(model, longer.tolist(), found, expected)
        cache = model.new_cache()


@pytest.mark.parametrize("at", [1, 5, 9])
def test_failing_processor_leaves_cache_usable(world_model, at):
    model, _, prompts = world_model
    calls = []

    def failing(input_ids, scores):
        calls.append(1)
        if len(calls) == at:
            raise Cancelled
        return scores

    cache = model.new_cache()
    ids = torch.tensor([prompts[0]])
    with pytest.raises(Cancelled):
        model.generate(
            ids, past_key_values=cache, speculative=3, logits_processor=LogitsProcessorList([failing]), **OPTIONS
        )  # fmt: skip
    found = model.generate(ids, past_key_values=cache, **OPTIONS)
    assert_same_answers(model, ids.tolist(), found, model.generate(ids, **OPTIONS))


def test_sliding_windows_stop_recording_after_every_outcome():
    model = DivergenceForCausalLM.from_parts(*make_parts("mistral"), "linear:1")
    for streamer in (None, Impatient(4)):
        cache = model.new_cache()
        try:
            model.generate(
                torch.tensor([[5, 9, 200]]), past_key_values=cache, streamer=streamer, speculative=2, **OPTIONS
            )  # fmt: skip
        except Cancelled:
            assert streamer is not None
        assert not any(getattr(layer, "record_past", False) for layer in cache.layers)


def test_draft_statistics_stop_at_end_of_sequence(world_model):
    model, _, prompts = world_model
    model.generation_config.eos_token_id = 0
    for prompt in prompts[:2]:
        statistics = SpeculationStatistics()
        options = OPTIONS | {"max_new_tokens": 40, "speculative": Speculation(6, statistics)}
        found = model.generate(torch.tensor([prompt]), **options)
        # The prompt's pass gives the first token.
        assert statistics.tokens == found.shape[1] - len(prompt) - 1
        assert statistics.accepted <= statistics.tokens


def test_prefix_constraint_never_sees_disallowed_text(world_model):
    model, _, prompts = world_model

    def allowed(row, ids):
        # After each token only those with a number one to five higher, modulo the vocabulary.
        last = int(ids[-1])
        if len(ids) > length and (last - int(ids[-2])) % 500 not in range(1, 6):
            return []
        return [(last + step) % 500 for step in range(1, 6)]

    for prompt in prompts[:3]:
        ids, length = torch.tensor([prompt]), len(prompt)
        options = {**OPTIONS, "max_new_tokens": 12, "prefix_allowed_tokens_fn": allowed, "eos_token_id": 511}
        plain, found = (model.generate(ids, speculative=gamma, **options) for gamma in (None, 3))
        assert_same_answers(model, [prompt], found, plain, prefix_allowed_tokens_fn=allowed)


class Enough(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= 90)


def test_large_max_new_tokens_allocates_no_memory_upfront(world_model):
    model, _, prompts = world_model
    options = OPTIONS | {"max_new_tokens": 10**9, "stopping_criteria": StoppingCriteriaList([Enough()])}
    found = model.generate(torch.tensor([prompts[0]]), speculative=4, **options)
    assert found.shape[1] <= 90


def test_unsupported_outputs_and_conflicting_options_raise(world_model):
    model, _, prompts = world_model
    ids = torch.tensor([prompts[0]])
    for name in ("output_attentions", "output_hidden_states"):
        with pytest.raises(UsageError, match="not offered by a steered model"):
            model.generate(ids, speculative=2, return_dict_in_generate=True, **{name: True}, **OPTIONS)
    with pytest.raises(UsageError, match="give one of them"):
        model.generate(ids, speculative=2, custom_generate=lambda *_, **__: ids, **OPTIONS)
    with pytest.raises(UsageError, match="input_ids"):
        model.generate(inputs_embeds=torch.zeros(1, 3, 64), speculative=2, **OPTIONS)
