"""Accept or reject what a draft proposes, so that what is kept follows the steered distribution exactly.

Pure tensors in, tensors out: chance comes in as uniform numbers, so that a token depends on the numbers of its own
position and not on how positions were grouped into blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from divdec.fail_closed import check

NONE = -1  # a draft that proposes nothing
NO_TOKEN = "no token can be chosen: a score is NaN or +inf, or the rule and the logits processors rule out every token"


class Verdict(NamedTuple):
    """What of a block of drafts is kept.

    The first `kept` tokens of a row stand; what follows them was proposed after a token that was rejected.
    """

    tokens: Int[Tensor, "batch block"]
    """The drafts, the last one kept replaced where it was rejected."""
    accepted: Bool[Tensor, "batch block"]
    """Whether each draft would be kept, given that those before it are."""
    kept: Int[Tensor, " batch"]
    """How many tokens stand: the accepted ones up to the first that was rejected, and what replaces it."""


def pick(weights: Float[Tensor, "*batch vocab"], uniform: Float[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
    """Draw a token with a probability proportional to its weight: the first whose cumulative weight exceeds uniform.

    Args:
        weights: not negative, not all 0.
        uniform: in [0, 1).

    Raises:
        FailedClosed: the weights are all 0 or not finite, and give no distribution.
    """
    cumulative = weights.double().cumsum(dim=-1)  # float32 would round small weights of a large vocabulary away
    total = cumulative[..., -1:]
    # A comparison that NaN fails, too.
    check(((total > 0) & total.isfinite()).all(), "the steered probabilities are all 0 or not finite: nothing to draw")
    # Scaled and cut off below the total: rounding must not pick what comes after the last token with a weight.
    threshold = torch.minimum(uniform.double()[..., None] * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)


def first_choice(scores: Float[Tensor, "*batch vocab"]) -> Int[Tensor, "*batch"]:
    """The token with the highest score.

    Raises:
        FailedClosed: a score is NaN or +inf, or all are −inf; `argmax` would name a token that is ruled out.
    """
    check(scores.amax(dim=-1).isfinite().all(), NO_TOKEN)
    return scores.argmax(dim=-1)


def verify_greedy(scores: Float[Tensor, "batch block vocab"], drafts: Int[Tensor, "batch block"]) -> Verdict:
    """Keep drafts while each is the steered model's first choice; then take that first choice.

    Args:
        scores: steered scores after every logits processor, before each draft.
        drafts: proposed tokens, −1 for none.

    Raises:
        FailedClosed: of a token that is kept no score is finite; see `first_choice`.
    """
    tokens = scores.argmax(dim=-1)
    accepted = tokens == drafts
    kept = _kept(accepted)
    undecided = torch.arange(drafts.shape[1], device=kept.device) >= kept[:, None]
    check((scores.amax(dim=-1).isfinite() | undecided).all(), NO_TOKEN)
    return Verdict(tokens, accepted, kept)


def verify_sampled(
    scores: Float[Tensor, "batch block vocab"],
    drafts: Int[Tensor, "batch block"],
    draft_scores: Float[Tensor, "batch block vocab"] | None,
    uniform: Float[Tensor, "batch block 2"],
) -> Verdict:
    """Keep a draft x ~ q with probability min(1, s(x)/q(x)), else draw from max(0, s − q) (Leviathan et al. 2023).

    What is kept is then distributed as s, the steered model after all processors, whatever q is.

    Args:
        scores: log s, steered scores after every logits processor and temperature, before each draft.
        drafts: proposed tokens, −1 for none.
        draft_scores: log q, that they were drawn from; None where each was proposed with certainty.
        uniform: in [0, 1), one number that accepts and one that draws in place of what was rejected.
    """
    steered = scores.softmax(dim=-1)
    at = drafts.clamp(min=0)[..., None]
    offered = drafts != NONE
    if draft_scores is None:
        proposed = torch.zeros_like(steered).scatter(-1, at, offered[..., None].to(steered.dtype))
    else:
        proposed = draft_scores.softmax(dim=-1)
    acceptance = uniform[..., 0] * proposed.gather(-1, at).squeeze(-1) < steered.gather(-1, at).squeeze(-1)
    accepted = offered & acceptance
    kept = _kept(accepted)
    last = kept[:, None] - 1
    rows = last[..., None].expand(-1, -1, scores.shape[-1])
    here = steered.gather(1, rows).squeeze(1)
    residual = (here - proposed.gather(1, rows).squeeze(1)).clamp(min=0)
    # Equal distributions leave nothing, and reject nothing but by rounding.
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, here)
    drawn = pick(residual, uniform[..., 1].gather(1, last).squeeze(1))[:, None]
    tokens = drafts.scatter(1, last, torch.where(accepted.gather(1, last), drafts.gather(1, last), drawn))
    return Verdict(tokens, accepted, kept)


def _kept(accepted: Bool[Tensor, "batch block"]) -> Int[Tensor, " batch"]:
    # The last token of a block stands whether it was drafted or replaced.
    return accepted[:, :-1].long().cumprod(dim=1).sum(dim=1) + 1
