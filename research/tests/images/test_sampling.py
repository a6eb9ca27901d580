"""Images are drawn by the decoding loop of texts: steered, guided, drafted, and never without steering."""

import dataclasses

import pytest
import torch
from transformers import GenerationConfig, ImageGPTConfig, ImageGPTForCausalImageModeling

from divdec import DivergenceForCausalLM, UsageError, write_bundle
from divdec.errors import FailedClosed
from divdec.steering import Steering
from divdec_research.images.models import check_image_model, load_image_model
from divdec_research.images.sampling import sample
from divdec_research.images.settings import SamplingSettings
from support.exactness import assert_close, assert_same_answer, assert_same_answers

CLASSES = list(range(10))
GREEDY = SamplingSettings(top_k=1, batch_size=30)


@pytest.fixture(scope="module")
def parts(image_world):
    return [image_world.load(name) for name in ("target", "retain_auxiliary", "forget_auxiliary")]


@pytest.fixture(scope="module")
def steered(parts):
    return DivergenceForCausalLM.from_parts(*parts, "linear:2").eval()


def rank(k, layout):
    return Steering("rank", k=k, vocabulary=tuple(range(layout.codes)))


def assert_same_images(model, layout, found, expected):
    """The same codes, or one of two that are equally likely."""
    only_codes = {"suppress_tokens": list(range(layout.codes, layout.vocab_size))}
    found, expected = found.reshape(len(CLASSES), -1).tolist(), expected.reshape(len(CLASSES), -1).tolist()
    for prompt, one, other in zip(layout.prompts(CLASSES).tolist(), found, expected, strict=True):
        assert_same_answer(model, prompt, one, other, eos_token_id=None, **only_codes)


def test_seeds_and_batches(steered, image_world):
    layout = image_world.layout
    one = sample(steered, layout, CLASSES, SamplingSettings(seed=3))
    assert one.shape == (10, 4, 4)
    assert torch.equal(one, sample(steered, layout, CLASSES, SamplingSettings(seed=3)))
    assert not torch.equal(one, sample(steered, layout, CLASSES, SamplingSettings(seed=4)))
    whole = sample(steered, layout, CLASSES, GREEDY)
    settings = dataclasses.replace(GREEDY, batch_size=3)
    assert_same_images(steered, layout, sample(steered, layout, CLASSES, settings), whole)


def test_sampled_images_follow_steered_distribution_and_contain_only_codes(parts, steered, image_world):
    layout = image_world.layout
    codes = sample(steered, layout, CLASSES, GREEDY).reshape(10, -1)
    tokens = torch.cat([layout.prompts(CLASSES), codes], dim=1)
    with torch.no_grad():
        target, q, p = (piece(tokens[:, :-1]).logits for piece in parts)
    logits = target + 2 * (q - p)
    logits[..., layout.codes :] = -torch.inf
    assert_same_images(steered, layout, codes, logits.argmax(-1))
    # Class tokens have logits of their own, which would be drawn now and then.
    hot = sample(steered, layout, CLASSES, SamplingSettings(temperature=50.0))
    assert int(hot.max()) < layout.codes


def test_steering_reduces_forgotten_classes_in_samples(parts, image_world):
    layout, settings = image_world.layout, SamplingSettings(batch_size=60)
    classes = [index for index in (1, 4, 7) for _ in range(20)]
    real = image_world.codec.encode(image_world.images)

    def distance(model):
        drawn = image_world.codec.decode(sample(model, layout, classes, settings)).flatten(1)
        nearest = []
        for image, index in zip(drawn, classes, strict=True):
            rows = [row for row, label in enumerate(image_world.labels) if label == index]
            own = image_world.codec.decode(real[rows]).flatten(1)
            nearest.append(float((own - image).norm(dim=1).min()))
        return sum(nearest) / len(nearest)

    plain, steered = (distance(DivergenceForCausalLM.from_parts(*parts, f"linear:{alpha}").eval()) for alpha in (0, 4))
    assert steered > 1.1 * plain


@pytest.mark.parametrize("rule", ["linear", "rank"])
def test_speculative_image_sampling_matches_plain(parts, image_world, rule):
    layout = image_world.layout
    steering = Steering(alpha=2.0) if rule == "linear" else rank(10, layout)
    model = DivergenceForCausalLM.from_parts(*parts, steering).eval()
    plain = sample(model, layout, CLASSES, GREEDY)
    for drafted in (3, True):
        assert_same_images(model, layout, sample(model, layout, CLASSES, GREEDY, speculative=drafted), plain)


def test_rank_rule_masks_half_of_codebook(parts, image_world):
    layout = image_world.layout
    model = DivergenceForCausalLM.from_parts(*parts, rank(layout.codes // 2, layout)).eval()
    codes = sample(model, layout, CLASSES, SamplingSettings(seed=1)).reshape(10, -1)
    tokens = torch.cat([layout.prompts(CLASSES), codes], dim=1)[:, :-1]
    with torch.no_grad():
        _, q, p = (piece(tokens).logits for piece in parts)
    allowed = (q - p)[..., : layout.codes].topk(layout.codes // 2, dim=-1).indices
    assert (allowed == codes[..., None]).any(-1).all()


@pytest.mark.parametrize("scale", [0.5, 3.0])
@pytest.mark.parametrize("rule", ["linear", "rank"])
def test_guidance_is_applied_after_steering_and_before_filters(parts, image_world, rule, scale):
    layout = image_world.layout
    steering = Steering(alpha=2.0) if rule == "linear" else rank(10, layout)
    model = DivergenceForCausalLM.from_parts(*parts, steering).eval()
    settings = dataclasses.replace(GREEDY, guidance=scale, batch_size=7)
    codes = sample(model, layout, CLASSES, settings).reshape(10, -1)
    scores = []
    for prompts in (layout.prompts(CLASSES), layout.prompts([None] * 10)):
        with torch.no_grad():
            logits = model(torch.cat([prompts, codes], dim=1)[:, :-1]).logits.clone()
        if not scores:  # tokens that are no code are taken from what is drawn from
            logits[..., layout.codes :] = -torch.inf
        scores.append(logits.log_softmax(-1))
    guided = scores[1] + scale * (scores[0] - scores[1])
    guided[(scores[0] == -torch.inf) | (scores[1] == -torch.inf)] = -torch.inf
    assert not guided.isnan().any()
    assert torch.equal(guided.argmax(-1), codes)
    unguided = sample(model, layout, CLASSES, GREEDY).reshape(10, -1)
    assert not torch.equal(unguided, codes)


def test_sampling_errors(parts, steered, image_world):
    layout = image_world.layout
    with pytest.raises(UsageError, match="class 10 is out of range; accepted: 0 to 9"):
        sample(steered, layout, [10])
    with pytest.raises(UsageError, match="cannot be drafted"):
        sample(steered, layout, [0], SamplingSettings(guidance=2.0), speculative=True)
    without = dataclasses.replace(layout, no_class=None)
    with pytest.raises(UsageError, match="which guidance needs"):
        sample(steered, without, [0], SamplingSettings(guidance=2.0))
    with pytest.raises(UsageError, match="the model has 44 tokens, its image layout 45"):
        check_image_model(steered, dataclasses.replace(layout, vocab_size=45))
    with pytest.raises(UsageError, match="the model has 17 positions, an image needs 20"):
        check_image_model(steered, dataclasses.replace(layout, height=5))
    for options, named in (
        ({"temperature": 0.0}, "temperature"),
        ({"top_k": 0}, "top-k"),
        ({"top_p": 1.5}, "top-p"),
        ({"guidance": float("nan")}, "guidance"),
        ({"batch_size": 0}, "batch-size"),
    ):
        with pytest.raises(UsageError, match=named):
            SamplingSettings(**options)


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_failing_expert_stops_image_sampling(parts, image_world, guidance):
    target, q, p = parts
    model = DivergenceForCausalLM.from_parts(target, q, p, "linear:2").eval()
    weight = p.transformer.ln_f.weight
    saved = weight.detach().clone()
    try:
        with torch.no_grad():
            weight[0] = torch.nan
        with pytest.raises(FailedClosed):
            sample(model, image_world.layout, [0], SamplingSettings(guidance=guidance))
    finally:
        with torch.no_grad():
            weight.copy_(saved)


def test_guidance_without_allowed_code_raises(parts, image_world):
    layout = image_world.layout
    model = DivergenceForCausalLM.from_parts(*parts, rank(layout.codes - 1, layout)).eval()
    with pytest.raises(UsageError, match="suppresses all tokens"):
        sample(model, layout, CLASSES, SamplingSettings(guidance=2.0))


def test_the_generation_config_of_a_checkpoint_is_ignored(parts, image_world):
    layout = image_world.layout
    model = DivergenceForCausalLM.from_parts(*parts, "linear:2").eval()
    wanted = sample(model, layout, CLASSES, SamplingSettings(seed=1))
    own = GenerationConfig(repetition_penalty=5.0, no_repeat_ngram_size=2, max_time=1e-9, num_beams=3, min_p=0.5)
    model.generation_config = own
    assert torch.equal(wanted, sample(model, layout, CLASSES, SamplingSettings(seed=1)))
    assert model.generation_config is own


def test_rank_rule_counts_only_image_codes(image_world, tmp_path):
    parts = {piece: str(image_world.folder / piece) for piece in ("target", "retain_auxiliary", "forget_auxiliary")}
    bundle = write_bundle(tmp_path / "bundle", **parts, steering="rank:12")
    stored, chosen = (load_image_model(str(bundle), steering=rule) for rule in (None, Steering("rank", k=12)))
    assert stored.steering == chosen.steering
    soft = write_bundle(tmp_path / "soft", **parts, steering="rank:12:soft")
    with pytest.raises(UsageError, match="sample images with rank:12"):
        load_image_model(str(soft))


def test_images_are_sampled_from_bundle_and_plain_checkpoint(image_world, steered, tmp_path):
    opened = load_image_model(str(image_world.bundle))
    assert (opened.layout, str(opened.steering)) == (image_world.layout, "linear:2")
    drawn = sample(opened.model, opened.layout, CLASSES, GREEDY)
    assert torch.equal(drawn, sample(steered, image_world.layout, CLASSES, GREEDY))
    ranked = load_image_model(str(image_world.bundle), steering=Steering("rank", k=5))
    assert ranked.steering.vocabulary == tuple(range(image_world.layout.codes))
    plain = load_image_model(str(image_world.folder / "target"))
    assert plain.steering is None
    with pytest.raises(UsageError, match="is a plain checkpoint without auxiliaries"):
        load_image_model(str(image_world.folder / "target"), steering=Steering())
    with pytest.raises(UsageError, match="is no image model"):
        load_image_model(str(image_world.folder / "retain_auxiliary"))


def test_any_causal_image_token_model_can_be_steered():
    def image_gpt(seed, width):
        torch.manual_seed(seed)
        config = ImageGPTConfig(vocab_size=17, n_positions=17, n_embd=width, n_layer=2, n_head=4, initializer_range=0.3)
        return ImageGPTForCausalImageModeling(config).eval()

    parts = [image_gpt(0, 32), image_gpt(1, 16), image_gpt(2, 16)]
    model = DivergenceForCausalLM.from_parts(*parts, "linear:2").eval()
    begin = torch.full((2, 1), 16)  # the token that an image begins with is no colour
    drawn = model.generate(
        begin, attention_mask=torch.ones_like(begin), do_sample=False, max_new_tokens=16, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    with torch.no_grad():
        target, q, p = (piece(drawn[:, :-1]).logits for piece in parts)
        assert_close(model(drawn[:, :-1]).logits, target + 2 * (q.log_softmax(-1) - p.log_softmax(-1)))
    best = (target + 2 * (q - p)).argmax(-1)
    assert_same_answers(model, begin.tolist(), drawn, torch.cat([begin, best], dim=1), eos_token_id=None)
    assert not torch.equal(target.argmax(-1), drawn[:, 1:])
