"""Accept or reject drafted tokens so that the accepted ones follow the steered distribution exactly.

Functions take uniform random numbers as arguments; a result depends on the numbers of its position alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from divdec.fail_closed import NO_TOKEN, check


class Verdict(NamedTuple):
    """Result of verifying one block of drafts."""

    tokens: Int[Tensor, "batch block"]
    """The drafts, with the first rejected one replaced; entries after it are meaningless."""
    accepted: Bool[Tensor, "batch block"]
    """Whether each draft is accepted, provided that all before it are."""
    kept: Int[Tensor, " batch"]
    """Number of valid tokens: the accepted prefix and the token after it."""


def pick(weights: Float[Tensor, "*batch vocab"], uniform: Float[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
    """Draw a token in proportion to its weight: the first whose cumulative weight exceeds `uniform`, in [0, 1).

    Raises:
        FailedClosed: the weights are all 0 or not finite.
    """
    cumulative = weights.double().cumsum(dim=-1)  # float32 loses small weights of a large vocabulary
    total = cumulative[..., -1:]
    # The comparison is also false for NaN.
    check(((total > 0) & total.isfinite()).all(), "the steered probabilities are all 0 or not finite: nothing to draw")
    # Below the total, or rounding could select a token of weight 0 at the end.
    threshold = torch.minimum(uniform.double()[..., None] * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)


def first_choice(scores: Float[Tensor, "*batch vocab"]) -> Int[Tensor, "*batch"]:
    """Return the token with the highest score.

    Raises:
        FailedClosed: a score is NaN or +inf, or all are −inf, where `argmax` would return an excluded token.
    """
    check(scores.amax(dim=-1).isfinite().all(), NO_TOKEN)
    return scores.argmax(dim=-1)


def verify_greedy(scores: Float[Tensor, "batch block vocab"], drafts: Int[Tensor, "batch block"]) -> Verdict:
    """Accept the longest prefix of drafts that are the steered model's first choice, then add one first choice.

    Raises:
        FailedClosed: the scores of a valid token are not finite (see `first_choice`).
    """
    tokens = scores.argmax(dim=-1)
    accepted = tokens == drafts
    kept = _count_kept(accepted)
    unused = torch.arange(drafts.shape[1], device=kept.device) >= kept[:, None]
    check((scores.amax(dim=-1).isfinite() | unused).all(), NO_TOKEN)
    return Verdict(tokens, accepted, kept)


def verify_sampled(
    scores: Float[Tensor, "batch block vocab"],
    drafts: Int[Tensor, "batch block"],
    draft_scores: Float[Tensor, "batch block vocab"],
    uniform: Float[Tensor, "batch block 2"],
) -> Verdict:
    """Accept a draft x ~ q with probability min(1, s(x)/q(x)), else sample from max(0, s − q) (Leviathan et al. 2023).

    Args:
        scores: log s, processed steered scores before each draft.
        drafts: proposed tokens.
        draft_scores: log q, from which the drafts were drawn.
        uniform: numbers in [0, 1): the first accepts, the second draws the replacement.
    """
    steered, proposed, index = scores.softmax(dim=-1), draft_scores.softmax(dim=-1), drafts[..., None]
    accepted = uniform[..., 0] * proposed.gather(-1, index).squeeze(-1) < steered.gather(-1, index).squeeze(-1)
    kept = _count_kept(accepted)
    last = kept[:, None] - 1
    rows = last[..., None].expand(-1, -1, scores.shape[-1])
    steered_last = steered.gather(1, rows).squeeze(1)
    residual = (steered_last - proposed.gather(1, rows).squeeze(1)).clamp(min=0)
    # If s equals q there is no residual, and only rounding can have rejected the draft.
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, steered_last)
    drawn = pick(residual, uniform[..., 1].gather(1, last).squeeze(1))[:, None]
    tokens = drafts.scatter(1, last, torch.where(accepted.gather(1, last), drafts.gather(1, last), drawn))
    return Verdict(tokens, accepted, kept)


def _count_kept(accepted: Bool[Tensor, "batch block"]) -> Int[Tensor, " batch"]:
    # The token after the accepted prefix is valid, drafted or replaced.
    return accepted[:, :-1].long().cumprod(dim=1).sum(dim=1) + 1
