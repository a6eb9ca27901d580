"""The losses against numbers worked out by hand, from the papers' formulas."""

import math

import pytest
import torch

from divdec_research.baselines import objective
from divdec_research.baselines.methods.idk_dpo import idk_dpo
from divdec_research.baselines.methods.npo import npo
from divdec_research.baselines.methods.rmu import misdirection
from divdec_research.baselines.methods.simnpo import simnpo
from divdec_research.baselines.methods.undial import undial

IGNORED = -100
# Probabilities of three tokens at each position; the last position predicts nothing. log of them are logits.
PROBABILITIES = torch.tensor(
    [
        [[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6], [1 / 3, 1 / 3, 1 / 3]],
        [[0.4, 0.4, 0.2], [0.7, 0.2, 0.1], [0.25, 0.5, 0.25], [1 / 3, 1 / 3, 1 / 3]],
    ]
)
# Of the first sequence two tokens are labelled (0.8 and 0.6), of the second one (0.5): its last.
LABELS = torch.tensor([[IGNORED, IGNORED, 1, 2], [IGNORED, IGNORED, IGNORED, 1]])
LOGITS = PROBABILITIES.log() + torch.tensor([3.0, -2.0])[:, None, None]  # a constant changes no probability


def test_token_losses_use_next_labelled_token():
    expected = [[0, -math.log(0.8), -math.log(0.6)], [0, 0, -math.log(0.5)]]
    torch.testing.assert_close(objective.token_losses(LOGITS, LABELS), torch.tensor(expected))
    assert objective.predicted(LABELS).tolist() == [[False, True, True], [False, False, True]]


def test_log_probabilities_are_summed_over_a_sequence():
    found = objective.sequence_log_probabilities(LOGITS, LABELS)
    assert found.tolist() == pytest.approx([math.log(0.48), math.log(0.5)])


def test_nll_averages_over_batch_tokens():
    expected = -(math.log(0.8) + math.log(0.6) + math.log(0.5)) / 3
    assert objective.nll(LOGITS, LABELS).item() == pytest.approx(expected)
    # Of twelve tokens in all micro-batches these are three.
    assert objective.nll(LOGITS, LABELS, 12).item() == pytest.approx(expected / 4)


def test_batch_without_labels_does_not_give_nan():
    assert objective.nll(LOGITS, torch.full_like(LABELS, IGNORED)).item() == 0


def test_npo_loss_matches_formula():
    # ratios 1/4 and 1 at β = 0.5: (2/β)·log(1 + ratio^β) = 4·log 1.5 and 4·log 2.
    log_pi = torch.tensor([0.1, 0.3]).log()
    reference = torch.tensor([0.4, 0.3]).log()
    expected = (4 * math.log(1.5) + 4 * math.log(2)) / 2
    assert npo(log_pi, reference, 0.5).item() == pytest.approx(expected)


@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_npo_gradient_matches_gradient_ascent_then_vanishes(beta):
    log_pi = torch.tensor([-3.0, -3.0 - 20 / beta], requires_grad=True)
    npo(log_pi, torch.tensor([-3.0, -3.0]), beta).backward()
    # Of the mean over two: a half where the policy is the reference's, nothing where it has long fallen.
    assert log_pi.grad.tolist() == pytest.approx([0.5, 0.0], abs=1e-8)


def test_simnpo_loss_matches_formula():
    # Mean probabilities 1/2 and 1/4 at β = 2: odds of 4 and 16 to 1, so sigmoids of 4/5 and 16/17; 2/β = 1.
    log_pi = torch.tensor([3 * math.log(0.5), math.log(0.25)])
    lengths = torch.tensor([3, 1])
    expected = -(math.log(4 / 5) + math.log(16 / 17)) / 2
    assert simnpo(log_pi, lengths, 2.0, 0.0).item() == pytest.approx(expected)
    # A margin of log 4 divides the odds by 4: 1/1 and 4/1.
    expected = -(math.log(1 / 2) + math.log(4 / 5)) / 2
    assert simnpo(log_pi, lengths, 2.0, math.log(4)).item() == pytest.approx(expected)


def test_idk_dpo_loss_matches_formula():
    # The idk answer has become 4 times as likely, the true one a ninth: odds (4·9)^½ = 6 at β = ½; 2/β = 4.
    found = idk_dpo(
        torch.tensor([math.log(0.4)]),
        torch.tensor([math.log(0.1)]),
        torch.tensor([math.log(0.1)]),
        torch.tensor([math.log(0.9)]),
        0.5,
    )
    assert found.item() == pytest.approx(-4 * math.log(6 / 7))


def test_undial_loss_matches_formula():
    # The teacher's labelled token loses log 4: 0.8 becomes 0.2 beside 0.1 and 0.1, 0.6 becomes 0.15 beside 0.2, 0.2,
    # 0.5 becomes 0.125 beside 0.25, 0.25. The student is uniform but for the first position's 0.5, 0.25, 0.25.
    student = torch.full((2, 4, 3), 1 / 3)
    student[0, 1] = torch.tensor([0.5, 0.25, 0.25])
    adjusted = [[0.1 / 0.4, 0.2 / 0.4, 0.1 / 0.4]]
    first = -sum(t * math.log(s) for t, s in zip(adjusted[0], (0.5, 0.25, 0.25), strict=True))
    expected = (first + 2 * math.log(3)) / 3
    assert undial(student.log(), LOGITS, LABELS, math.log(4)).item() == pytest.approx(expected)


def test_undial_is_minimal_at_adjusted_teacher():
    beta = 2.5
    adjusted = LOGITS.clone()
    for row, place, token in ((0, 1, 1), (0, 2, 2), (1, 2, 1)):
        adjusted[row, place, token] -= beta
    adjusted.requires_grad_()
    undial(adjusted, LOGITS, LABELS, beta).backward()
    assert adjusted.grad.abs().max() < 1e-6
    other = LOGITS.clone().requires_grad_()
    undial(other, LOGITS, LABELS, beta).backward()
    assert other.grad.abs().max() > 0.05
    assert other.grad[0, 0].abs().max() == 0  # predicts a token of the prompt


def test_kl_divergence_from_reference_model():
    # Two of the three positions agree; at the third the reference is (1/4, 1/2, 1/4), the model (1/2, 3/8, 1/8).
    model = LOGITS.clone()
    model[1, 2] = torch.tensor([0.5, 0.375, 0.125]).log()
    expected = (0.25 * math.log(1 / 2) + 0.5 * math.log(4 / 3) + 0.25 * math.log(2)) / 3
    assert objective.kl_from_reference(model, LOGITS, LABELS).item() == pytest.approx(expected, rel=1e-5)
    model[0, 0] = torch.tensor([9.0, 0.0, 0.0])  # predicts a token of the prompt
    assert objective.kl_from_reference(model, LOGITS, LABELS).item() == pytest.approx(expected, rel=1e-5)


def test_misdirection_averages_tokens_then_sequences():
    hidden = torch.zeros(2, 4, 2)
    hidden[0, 2], hidden[0, 3], hidden[1, 3] = torch.tensor([[1.0, 3.0], [1.0, 1.0], [4.0, 1.0]])
    hidden[1, 1] = 100.0  # not labelled
    aim = torch.ones(1, 1, 2)
    # Squared distances over the width of 2: 4/2 and 0 of the first sequence, 9/2 of the second.
    assert misdirection(hidden, aim, LABELS).item() == pytest.approx(((2 + 0) / 2 + 4.5) / 2)
    assert misdirection(hidden, hidden, LABELS).item() == 0


def test_half_precision_logits_are_computed_in_float32():
    found = objective.nll(LOGITS.bfloat16(), LABELS)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(objective.nll(LOGITS, LABELS).item(), abs=0.02)
