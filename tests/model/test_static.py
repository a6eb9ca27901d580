"""A cache of fixed length answers as one that grows, and compiled passes over it as passes that are not."""

import copy

import pytest
import torch
import transformers
from transformers.generation.configuration_utils import CompileConfig

from conftest import make_parts, tiny_model
from divdec import DivergenceForCausalLM, UsageError
from divdec.decoding.speculative import Speculation
from divdec.decoding.statistics import SpeculationStatistics
from divdec.errors import FailedClosed
from divdec.experts.combined import CombinedExperts
from divdec.experts.compiled import ROUND, _kept
from divdec.experts.fixed_cache import FixedCache, FixedLayer
from divdec.experts.forward import logits_of, new_cache
from divdec.experts.neural import NeuralPair
from divdec.experts.ngram import NgramPair
from divdec.experts.ngram_fit import fit
from exactness import assert_close, assert_same_answers

ONE = {"input_ids": torch.tensor([[5, 9, 200, 31]])}
PADDED = {
    "input_ids": torch.tensor([[1, 1, 5, 9], [1, 77, 8, 300], [2, 45, 6, 250]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]]),
}
INPUTS = {"one": ONE, "padded": PADDED}


def generate(model, inputs, **options):
    return model.generate(
        **inputs, **{"max_new_tokens": 16, "do_sample": False, "pad_token_id": 1, "eos_token_id": None, **options}
    )


def assert_equal(model, inputs, found, expected):
    masks = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    prompts = [row[mask].tolist() for row, mask in zip(inputs["input_ids"], masks, strict=True)]
    assert_same_answers(model, prompts, found, expected, eos_token_id=None)


def static(model, inputs, **options):
    return generate(model, inputs, cache_implementation="static", **options)


@pytest.mark.parametrize("steering", ["linear:1.5", "rank:20"])
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("speculative", [None, 1, 3, True])
def test_answers_are_those_of_a_growing_cache(steered, steering, inputs, speculative):
    steered.steering = steering
    options = {"speculative": speculative}
    expected = generate(steered, INPUTS[inputs])
    assert_equal(steered, INPUTS[inputs], static(steered, INPUTS[inputs], **options), expected)


@pytest.mark.parametrize("speculative", [None, 2])
def test_sequences_that_end_leave_the_batch(speculative):
    model = DivergenceForCausalLM.from_parts(*make_parts("llama"), steering="linear:1.5")
    ends = generate(model, PADDED)[:, [7, 10, 17]].diagonal().tolist()
    options = {"eos_token_id": ends, "speculative": speculative}
    assert_equal(model, PADDED, static(model, PADDED, **options), generate(model, PADDED, eos_token_id=ends))


def test_samples_and_beams_are_those_of_a_growing_cache(steered):
    for options in ({"do_sample": True, "num_return_sequences": 2}, {"num_beams": 3}):
        answers = []
        for make in (generate, static):
            torch.manual_seed(0)
            answers.append(make(steered, PADDED, **options))
        assert torch.equal(*answers)


def test_scores_equal_those_of_a_growing_cache(steered):
    options = {"return_dict_in_generate": True, "output_scores": True}
    for speculative in (None, 3):
        ours, expected = (make(steered, PADDED, **options, speculative=speculative) for make in (static, generate))
        assert_close(torch.stack(ours.scores), torch.stack(expected.scores))


def fixed_and_growing(family="llama", rows=PADDED):
    model = tiny_model(family, 512, seed=3)
    caches = FixedCache("target", model, 24), new_cache(model)
    for cache in caches:
        read(model, cache, rows["input_ids"], rows["attention_mask"])
    return model, *caches


@torch.no_grad()
def read(model, cache, ids, mask):
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return logits_of(model, ids, mask, positions, cache)


def assert_same(fixed, growing):
    """The fixed cache's filled part against a growing one's."""
    for ours, expected in zip(fixed.layers, growing.layers, strict=True):
        length = expected.get_seq_length()
        assert ours.get_seq_length() == int(ours.cumulative_length) == length
        for one, other in ((ours.keys, expected.keys), (ours.values, expected.values)):
            assert_close(one[:, :, :length], other)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_what_is_rolled_back_leaves_no_trace(family):
    model, fixed, growing = fixed_and_growing(family)
    mask, more = PADDED["attention_mask"], torch.tensor([[7, 8, 9], [300, 2, 4], [11, 12, 13]])
    read(model, fixed, more, torch.cat([mask, torch.ones_like(more)], dim=1))
    fixed.crop(-3)
    assert_same(fixed, growing)
    ours, expected = (
        read(model, cache, more[:, :2], torch.cat([mask, torch.ones_like(more[:, :2])], dim=1))
        for cache in (fixed, growing)
    )
    assert_close(ours, expected)
    assert_same(fixed, growing)


def test_rows_are_selected_repeated_reordered_and_reset():
    _, fixed, growing = fixed_and_growing()
    address = fixed.layers[0].keys.data_ptr()
    for cache in (fixed, growing):
        cache.reorder_cache(torch.tensor([2, 0, 1]))
    assert fixed.layers[0].keys.data_ptr() == address
    assert_same(fixed, growing)
    for cache in (fixed, growing):
        cache.batch_select_indices(torch.tensor([0, 2]))
        cache.batch_repeat_interleave(2)
    assert_same(fixed, growing)
    fixed.reset()
    assert fixed.get_seq_length() == int(fixed.layers[1].cumulative_length) == 0
    assert not fixed.layers[0].keys.any()


@pytest.fixture
def model():
    return DivergenceForCausalLM.from_parts(*make_parts("llama"), steering="linear:1.5")


def kept(model, inputs=ONE, **options):
    """The cache of an answer that was kept."""
    return static(model, inputs, return_dict_in_generate=True, **options).past_key_values


def test_rows_that_lose_different_numbers_are_shifted_in_place(model):
    cache, growing = (make(model, PADDED, return_dict_in_generate=True).past_key_values for make in (static, generate))
    address = cache.target.layers[0].keys.data_ptr()
    for each in (cache, growing):
        assert each.can_shift_rows
        each.shift_rows(torch.tensor([0, 2, 1]), padding=1)
    assert cache.check_length() == growing.check_length() == 18
    assert cache.target.layers[0].keys.data_ptr() == address
    assert_same(cache.target, growing.target)
    assert_same(cache.experts.forget.cache, growing.experts.forget.cache)


def test_an_answer_goes_on_from_a_kept_cache(model):
    first = static(model, ONE, return_dict_in_generate=True, max_new_tokens=30)
    whole = first.sequences
    cache = first.past_key_values
    assert cache.check_length() == whole.shape[1] - 1
    cache.crop(-(cache.check_length() - 10))
    again = generate(model, {"input_ids": whole[:, :12]}, past_key_values=cache, max_new_tokens=8, speculative=2)
    assert_equal(model, {"input_ids": whole[:, :12]}, again, whole[:, :20])
    assert cache.check_length() == 19
    copied = copy.deepcopy(cache)
    copied.crop(-5)
    assert (copied.check_length(), cache.check_length()) == (14, 19)
    assert int(cache.target.layers[-1].cumulative_length) == 19


def test_parts_of_different_length_answer_nothing(model):
    for part in ("target", "retain", "forget"):
        cache = kept(model)
        own = cache.target if part == "target" else cache.experts.part(part).cache
        own.crop(-1)
        with pytest.raises(FailedClosed, match="different numbers of tokens"), torch.no_grad():
            model(torch.tensor([[5]]), past_key_values=cache)
    cache = kept(model)
    cache.crop(-1)
    # A part that reads without the others is not believed to have read.
    with torch.no_grad():
        model.target(torch.tensor([[5]]), past_key_values=cache.target)
    assert cache.check_length() == 18


def test_a_full_cache_answers_nothing(model):
    cache = kept(model)
    with pytest.raises(FailedClosed, match="19 tokens at most, 20 were given"), torch.no_grad():
        model(torch.tensor([[5]]), past_key_values=cache)
    assert cache.check_length() == 19
    with pytest.raises(UsageError, match="static cache of 19 tokens, 24 may be needed"):
        generate(model, {"input_ids": torch.full((1, 20), 5)}, past_key_values=cache, max_new_tokens=5)


def test_experts_that_are_no_models_keep_caches_of_their_own(tmp_path):
    target, retain, forget = make_parts("llama")
    texts = [[5, 9, 200, 31, 7, 8], [77, 8, 300, 4]], [[5, 9, 200, 45, 6]]
    for number in range(2):
        (tmp_path / str(number)).mkdir()
    ngrams = NgramPair(*(fit(text, 512, tmp_path / str(number)) for number, text in enumerate(texts)))
    for experts in (ngrams, CombinedExperts([(NeuralPair(retain, forget), 1.0), (ngrams, 0.5)])):
        model = DivergenceForCausalLM.from_experts(target, experts, "linear:1")
        for speculative in (None, 2):
            assert_equal(model, PADDED, static(model, PADDED, speculative=speculative), generate(model, PADDED))
        layers = kept(model).layers
        assert any(isinstance(layer, FixedLayer) for layer in layers)
        assert not all(isinstance(layer, FixedLayer) for layer in layers)


@pytest.mark.parametrize("kind", ["bloom", "falcon"])
def test_positions_that_are_distances_are_not_static(kind):
    sizes = {"vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model(kind, **sizes, **({"alibi": True} if kind == "falcon" else {}))
    target = transformers.AutoModelForCausalLM.from_config(config).eval()
    model = DivergenceForCausalLM.from_parts(target, *make_parts("llama")[1:])
    with pytest.raises(UsageError, match="target, whose positions are distances"):
        static(model, PADDED)


def test_what_cannot_be_static_is_refused_in_one_line(model):
    parts = make_parts("llama")[:2]
    windows = DivergenceForCausalLM.from_parts(*parts, tiny_model("mistral", 512, seed=5))
    with pytest.raises(UsageError, match="forget auxiliary, whose StaticSlidingWindowLayer") as refused:
        static(windows, ONE)
    assert "\n" not in str(refused.value)
    model.experts.retain.config._attn_implementation = "flex_attention"
    with pytest.raises(UsageError, match="retain auxiliary with attention 'flex_attention'") as refused:
        static(model, ONE)
    assert "\n" not in str(refused.value)
    with pytest.raises(UsageError, match=r"'quantized' is not offered.*'static'"):
        generate(model, ONE, cache_implementation="quantized")


class Compilations:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self):
        self.number = 0

    def __call__(self, graph, inputs, **options):
        self.number += 1
        return graph.forward

    def __deepcopy__(self, memo):
        return self


def compiled(backend, mode="default"):
    config = CompileConfig(backend=backend, mode=mode, fullgraph=True)
    config._compile_all_devices = True
    return config


@pytest.mark.slow
@pytest.mark.parametrize("inputs", INPUTS)
def test_compiled_passes_answer_the_same_and_contexts_that_grow_compile_nothing(model, inputs):
    counting = Compilations()
    found = []
    for speculative in (None, 1, 3, True):
        before = counting.number
        for number in (12, 30):
            expected = generate(model, INPUTS[inputs], max_new_tokens=number)
            options = {"speculative": speculative, "compile_config": compiled(counting)}
            found_now = static(model, INPUTS[inputs], max_new_tokens=number, **options)
            assert_equal(model, INPUTS[inputs], found_now, expected)
        found.append(counting.number - before)
    # Passes of one token in each part; then blocks in target and forget auxiliary, of whatever size.
    if inputs == "one":
        assert found == [3, 2, 0, 0]
    else:  # sequences that are done leave the batch, whose size is then another: 1, the first, or any
        assert found[0] == 3
        assert sum(found) <= 3 * 6


def test_a_compiled_cache_serves_the_next_answer_unless_it_was_given_away(model):
    counting = Compilations()
    options = {"compile_config": compiled(counting)}
    first = static(model, ONE, **options)
    assert_equal(model, ONE, first, generate(model, ONE))
    cache = _kept[model.target]
    assert (cache.max_length, cache.held.tokens, cache.layers[0].keys.abs().sum()) == (ROUND, 0, 0)
    assert_equal(model, ONE, static(model, ONE, **options), first)
    assert _kept[model.target] is cache
    held = kept(model, **options)
    assert held.target is cache
    assert model.target not in _kept
    assert_equal(model, ONE, static(model, ONE, **options), first)
    assert held.check_length() == first.shape[1] - 1
    generate(model, {"input_ids": first[:, :20]}, past_key_values=held, max_new_tokens=3)
    assert held.check_length() == 22
    assert counting.number == 3  # one for each part, whatever the length of the context
    static(model, ONE, disable_compile=True)


@pytest.mark.parametrize("stance", ["force_eager", pytest.param("default", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("before", "after"), [(torch.float32, torch.float64), (torch.bfloat16, torch.float32)])
def test_a_kept_cache_of_another_kind_serves_no_answer(before, after, stance):
    parts = (tiny_model("llama", 512, seed, width=16, layers=1) for seed in range(3))
    model = DivergenceForCausalLM.from_parts(*parts, steering="linear:1.5").to(before)
    options = {"compile_config": compiled(Compilations()), "return_dict_in_generate": True, "output_scores": True}
    with torch.compiler.set_stance(stance):  # caches are kept wherever passes would be compiled
        static(model, ONE, **options | {"return_dict_in_generate": False})
        old = [_kept[part] for part in (model.target, model.experts.retain, model.experts.forget)]
        model.to(after)
        ours = static(model, ONE, **options)
    expected = generate(model, ONE, return_dict_in_generate=True, output_scores=True)
    assert torch.equal(ours.sequences, expected.sequences)
    assert_close(torch.stack(ours.scores), torch.stack(expected.scores))
    experts = ours.past_key_values.experts
    new = [ours.past_key_values.target, experts.retain.cache, experts.forget.cache]
    assert [cache.layers[0].keys.dtype for cache in (*old, *new)] == [before] * 3 + [after] * 3


def test_a_cache_fits_the_kind_and_the_place_it_was_made_for():
    model, fixed, _ = fixed_and_growing()
    assert fixed.fits(model)
    assert not fixed.fits(copy.deepcopy(model).double())
    assert not fixed.fits(copy.deepcopy(model).to("meta"))
    assert fixed.fits(model.double().float())


@pytest.mark.slow
def test_passes_are_timed_though_compiled(model):
    statistics = SpeculationStatistics()
    speculation = Speculation(gamma=2, statistics=statistics)
    counting = Compilations()
    found = static(model, ONE, speculative=speculation, compile_config=compiled(counting))
    assert_equal(model, ONE, found, generate(model, ONE))
    assert counting.number
    assert all(statistics.seconds[name] > 0 for name in ("target", "retain", "forget"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's compiler warns of torch
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_inductor_answers_the_same(family):
    model = DivergenceForCausalLM.from_parts(*make_parts(family), steering="linear:1.5")
    options = {"compile_config": compiled("inductor", "reduce-overhead")}
    for inputs in INPUTS.values():
        for speculative in (None, 3):
            found = static(model, inputs, speculative=speculative, **options)
            assert_equal(model, inputs, found, generate(model, inputs))
