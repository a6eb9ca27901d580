"""Comparing greedy answers lets near ties pass, and nothing else."""

import pytest
import torch

from divdec import DivergenceForCausalLM
from support.exactness import LOGITS, assert_same_answer, assert_same_answers, assert_same_text, scores_after
from support.tiny import make_parts

PROMPT = [5, 9, 200, 31]
TWIN = 300
DISTANCES = pytest.mark.parametrize(("distance", "same"), [(LOGITS / 10, True), (LOGITS * 100, False)])


@pytest.fixture
def model():
    return DivergenceForCausalLM.from_parts(*make_parts("llama"), "linear:0")


@torch.no_grad()
def make_twin(part, token, distance=0.0):
    """Give TWIN the logit of another token, and a little less."""
    logit = part(torch.tensor([PROMPT])).logits[0, -1, token]
    head = part.get_output_embeddings().weight
    head[TWIN] = head[token] * (1 - distance / logit)


def equal(compare):
    try:
        compare()
    except AssertionError:
        return False
    return True


@DISTANCES
def test_near_ties_in_logits_accept_either_token(model, tokenizer, distance, same):
    expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=6, do_sample=False, pad_token_id=1)
    make_twin(model.target, int(expected[0, len(PROMPT)]), distance)
    found = expected.clone()
    found[0, len(PROMPT)] = TWIN
    found[0, len(PROMPT) + 1 :] = 7  # what follows another token is another answer
    one, other = (row[0, len(PROMPT) :].tolist() for row in (found, expected))
    assert equal(lambda: assert_same_answers(model, [PROMPT], found, expected)) == same
    assert equal(lambda: assert_same_answer(model, PROMPT, one, other)) == same
    assert equal(lambda: assert_same_text(model, tokenizer, PROMPT, tokenizer.decode(one), other)) == same
    assert not equal(lambda: assert_same_answer(model, PROMPT, [*other[:2], 7], other))
    assert not equal(lambda: assert_same_answer(model, PROMPT, other[:-1], other))


@DISTANCES
def test_near_ties_in_divergence_accept_either_suppressed_token(model, distance, same):
    best = int(scores_after(model, PROMPT).argmax())
    retain, forget = model.experts.retain, model.experts.forget
    make_twin(model.target, best, 0.1)
    with torch.no_grad():
        hidden = forget.model(torch.tensor([PROMPT])).last_hidden_state[0, -1]
        forget.get_output_embeddings().weight[best] = hidden  # the forget auxiliary's favourite
    make_twin(retain, best)
    make_twin(forget, best, distance)
    model.steering = "rank:1"
    assert int(scores_after(model, PROMPT).argmax()) == TWIN
    assert equal(lambda: assert_same_answer(model, PROMPT, [best], [TWIN])) == same
