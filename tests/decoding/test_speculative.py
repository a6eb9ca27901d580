"""Speculative decoding against plain decoding, through every door of generate(); what cannot be had is refused."""

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from divdec import DivergenceForCausalLM, UsageError
from divdec.data.formatting import left_padded
from divdec.decoding import speculative
from divdec.decoding.speculative import Speculation, SpeculationStatistics, SpeculativeSequence
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


def assert_same(model, prompts, gammas, **options):
    for prompt in prompts:
        plain = generate(model, [prompt], **options)
        for gamma in gammas:
            found = generate(model, [prompt], speculative=gamma, **options)
            assert_same_answers(model, [prompt], found, plain, **options)


# On real text, with models that were trained on it.


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("gamma", [1, 4, 8])
def test_speculative_greedy_output_matches_plain_on_tofu(tofu, rule, gamma):
    model, _, prompts = tofu
    model.steering = rule
    # Each rule meets every twenty-fourth question; test-slow asks all of them.
    assert_same(model, prompts[RULES.index(rule) :: 24], [gamma], max_new_tokens=12)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_speculative_greedy_output_matches_plain_for_all_draft_lengths(tofu, rule):
    model, _, prompts = tofu
    model.steering = rule
    assert_same(model, prompts, [*GAMMAS, True], max_new_tokens=12)


@pytest.mark.parametrize("rule", RULES)
def test_speculative_greedy_output_matches_plain_on_demo_world(world_model, rule):
    model, _, prompts = world_model
    model.steering = rule
    assert_same(model, prompts[::5], [5, True])


def test_batch_of_several_rows_decodes_without_drafts(world_model):
    model, _, prompts = world_model
    statistics = SpeculationStatistics()
    for options in ({}, {"do_sample": True}, {"num_return_sequences": 2, "do_sample": True}):
        several = prompts[: 1 if "num_return_sequences" in options else 3]
        torch.manual_seed(3)
        plain = generate(model, several, **options)
        torch.manual_seed(3)
        found = generate(model, several, speculative=Speculation(3, statistics), **options)
        assert torch.equal(found, plain)
    assert statistics == SpeculationStatistics()


def test_drafts_are_accepted_and_counted(world_model):
    model, _, prompts = world_model
    model.steering = "linear:1"
    statistics = SpeculationStatistics()
    for prompt in prompts[:8]:
        generate(model, [prompt], speculative=Speculation(4, statistics))
    assert 0.3 < statistics.acceptance_rate < 1
    assert 1.5 < statistics.tokens_per_pass <= 5
    assert statistics.to_dict()["tokens_per_pass"] == statistics.tokens_per_pass


# On random models of several families, whose drafts are hardly ever right.


@pytest.mark.parametrize("options", PROCESSORS)
def test_processors_see_same_inputs_as_in_plain_decoding(steered, options):
    assert_same(steered, PROMPTS, [3], **options)


def test_processors_apply_with_trained_drafts(world_model):
    model, _, prompts = world_model
    model.steering = "linear:1"
    for options in ({"repetition_penalty": 1.2}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 14}):
        assert_same(model, prompts[:4], [2, 5], **options)


def test_custom_processor_and_stopping_criterion_see_every_length(world_model):
    model, _, prompts = world_model
    seen = {"plain": [], "speculative": []}

    def run(name, **options):
        class Processor:
            def __call__(self, input_ids, scores):
                scores[:, int(input_ids[0, -1]) % 7] -= 1
                return scores

        class Criterion(StoppingCriteria):
            def __call__(self, input_ids, scores, **kwargs):
                seen[name].append(input_ids.shape)
                return torch.tensor([input_ids.shape[1] > 18])

        return generate(
            model, prompts[:1], logits_processor=LogitsProcessorList([Processor()]),
            stopping_criteria=StoppingCriteriaList([Criterion()]), **options,
        )  # fmt: skip

    assert torch.equal(run("plain"), run("speculative", speculative=3))
    assert seen["speculative"] == seen["plain"]


@pytest.mark.parametrize("samples", [False, True])
def test_no_text_behind_an_end_token_is_processed(steered, samples):
    text = [9, 7, 0]

    class OnlyText:
        """Excludes every token behind the end, as a grammar does."""

        def __call__(self, input_ids, scores):
            written = input_ids[0, 4:].tolist()
            allowed = text[len(written)] if written == text[: len(written)] and len(written) < len(text) else []
            return scores.masked_fill(~torch.isin(torch.arange(scores.shape[1]), torch.tensor(allowed)), -torch.inf)

    def allowed(row, input_ids):  # transformers refuses an empty list
        return [text[len(input_ids) - 4]] if len(input_ids) - 4 < len(text) else []

    for option in ({"logits_processor": LogitsProcessorList([OnlyText()])}, {"prefix_allowed_tokens_fn": allowed}):
        for gamma in (4, True):
            answer = generate(steered, PROMPTS[:1], do_sample=samples, speculative=gamma, **option)
            assert answer[0, 4:].tolist() == text


class Recorder(BaseStreamer):
    def __init__(self):
        self.steps, self.ended = [], 0

    def put(self, value):
        self.steps.append(value.tolist())

    def end(self):
        self.ended += 1


def test_streamer_receives_same_tokens(world_model):
    model, _, prompts = world_model
    plain, found = Recorder(), Recorder()
    generate(model, prompts[:1], streamer=plain)
    generate(model, prompts[:1], streamer=found, speculative=4)
    assert found.steps == plain.steps
    assert found.ended == 1


def test_scores_logits_and_cache_match_plain_decoding(world_model):
    model, _, prompts = world_model
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.1}
    plain = generate(model, prompts[:1], **options)
    found = generate(model, prompts[:1], speculative=5, **options)
    assert torch.equal(found.sequences, plain.sequences)
    for name in ("scores", "logits"):
        for scores, expected in zip(found[name], plain[name], strict=True):
            assert_close(scores, expected)
    assert found.past_key_values.check_length() == plain.past_key_values.check_length()
    transition = model.compute_transition_scores(found.sequences, found.scores)
    assert_close(transition, model.compute_transition_scores(plain.sequences, plain.scores))


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
    full = model.new_cache()
    model(ids, past_key_values=full)
    with pytest.raises(UsageError, match="tokens already; give more of them"):
        list(_steps(model, ids, full))
    # All but the newest token: nothing is left to prefill.
    full.crop(-1)
    tokens = [token for step in _steps(model, ids, full) for token in step]
    expected = model.generate(input_ids=ids, max_new_tokens=9, do_sample=False, pad_token_id=1)
    assert_same_answers(model, ids.tolist(), torch.cat([ids, torch.tensor([tokens])], dim=1), expected)


def _steps(model, ids, cache):
    config = GenerationConfig(max_length=ids.shape[1] + 9)
    criteria = StoppingCriteriaList([MaxLengthCriteria(config.max_length), EosTokenCriteria(0)])
    sequence = SpeculativeSequence(model, ids, LogitsProcessorList(), criteria, config, {"past_key_values": cache})
    return speculative.decode(sequence, Speculation(3))


def test_stop_string_across_draft_block_matches_plain_decoding(world_model):
    model, tokenizer, prompts = world_model
    for prompt in prompts[:2]:
        text = tokenizer.decode(generate(model, [prompt], max_new_tokens=24)[0, len(prompt) :])
        stop = text[len(text) // 2 :][:4]
        assert_same(model, prompts[:4], [4], max_new_tokens=24, stop_strings=[stop], tokenizer=tokenizer)


def test_answer_reaches_max_length_without_eos_token(world_model):
    model, tokenizer, prompts = world_model
    config = GenerationConfig(max_new_tokens=20, do_sample=False, pad_token_id=1, eos_token_id=None)
    stops = {"stop_strings": [" the", "e"], "tokenizer": tokenizer}
    eos_token_id, model.generation_config.eos_token_id = model.generation_config.eos_token_id, None
    try:
        for prompt in prompts[:4]:
            ids = torch.tensor([prompt])
            plain, found = (
                model.generate(ids, generation_config=config, speculative=gamma, **stops) for gamma in (None, 4)
            )
            assert_same_answers(model, [prompt], found, plain, eos_token_id=None)
    finally:
        model.generation_config.eos_token_id = eos_token_id


def test_chunked_prefill_matches_plain_decoding(world_model):
    model, _, prompts = world_model
    assert_same(model, prompts[:3], [3], prefill_chunk_size=4)


def test_left_padded_prompt_matches_plain_decoding(world_model):
    model, _, prompts = world_model
    prompt = prompts[0]
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 1}
    options["attention_mask"] = torch.tensor([[0, 0, *[1] * len(prompt)]])
    plain, found = (
        model.generate(torch.tensor([[1, 1, *prompt]]), speculative=gamma, **options) for gamma in (None, 3)
    )
    assert_same_answers(model, [prompt], found[:, 2:], plain[:, 2:])


# Sampling.


def sampled(model, prompt, count, seed, **options):
    torch.manual_seed(seed)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        options |= {"max_new_tokens": 3, "do_sample": True, "pad_token_id": 1, "eos_token_id": None}
        answers = [model.generate(ids, **options)[0, len(prompt) :] for _ in range(count)]
    return torch.stack(answers).numpy()


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
    ("rule", "count"),
    [
        ("linear:0.7", 600),
        ("rank:2", 600),
        pytest.param("linear:0.7", 6000, marks=pytest.mark.slow),
        pytest.param("rank:2", 6000, marks=pytest.mark.slow),
    ],
)
def test_samples_follow_the_steered_distribution(tiny, rule, count):
    tiny.steering = rule
    answers = sampled(tiny, [3, 2], count, 0, temperature=1.3, speculative=2)
    probabilities = exact(tiny, [3, 2], 1.3)
    assert p_value(answers, probabilities) > 0.001
    for position, others in enumerate([(1, 2), (0, 2), (0, 1)]):
        marginal = probabilities.sum(axis=others)
        cumulative = np.cumsum(marginal / marginal.sum())
        spread = np.random.default_rng(0).random(len(answers))  # KS wants numbers without ties
        lower = np.concatenate([[0], cumulative])[answers[:, position]]
        uniform = lower + spread * (marginal / marginal.sum())[answers[:, position]]
        assert stats.kstest(uniform, "uniform").pvalue > 0.001


def test_wrong_acceptance_rule_is_detected(tiny, monkeypatch):
    right = speculative.verify_sampled

    def wrong(scores, drafts, draft_scores, uniform):
        return right(scores, drafts, draft_scores, uniform * torch.tensor([0.5, 1.0]))  # accepts too often

    monkeypatch.setattr(speculative, "verify_sampled", wrong)
    tiny.steering = "linear:0.7"
    answers = sampled(tiny, [3, 2], 600, 0, temperature=1.3, speculative=2)
    assert p_value(answers, exact(tiny, [3, 2], 1.3)) < 0.001


def test_speculative_samples_stay_within_top_k_and_top_p(tiny):
    tiny.steering = "linear:0.7"
    options = {"temperature": 0.9, "top_k": 3, "top_p": 0.8}
    answers = sampled(tiny, [3, 2], 300, 0, speculative=2, **options)
    plain = sampled(tiny, [3, 2], 300, 0, **options)
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
        found.append(generate(model, prompts[:1], do_sample=True, speculative=gamma))
        assert torch.rand(()).item() == found_next(found, 7)
    assert all(torch.equal(found[0], other) for other in found[1:])
    torch.manual_seed(8)
    assert not torch.equal(found[0], generate(model, prompts[:1], do_sample=True, speculative=2))


def found_next(found, seed):
    """The number that the global generator gives after an answer: only one was taken from it."""
    torch.manual_seed(seed)
    torch.randint(2**62, ())
    return torch.rand(()).item()


# Caches.


def test_sliding_windows_are_rolled_back():
    model = DivergenceForCausalLM.from_parts(*make_parts("mistral"), "linear:1")
    assert_same(model, PROMPTS, [2, 8], max_new_tokens=24)


# Fail closed.


@pytest.mark.parametrize("part", ["forget", "target"])
def test_broken_component_fails_closed_during_speculation(world_model, part):
    model, _, prompts = world_model
    broken = model.target if part == "target" else model.experts.forget
    weight = broken.get_output_embeddings().weight
    kept = weight.data.clone()
    try:
        weight.data[3] = torch.nan
        with pytest.raises(FailedClosed):
            generate(model, prompts[:1], speculative=3)
    finally:
        weight.data.copy_(kept)


def test_unverified_draft_in_cache_raises(steered):
    cache = steered.new_cache()
    ids = torch.tensor([PROMPTS[0]])
    steered(input_ids=ids, past_key_values=cache)
    steered.experts.draft_logits(Inputs(torch.tensor([[6]]), None, None), cache.experts, steered.steer)
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
            row = generate(model, [prompt], speculative=Speculation(6, statistics))[0]
            divergence = model.components(row[None])[2]
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
        ({"speculative": True, "penalty_alpha": 0.6, "top_k": 4}, "contrastive search is not offered"),
        ({"speculative": True, "prompt_lookup_num_tokens": 3}, "leave out speculative="),
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


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_embedding_by_length_is_not_speculated_on(part, kind):
    """The largest position of a block would choose the factors of all its tokens."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4, "original_max_position_embeddings": 32}
    rotary = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0} | (factors if kind == "longrope" else {})
    parts = [
        tiny_model("llama", 512, seed, **({"rope_parameters": rotary} if seed == part else {})) for seed in range(3)
    ]
    model = DivergenceForCausalLM.from_parts(*parts)
    assert generate(model, PROMPTS[:1]).shape[1] > 4
    for drafting in ({"speculative": 2}, {"prompt_lookup_num_tokens": 2}):
        with pytest.raises(UsageError, match=rf"rotary embedding.*\({kind}\).*: leave"):
            generate(model, PROMPTS[:1], **drafting)


def test_invalid_speculation_settings_are_rejected(steered):
    with pytest.raises(UsageError, match="beam search"):
        generate(steered, PROMPTS[:1], speculative=True, generation_config=GenerationConfig(num_beams=3))
    with pytest.raises(UsageError, match="speculative is 'yes'; accepted: True"):
        Speculation.of("yes")


def test_q_of_combined_experts_drafts_and_ngrams_alone_cannot(world, tokenizer):
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
    for several in (prompts[:1], prompts):
        with pytest.raises(UsageError, match="needs a retain auxiliary with the target's own tokens"):
            generate(model, several, speculative=True)
    both = CombinedExperts([(NeuralPair(*auxiliaries), 1.0), (ngrams, 0.5)])
    model = DivergenceForCausalLM.from_experts(target, both, "linear:1")
    statistics = SpeculationStatistics()
    assert_same(model, prompts, [3, Speculation(4, statistics)])
    assert statistics.offered
