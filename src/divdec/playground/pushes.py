"""What steering did to each token of an answer, in numbers. Pure tensors in: it knows nothing of text or pages."""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Float, Int
from torch import Tensor

MOST = 4  # tokens named at a position
LEAST_LOSS = 0.005  # of probability; what lost less is not named


@dataclasses.dataclass(frozen=True)
class Push:
    """What steering did to one token at one position."""

    token: int
    """Its id."""
    push: float
    """log P_steered − log P_target in nats: above 0 it was pushed up, −∞ where a rule has masked it."""
    before: float
    """Probability under the target alone."""
    after: float
    """Probability under the steered model."""


@dataclasses.dataclass(frozen=True)
class Place:
    """One position of an answer."""

    chosen: Push
    """The token that stands there."""
    lost: tuple[Push, ...]
    """Other tokens from which steering took probability, the greatest loss first."""


def places(
    target_logits: Float[Tensor, "tokens vocab"],
    steered_logits: Float[Tensor, "tokens vocab"],
    chosen: Int[Tensor, " tokens"],
) -> list[Place]:
    """What was pushed at each position of an answer.

    Args:
        target_logits: ℓ_P before each token.
        steered_logits: the same after the rule.
        chosen: the answer's token ids.
    """
    before, after = target_logits.float().log_softmax(dim=-1), steered_logits.float().log_softmax(dim=-1)
    loss = before.exp() - after.exp()
    largest = loss.topk(min(MOST + 1, loss.shape[-1]), dim=-1)  # one more: the chosen token may be among them
    found = []
    for place, token in enumerate(chosen.tolist()):
        named = [
            _push(other, before[place], after[place])
            for other, lost in zip(largest.indices[place].tolist(), largest.values[place].tolist(), strict=True)
            if lost >= LEAST_LOSS and other != token
        ]
        found.append(Place(_push(token, before[place], after[place]), tuple(named[:MOST])))
    return found


def _push(token: int, before: Float[Tensor, " vocab"], after: Float[Tensor, " vocab"]) -> Push:
    old, new = float(before[token]), float(after[token])
    # A token that neither of the two would ever give was not pushed.
    return Push(token, 0.0 if old == new else new - old, float(torch.tensor(old).exp()), float(torch.tensor(new).exp()))
