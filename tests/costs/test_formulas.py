"""The paper's formulas against its inequality, written out anew, and against numbers worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from divdec.costs import estimate as formulas

SIZES = st.floats(min_value=1e6, max_value=1e12)
EPOCHS = st.floats(min_value=0.1, max_value=100)
TOKENS = st.floats(min_value=1, max_value=1e12)


def test_paper_example_is_reproduced():
    # "applying our method to a 10B parameter model using 1B parameter small models ... a 20% increase"
    settings = formulas.CostSettings(target="10B", aux="1B", forget_tokens="1M")
    assert formulas.estimate_costs(settings)["compute_increase"] == pytest.approx(0.20)


@given(SIZES, SIZES, EPOCHS, EPOCHS, TOKENS, TOKENS)
def test_costs_are_equal_at_break_even_volume(N, n, e_N, e_n, d_retain, d_forget):
    I = formulas.break_even(N, n, e_N, d_forget)  # noqa: E741
    train = 6 * n * e_n * (d_retain + d_forget)
    steering = train + 2 * (N + 2 * n) * I
    distilling = train + (6 * N + 4 * n) * e_N * d_forget + 2 * N * I
    assert steering == pytest.approx(distilling, rel=1e-9)
    ours = formulas.auxiliary_training(n, e_n, d_retain, d_forget) + formulas.inference(N, n, I)
    theirs = (
        formulas.auxiliary_training(n, e_n, d_retain, d_forget)
        + formulas.distillation(N, n, e_N, d_forget)
        + formulas.inference(N, 0.0, I)
    )
    assert ours == pytest.approx(steering, rel=1e-12)
    assert theirs == pytest.approx(distilling, rel=1e-12)


def test_formulas_match_hand_computed_values():
    # 8B, 1B, 10 passes over 1M and 10M tokens.
    assert formulas.auxiliary_training(1e9, 10.0, 10e6, 1e6) == pytest.approx(6 * 1e9 * 10 * 11e6)
    assert formulas.auxiliary_training(1e9, 10.0, 10e6, 1e6, "full-retain") == pytest.approx(6 * 1e9 * 10 * 21e6)
    assert formulas.auxiliary_training(1e9, 10.0, 10e6, 1e6, "matched") == pytest.approx(6 * 1e9 * 10 * 22e6)
    assert formulas.distillation(8e9, 1e9, 10.0, 1e6) == pytest.approx(52e9 * 1e7)
    assert formulas.distillation(8e9, 1e9, 10.0, 1e6, "live") == pytest.approx(68e9 * 1e7)
    assert formulas.break_even(8e9, 1e9, 10.0, 1e6) == pytest.approx(130e6)
    assert formulas.break_even(8e9, 1e9, 10.0, 1e6, "live") == pytest.approx(170e6)


@given(SIZES, SIZES, EPOCHS, TOKENS)
def test_teacher_pass_raises_distillation_cost_and_break_even_volume(N, n, epochs, tokens):
    assert formulas.break_even(N, n, epochs, tokens, "live") > formulas.break_even(N, n, epochs, tokens)
