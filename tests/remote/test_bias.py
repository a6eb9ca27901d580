"""What a limited bias proves, compared with the exact distributions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from divdec.errors import FailedClosed
from divdec.remote.bias import MAX_BIAS, Bias, Candidates, choose_bias

VOCAB = 24


def problem(seed, spread=3.0):
    """Target logits, what is wanted, and a generator."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(VOCAB, generator=generator, dtype=torch.float64)
    return logits, spread * torch.randn(VOCAB, generator=generator, dtype=torch.float64), generator


SEEDS = st.integers(0, 10_000)
ENTRIES = st.integers(1, VOCAB + 2)


@given(SEEDS, ENTRIES, st.booleans(), st.sampled_from((3.0, 150.0)))
def test_bias_and_remainder_add_up_to_the_shift(seed, entries, closest, spread):
    _, wanted, _ = problem(seed, spread)
    bias = choose_bias(wanted, entries, {3, 5}, closest=closest)
    assert len(bias.entries) <= entries
    assert all(abs(value) <= MAX_BIAS for value in bias.entries.values())
    difference = bias.sent + bias.remainder - wanted
    torch.testing.assert_close(difference, difference[:1].expand_as(difference))  # a constant changes no softmax


@given(SEEDS, ENTRIES)
def test_no_omitted_token_has_a_positive_remainder(seed, entries):
    _, wanted, _ = problem(seed)
    bias = choose_bias(wanted, entries, {0, 7})
    assert bias.remainder.max() <= 1e-12
    assert all(bias.gap(token) == pytest.approx(0, abs=1e-12) for token in bias.entries)


@given(SEEDS, ENTRIES, st.booleans())
def test_gap_bounds_argmax_error(seed, entries, closest):
    logits, wanted, _ = problem(seed)
    bias = choose_bias(wanted, entries, closest=closest)
    chosen = int((logits + bias.sent).argmax())
    steered = logits + wanted
    assert steered.max() - steered[chosen] <= bias.gap(chosen) + 1e-9
    if bias.gap(chosen) == 0:
        assert chosen == int(steered.argmax())


@given(SEEDS, ENTRIES, st.sampled_from((0.5, 1.0, 2.0)), st.booleans())
def test_accepted_draws_follow_the_steered_distribution(seed, entries, temperature, closest):
    logits, wanted, _ = problem(seed)
    bias = choose_bias(wanted, entries, closest=closest)
    drawn = ((logits + bias.sent) / temperature).softmax(0)
    accepted = drawn * torch.tensor(
        [bias.acceptance(token, temperature) for token in range(VOCAB)], dtype=torch.float64
    )
    torch.testing.assert_close(accepted / accepted.sum(), ((logits + wanted) / temperature).softmax(0))


@given(SEEDS, ENTRIES, st.sampled_from((0.5, 1.0, 2.0)), st.booleans())
def test_total_variation_bound_holds(seed, entries, temperature, closest):
    logits, wanted, _ = problem(seed, spread=0.5)
    bias = choose_bias(wanted, entries, closest=closest)
    drawn, steered = (((logits + added) / temperature).softmax(0) for added in (bias.sent, wanted))
    assert (drawn - steered).abs().sum() / 2 <= bias.total_variation(temperature) + 1e-12


def test_total_variation_bound_is_tight():
    # Two tokens that are missing 1 in either direction: the worst target gives the first the weight 1/(1 + e).
    bias = Bias({}, torch.tensor([1.0, -1.0], dtype=torch.float64))
    share = 1 / (1 + math.e)
    drawn = torch.tensor([share, 1 - share], dtype=torch.float64)
    steered = (drawn.log() + bias.remainder).softmax(0)
    assert float(steered[0] - drawn[0]) == pytest.approx(bias.total_variation(1.0), abs=1e-12)


@given(SEEDS, st.integers(1, VOCAB - 1))
def test_closest_mode_minimizes_remainder_range(seed, entries):
    _, wanted, _ = problem(seed)
    bias = choose_bias(wanted, entries, closest=True)
    values, left_out = wanted.sort().values, VOCAB - entries
    best = min(float(values[start + left_out - 1] - values[start]) for start in range(entries + 1))
    assert float(bias.remainder.max() - bias.remainder.min()) == pytest.approx(best, abs=1e-9)


def test_all_entries_are_used_where_nothing_is_raised():
    shift = torch.zeros(500, dtype=torch.float64)
    shift[:316] = -torch.arange(1, 317, dtype=torch.float64)  # as with a margin
    assert len(choose_bias(shift, 300).entries) == 300


def test_small_rank_mask_is_sent_completely():
    wanted = torch.zeros(VOCAB, dtype=torch.float64)
    wanted[[2, 9, 11]] = -math.inf
    bias = choose_bias(wanted, 3)
    assert bias.entries == {2: -100.0, 9: -100.0, 11: -100.0}
    assert bias.gap(5) == 0
    assert bias.acceptance(5, 1.0) == 1


def test_a_rank_rule_that_does_not_fit_sends_the_tokens_that_the_target_prefers():
    wanted = torch.zeros(VOCAB, dtype=torch.float64)
    wanted[[2, 9, 11]] = -math.inf
    bias = choose_bias(wanted, 1, {11, 20})
    assert bias.entries == {11: -100.0}
    assert bias.gap(2) == math.inf
    assert bias.acceptance(2, 1.0) == 0


def test_a_shift_that_is_not_a_number_is_refused():
    wanted = torch.zeros(VOCAB, dtype=torch.float64)
    wanted[4] = math.nan
    with pytest.raises(FailedClosed, match="not finite"):
        choose_bias(wanted, 300)


def likeliest(logits, number):
    logprobs = logits.log_softmax(0)
    values, ids = logprobs.topk(number)
    sure = torch.zeros(len(ids), dtype=torch.bool)
    return Candidates(ids, values, torch.full_like(logits, float(values[-1])), sure)


@given(SEEDS, st.integers(1, VOCAB))
def test_the_gap_bounds_the_best_candidate(seed, number):
    logits, wanted, _ = problem(seed)
    token, gap = likeliest(logits, number).best(wanted)
    steered = logits + wanted
    assert steered.max() - steered[token] <= gap + 1e-9
    if gap == 0:
        assert token == int(steered.argmax())


@given(SEEDS, st.integers(2, VOCAB))
def test_candidates_with_ambiguous_names_have_no_finite_bound(seed, number):
    logits, wanted, _ = problem(seed)
    values, ids = logits.log_softmax(0).topk(number)
    # Token 2i and 2i + 1 have one name, which is read as the even one.
    read = dict(zip((ids - ids % 2).tolist()[::-1], values.tolist()[::-1], strict=True))
    ceiling = torch.full_like(logits, float(values[-1]))
    for token, value in read.items():
        ceiling[token + 1] = max(value, float(values[-1]))
    told_ids, told_values = torch.tensor(list(read)), torch.tensor(list(read.values()), dtype=torch.float64)
    candidates = Candidates(told_ids, told_values, ceiling, torch.ones(len(read), dtype=torch.bool))
    _, gap = candidates.best(wanted)
    assert gap == math.inf


@given(SEEDS, st.integers(2, VOCAB), st.integers(0, VOCAB - 1))
def test_single_ambiguous_candidate_is_within_reported_bounds(seed, number, other):
    logits, wanted, _ = problem(seed)
    values, ids = logits.log_softmax(0).topk(number)
    if other in ids.tolist():
        return
    # The least likely candidate shares its name with this other token; either may be meant.
    swapped = ids.clone()
    swapped[-1] = other
    unsure = torch.zeros(number, dtype=torch.bool)
    unsure[-1] = True
    candidates = Candidates(swapped, values, torch.full_like(logits, float(values[-1])), unsure)
    token, gap = candidates.best(wanted)
    steered = logits + wanted
    assert steered.max() - steered[token] <= gap + 1e-9
