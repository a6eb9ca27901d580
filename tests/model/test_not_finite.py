"""Numbers that are no answer stop every path, and what stands at padding is nobody's answer."""

import contextlib

import pytest
import torch
from transformers import GenerationConfig

from divdec import DivergenceForCausalLM, Steering
from divdec.data.formatting import IGNORED, Example
from divdec.errors import FailedClosed
from divdec.evaluation.scoring import score_settings
from divdec.experts.combined import CombinedExperts
from divdec.experts.neural import NeuralPair
from divdec.experts.ngram import NgramPair
from divdec.experts.ngram_fit import count
from support.tiny import make_parts

PROMPTS = [[5, 9, 200, 31], [77, 8, 300, 2, 45, 6]]
RULES = ("linear:1.5", "rank:20", "rank:20:soft")


@pytest.fixture(scope="module", params=["pair", "ngrams", "both"])
def model(request):
    target, *auxiliaries = make_parts("llama")
    texts = [[*PROMPTS[0], 7], [*PROMPTS[1], 9, 10]]
    ngrams = NgramPair(count(texts[:1], 512, 3), count(texts, 512, 3))
    if request.param == "pair":
        return DivergenceForCausalLM.from_parts(target, *auxiliaries)
    if request.param == "ngrams":
        return DivergenceForCausalLM.from_experts(target, ngrams)
    from divdec.experts.neural import NeuralPair

    return DivergenceForCausalLM.from_experts(target, CombinedExperts([(NeuralPair(*auxiliaries), 1.0), (ngrams, 1.0)]))


@contextlib.contextmanager
def target_with(model, change):
    """Let the target give other logits, as one that overflows does."""
    hook = model.target.register_forward_hook(lambda module, args, output: (change(output.logits), None)[1])
    try:
        yield
    finally:
        hook.remove()


def padded(side):
    width = max(map(len, PROMPTS))
    rows = [(prompt, [1] * (width - len(prompt))) for prompt in PROMPTS]
    ids = [[*padding, *prompt] if side == "left" else [*prompt, *padding] for prompt, padding in rows]
    masks = [([0] * len(padding), [1] * len(prompt)) for prompt, padding in rows]
    masks = [[*zeros, *ones] if side == "left" else [*ones, *zeros] for zeros, ones in masks]
    return torch.tensor(ids), torch.tensor(masks)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("rule", RULES)
def test_padding_logits_do_not_expose_target(model, side, rule):
    model.steering = rule
    ids, mask = padded(side)
    with torch.no_grad():
        kept = [model(ids, attention_mask=mask).logits, model(ids, attention_mask=mask, logits_to_keep=3).logits]
        with target_with(model, lambda logits: logits.masked_fill_(mask[:, -logits.shape[1] :, None] == 0, torch.nan)):
            kept.append(model(ids, attention_mask=mask).logits)
        others = [model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS]
    for logits in kept:
        covered = mask[:, -logits.shape[1] :]
        assert logits[covered == 0].unique(dim=0).shape[0] == (covered == 0).any()
        assert set(logits[covered == 0].unique().tolist()) <= {0.0, -torch.inf}
        for row, alone in enumerate(others):
            real = logits[row][covered[row] != 0]
            expected = (
                alone[len(alone) - len(real) :] if side == "left" else alone[: int(mask[row].sum())][-len(real) :]
            )
            if len(real):
                torch.testing.assert_close(real, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_change_losses_or_gradients(model, side):
    model.steering = "linear:1.5"
    ids, mask = padded(side)
    labels = ids.masked_fill(mask == 0, IGNORED)
    weights = list(model.target.parameters())
    together = model(ids, attention_mask=mask, labels=labels, num_items_in_batch=1).loss
    alone = sum(model(torch.tensor([p]), labels=torch.tensor([p]), num_items_in_batch=1).loss for p in PROMPTS)
    torch.testing.assert_close(together, alone)
    for one, other in zip(*(torch.autograd.grad(loss, weights) for loss in (together, alone)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


WAYS = {
    "forward": lambda model, ids: model(ids),
    "components": lambda model, ids: model.components(ids),
    "evaluation": lambda model, ids: score_settings(model, [example(ids)], [model.steering]),
    "greedy": lambda model, ids: generate(model, ids),
    "sampling": lambda model, ids: generate(model, ids, do_sample=True),
    "beams": lambda model, ids: generate(model, ids, num_beams=2),
    "lookup": lambda model, ids: generate(model, ids, prompt_lookup_num_tokens=2),
    "guidance": lambda model, ids: generate(model, ids, guidance_scale=1.5),
    "speculative": lambda model, ids: generate(model, ids, speculative=can_speculate(model)),
    "uncached": lambda model, ids: generate(model, ids, use_cache=False),
}


def can_speculate(model):
    return isinstance(model.experts, NeuralPair)  # n-grams draft nothing


def example(ids):
    return Example(ids[0].tolist(), [IGNORED, *ids[0, 1:].tolist()])


def generate(model, ids, **options):
    config = GenerationConfig(pad_token_id=1, eos_token_id=0)
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False, **options}
    return model.generate(ids, generation_config=config, **given)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("rule", ["linear:1.5", "rank:20"])
@pytest.mark.parametrize("way", WAYS)
def test_target_overflow_raises_on_every_path(model, way, rule, value):
    """Also where the rule suppresses the very token whose logit overflows."""
    model.steering = "rank:20:soft" if (way, rule) == ("guidance", "rank:20") else rule  # a hard fill is refused
    ids = torch.tensor(PROMPTS[:1])
    with torch.no_grad():
        worst = int(model.components(ids)[2][0, -1].argmin())
        overflowing = target_with(model, lambda logits: logits[..., worst].fill_(value))
        with overflowing, pytest.raises(FailedClosed, match="target's logits are not finite"):
            WAYS[way](model, ids)


@pytest.mark.parametrize("rule", RULES[:2])
@pytest.mark.parametrize("way", ["greedy", "speculative", "beams", "sampling"])
def test_target_may_mask_padded_vocabulary(model, rule, way):
    model.steering = rule
    ids = torch.tensor(PROMPTS[:1])
    with torch.no_grad(), target_with(model, lambda logits: logits[..., 400:].fill_(-torch.inf)):
        assert (model(ids).logits[..., 400:] == -torch.inf).all()
        assert WAYS[way](model, ids).max() < 400


@pytest.mark.parametrize("way", ["forward", "greedy", "sampling", "beams", "speculative", "lookup"])
def test_position_without_allowed_token_raises(model, way):
    """`argmax` would answer with token 0, which is ruled out like all others."""
    model.steering = "rank:20"
    ids = torch.tensor(PROMPTS[:1])
    with torch.no_grad():
        left = model(ids).logits[0, -1] == -torch.inf
        narrow = target_with(model, lambda logits: logits[:, -1].masked_fill_(~left, -torch.inf))
        with narrow, pytest.raises(FailedClosed, match="rule out every token"):
            WAYS[way](model, ids)


def test_overflowing_strength_raises(model):
    model.steering = Steering(alpha=1000.0)
    ids = torch.tensor(PROMPTS[:1])
    _, target_logits, divergence = model.components(ids)
    with pytest.raises(FailedClosed, match=r"NaN or \+inf"):
        model.steering.apply(target_logits, divergence.abs() * 1e38 + 1e37)
