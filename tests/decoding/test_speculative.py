"""Speculative decoding against plain decoding, through every door of generate(); what cannot be had is refused."""

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from divdec import DivergenceForCausalLM, UsageError
from divdec.data.formatting import left_padded
from divdec.decoding import speculative
from divdec.decoding.speculative import Speculation
from divdec.decoding.statistics import SpeculationStatistics
from divdec.errors import FailedClosed
from divdec.experts.protocol import Inputs
from support.exactness import assert_close, assert_same_answers
from support.tiny import make_parts, tiny_model

PROMPTS = [[5, 9, 200, 31], [77, 8, 300, 2, 45, 6, 250, 12, 33], [400], [7, 7, 7, 7]]
GAMMAS = range(1, 9)
PROCESSORS = [{"repetition_penalty": 1.3, "min_new_tokens": 5}, {"bad_words_ids": [[7], [8, 9]]}]
RULES = ("linear:0.5", "linear:2:0.5", "linear:2:0.5:full", "rank:20")


def generate(model, prompts, **options):
    ids, mask = left_padded(prompts, 1)
    return model.generate(
        input_ids=ids,
        attention_mask=mask,
        **{"max_new_tokens": 16, "do_sample": False, "pad_token_id": 1, **options},
    )


def in_batches(model, prompts, size, **options):
    return [generate(model, prompts[start : start + size], **options) for start in range(0, len(prompts), size)]


def assert_same(model, prompts, size, gammas, **options):
    plain = in_batches(model, prompts, size, **options)
    for gamma in gammas:
        found = in_batches(model, prompts, size, speculative=gamma, **options)
        for start, one, other in zip(range(0, len(prompts), size), plain, found, strict=True):
            assert_same_answers(model, prompts[start : start + size], other, one, **options)


# On real text, with models that were trained on it.


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("gamma", [1, 4, 8])
def test_speculative_greedy_output_matches_plain_on_tofu(tofu, rule, gamma):
    model, _, prompts = tofu
    model.steering = rule
    # Each rule meets every twelfth question, each number of drafts another batch size; test-slow crosses all of them.
    size = 9 - gamma
    chosen = prompts[RULES.index(rule) :: 12]
    assert_same(model, chosen if size > 2 else chosen[::2], size, [gamma], max_new_tokens=12)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", range(1, 9))
def test_speculative_greedy_output_matches_plain_for_all_draft_lengths(tofu, rule, size):
    model, _, prompts = tofu
    model.steering = rule
    assert_same(model, prompts, size, [*GAMMAS, True], max_new_tokens=12)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("size", "gamma"),
    [(1, 5), (5, True), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((2, 8), (4, 1), (8, 3)))],
)
def test_speculative_greedy_output_matches_plain_on_demo_world(world_model, rule, size, gamma):
    model, _, prompts = world_model
    model.steering = rule
    assert_same(model, prompts if size > 2 else prompts[::5], size, [gamma])


def test_drafts_are_accepted_and_counted(world_model):
    model, _, prompts = world_model
    model.steering = "linear:1"
    statistics = SpeculationStatistics()
    in_batches(model, prompts[:8], 4, speculative=Speculation(4, statistics=statistics))
    assert statistics.drafter == "retain"
    assert 0.3 < statistics.acceptance_rate < 1
    assert 1.5 < statistics.tokens_per_pass <= 5
    assert len(statistics.acceptance) == 4
    assert statistics.to_dict()["tokens_per_pass"] == statistics.tokens_per_pass


def test_draft_length_is_measured_by_number_of_unfinished_sequences(world_model):
    model, _, prompts = world_model
    model.steering = "linear:1"
    plain = generate(model, prompts[:4])
    speculative._CONTROLLERS.pop(model, None)
    end = int(plain[0, -12])  # of the first sequence, which then ends before others
    generate(model, prompts[:4], speculative=True, eos_token_id=end)
    rows = [rows for _, rows in speculative._CONTROLLERS[model]]
    assert rows[0] == 4
    assert len(rows) > 1


# On random models of several families, whose drafts are hardly ever right.


@pytest.mark.parametrize("drafter", ["retain", "lookup"])
@pytest.mark.parametrize("options", PROCESSORS)
def test_processors_see_same_inputs_as_in_plain_decoding(steered, drafter, options):
    for prompts in (PROMPTS[:1], PROMPTS):
        plain = generate(steered, prompts, **options)
        found = generate(steered, prompts, speculative=Speculation(3, drafter), **options)
        assert_same_answers(steered, prompts, found, plain, **options)


def test_processors_apply_with_trained_drafts(world_model):
    model, _, prompts = world_model
    model.steering = "linear:1"
    for options in ({"repetition_penalty": 1.2}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 14}):
        assert_same(model, prompts[:4], 4, [2, 5], **options)


def test_custom_processor_and_stopping_criterion_see_whole_batch(world_model):
    model, _, prompts = world_model
    seen = {"plain": [], "speculative": []}

    def run(name, **options):
        class Processor:
            def __call__(self, input_ids, scores):
                assert len(scores) == 3
                scores[:, int(input_ids[0, -1]) % 7] -= 1
                return scores

        class Criterion(StoppingCriteria):
            def __call__(self, input_ids, scores, **kwargs):
                seen[name].append(input_ids.shape)
                return torch.tensor([input_ids.shape[1] > 18 + row and bool(row) for row in range(3)])

        return generate(
            model, prompts[:3], logits_processor=LogitsProcessorList([Processor()]),
            stopping_criteria=StoppingCriteriaList([Criterion()]), **options,
        )  # fmt: skip

    # A row's scores depend here on the first row, which may be shorter: only the last token's column is compared.
    one = run("plain")
    other = run("speculative", speculative=3)
    assert torch.equal(one[0], other[0])
    assert set(seen["speculative"]) == set(seen["plain"])


class Recorder(BaseStreamer):
    def __init__(self):
        self.steps, self.ended = [], 0

    def put(self, value):
        self.steps.append(value.tolist())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("count", [1, 3])
def test_streamer_receives_same_tokens(world_model, count):
    model, _, prompts = world_model
    plain, found = Recorder(), Recorder()
    generate(model, prompts[:count], streamer=plain)
    generate(model, prompts[:count], streamer=found, speculative=4)
    assert found.steps == plain.steps
    assert found.ended == 1


@pytest.mark.parametrize("count", [1, 3])
def test_scores_logits_and_cache_match_plain_decoding(world_model, count):
    model, _, prompts = world_model
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.1}
    plain = generate(model, prompts[:count], **options)
    found = generate(model, prompts[:count], speculative=5, **options)
    assert torch.equal(found.sequences, plain.sequences)
    start = found.sequences.shape[1] - len(found.scores)
    for name in ("scores", "logits"):
        for step, (one, other) in enumerate(zip(found[name], plain[name], strict=True)):
            going = found.sequences[:, start + step] != 1
            assert_close(one[going], other[going])
            assert one.isfinite().all()
    if count == 1:
        assert found.past_key_values.check_length() == plain.past_key_values.check_length()
    transition = model.compute_transition_scores(found.sequences, found.scores)
    expected = model.compute_transition_scores(plain.sequences, plain.scores)
    going = found.sequences[:, start:] != 1
    assert_close(transition[going], expected[going])


def test_conversation_continues_from_cache(world_model):
    model, _, prompts = world_model
    cache = model.new_cache()
    ids = torch.tensor([prompts[0]])
    for turn in range(3):
        expected = model.generate(input_ids=ids, max_new_tokens=9, do_sample=False, pad_token_id=1)
        found = model.generate(
            input_ids=ids, max_new_tokens=9, do_sample=False, pad_token_id=1, past_key_values=cache, speculative=4
        )
        assert_same_answers(model, ids.tolist(), found, expected)
        assert cache.check_length() == found.shape[1] - 1
        ids = torch.cat([found, torch.tensor([prompts[turn + 1]])], dim=1)
    with pytest.raises(UsageError, match="one sequence"):
        generate(model, prompts[:2], past_key_values=_filled(model, prompts[:2]), speculative=2)


def _filled(model, prompts):
    ids, mask = left_padded(prompts, 1)
    cache = model.new_cache()
    model(input_ids=ids[:, :2], attention_mask=mask[:, :2], past_key_values=cache)
    return cache


@pytest.mark.parametrize("size", [1, 4])
def test_stop_string_across_draft_block_matches_plain_decoding(world_model, size):
    model, tokenizer, prompts = world_model
    plain = in_batches(model, prompts[:4], 1, max_new_tokens=24)
    texts = [tokenizer.decode(row[0, len(prompt) :]) for row, prompt in zip(plain, prompts, strict=False)]
    for text in texts[: 2 if size > 1 else 1]:
        middle = len(text) // 2
        stop = text[middle : middle + 4]
        assert_same(
            model, prompts[:4], size, [4], max_new_tokens=24, stop_strings=[stop], tokenizer=tokenizer
        )  # fmt: skip


def test_rows_reach_max_length_without_eos_token(world_model):
    model, tokenizer, prompts = world_model
    config = GenerationConfig(max_new_tokens=20, do_sample=False, pad_token_id=1, eos_token_id=None)
    stops = {"stop_strings": [" the", "e"], "tokenizer": tokenizer}
    for count in (1, 4):
        ids, mask = left_padded(prompts[:count], 1)
        kept = model.generation_config.eos_token_id
        model.generation_config.eos_token_id = None
        try:
            plain = model.generate(ids, attention_mask=mask, generation_config=config, **stops)
            found = model.generate(ids, attention_mask=mask, generation_config=config, speculative=4, **stops)
        finally:
            model.generation_config.eos_token_id = kept
        assert_same_answers(model, prompts[:count], found, plain, eos_token_id=None)


def test_chunked_prefill_and_num_return_sequences(world_model):
    model, _, prompts = world_model
    assert_same(model, prompts[:3], 3, [3], prefill_chunk_size=4)
    found = generate(model, prompts[:2], do_sample=True, num_return_sequences=3, speculative=3)
    assert len(found) == 6


# Sampling.


def sampled(model, prompt, count, seed, **options):
    torch.manual_seed(seed)
    ids = torch.tensor([prompt]).expand(count, -1)
    with torch.inference_mode():
        output = model.generate(ids, max_new_tokens=3, do_sample=True, pad_token_id=1, eos_token_id=None, **options)
    return output[:, len(prompt) :].numpy()


@pytest.fixture(scope="module")
def tiny():
    """Seven tokens: every sequence of three can be counted."""
    target, retain, forget = (tiny_model("llama", 7, seed, width=16, layers=1) for seed in (3, 4, 5))
    model = DivergenceForCausalLM.from_parts(target, retain, forget, "linear:0.7")
    model.generation_config.eos_token_id = None
    return model


def exact(model, prompt, temperature):
    """The probability of every sequence of three tokens, by the definition."""
    found = np.ones((7, 7, 7))
    with torch.inference_mode():
        for a in range(7):
            for b in range(7):
                ids = torch.tensor([[*prompt, a, b]])
                probabilities = (model(ids, logits_to_keep=3).logits[0] / temperature).softmax(-1).numpy()
                found[a, b] = probabilities[0, a] * probabilities[1, b] * probabilities[2]
    return found


def p_value(answers, probabilities):
    count = np.zeros_like(probabilities)
    np.add.at(count, tuple(answers.T), 1)
    expected = probabilities / probabilities.sum() * len(answers)
    rare = expected < 5
    together = [count[~rare], [count[rare].sum()]], [expected[~rare], [expected[rare].sum()]]
    observed, wanted = (np.concatenate(part) for part in together)
    return stats.chisquare(observed[wanted > 0], wanted[wanted > 0]).pvalue


@pytest.mark.parametrize(
    ("rule", "drafter", "seed"),
    [
        ("linear:0.7", "retain", 0),
        ("rank:2", "retain", 0),
        ("linear:0.7", "lookup", 0),
        *(
            pytest.param(rule, drafter, 1, marks=pytest.mark.slow)
            for rule in ("linear:0.7", "rank:2")
            for drafter in ("retain", "lookup")
        ),
    ],
)
def test_samples_follow_the_steered_distribution(tiny, rule, drafter, seed):
    tiny.steering = rule
    answers = sampled(tiny, [3, 2], 6000, seed, temperature=1.3, speculative=Speculation(2, drafter))
    probabilities = exact(tiny, [3, 2], 1.3)
    assert p_value(answers, probabilities) > 0.001
    for position, others in enumerate([(1, 2), (0, 2), (0, 1)]):
        marginal = probabilities.sum(axis=others)
        cumulative = np.cumsum(marginal / marginal.sum())
        spread = np.random.default_rng(seed).random(len(answers))  # KS wants numbers without ties
        lower = np.concatenate([[0], cumulative])[answers[:, position]]
        uniform = lower + spread * (marginal / marginal.sum())[answers[:, position]]
        assert stats.kstest(uniform, "uniform").pvalue > 0.001


def test_wrong_acceptance_rule_is_detected(tiny, monkeypatch):
    right = speculative.verify_sampled

    def wrong(scores, drafts, draft_scores, uniform):
        return right(scores, drafts, draft_scores, uniform * torch.tensor([0.5, 1.0]))  # accepts too often

    monkeypatch.setattr(speculative, "verify_sampled", wrong)
    tiny.steering = "linear:0.7"
    answers = sampled(tiny, [3, 2], 6000, 0, temperature=1.3, speculative=Speculation(2))
    assert p_value(answers, exact(tiny, [3, 2], 1.3)) < 0.001


def test_speculative_samples_stay_within_top_k_and_top_p(tiny):
    tiny.steering = "linear:0.7"
    options = {"temperature": 0.9, "top_k": 3, "top_p": 0.8}
    answers = sampled(tiny, [3, 2], 1500, 0, speculative=Speculation(2), **options)
    plain = sampled(tiny, [3, 2], 1500, 0, **options)
    assert set(answers[:, 0]) == set(plain[:, 0])
    for position in range(3):
        table = [np.bincount(found[:, position], minlength=7) for found in (answers, plain)]
        table = np.array(table)[:, np.sum(table, axis=0) > 0]
        assert stats.chi2_contingency(table).pvalue > 0.001


def test_seeded_sampling_is_independent_of_draft_length(world_model):
    model, _, prompts = world_model
    model.steering = "linear:1"
    found = []
    for gamma in (1, 2, 5, True, Speculation(3, statistics=SpeculationStatistics())):
        torch.manual_seed(7)
        found.append(generate(model, prompts[:3], do_sample=True, speculative=gamma))
        assert torch.rand(()).item() == found_next(found, 7)
    assert all(torch.equal(found[0], other) for other in found[1:])
    torch.manual_seed(8)
    assert not torch.equal(found[0], generate(model, prompts[:3], do_sample=True, speculative=2))


def found_next(found, seed):
    """The number that the global generator gives after an answer: only one was taken from it."""
    torch.manual_seed(seed)
    torch.randint(2**62, ())
    return torch.rand(()).item()


# Caches.


@settings(max_examples=15)
@given(
    removed=st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=4),
    family=st.sampled_from(["llama", "gpt2"]),
    ahead=st.booleans(),
)
def test_cache_after_row_removals_matches_fresh_prefill(removed, family, ahead):
    model = DivergenceForCausalLM.from_parts(*make_parts(family), "linear:1")
    generator = torch.Generator().manual_seed(0)
    ids, mask = left_padded([[5, 9, 200, 31], [77, 8, 300, 2, 45, 6], [400, 3]], 1)
    cache = model.new_cache()
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, past_key_values=cache)
        for pattern in removed:
            block = torch.randint(2, 500, (3, 5), generator=generator)
            longer = torch.cat([mask, mask.new_ones(3, 5)], dim=1)
            positions = mask.sum(1, keepdim=True) + torch.arange(5)
            if ahead:
                for step in range(4):
                    masked, own = longer[:, : mask.shape[1] + step + 1], positions[:, step : step + 1]
                    inputs = Inputs(block[:, step : step + 1], masked, own)
                    model.experts.draft_logits(inputs, cache.experts, model.steering)
            model(input_ids=block, attention_mask=longer, position_ids=positions, past_key_values=cache)
            cache.crop(-min(pattern))
            shifts = torch.tensor(pattern) - min(pattern)
            ids, mask = torch.cat([ids, block], 1), longer
            ids, mask = ids[:, : ids.shape[1] - min(pattern)], mask[:, : mask.shape[1] - min(pattern)]
            cache.shift_rows(shifts, 0)
            ids = torch.stack([row.roll(int(by)) for row, by in zip(ids, shifts, strict=True)])
            mask = torch.stack([row.roll(int(by)) for row, by in zip(mask, shifts, strict=True)])
            mask = mask * (torch.arange(mask.shape[1])[None] >= shifts[:, None])
        fresh = model.new_cache()
        model(input_ids=ids, attention_mask=mask, past_key_values=fresh)
    assert cache.check_length() == fresh.check_length() == ids.shape[1]
    for one, other in zip(cache.layers, fresh.layers, strict=True):
        if one.keys is not None:
            real = mask.bool()[:, None, :, None].expand_as(one.keys)
            assert_close(one.keys[real], other.keys[real])
            assert_close(one.values[real], other.values[real])


def test_sliding_windows_are_rolled_back_in_single_and_batched_decoding():
    model = DivergenceForCausalLM.from_parts(*make_parts("mistral"), "linear:1")
    assert_same(model, PROMPTS[:1], 1, [3], max_new_tokens=24)
    assert_same(model, PROMPTS, 4, [2, 8], max_new_tokens=24)


# Fail closed.


@pytest.mark.parametrize("part", ["forget", "target"])
def test_broken_component_fails_closed_during_speculation(world_model, part):
    model, _, prompts = world_model
    broken = model.target if part == "target" else model.experts.forget
    weight = broken.get_output_embeddings().weight
    kept = weight.data.clone()
    try:
        weight.data[3] = torch.nan
        for drafter in ("retain", "lookup"):
            with pytest.raises(FailedClosed):
                generate(model, prompts[:2], speculative=Speculation(3, drafter))
    finally:
        weight.data.copy_(kept)


def test_unverified_draft_in_cache_raises(steered):
    cache = steered.new_cache()
    ids = torch.tensor([PROMPTS[0]])
    steered(input_ids=ids, past_key_values=cache)
    steered.experts.draft_logits(Inputs(torch.tensor([[6]]), None, None), cache.experts, steered.steering)
    with pytest.raises(FailedClosed, match="read ahead"):
        cache.batch_select_indices(torch.tensor([0]))
    with pytest.raises(RuntimeError):
        cache.crop(-1)
    with pytest.raises(FailedClosed, match="other tokens"):
        steered(input_ids=torch.tensor([[7]]), past_key_values=cache)
    with pytest.raises(FailedClosed, match="begin with a new one"):
        steered(input_ids=torch.tensor([[6]]), past_key_values=cache)


def test_suppressed_target_token_is_never_accepted(tofu):
    model, _, prompts = tofu
    model.steering = "rank:50"
    statistics = SpeculationStatistics()
    with torch.inference_mode():
        for prompt in prompts[:5]:
            row = generate(model, [prompt], speculative=Speculation(6, statistics=statistics))[0]
            _, divergence = model.components(row[None])
            for place in range(len(prompt) - 1, len(row) - 1):
                suppressed = divergence[0, place].topk(50, largest=False).indices
                assert row[place + 1] not in suppressed
    assert statistics.tokens


# What cannot be had.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative": 0}, "gamma is 0; accepted: a whole number of drafted tokens, at least 1"),
        ({"speculative": True, "num_beams": 2}, "not offered with beam search"),
        ({"speculative": True, "penalty_alpha": 0.6, "top_k": 4}, "not offered with contrastive search"),
        ({"speculative": True, "prompt_lookup_num_tokens": 3}, "give drafter='lookup'"),
        ({"speculative": True, "use_cache": False}, "leave use_cache on"),
        ({"speculative": True, "synced_gpus": True}, "FSDP"),
        ({"speculative": True, "position_ids": torch.arange(3, 7)[None]}, "leave position_ids out"),
    ],
)
def test_unsupported_speculative_options_give_one_line_error(steered, options, message):
    with pytest.raises(UsageError, match=message) as error:
        generate(steered, PROMPTS[:1], **options)
    assert "\n" not in str(error.value)


def test_recurrent_states_are_not_speculated_on():
    """They sum up their tokens: what was drafted and not kept could not be taken back."""
    import transformers

    config = transformers.Qwen3NextConfig(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, layer_types=["linear_attention", "full_attention"], eos_token_id=0,
        bos_token_id=None, pad_token_id=1,
    )  # fmt: skip
    recurrent = transformers.AutoModelForCausalLM.from_config(config).eval()
    model = DivergenceForCausalLM.from_parts(recurrent, tiny_model("llama", 512, 1), tiny_model("llama", 512, 2))
    ids = torch.tensor([[5, 6, 7]])
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    assert model.generate(ids, **given).shape[1] > 3
    with pytest.raises(UsageError, match="recurrent state"):
        model.generate(ids, speculative=True, **given)


def test_invalid_speculation_settings_are_rejected(steered):
    with pytest.raises(UsageError, match="beam search"):
        generate(steered, PROMPTS[:1], speculative=True, generation_config=GenerationConfig(num_beams=3))
    with pytest.raises(UsageError, match="drafter is 'oracle'; accepted: auto"):
        Speculation(drafter="oracle")
    with pytest.raises(UsageError, match="speculative is 'yes'; accepted: True"):
        Speculation.of("yes")


def test_ngrams_are_drafted_for_by_lookup_and_combined_experts_by_q(world, tokenizer, caplog):
    from divdec.experts.combined import CombinedExperts
    from divdec.experts.neural import NeuralPair
    from divdec.experts.ngram import NgramPair
    from divdec.experts.ngram_fit import count

    texts = [tokenizer(text)["input_ids"] for text in world.corpus[:60]]
    retain, forget = (count(part, len(tokenizer), 3) for part in (texts[:50], texts))
    target, *auxiliaries = make_parts("llama", len(tokenizer))
    ngrams = NgramPair(retain, forget)
    prompts = [ids[:12] for ids in texts[:3]]
    model = DivergenceForCausalLM.from_experts(target, ngrams, "linear:1")
    statistics = SpeculationStatistics()
    with caplog.at_level(logging.WARNING):
        assert_same(model, prompts, 3, [3, Speculation(statistics=statistics)])
    assert statistics.drafter == "lookup"
    both = CombinedExperts([(NeuralPair(*auxiliaries), 1.0), (ngrams, 0.5)])
    model = DivergenceForCausalLM.from_experts(target, both, "linear:1")
    statistics = SpeculationStatistics()
    assert_same(model, prompts, 3, [3, Speculation(4, statistics=statistics)])
    assert statistics.drafter == "retain"
