"""Speculation by a model that follows a registry: what may be said is what plain decoding may say."""

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from divdec import DivergenceForCausalLM
from divdec.data.formatting import left_padded
from divdec.data.records import texts_of
from divdec.decoding.speculative import Speculation, SpeculationStatistics
from divdec.experts.neural import NeuralPair
from divdec.takedowns.correction import TakedownCorrection
from divdec.takedowns.registry import Registry
from support.exactness import assert_same_answers
from support.tiny import tiny_model

TOKENS, PROMPT, LENGTH = 48, 12, 16  # of a text that the target knows by heart, of its beginning, of an answer


@pytest.fixture(scope="module")
def articles(world):
    texts = list(dict.fromkeys(text for text in world.corpus if len(text) > 40))
    return [" ".join(texts[start : start + 4]) for start in range(0, 48, 4)]


@pytest.fixture(scope="module")
def known(articles, tokenizer):
    """What the target knows: eight texts of the retain set, and four more."""
    return [tokenizer(text, add_special_tokens=False)["input_ids"][:TOKENS] for text in articles]


def trained(texts, vocab_size, seed, width):
    """A model that repeats the texts after some seconds."""
    model = tiny_model("llama", vocab_size, seed, width, layers=1).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    ids = torch.tensor(texts)
    for _ in range(50):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.fixture(scope="module")
def target(known, tokenizer):
    return trained(known, len(tokenizer), seed=0, width=64)


@pytest.fixture(scope="module")
def pair(known, tokenizer):
    return NeuralPair(*(trained(known[:count], len(tokenizer), seed=1, width=32) for count in (8, 10)))


@pytest.fixture
def registry(tmp_path, checkpoints, articles):
    return Registry.create(tmp_path / "registry", texts_of("retain", articles[:8]), checkpoints / "target", order=3)


@pytest.fixture
def model(registry, target, pair):
    takedowns = TakedownCorrection(registry.folder, strength=20.0)
    return DivergenceForCausalLM.from_experts(target, pair, "linear:1", takedowns=takedowns)


def answer(model, prompts, **options):
    ids, mask = left_padded(prompts, 1)
    options = {"max_new_tokens": LENGTH, "do_sample": False, "pad_token_id": 1, "eos_token_id": None, **options}
    return model.generate(input_ids=ids, attention_mask=mask, **options)


@pytest.fixture
def prompts(known):
    """The beginning of a text that is taken down."""
    return [known[10][:PROMPT]]


def test_speculative_greedy_output_matches_plain_with_takedowns(model, registry, articles, known, prompts):
    before = answer(model, prompts, speculative=3)
    assert_same_answers(model, prompts, before, answer(model, prompts))
    registry.add("case", texts_of("t", articles[10:11]))
    statistics = SpeculationStatistics()
    during = answer(model, prompts, speculative=Speculation(3, statistics=statistics))
    assert_same_answers(model, prompts, during, answer(model, prompts))
    assert_same_answers(model, prompts, during, answer(model, prompts, speculative=True))
    # The text that the target went on with is said no longer.
    assert before[0, -LENGTH:][:4].tolist() == known[10][PROMPT : PROMPT + 4]
    assert during[0, -LENGTH:][:4].tolist() != known[10][PROMPT : PROMPT + 4]
    assert 0 < statistics.acceptance_rate < 1
    registry.remove("case")
    assert_same_answers(model, prompts, answer(model, prompts, speculative=3), before)


class Interruption(BaseStreamer):
    """Adds a request as soon as so many tokens were said."""

    def __init__(self, registry, text, after):
        self.registry, self.text, self.after, self.heard = registry, text, after, 0

    def put(self, value):
        self.heard += 1
        if self.heard == self.after:
            self.registry.add("case", texts_of("t", [self.text]))

    def end(self):
        pass


def test_takedown_during_generation_applies_to_next_generation(model, registry, articles, prompts):
    before = answer(model, prompts)
    running = answer(model, prompts, speculative=3, streamer=Interruption(registry, articles[10], after=4))
    assert [entry.id for entry in registry.entries()] == ["case"]
    assert torch.equal(running, before)
    following = answer(model, prompts, speculative=3)
    assert_same_answers(model, prompts, following, answer(model, prompts))
    assert not torch.equal(following, before)


def test_speculative_generation_with_reused_cache_applies_registry_changes(model, registry, articles, prompts):
    options = {"speculative": 3, "max_new_tokens": 4}
    cache = model.new_cache()
    first = answer(model, prompts, past_key_values=cache, **options)
    before = answer(model, first.tolist())
    registry.add("case", texts_of("t", articles[10:11]))
    after = answer(model, first.tolist(), past_key_values=cache, speculative=3)
    assert_same_answers(model, first.tolist(), after, answer(model, first.tolist()))
    assert not torch.equal(after, before)
