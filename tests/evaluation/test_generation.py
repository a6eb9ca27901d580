"""Samples of a model: questions that it writes and answers itself."""

from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from divdec import UsageError
from divdec.checkpoint import load_model
from divdec.evaluation.generation import (
    continuations,
    sample_records,
    start_ids,
    thought_of,
    user_prefix,
    without_padding,
)


@pytest.fixture(scope="module")
def target(models):
    return load_model(models / "target")


def test_samples_are_the_models_own_and_repeat_with_the_seed(target, tokenizer):
    one, two = (sample_records(target, tokenizer, 12, max_new_tokens=8, seed=1) for _ in range(2))
    assert one.records == two.records
    assert one.kind == ("question/answer" if tokenizer.chat_template else "text")
    assert sample_records(target, tokenizer, 12, max_new_tokens=8, seed=2).records != one.records


def test_answers_end_with_the_positions_of_a_model_that_learned_them(tokenizer):
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=32, n_embd=16, n_layer=1, n_head=2)
    outputs = continuations(GPT2LMHeadModel(config).eval(), tokenizer, [[5] * 30, [6] * 4], max_new_tokens=12)
    assert len(outputs[0]) == 2


def test_a_long_prompt_shortens_no_other_answer(tokenizer):
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=128, n_embd=16, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config).eval()
    model.generation_config.eos_token_id = None
    prompts = [[5] * 128, [6] * 5, [7] * 120, [8] * 3]
    assert [len(ids) for ids in continuations(model, tokenizer, prompts, max_new_tokens=64)] == [1, 64, 8, 64]
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    outputs = continuations(model, tokenizer, prompts, max_new_tokens=64)
    alone = [continuations(model, tokenizer, [prompt], max_new_tokens=64)[0] for prompt in prompts]
    assert [without_padding(model, ids) for ids in outputs] == [without_padding(model, ids) for ids in alone]


def test_a_template_that_switches_thinking_off_begins_no_thought():
    tokenizer = SimpleNamespace(decode=lambda ids, **options: " ".join(ids))
    off, on = ["user", "<think>", "\n", "</think>", "\n"], ["user", "<think>"]
    assert thought_of(tokenizer, off, ()) == "closed"
    assert thought_of(tokenizer, off, ["Budapest"]) is None
    assert thought_of(tokenizer, off, ["<think>", "hm"]) == "open"
    assert thought_of(tokenizer, on, ["hm"]) == "open"
    assert thought_of(tokenizer, on, ["hm", "</think>", "Budapest"]) == "closed"


def test_user_prefix_ends_where_the_first_message_begins(tokenizer):
    prompt = [{"role": "user", "content": "Where?"}]
    whole = tokenizer.apply_chat_template(prompt, tokenize=False)
    assert whole.startswith(tokenizer.decode(user_prefix(tokenizer)) + "Where?")


def test_a_model_that_writes_nothing_is_refused(target, tokenizer, monkeypatch):
    head = target.get_output_embeddings()
    monkeypatch.setattr(
        head,
        "forward",
        lambda hidden: (
            torch.nn.functional.one_hot(
                torch.full(hidden.shape[:-1], tokenizer.eos_token_id), head.weight.shape[0]
            ).float()
            * 1e4
        ),
    )
    with pytest.raises(UsageError, match="only 0 of 12 samples"):
        sample_records(target, tokenizer, 12)


def test_sampling_leaves_generation_settings_and_random_state_alone(target, tokenizer, monkeypatch):
    expected = sample_records(target, tokenizer, 12, max_new_tokens=8, seed=1).records
    for name, value in {"temperature": 0.1, "top_p": 0.1, "min_p": 0.5, "do_sample": True}.items():
        monkeypatch.setattr(target.generation_config, name, value)
    state = torch.get_rng_state()
    assert sample_records(target, tokenizer, 12, max_new_tokens=8, seed=1).records == expected
    assert torch.equal(torch.get_rng_state(), state)


def test_a_template_that_begins_with_the_message_samples_from_the_start_token(target, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    assert user_prefix(tokenizer) == start_ids(tokenizer)
    assert len(sample_records(target, tokenizer, 4, max_new_tokens=8).records) >= 2
