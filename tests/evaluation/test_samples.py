"""Samples of a model: questions that it writes and answers itself."""

import pytest
import torch

from divdec import UsageError
from divdec.evaluation.samples import sample_records, user_prefix
from divdec.model.checkpoint import load_model


@pytest.fixture(scope="module")
def target(models):
    return load_model(models / "target")


def test_samples_are_the_models_own_and_repeat_with_the_seed(target, tokenizer):
    one, two = (sample_records(target, tokenizer, 12, max_new_tokens=8, seed=1) for _ in range(2))
    assert one.records == two.records
    assert one.kind == ("question/answer" if tokenizer.chat_template else "text")
    assert sample_records(target, tokenizer, 12, max_new_tokens=8, seed=2).records != one.records


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
