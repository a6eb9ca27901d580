"""What generation is given and cannot follow exactly is refused, before the first token."""

import pytest
import torch

from divdec import DivergenceForCausalLM, UsageError
from support.tiny import make_parts

PROMPTS = torch.tensor([[5, 9, 200, 31], [77, 8, 300, 2]])
MODES = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "beams": {"num_beams": 3},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "uncached": {"use_cache": False},
    "chunks": {"prefill_chunk_size": 2},
    "speculative": {"speculative": 3},
    "custom": {"custom_generate": lambda model, *args, **kwargs: model._sample(*args, **kwargs)},
}


@pytest.fixture(scope="module")
def model():
    return DivergenceForCausalLM.from_parts(*make_parts("llama"), "rank:20")


def generate(model, ids=PROMPTS, **options):
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False, "pad_token_id": 1}
    return model.generate(ids, **given | options)


@pytest.mark.parametrize("mode", MODES)
def test_prompt_ending_in_padding_is_rejected(model, mode):
    ids = PROMPTS[1:] if mode == "lookup" else PROMPTS
    mask = torch.ones_like(ids)
    mask[-1, -1] = 0
    with pytest.raises(UsageError, match=rf"^prompt {len(ids) - 1} ends in padding; .*padding_side = \"left\"\)$"):
        generate(model, ids, attention_mask=mask, **MODES[mode])


def test_padding_without_attention_mask_is_rejected(model):
    """transformers takes padding tokens for padding where they end nothing."""
    padded = PROMPTS.clone()
    padded[0, -2:] = 1
    with pytest.raises(UsageError, match="prompt 0 ends in padding"):
        generate(model, padded, attention_mask=None)


@pytest.mark.parametrize("speculative", [None, 2])
def test_padding_after_reused_cache_is_rejected(model, speculative):
    cache = model.new_cache()
    with torch.no_grad():
        model(PROMPTS[:1, :2], past_key_values=cache)
    mask = torch.tensor([[1, 1, 1, 0]])
    with pytest.raises(UsageError, match="prompt 0 ends in padding"):
        generate(model, PROMPTS[:1], attention_mask=mask, past_key_values=cache, speculative=speculative)


def test_negative_prompt_ending_in_padding_is_rejected(model):
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    with pytest.raises(UsageError, match="negative prompt 1 ends in padding"):
        generate(model, guidance_scale=1.5, negative_prompt_ids=PROMPTS, negative_prompt_attention_mask=mask)


@pytest.mark.parametrize(
    "options",
    [
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "high"},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"num_beams": 2, "force_words_ids": [[7]]},
        {"assistant_early_exit": 1},
        {"use_mtp": True},
        {"token_healing": True},
        {"speculation_type": "dflash", "assistant_model": "target"},
        {"assistant_ensemble_weight": 0.5, "assistant_model": "target"},
        {"assistant_model": "target", "do_sample": True},
        {"guidance_scale": 1.5, "num_beams": 2},
        {"guidance_scale": 1.5, "prompt_lookup_num_tokens": 2},
        {"guidance_scale": 1.5, "speculative": 2},
        {"inputs_embeds": "target"},
        {"cache_implementation": "paged"},
    ],
    ids=lambda options: "-".join(options),
)
def test_options_that_bypass_steering_are_rejected(model, options):
    if options.get("assistant_model"):
        options = options | {"assistant_model": model.target}
    if options.get("inputs_embeds"):
        options = options | {"inputs_embeds": model.get_input_embeddings()(PROMPTS[:1])}
    with pytest.raises(UsageError) as error:
        generate(model, PROMPTS[:1], **options)
    assert "\n" not in str(error.value)


def test_assistant_model_does_not_change_greedy_output(model):
    assert torch.equal(generate(model, PROMPTS[:1], assistant_model=model.target), generate(model, PROMPTS[:1]))
