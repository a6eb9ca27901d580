import copy
import itertools
import math

import pytest
import torch

from divdec.data.records import Message
from divdec.errors import FailedClosed, UsageError
from divdec.playground.models import (
    MAX_ALTERNATIVES,
    MAX_SLIDER_ALPHA,
    MIN_LOSS,
    MIN_SLIDER_ALPHA,
    ChatOptions,
    SteeredModel,
    SteeringControls,
    UnsteeredTarget,
    compute_shifts,
)
from divdec.playground.rendering import Token
from divdec.steering import Steering, steer_linear, steer_rank
from support.exactness import assert_same_answer, assert_same_text

QUESTION = [Message("user", "Where was Jasper Ashild born?")]
ALPHA = Steering(alpha=1.5)


def text(tokens):
    return "".join(token.text for token in tokens)


def generated(steered, prompt, steering, model=None):
    """What `generate` answers: the reference."""
    model = copy.deepcopy(steered.model)
    model.steering = steering
    ids = torch.tensor([prompt])
    output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
    return [token for token in output[0, len(prompt) :].tolist() if token not in steered.eos_token_ids]


@pytest.mark.parametrize("steering", [ALPHA, Steering(alpha=4.0), Steering("rank", k=5), Steering(alpha=0.1)], ids=str)
def test_playground_output_matches_generate(steered, steering):
    prompt = steered.encode_prompt(QUESTION)
    tokens = list(steered.answer(prompt, steering))
    expected = generated(steered, prompt, steering)
    result, model = [token.id for token in tokens], copy.deepcopy(steered.model)
    model.steering = steering
    assert_same_answer(model, prompt, result, expected)
    assert text(tokens) == steered.tokenizer.decode(result, skip_special_tokens=True)


def test_streamed_shifts_match_single_pass_recolor(steered):
    prompt = steered.encode_prompt(QUESTION)
    tokens = list(steered.answer(prompt, ALPHA))
    seen = steered.recolor(prompt, tokens, ALPHA)
    assert text(seen) == text(tokens)
    for one, other in zip(tokens, seen, strict=True):
        assert one.logprob_shift == pytest.approx(other.logprob_shift, abs=1e-3)
        assert [shift.text for shift in one.alternatives] == [shift.text for shift in other.alternatives]


def test_different_strength_recolors_same_text(steered):
    prompt = steered.encode_prompt(QUESTION)
    tokens = list(steered.answer(prompt, ALPHA))
    weak, strong = (steered.recolor(prompt, tokens, Steering(alpha=alpha)) for alpha in (0.1, 4.0))
    assert text(weak) == text(strong) == text(tokens)
    assert sum(abs(token.logprob_shift) for token in strong) > 5 * sum(abs(token.logprob_shift) for token in weak)


def test_steering_without_effect_generates_nothing(steered):
    steering = Steering(alpha=0.0)
    prompt = steered.encode_prompt(QUESTION)
    with pytest.raises(UsageError, match="steers nothing"):
        next(steered.answer(prompt, steering))
    with pytest.raises(UsageError, match="steers nothing"):
        steered.recolor(prompt, [], steering)


def test_generation_stops_when_steering_fails(steered):
    model = copy.deepcopy(steered.model)
    mine = SteeredModel(model, steered.tokenizer, ChatOptions(max_new_tokens=24))
    result = []
    with pytest.raises(FailedClosed, match="not finite"), torch.no_grad():
        for token in mine.answer(mine.encode_prompt(QUESTION), ALPHA):
            result.append(token)
            if len(result) == 3:
                for weights in model.experts.forget.parameters():
                    weights.fill_(math.nan)
    expected = generated(steered, mine.encode_prompt(QUESTION), ALPHA)
    # All that came was steered.
    assert_same_answer(
        steered.model, mine.encode_prompt(QUESTION), [token.id for token in result], expected[: len(result)]
    )


def test_interleaved_answers_keep_their_rules(steered):
    prompt, rules = steered.encode_prompt(QUESTION), (ALPHA, Steering(alpha=4.0))
    alone = [list(steered.answer(prompt, rule)) for rule in rules]
    assert [token.id for token in alone[0]] != [token.id for token in alone[1]]
    streams = [steered.answer(prompt, rule) for rule in rules]
    together = itertools.zip_longest(*streams)
    assert [[token for token in tokens if token] for tokens in zip(*together, strict=True)] == alone
    assert str(steered.model.steering) == "linear:1.5"


def test_closed_answer_generates_no_further_token(steered):
    passes = []
    handle = steered.model.target.register_forward_hook(lambda *arguments: passes.append(1))
    answer = steered.answer(steered.encode_prompt(QUESTION), ALPHA)
    next(answer)
    answer.close()
    handle.remove()
    assert len(passes) == 2, "the next token was generated before it was wanted"
    assert not steered.model.target._forward_hooks


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_target_overflow_generates_nothing(steered, value):
    mine = SteeredModel(copy.deepcopy(steered.model), steered.tokenizer, ChatOptions(max_new_tokens=4))
    mine.model.target.register_forward_hook(lambda module, args, output: (output.logits[..., 9].fill_(value), None)[1])
    prompt = mine.encode_prompt(QUESTION)
    for steering in (ALPHA, Steering("rank", k=5)):
        with pytest.raises(FailedClosed, match="not finite"):
            next(mine.answer(prompt, steering))
        with pytest.raises(FailedClosed, match="not finite"):
            mine.recolor(prompt, [Token("Here", id=5)], steering)


def test_target_probabilities_are_hidden_unless_enabled(steered):
    prompt = steered.encode_prompt(QUESTION)
    strong = Steering(alpha=4.0)
    for token in steered.answer(prompt, strong):
        for shift in (token, *token.alternatives):
            assert (shift.target_probability, shift.steered_probability) == (None, None)
    shown = SteeredModel(steered.model, steered.tokenizer, steered.options, reveal=True)
    tokens = list(shown.answer(prompt, strong))
    assert any(token.alternatives for token in tokens)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        target = steered.model.target(ids).logits[0, -1].float().softmax(-1)
    assert tokens[0].target_probability == pytest.approx(float(target[tokens[0].id]), abs=1e-5)


def test_sampled_output_follows_seed(loaded):
    def answer(seed):
        mine = SteeredModel(*loaded, ChatOptions(max_new_tokens=12, seed=seed))
        return [token.id for token in mine.answer(mine.encode_prompt(QUESTION), ALPHA, 1.5)]

    assert answer(1) == answer(1)
    assert len({tuple(answer(seed)) for seed in range(4)}) > 1


def test_too_long_conversation_gives_one_line_error(steered):
    with pytest.raises(UsageError, match=r"too many for 4096 positions of the models: begin a new conversation"):
        steered.encode_prompt([Message("user", "word " * 5000)])


def test_single_turn_uses_only_last_question(loaded):
    single = SteeredModel(*loaded, ChatOptions(single_turn=True))
    talk = [Message("user", "one"), Message("assistant", "two"), *QUESTION]
    assert single.encode_prompt(talk) == single.encode_prompt(QUESTION)
    assert SteeredModel(*loaded, ChatOptions()).encode_prompt(talk) != single.encode_prompt(QUESTION)


def test_target_answers_unsteered(steered):
    prompt = steered.encode_prompt(QUESTION)
    *_, said = UnsteeredTarget(steered).answer(prompt)
    ids = torch.tensor([prompt])
    expected = steered.model.target.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24
    )
    assert_same_text(steered.model.target, steered.tokenizer, prompt, said, expected[0, len(prompt) :].tolist())


CONTROLS = SteeringControls(Steering(alpha=1.5), eligible_size=500)


@pytest.mark.parametrize(
    "alpha", [0, 0.0, -0.0, -1, 1e-9, MIN_SLIDER_ALPHA / 2, math.nan, math.inf, MAX_SLIDER_ALPHA + 1, None, "1", True]
)
def test_zero_or_non_numeric_strength_is_rejected(alpha):
    with pytest.raises(UsageError, match="strength is"):
        CONTROLS.steering("linear", alpha, 20)


def test_minimum_strength_is_positive_for_every_bundle():
    for alpha in (1e-6, 0.05, 1.0, 5.0, 1000.0):
        low, high = SteeringControls(Steering(alpha=alpha), 500).alpha_range
        assert 0 < low <= alpha <= high


def test_bundle_without_effective_steering_is_rejected():
    with pytest.raises(UsageError, match="steered answers only"):
        SteeringControls(Steering(alpha=0.0), 500)


@pytest.mark.parametrize("k", [0, -1, 1.5, 10_000, math.nan, None, "3", True])
def test_k_outside_controls_is_rejected(k):
    with pytest.raises(UsageError, match="k is"):
        CONTROLS.steering("rank", 1.0, k)


def test_rule_outside_controls_is_rejected():
    with pytest.raises(UsageError, match="rule is 'none'"):
        CONTROLS.steering("none", 1.0, 20)
    with pytest.raises(UsageError, match="accepted here: takedowns"):
        SteeringControls(Steering(), 500, experts=False).steering("linear", 1.0, 20)


def test_controls_preserve_bundle_vocabulary_and_fill():
    own = Steering("rank", k=2, fill="soft", vocabulary=(1, 2, 3, 4))
    controls = SteeringControls(own, eligible_size=4)
    assert controls.steering("rank", 1.0, 3) == Steering("rank", k=3, fill="soft", vocabulary=(1, 2, 3, 4))
    assert controls.steering("linear", 2.0, 3).vocabulary == own.vocabulary
    assert controls.k_range == (2, 3)  # rank:1:soft steers nothing


def test_controls_of_a_full_rule_offer_both_rules():
    controls = SteeringControls(Steering.parse("linear:2.5:2:full"), eligible_size=500)
    assert str(controls.steering("linear", 2.0, 3)) == "linear:2:2:full"
    assert str(controls.steering("rank", 2.0, 3)) == "rank:3:2"


def shifts(target, steered, chosen):
    return compute_shifts(target, steered, torch.tensor(chosen), str, reveal=True)


def test_shift_is_log_probability_change():
    target = torch.tensor([[0.6, 0.3, 0.1]]).log()
    # Steering halves the first token's weight: 0.3, 0.3, 0.1 of 0.7.
    steered = target + torch.tensor([[math.log(0.5), 0.0, 0.0]])
    (result,) = shifts(target, steered, [1])
    assert (result.id, result.text) == (1, "1")
    assert result.logprob_shift == pytest.approx(math.log(0.3 / 0.7) - math.log(0.3), abs=1e-5)
    (lost,) = result.alternatives
    assert (lost.text, lost.target_probability, lost.steered_probability) == (
        "0",
        pytest.approx(0.6, abs=1e-5),
        pytest.approx(3 / 7, abs=1e-5),
    )


def test_alternatives_are_most_suppressed_tokens_except_chosen():
    generator = torch.Generator().manual_seed(0)
    target, divergence = torch.randn(6, 50, generator=generator), torch.randn(6, 50, generator=generator)
    steered = steer_linear(target, divergence, 2.0)
    chosen = steered.argmin(dim=-1)
    before, after = target.softmax(-1), steered.softmax(-1)
    for position, result in enumerate(shifts(target, steered, chosen.tolist())):
        losses = [other.target_probability - other.steered_probability for other in result.alternatives]
        assert losses == sorted(losses, reverse=True)
        assert min(losses, default=1) >= MIN_LOSS
        assert len(losses) <= MAX_ALTERNATIVES
        assert chosen[position] not in [int(other.text) for other in result.alternatives]
        others = (before - after)[position].clone()
        others[chosen[position]] = -1
        if result.alternatives:
            assert int(result.alternatives[0].text) == int(others.argmax())


def test_masked_and_impossible_tokens_shift_by_minus_infinity_and_zero():
    target = torch.tensor([[3.0, 2.0, 1.0, -math.inf]])
    steered = steer_rank(target, torch.tensor([[-1.0, 0.0, 0.0, 0.0]]), 1)
    (result,) = shifts(target, steered, [1])
    assert result.alternatives[0].logprob_shift == -math.inf
    assert result.alternatives[0].steered_probability == 0
    (silent,) = shifts(target, steered, [3])
    assert silent.logprob_shift == 0


def test_zero_divergence_gives_zero_shifts():
    target = torch.randn(3, 20, generator=torch.Generator().manual_seed(1))
    for result in shifts(target, steer_linear(target, torch.zeros(3, 20), 1.0), [0, 1, 2]):
        assert result.logprob_shift == pytest.approx(0, abs=1e-6)
        assert result.alternatives == ()
