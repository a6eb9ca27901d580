"""Losses of the gradient methods as pure functions of tensors.

Position t of the logits predicts token t + 1; labels are token ids, −100 where nothing is learned. A log-probability
of a sequence is log π(y | x), summed over its labelled tokens. Everything is computed in float32
and in nats. research/README.md lists differences from published code.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, logsigmoid

from divdec.data.formatting import IGNORED

Logits = Float[Tensor, "batch tokens vocabulary"]
Labels = Int[Tensor, "batch tokens"]
TokenLosses = Float[Tensor, "batch tokens-1"]
PerSequence = Float[Tensor, " batch"]
Loss = Float[Tensor, ""]


def predicted(labels: Labels) -> Bool[Tensor, "batch tokens-1"]:
    """Mark the positions that predict a labelled token."""
    return labels[:, 1:] != IGNORED


def token_losses(logits: Logits, labels: Labels) -> TokenLosses:
    """−log π(token | tokens before it), 0 where the token is not labelled."""
    following = labels[:, 1:]
    flat = cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), following.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return flat.view(following.shape)


def nll(
    logits: Logits,
    labels: Labels,
    labelled: Tensor | int | None = None,
) -> Loss:
    """Mean of −log π over the labelled tokens of the whole batch: the retain term of all methods but RMU.

    `labelled` replaces their number as the divisor.
    """
    count = predicted(labels).sum().clamp(min=1) if labelled is None else labelled
    return token_losses(logits, labels).sum() / count


def sequence_log_probabilities(logits: Logits, labels: Labels) -> PerSequence:
    """The log π(y | x): the sum of log π over a sequence's labelled tokens."""
    return -token_losses(logits, labels).sum(-1)


def gradient_ascent(
    logits: Logits,
    labels: Labels,
    labelled: Tensor | int | None = None,
) -> Loss:
    """−NLL (Jang et al. 2023; Thudi et al. 2022), also the forget term of GradDiff. It has no lower bound."""
    return -nll(logits, labels, labelled)


def npo(log_probabilities: PerSequence, reference: PerSequence, beta: float) -> Loss:
    """(2/β) · mean of −log σ(−β · log(π/π_ref)) (Zhang et al. 2024, L_NPO).

    As β → 0 its gradient becomes that of gradient ascent on the sequences' NLL; at π = π_ref it equals that at any β.

    Args:
        log_probabilities: log π(y | x) of the forget sequences, summed over tokens.
        reference: the same of the frozen target.
        beta: how soon a sequence that has become less likely counts less.
    """
    return -2 / beta * logsigmoid(-beta * (log_probabilities - reference)).mean()


def simnpo(log_probabilities: PerSequence, lengths: Int[Tensor, " batch"], beta: float, delta: float) -> Loss:
    """(2/β) · mean of −log σ(−(β/|y|) · log π − δ) (Fan et al. 2024, where δ is called γ)."""
    return -2 / beta * logsigmoid(-beta * log_probabilities / lengths - delta).mean()


def idk_dpo(
    chosen: PerSequence,
    rejected: PerSequence,
    chosen_reference: PerSequence,
    rejected_reference: PerSequence,
    beta: float,
) -> Loss:
    """(2/β) · mean of −log σ(β · (log(π/π_ref)(chosen) − log(π/π_ref)(rejected))).

    Rafailov et al. 2023, eq. 7, with "I don't know" chosen over the true answer as in Maini et al. 2024. The factor
    2/β is NPO's (Zhang et al. 2024, which compares both), so that γ and α weigh the same in all methods.
    """
    advantage = (chosen - chosen_reference) - (rejected - rejected_reference)
    return -2 / beta * logsigmoid(beta * advantage).mean()


def undial(
    logits: Logits,
    teacher_logits: Logits,
    labels: Labels,
    beta: float,
) -> Loss:
    """Cross entropy with softmax(teacher's logits − β · one-hot of the memorised token), mean over labelled tokens.

    Dong et al. 2024, the adjusted teacher and its loss.
    """
    chosen = predicted(labels)
    tokens = labels[:, 1:][chosen]
    teacher = teacher_logits[:, :-1][chosen].float()
    lowered = teacher.scatter_add(-1, tokens[:, None], torch.full_like(teacher[:, :1], -beta))
    total = cross_entropy(logits[:, :-1][chosen].float(), lowered.softmax(-1), reduction="sum")
    return total / chosen.sum().clamp(min=1)


def kl_from_reference(
    logits: Logits,
    reference_logits: Logits,
    labels: Labels,
) -> Loss:
    """KL(π_ref ‖ π), mean over labelled tokens: the other retain term (Maini et al. 2024, "KL Minimization")."""
    chosen = predicted(labels)
    log_pi = logits[:, :-1][chosen].float().log_softmax(-1)
    log_reference = reference_logits[:, :-1][chosen].float().log_softmax(-1)
    return kl_div(log_pi, log_reference, log_target=True, reduction="sum") / chosen.sum().clamp(min=1)


def misdirection(
    hidden: Float[Tensor, "batch tokens width"],
    aim: Float[Tensor, "#batch #tokens width"],
    labels: Labels,
) -> Loss:
    """Mean over sequences of the mean over their labelled tokens of ‖h − aim‖² / width: both terms of RMU.

    Li et al. 2024, section 4.2. The division by the width is that of the authors' code (mse_loss), which their values
    of c and α assume.
    """
    chosen = labels != IGNORED
    distances = (hidden.float() - aim.float()).square().mean(-1) * chosen
    return (distances.sum(-1) / chosen.sum(-1).clamp(min=1)).mean()
