"""Rows that are put together, selected and narrowed hold what a fresh prefill of each holds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from divdec import DivergenceForCausalLM
from divdec.errors import FailedClosed
from divdec.experts.combined import CombinedExperts
from divdec.experts.neural import NeuralPair
from divdec.experts.ngram import NgramPair
from divdec.experts.ngram_fit import count
from divdec.serving.batches import drop_columns, join
from support.tiny import make_parts, tiny_model

VOCAB = 512


def windowed():
    return DivergenceForCausalLM.from_parts(
        tiny_model("mistral", VOCAB, 0, 64, 3), tiny_model("gpt2", VOCAB, 1), tiny_model("mistral", VOCAB, 2)
    )


def counted():
    texts = [[(7 * place * (1 + kind)) % VOCAB for place in range(400)] for kind in range(2)]
    ngrams = NgramPair(count(texts[:1], VOCAB, 3), count(texts, VOCAB, 3))
    target, retain, forget = make_parts("gpt2")
    return DivergenceForCausalLM.from_experts(
        target, CombinedExperts([(NeuralPair(retain, forget), 1.0), (ngrams, 1.0)])
    )


@pytest.fixture(scope="module", params=["llama", "gpt2", "windowed", "ngrams"])
def model(request):
    if request.param == "windowed":
        return windowed()
    return counted() if request.param == "ngrams" else DivergenceForCausalLM.from_parts(*make_parts(request.param))


class Rows:
    """Texts with their common cache, and the mask that says which columns are theirs."""

    def __init__(self, model, text):
        self.model, self.texts, self.cache = model, [list(text)], model.new_cache()
        self.mask = torch.ones(1, len(text), dtype=torch.long)
        self.read(torch.tensor([text]))

    @torch.inference_mode()
    def read(self, ids):
        return self.model(ids, attention_mask=self.mask, past_key_values=self.cache).logits[:, -1]

    def add(self, token):
        ids = torch.tensor([[(token + 13 * row) % VOCAB] for row in range(len(self.texts))])
        self.texts = [text + row for text, row in zip(self.texts, ids.tolist(), strict=True)]
        self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
        return self.read(ids)

    def join(self, other):
        left = join(self.cache, other.cache)
        masks = (torch.nn.functional.pad(rows.mask, (n, 0)) for rows, n in zip((self, other), left, strict=True))
        self.mask, self.texts = torch.cat(list(masks)), self.texts + other.texts

    def select(self, places):
        self.cache.batch_select_indices(torch.tensor(places))
        self.mask, self.texts = self.mask[places], [self.texts[place] for place in places]
        padding = int((self.mask.cumsum(1) == 0).sum(1).min())
        drop_columns(self.cache, padding)
        self.mask = self.mask[:, padding:]


@torch.inference_mode()
def fresh(model, text):
    return model(torch.tensor([text])).logits[0, -1]


ids = st.lists(st.integers(2, VOCAB - 1), min_size=1, max_size=14)
ACTIONS = st.lists(st.one_of(ids, st.integers(2, VOCAB - 1), st.randoms(use_true_random=False)), max_size=8)


@given(first=ids, actions=ACTIONS)
@settings(max_examples=40)
def test_rows_are_independent_when_batch_changes(model, first, actions):
    rows = Rows(model, first)
    for action in actions:
        if isinstance(action, list):
            rows.join(Rows(model, action))
        elif isinstance(action, int):
            rows.add(action)
        else:
            places = [place for place in range(len(rows.texts)) if action.random() < 0.6]
            rows.select(places or [action.randrange(len(rows.texts))])
    found = rows.add(5)
    for text, logits in zip(rows.texts, found, strict=True):
        torch.testing.assert_close(logits, fresh(model, text), atol=1e-4, rtol=1e-4)


def test_caches_of_different_models_cannot_be_joined(model):
    rows, other = Rows(model, [5, 6]), Rows(DivergenceForCausalLM.from_parts(*make_parts("llama")), [5, 6])
    with pytest.raises(FailedClosed, match="different models"):
        join(rows.cache, other.cache)
    assert rows.cache.check_length() == 2
    torch.testing.assert_close(rows.add(7)[0], fresh(model, [5, 6, 7]), atol=1e-4, rtol=1e-4)
