"""Models that sum up what they have read: what cannot be taken back is refused, all else answers the same."""

import functools
import gc

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from divdec import DivergenceForCausalLM, UsageError
from divdec.decoding.cache import holds_tokens
from support.architectures import tiny_architecture
from support.tiny import tiny_model

# Linear attention beside attention, both in one layer, and layers of the architecture's own.
STATEFUL = ("olmo_hybrid", "falcon_h1", "deepseek_v4")
REPEATED = [5, 17, 80, 33, 9] * 3  # so that looking the text up proposes tokens
OTHER = [40, 7, 8, 61, 23, 11, 90]
DRAFTING = {
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
    "assisted": {"assistant_model": None},
    "speculative": {"speculative": 4},
}


@functools.cache
def architecture(model_type, seed=0):
    return tiny_architecture(model_type, seed)


def steered(model_type, part="all"):
    """A steered model with parts of an architecture, or with one of them beside Llamas."""
    own = {"target": [0], "retain": [1], "all": [0, 1, 2]}[part]
    parts = [architecture(model_type, seed) if seed in own else tiny_model("llama", 96, seed) for seed in range(3)]
    model = DivergenceForCausalLM.from_parts(*parts, steering="linear:1.5")
    model.generation_config.eos_token_id = None
    return model


def generate(model, prompt=REPEATED, **options):
    ids = torch.tensor([prompt])
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=1, **options
    )[0].tolist()


def drafting(name):
    options = dict(DRAFTING[name])
    if name == "assisted":
        options["assistant_model"] = tiny_model("llama", 96, 7)
    return options


def interleaved(model, prompts, steps=8):
    """Greedy answers to several prompts, a token of each at a time, each with its own cache."""
    caches, texts = [model.new_cache() for _ in prompts], [list(prompt) for prompt in prompts]
    given = [torch.tensor([prompt]) for prompt in prompts]
    with torch.no_grad():
        for _ in range(steps):
            for place, cache in enumerate(caches):
                token = model(given[place], past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
                given[place] = token
                texts[place].append(int(token))
    return texts


@pytest.mark.parametrize(("model_type", "part"), [*((name, "target") for name in STATEFUL), (STATEFUL[0], "retain")])
def test_recurrent_component_makes_model_stateful(model_type, part):
    model = steered(model_type, part)
    plain = generate(model)
    assert generate(model, use_cache=False) == plain
    assert interleaved(model, [REPEATED, OTHER])[0] == plain[: len(REPEATED) + 8]
    assert model._is_stateful
    for name in DRAFTING:
        with pytest.raises(UsageError, match=rf"recurrent state.* \({model_type}\): leave") as error:
            generate(model, **drafting(name))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("model_type", STATEFUL)
def test_recurrent_state_cannot_be_cropped_or_selected(model_type):
    """The methods that such layers inherit change keys and values, and leave the state as it was."""
    model = steered(model_type, "retain")
    cache = model.new_cache()
    cache.activate_past_recording()
    with torch.no_grad():
        model(torch.tensor([REPEATED, REPEATED[::-1]]), past_key_values=cache)
    for change in (lambda: cache.crop(-2), lambda: cache.batch_repeat_interleave(2),
                   lambda: cache.batch_select_indices(torch.tensor([1]))):  # fmt: skip
        with pytest.raises(RuntimeError, match="recurrent state"):
            change()
    assert cache.check_length() == len(REPEATED)


def test_beam_search_reorders_recurrent_states():
    model = steered("olmo_hybrid")
    assert generate(model, num_beams=3) == generate(model, num_beams=3, use_cache=False)


def test_convolution_states_can_be_cropped():
    model = steered("lfm3")
    assert not model._is_stateful
    plain = generate(model)
    assert generate(model, **drafting("prompt lookup")) == plain
    assert generate(model, **drafting("assisted")) == plain
    with pytest.raises(UsageError, match="recurrent state"):
        generate(model, speculative=2)


@pytest.mark.parametrize("model_type", ["recurrent_gemma", "minimax"])
def test_recurrent_state_outside_cache_is_rejected(model_type):
    """Two answers would share it, or a cache of another class would be needed."""
    with pytest.raises(UsageError, match="does not store its state in a DynamicCache") as error:
        DivergenceForCausalLM.from_parts(
            architecture(model_type), tiny_model("llama", 96, 1), tiny_model("llama", 96, 2)
        )
    assert "\n" not in str(error.value)


def test_recurrent_remote_experts_recompute_context():
    from divdec.remote.experts import LoadedExperts, SteeringContext
    from divdec.steering import Steering

    experts = steered("deepseek_v4").experts
    context = SteeringContext(LoadedExperts(range(96), experts, None, (), None, 96), Steering())
    short = REPEATED[:6]
    first = context.logit_shift(short)
    context.logit_shift([*short, 7, 8])
    torch.testing.assert_close(context.logit_shift(short), first, rtol=0, atol=1e-4)


def test_vllm_rejects_recurrent_models_before_loading(tokenizer, checkpoints, tmp_path):
    from divdec import write_bundle
    from divdec.serving.vllm.configuration import EngineOptions, check_weights_complete, read_parts

    tiny_architecture("falcon_h1", vocab_size=512).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    pair = {f"{name}_auxiliary": str(checkpoints / name) for name in ("retain", "forget")}
    bundle = write_bundle(tmp_path / "bundle", target=str(tmp_path / "target"), **pair, steering="linear:1")
    with pytest.raises(UsageError, match=r"target .* has a recurrent state .falcon_h1"):
        check_weights_complete(read_parts(str(bundle), None, EngineOptions()))


def refusal(work):
    """What a call gives, or the error with which it was refused."""
    try:
        return work(), None
    except Exception as error:  # also of transformers: nothing was answered
        return None, error


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_every_architecture_decodes_consistently_or_is_rejected(model_type):
    parts, error = refusal(lambda: [tiny_architecture(model_type, seed) for seed in range(3)])
    if error is not None:
        pytest.skip(f"transformers cannot make it so small: {type(error).__name__}")
    model, error = refusal(lambda: DivergenceForCausalLM.from_parts(*parts, steering="linear:1.5"))
    if error is None:
        model.generation_config.eos_token_id = None
        plain, error = refusal(lambda: [generate(model, prompt, use_cache=True) for prompt in (REPEATED, OTHER)])
    if error is not None:
        assert len(str(error).splitlines()) == 1
        return
    parts[0].generation_config.eos_token_id = None
    if generate(parts[0], use_cache=True) != generate(parts[0], use_cache=False):
        pytest.skip("transformers answers otherwise without a cache")
    assert [generate(model, prompt, use_cache=False) for prompt in (REPEATED, OTHER)] == plain
    assert interleaved(model, [REPEATED, OTHER]) == [text[: len(text) - 4] for text in plain]
    recurrent = model._is_stateful or not all(map(holds_tokens, model.new_cache().layers))
    for name in DRAFTING:
        found, error = refusal(functools.partial(generate, model, **drafting(name), use_cache=True))
        assert found == plain[0] if error is None else recurrent and isinstance(error, UsageError), (name, error)
    model = parts = None
    gc.collect()
