"""The steered model against three independent forwards and the formula, and through every door of generate()."""

import copy
import io
import pickle
from contextlib import redirect_stdout

import pytest
import torch
import transformers
from transformers import DynamicCache, TextStreamer

from divdec import DivergenceForCausalLM, Experts, Steering, UsageError
from divdec.decoding.processors import SteeredProcessors
from divdec.errors import FailedClosed
from divdec.passes import check_part
from support import reference
from support.exactness import assert_close, assert_same_answer
from support.tiny import make_parts, tiny_model

SETTINGS = ("linear:1.5", "linear:0.3", "rank:7", "rank:40:soft")
PROMPTS = [[5, 9, 200, 31], [77, 8, 300, 2, 45, 6, 250, 12, 33], [400]]


def left_padded(prompts, padding=1):
    width = max(map(len, prompts))
    ids = torch.tensor([[padding] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def parts_of(model):
    return model.target, model.experts.retain, model.experts.forget


def generate(model, prompts, **options):
    ids, mask = left_padded(prompts)
    output = model.generate(
        input_ids=ids,
        attention_mask=mask,
        **{"max_new_tokens": 12, "do_sample": False, "pad_token_id": 1, **options},
    )
    return [row[ids.shape[1] :].tolist() for row in output]


def assert_all_same(model, prompts, found, expected):
    for prompt, one, other in zip(prompts, found, expected, strict=True):
        assert_same_answer(model, prompt, trimmed(one), trimmed(other))


def trimmed(answer, end=0):
    return answer[: answer.index(end) + 1] if end in answer else answer


@pytest.mark.parametrize("setting", SETTINGS)
def test_logits_equal_the_reference(steered, setting):
    steered.steering = setting
    for prompt in PROMPTS:
        with torch.no_grad():
            logits = steered(input_ids=torch.tensor([prompt])).logits[0]
        expected = reference.steered_logits(*parts_of(steered), prompt, steered.steering)
        assert_close(logits, expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch_matches_unbatched(steered, side):
    ids, mask = left_padded(PROMPTS)
    if side == "right":
        ids, mask = (torch.stack([row.roll(int(m.sum())) for row, m in zip(t, mask, strict=True)]) for t in (ids, mask))
    with torch.no_grad():
        logits = steered(input_ids=ids, attention_mask=mask).logits
        for row, prompt in enumerate(PROMPTS):
            alone = steered(input_ids=torch.tensor([prompt])).logits[0]
            assert_close(logits[row][mask[row].bool()], alone)


def test_cached_logits_match_uncached(steered):
    ids, mask = left_padded(PROMPTS)
    with torch.no_grad():
        whole = steered(input_ids=ids, attention_mask=mask).logits
        cache = steered.new_cache()
        for start, stop in ((0, 4), (4, 5), (5, 9)):
            part = steered(input_ids=ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache).logits
            real = mask[:, start:stop].bool()
            assert_close(part[real], whole[:, start:stop][real])
    assert cache.check_length() == 9


def test_forward_returns_cache_by_default(steered):
    (expected,) = generate(steered, PROMPTS[:1])
    ids, cache, answer = torch.tensor([PROMPTS[0]]), None, []
    with torch.no_grad():
        for _ in range(len(trimmed(expected))):
            output = steered(input_ids=ids, past_key_values=cache)
            ids, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
            answer.append(ids.item())
    assert_same_answer(steered, PROMPTS[0], answer, trimmed(expected))
    assert steered(input_ids=ids, use_cache=False).past_key_values is None


def test_logits_to_keep_returns_last_positions(steered):
    ids = torch.tensor([PROMPTS[1]])
    with torch.no_grad():
        assert_close(steered(input_ids=ids, logits_to_keep=3).logits, steered(input_ids=ids).logits[:, -3:])


@pytest.mark.parametrize("setting", SETTINGS)
def test_greedy_generation_equals_the_reference(steered, setting):
    steered.steering = setting
    for prompt, answer in zip(PROMPTS, generate(steered, PROMPTS), strict=True):
        expected = reference.greedy(*parts_of(steered), prompt, steered.steering, 12, end=0)
        assert_same_answer(steered, prompt, trimmed(answer), expected)


@pytest.mark.parametrize("setting", SETTINGS)
def test_greedy_tokens_are_teacher_forced_argmax(steered, setting):
    steered.steering = setting
    (answer,) = generate(steered, PROMPTS[:1])
    answer = trimmed(answer)
    with torch.no_grad():
        logits = steered(input_ids=torch.tensor([PROMPTS[0] + answer])).logits[0]
    start = len(PROMPTS[0]) - 1
    assert_same_answer(steered, PROMPTS[0], logits[start:-1].argmax(-1).tolist(), answer)


def test_generation_without_cache_matches_cached(steered):
    assert_all_same(steered, PROMPTS, generate(steered, PROMPTS, use_cache=False), generate(steered, PROMPTS))


def test_generate_returns_steered_scores(steered):
    ids, mask = left_padded(PROMPTS[:1])
    output = steered.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=1,
        return_dict_in_generate=True, output_logits=True, output_scores=True,
    )  # fmt: skip
    sequence = output.sequences[0].tolist()
    expected = reference.steered_logits(*parts_of(steered), sequence[:-1], steered.steering)
    for step, (logits, scores) in enumerate(zip(output.logits, output.scores, strict=True)):
        assert_close(logits[0], expected[len(PROMPTS[0]) - 1 + step])
        torch.testing.assert_close(scores[0], logits[0])


def test_beam_search_matches_uncached_beam_search(steered):
    beams = generate(steered, PROMPTS, num_beams=3, num_return_sequences=2)
    assert beams == generate(steered, PROMPTS, num_beams=3, num_return_sequences=2, use_cache=False)
    assert len(beams) == 2 * len(PROMPTS)


def test_sampling_follows_the_seed_and_the_steered_distribution(steered):
    torch.manual_seed(3)
    first = generate(steered, PROMPTS, do_sample=True, num_return_sequences=2)
    torch.manual_seed(3)
    assert generate(steered, PROMPTS, do_sample=True, num_return_sequences=2) == first
    steered.steering = "rank:50"
    with torch.no_grad():
        logits = steered(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1]
    masked = set(logits.isneginf().nonzero().flatten().tolist())
    sampled = generate(
        steered, PROMPTS[:1], do_sample=True, num_return_sequences=200, max_new_tokens=1, temperature=5.0
    )
    assert len(masked) == 50
    assert not masked & {answer[0] for answer in sampled}


def test_assisted_decoding_with_q_matches_greedy(steered):
    for prompt in PROMPTS:
        found = generate(steered, [prompt], assistant_model=steered.experts.retain)
        assert_all_same(steered, [prompt], found, generate(steered, [prompt]))


def test_prompt_lookup_matches_greedy(steered):
    prompt = PROMPTS[1] * 3
    found = generate(steered, [prompt], prompt_lookup_num_tokens=3)
    assert_all_same(steered, [prompt], found, generate(steered, [prompt]))


@pytest.mark.parametrize("options", [{"assistant_model": True}, {"prompt_lookup_num_tokens": 2}])
def test_assisted_decoding_rejects_reused_cache(steered, options):
    if "assistant_model" in options:
        options = {"assistant_model": steered.experts.retain}
    ids = torch.tensor([PROMPTS[0]])
    kept = steered.generate(ids, max_new_tokens=2, do_sample=False, eos_token_id=None, return_dict_in_generate=True)
    with pytest.raises(UsageError, match="kept cache"):
        steered.generate(kept.sequences, past_key_values=kept.past_key_values, max_new_tokens=2, **options)
    cache = steered.new_cache()
    options = options | {"do_sample": False, "eos_token_id": None, "max_new_tokens": 2}
    assert torch.equal(steered.generate(ids, past_key_values=cache, **options), kept.sequences)


def test_a_cache_without_use_cache_is_refused(steered):
    """transformers would place the second token after a given cache where the first is."""
    ids = torch.tensor([PROMPTS[0]])
    kept = steered.generate(ids, max_new_tokens=2, do_sample=False, eos_token_id=None, return_dict_in_generate=True)
    with pytest.raises(UsageError, match="leave use_cache on"):
        steered.generate(kept.sequences, past_key_values=kept.past_key_values, max_new_tokens=2, use_cache=False)


def test_beams_that_end_in_a_suppressed_token_are_no_way_on():
    """The search fills its beams with impossible tokens where too few are possible."""
    no, rows = -torch.inf, torch.tensor([[5], [5]])
    for alive in (True, False):
        processors = SteeredProcessors([transformers.TemperatureLogitsWarper(2.0)], 1, num_beams=2)
        processors(rows, torch.tensor([[0.0, no, no], [0.0, no, no]]))
        longer = torch.cat([rows, torch.tensor([[0], [1]])], dim=1)  # the second beam ends in an excluded token
        scores = torch.tensor([[no, 0.0 if alive else no, no], [0.0, 0.0, no]])
        if alive:
            assert processors(longer, scores).tolist() == [[no, 0.0, no], [no, no, no]]
        else:
            with pytest.raises(FailedClosed, match="no token can be chosen"):
                processors(longer, scores)


def test_streamer_and_stop_strings(steered, tokenizer):
    ids = torch.tensor([PROMPTS[0]])
    with redirect_stdout(io.StringIO()) as stream:
        output = steered.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=1,
            streamer=TextStreamer(tokenizer, skip_prompt=True),
        )  # fmt: skip
    answer = output[0, ids.shape[1] :].tolist()
    assert stream.getvalue().strip() == tokenizer.decode(answer).strip()
    third = tokenizer.decode(answer[2:3])
    stopped = steered.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=1,
        stop_strings=[third], tokenizer=tokenizer,
    )  # fmt: skip
    assert stopped[0, ids.shape[1] :].tolist() == answer[: answer.index(answer[2]) + 1]


@pytest.mark.parametrize("options", [{"num_return_sequences": 2}, {"num_beams": 2, "do_sample": False}])
def test_reused_cache_requires_matching_batch_size(steered, options):
    ids = torch.tensor([PROMPTS[0]])
    cache = steered(ids[:, :-1]).past_key_values
    with pytest.raises(UsageError, match="holds 1 sequences, but the input has 2"):
        steered.generate(ids, past_key_values=cache, **{"max_new_tokens": 2, "do_sample": True, **options})
    with pytest.raises(UsageError, match="holds 1 sequences, but the input has 3"):
        steered(ids[:, -1:].repeat(3, 1), past_key_values=cache)
    cache.batch_repeat_interleave(2)
    steered.generate(ids, past_key_values=cache, **{"max_new_tokens": 2, "do_sample": True, **options})


def test_loss_is_mean_negative_log_probability(steered):
    ids = torch.tensor([PROMPTS[1]])
    labels = ids.clone()
    labels[:, :4] = -100
    with torch.no_grad():
        output = steered(input_ids=ids, labels=labels)
    expected = -output.logits.log_softmax(-1)[0, 3:-1].gather(1, ids[0, 4:, None]).mean()
    torch.testing.assert_close(output.loss, expected)


def test_bfloat16_models_are_steered_in_float32(family):
    model = DivergenceForCausalLM.from_parts(*(part.bfloat16() for part in make_parts(family)), steering="linear:1.5")
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPTS[1]])).logits
    assert logits.dtype == torch.float32
    assert generate(model, PROMPTS)


def test_models_of_different_families_combine():
    target, retain, forget = (
        tiny_model("gpt2", 512, 0, width=64),
        tiny_model("llama", 512, 1),
        tiny_model("qwen", 512, 2),
    )
    model = DivergenceForCausalLM.from_parts(target, retain, forget, "linear:1.2")
    for prompt, answer in zip(PROMPTS, generate(model, PROMPTS), strict=True):
        expected = reference.greedy(target, retain, forget, prompt, model.steering, 12, end=0)
        assert_same_answer(model, prompt, trimmed(answer), expected)


@pytest.mark.parametrize("widths", [(512, 520, 530), (530, 512, 520), (520, 530, 512)])
def test_padded_logits_are_truncated_to_common_vocabulary(widths):
    target, retain, forget = (tiny_model("llama", width, seed) for seed, width in enumerate(widths))
    model = DivergenceForCausalLM.from_parts(target, retain, forget, "rank:30")
    assert model.vocab_size == model.config.vocab_size == 512
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPTS[1]])).logits
    assert logits.shape[-1] == 512
    torch.testing.assert_close(logits[0], reference.steered_logits(target, retain, forget, PROMPTS[1], model.steering))
    assert all(max(answer) < 512 for answer in generate(model, PROMPTS, do_sample=True, temperature=9.0))


def test_sliding_window_target_generates_with_cache():
    model = DivergenceForCausalLM.from_parts(
        tiny_model("mistral", 512, 0), tiny_model("llama", 512, 1), tiny_model("gpt2", 512, 2), "linear:1"
    )
    prompts = [PROMPTS[1] * 2]
    assert_all_same(model, prompts, generate(model, prompts, use_cache=False), generate(model, prompts))


def test_steering_can_be_read_and_changed(steered):
    assert steered.steering == Steering(alpha=1.5)
    before = generate(steered, PROMPTS)
    steered.steering = "linear:0"
    alone = steered.target.generate(
        input_ids=torch.tensor([PROMPTS[0]]), attention_mask=torch.ones(1, 4, dtype=int), max_new_tokens=12,
        do_sample=False, pad_token_id=1,
    )  # fmt: skip
    assert_same_answer(steered.target, PROMPTS[0], trimmed(generate(steered, PROMPTS)[0]), alone[0, 4:].tolist())
    assert generate(steered, PROMPTS) != before
    assert steered.config.steering["alpha"] == 0
    steered.steering = Steering("rank", k=2, vocabulary=(3, 5, 9))
    steered.steering = "rank:1"
    assert steered.steering.vocabulary == (3, 5, 9)
    with pytest.raises(UsageError, match="3 eligible tokens"):
        steered.steering = "rank:3"
    steered.steering = Steering(alpha=0.0)
    with pytest.raises(UsageError, match="between 1 and 511"):
        steered.steering = "rank:512"
    assert str(steered.steering) == "linear:0"
    assert isinstance(steered.experts, Experts)


def test_cache_operations_apply_to_all_models(steered):
    ids = torch.tensor(PROMPTS[1:2] * 2)
    with torch.no_grad():
        whole = steered(input_ids=ids).logits
        cache = steered.new_cache()
        steered(input_ids=ids[:, :7], past_key_values=cache)
        cache.crop(-4)
        assert cache.check_length() == 3
        assert_close(steered(input_ids=ids[:, 3:], past_key_values=cache).logits, whole[:, 3:])
        cache.batch_select_indices(torch.tensor([1]))
        assert {layer.keys.shape[0] for layer in cache.layers if layer.keys is not None} == {1}
        cache.experts.retain.cache.crop(-1)
        with pytest.raises(RuntimeError, match="different numbers of tokens"):
            steered(input_ids=ids[:1, :1], past_key_values=cache)


def test_failed_sliding_window_crop_leaves_all_caches_unchanged():
    model = DivergenceForCausalLM.from_parts(
        tiny_model("llama", 512, 0), tiny_model("mistral", 512, 1), tiny_model("llama", 512, 2)
    )
    cache = model.new_cache()
    with torch.no_grad():
        model(input_ids=torch.tensor([list(range(2, 22))]), past_key_values=cache)
    with pytest.raises(RuntimeError, match="rolled back"):
        cache.crop(-2)
    assert cache.check_length() == 20


class TestFailsClosed:
    """Whatever would answer with the target alone is an error."""

    def test_non_finite_divergence(self, steered):
        with torch.no_grad():
            steered.experts.forget.get_output_embeddings().weight[3] = float("nan")
        for setting in SETTINGS:
            steered.steering = setting
            with pytest.raises(RuntimeError, match="not finite"):
                generate(steered, PROMPTS)

    @pytest.mark.parametrize("option", [{"output_hidden_states": True}, {"output_attentions": True}])
    def test_hidden_states_of_the_target(self, steered, option):
        with pytest.raises(UsageError, match="not offered by a steered model"):
            steered(input_ids=torch.tensor([PROMPTS[0]]), **option)

    def test_inputs_embeds(self, steered):
        embeddings = steered.get_input_embeddings()(torch.tensor([PROMPTS[0]]))
        with pytest.raises(UsageError, match="input_ids"):
            steered(inputs_embeds=embeddings)
        with pytest.raises(UsageError, match="input_ids"):
            steered.generate(inputs_embeds=embeddings, max_new_tokens=2)

    def test_target_cache(self, steered):
        cache = DynamicCache(config=steered.target.config)
        with pytest.raises(UsageError, match="new_cache"):
            steered(input_ids=torch.tensor([PROMPTS[0]]), past_key_values=cache)
        with pytest.raises(UsageError, match="new_cache"):
            steered.generate(input_ids=torch.tensor([PROMPTS[0]]), past_key_values=cache, max_new_tokens=2)

    @pytest.mark.parametrize("implementation", ["quantized", "offloaded", "static"])
    def test_cache_implementation_option(self, steered, implementation):
        with pytest.raises(UsageError, match="cache_implementation"):
            generate(steered, PROMPTS, cache_implementation=implementation)
        kept = {"past_key_values": steered.new_cache(), "cache_implementation": implementation}
        with pytest.raises(UsageError, match="cache_implementation"):
            generate(steered, PROMPTS, **kept)

    def test_mismatched_vocabularies(self, steered):
        with pytest.raises(UsageError, match="resized"):
            steered.resize_token_embeddings(600)
        with pytest.raises(UsageError, match="cannot be changed"):
            steered.set_input_embeddings(torch.nn.Embedding(3, 3))

    def test_adapters_and_rules_that_change_no_choice(self, steered):
        for change in (steered.add_adapter, steered.load_adapter):
            with pytest.raises(UsageError, match="load them into its target"):
                change("some/adapter")
        with pytest.raises(UsageError, match="steers nothing"):
            steered.steering = "rank:1:soft"

    def test_config_without_models(self, steered):
        with pytest.raises(UsageError, match="from_pretrained"):
            DivergenceForCausalLM(steered.config)

    @pytest.mark.parametrize("shape", [(1, 2), (1, 3), (1, 5)])
    def test_attention_mask_of_wrong_shape(self, steered, shape):
        for positions in (None, torch.arange(4)[None]):
            with pytest.raises(UsageError, match="attention_mask"):
                steered(
                    input_ids=torch.tensor([PROMPTS[0]]),
                    attention_mask=torch.ones(shape, dtype=int),
                    position_ids=positions,
                )

    @pytest.mark.parametrize("given", [-1, True])
    def test_non_numeric_logits_to_keep(self, steered, given):
        with pytest.raises(UsageError, match="logits_to_keep"):
            steered(input_ids=torch.tensor([PROMPTS[0]]), logits_to_keep=given)

    def test_unsupported_inputs(self, steered):
        with pytest.raises(UsageError, match="pixel_values is not offered"):
            steered(input_ids=torch.tensor([PROMPTS[0]]), pixel_values=torch.zeros(1))

    def test_a_cache_of_another_steered_model(self, steered):
        other = DivergenceForCausalLM.from_parts(*make_parts("llama"))
        cache = other.new_cache()
        with torch.no_grad():
            other(input_ids=torch.tensor([PROMPTS[0]]), past_key_values=cache)
        with pytest.raises(UsageError, match="belongs to another steered model"):
            steered(input_ids=torch.tensor([PROMPTS[0]]), past_key_values=cache)
        with pytest.raises(UsageError, match="belongs to another steered model"):
            steered.generate(input_ids=torch.tensor([PROMPTS[0] + [3]]), past_key_values=cache, max_new_tokens=2)

    @pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda model: pickle.loads(pickle.dumps(model))])
    def test_cache_of_original_model_in_copy(self, steered, copied):
        """A copy may be trained, or steered otherwise: what the original has read is not what it would have."""
        cache = steered.new_cache()
        ids = torch.tensor([PROMPTS[1]])
        with torch.no_grad():
            steered(ids[:, :4], past_key_values=cache)
            copies = [copied(steered), copied(steered)]
            for model in copies:
                with pytest.raises(UsageError, match="belongs to another steered model"):
                    model(ids[:, 4:], past_key_values=cache)
            with pytest.raises(UsageError, match="belongs to another steered model"):
                copies[0](ids[:, 4:], past_key_values=copies[1].new_cache())
            assert generate(copies[0], PROMPTS) == generate(steered, PROMPTS)
            # Copies of caches stay the model's, as beams and conversations that branch need.
            branch, unpickled = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
            logits = [steered(ids[:, 4:], past_key_values=own).logits for own in (cache, branch, unpickled)]
        assert torch.equal(logits[0], logits[1])
        assert torch.equal(logits[0], logits[2])

    def test_model_that_ignores_its_cache(self, steered, monkeypatch):
        forward = steered.experts.retain.forward
        monkeypatch.setattr(
            steered.experts.retain,
            "forward",
            lambda *args, **kwargs: forward(*args, **kwargs | {"past_key_values": None}),
        )
        with pytest.raises(RuntimeError, match="different numbers of tokens"):
            generate(steered, PROMPTS)

    def test_unsupported_architectures(self):
        import peft
        import transformers

        target, retain, forget = make_parts("llama")
        recurrent = transformers.MambaForCausalLM(
            transformers.MambaConfig(vocab_size=512, hidden_size=16, num_hidden_layers=1)
        )
        adapted = peft.get_peft_model(make_parts("llama")[1], peft.LoraConfig(r=2, target_modules="all-linear"))
        for parts in ((recurrent, retain, forget), (target, recurrent, forget), (target, retain, recurrent)):
            with pytest.raises(UsageError, match="store its state in a DynamicCache"):
                DivergenceForCausalLM.from_parts(*parts)
        with pytest.raises(UsageError, match="merge adapters first"):
            check_part("forget auxiliary", adapted)

    def test_one_model_as_both_auxiliaries(self):
        target, retain, _ = make_parts("llama")
        with pytest.raises(UsageError, match="the same model"):
            DivergenceForCausalLM.from_parts(target, retain, retain)

    def test_continuous_batching(self, steered):
        with pytest.raises(UsageError, match="continuous batching"):
            steered.generate_batch(PROMPTS)
        with pytest.raises(UsageError, match="continuous batching"):
            steered.init_continuous_batching()
