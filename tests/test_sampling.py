"""The acceptance rule by hand and by statistics; a wrong rule must fail the same tests."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from divdec.errors import FailedClosed
from divdec.sampling import pick, verify_greedy, verify_sampled

LOW = -torch.inf


def scores(*rows):
    return torch.tensor([rows], dtype=torch.float64).log()


def test_greedy_drafts_are_accepted_up_to_first_mismatch():
    logits = torch.tensor([[[0.0, 3, 1], [2, 0, 1], [0, 1, 5]]])
    for drafts, tokens, valid in (
        ([1, 0, 2], [1, 0, 2], 3),  # always
        ([0, 0, 2], [1, 0, 2], 1),  # never
        ([1, 2, 2], [1, 0, 2], 2),  # sometimes
        ([1, 0, 0], [1, 0, 2], 3),  # the last is replaced, and stands
    ):
        verdict = verify_greedy(logits, torch.tensor([drafts]))
        assert verdict.tokens[0, :valid].tolist() == tokens[:valid]
        assert verdict.kept.tolist() == [valid]


def test_rows_are_verified_independently():
    logits = torch.tensor([[[0.0, 3], [2, 0]], [[0, 3], [2, 0]]])
    verdict = verify_greedy(logits, torch.tensor([[1, 0], [0, 0]]))
    assert verdict.kept.tolist() == [2, 1]


@pytest.mark.parametrize("uniform", [0.0, 0.5, 0.999])
def test_draft_with_no_lower_steered_probability_is_always_accepted(uniform):
    noise = torch.full((1, 2, 2), uniform)
    steered = scores([0.5, 0.5], [0.9, 0.1])
    verdict = verify_sampled(steered, torch.tensor([[1, 0]]), scores([0.5, 0.5], [0.9, 0.1]), noise)
    assert verdict.accepted.all()
    assert verdict.tokens.tolist() == [[1, 0]]


@pytest.mark.parametrize("uniform", [0.0, 0.5, 0.999])
def test_masked_draft_is_never_accepted(uniform):
    noise = torch.full((1, 2, 2), uniform)
    steered = torch.tensor([[[0.0, LOW, 1.0], [0.0, 0.0, 0.0]]])
    verdict = verify_sampled(steered, torch.tensor([[1, 0]]), torch.tensor([[[0.0, 9, 0], [0, 0, 0]]]), noise)
    assert verdict.kept.tolist() == [1]
    assert verdict.tokens[0, 0].item() in (0, 2)


def test_rejected_draft_is_replaced_from_residual_distribution():
    # s = (0.2, 0.3, 0.5), q = (0.6, 0.3, 0.1): 0 is kept with 1/3, and only 2 is left over.
    steered, proposed = scores([0.2, 0.3, 0.5]), scores([0.6, 0.3, 0.1])
    for uniform, token in ((0.32, 0), (0.34, 2)):
        noise = torch.tensor([[[uniform, 0.01]]], dtype=torch.float64)
        verdict = verify_sampled(steered, torch.tensor([[0]]), proposed, noise)
        assert verdict.tokens.item() == token
        assert verdict.accepted.item() == (token == 0)


def drawn(count, seed, steered, proposed, rule=verify_sampled):
    """Tokens after one judged draft each."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(count, 1, 3, generator=generator, dtype=torch.float64)
    many = proposed.expand(count, 1, -1)
    drafts = pick(many.softmax(-1), noise[..., 0])
    return rule(steered.expand(count, 1, -1), drafts, many, noise[..., 1:]).tokens[:, 0]


def p_value(tokens, steered):
    expected = steered.softmax(-1)[0, 0] * len(tokens)
    observed = torch.bincount(tokens, minlength=len(expected)).double()
    possible = expected > 0
    assert not observed[~possible].any()
    return stats.chisquare(observed[possible].numpy(), expected[possible].numpy()).pvalue


@pytest.mark.parametrize("seed", range(4))
def test_accepted_tokens_follow_steered_distribution(seed):
    generator = torch.Generator().manual_seed(seed)
    steered, proposed = torch.randn(2, 1, 1, 12, generator=generator, dtype=torch.float64) * 1.5
    steered[..., 3] = LOW  # a masked token
    assert p_value(drawn(20_000, seed, steered, proposed), steered) > 0.001


def always(scores, drafts, draft_scores, noise):
    verdict = verify_sampled(scores, drafts, draft_scores, noise)
    return verdict._replace(tokens=drafts)


def without_residual(scores, drafts, draft_scores, noise):
    """What is rejected is drawn from the whole distribution again: the classical mistake."""
    verdict = verify_sampled(scores, drafts, draft_scores, noise)
    again = pick(scores.softmax(-1), noise[..., 1])
    return verdict._replace(tokens=torch.where(verdict.accepted, drafts, again))


@pytest.mark.parametrize("rule", [always, without_residual])
def test_wrong_acceptance_rule_fails_distribution_test(rule):
    generator = torch.Generator().manual_seed(0)
    steered, proposed = torch.randn(2, 1, 1, 12, generator=generator, dtype=torch.float64) * 1.5
    assert p_value(drawn(20_000, 0, steered, proposed, rule), steered) < 1e-6


@given(
    st.lists(st.floats(0, 10), min_size=2, max_size=20).filter(lambda weights: sum(weights) > 1e-3),
    st.floats(0, 1, exclude_max=True),
)
def test_pick_never_returns_zero_weight_token(weights, uniform):
    token = pick(torch.tensor([weights], dtype=torch.float64), torch.tensor([uniform], dtype=torch.float64)).item()
    assert weights[token] > 0


@pytest.mark.parametrize("weights", [[0.0, 0.0], [torch.nan, 1.0], [torch.inf, 1.0]])
def test_pick_from_invalid_distribution_fails_closed(weights):
    with pytest.raises(FailedClosed, match="not finite"):
        pick(torch.tensor([weights]), torch.tensor([0.5]))


def test_pick_with_largest_uniform_number_stays_in_support():
    weights = torch.rand(1, 50_000)
    weights[:, -100:] = 0
    assert pick(weights, torch.tensor([1 - 2**-53], dtype=torch.float64)).item() < 49_900
