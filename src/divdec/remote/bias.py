"""Limited `logit_bias`: the entries to send, what a reply then proves, and error bounds.

ℓ are the target's logits, which only its provider knows; w is the shift by the rule (linear: α·(ℓ_q − ℓ_p), rank: −∞
for k tokens and 0 for the others); s is the bias that is sent, 0 for most tokens. The steered distribution is
softmax((ℓ + w)/T), the provider samples from softmax((ℓ + s)/T), and e = w − s, up to a constant, is the remainder.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from divdec.errors import FailedClosed

MAX_BIAS = 100.0
"""Largest absolute value of an entry, in the API of OpenAI."""


@dataclasses.dataclass(frozen=True)
class Bias:
    """A bias, and the remainder of the shift."""

    entries: dict[int, float]
    """s by token id, without the zeros."""
    remainder: Float[Tensor, " vocab"]
    """e = w − s up to a constant, in float64; −∞ for tokens that the rank rule masks without an entry."""

    @property
    def sent(self) -> Float[Tensor, " vocab"]:
        """Bias of every token."""
        values = torch.tensor(list(self.entries.values()), dtype=self.remainder.dtype)
        return torch.zeros_like(self.remainder).index_put((torch.tensor([*self.entries], dtype=torch.long),), values)

    def gap(self, token: int) -> float:
        """Return the most nats by which the greedy choice under s lies below the steered one; 0: they are equal.

        ℓ_a + s_a ≥ ℓ_v + s_v for all v gives ℓ_v + w_v ≤ ℓ_a + w_a + (e_v − e_a).
        """
        return float(self.remainder.max() - self.remainder[token])

    def acceptance(self, token: int, temperature: float) -> float:
        """Return the probability to accept a token sampled under s, for rejection sampling."""
        return math.exp(-self.gap(token) / temperature)

    def total_variation(self, temperature: float) -> float:
        """Bound the total variation between the distributions under s and w, for any ℓ: tanh((max e − min e)/4T).

        Weights between exp(min e/T) and exp(max e/T) multiply the odds of any set of tokens by at most their ratio r;
        a probability x becomes at most rx/(rx + 1 − x), and the difference is largest, (√r − 1)/(√r + 1), at
        x = 1/(1 + √r).
        """
        return math.tanh(float(self.remainder.max() - self.remainder.min()) / (4 * temperature))


def choose_bias(
    shift: Float[Tensor, " vocab"], entries: int, known: Collection[int] = (), *, closest: bool = False
) -> Bias:
    """Choose the entries to send if not all fit.

    Args:
        shift: w in float64, −∞ for masked tokens; `FailedClosed` if it is not a number.
        entries: most entries in one request.
        known: tokens that the target is known to prefer here; they come first.
        closest: minimise the bound on the total variation. Otherwise no omitted token has a positive remainder, so
            that a greedy choice with an entry is proved to be the steered one.
    """
    if shift.isnan().any():
        raise FailedClosed("the experts' divergence is not finite (an auxiliary overflowed); no request is sent")
    masked = shift.isneginf()
    if masked.any():
        return _mask_tokens(shift, masked, entries, known)
    order = shift.argsort(stable=True)
    left_out = max(len(shift) - entries, 0)
    if closest and left_out:
        # All omitted tokens get one value: the best are neighbours in the order, the value is their middle.
        values = shift[order]
        start = int((values[left_out - 1 :] - values[: len(values) - left_out + 1]).argmin())
        window = values[start : start + left_out]
        base = float((window[0] + window[-1]) / 2)
        chosen = torch.cat([order[:start], order[start + left_out :]])
    else:
        first = torch.tensor(sorted(known)[:entries], dtype=torch.long)
        fresh = order[~torch.isin(order, first)]
        room = min(entries - len(first), len(fresh))
        raised = room // 2 if len(fresh) and shift[fresh[-1]] > 0 else 0  # with a margin most are 0
        chosen = torch.cat([first, fresh[: room - raised], fresh[len(fresh) - raised :]])
        omitted = shift[~torch.isin(torch.arange(len(shift)), chosen)]
        base = float(omitted.max()) if len(omitted) else 0.0
    sent = (shift[chosen] - base).clamp(-MAX_BIAS, MAX_BIAS)
    remainder = shift - base
    remainder[chosen] -= sent
    return Bias({token: value for token, value in zip(chosen.tolist(), sent.tolist(), strict=True) if value}, remainder)


def _mask_tokens(shift: Float[Tensor, " vocab"], masked: Tensor, count: int, known: Collection[int]) -> Bias:
    """Send as many masked tokens as fit, those first that the target is known to prefer; then the others."""
    suppressed = [token for token in sorted(known) if masked[token]]
    suppressed += [token for token in masked.nonzero().flatten().tolist() if token not in set(suppressed)]
    entries = dict.fromkeys(suppressed[:count], -MAX_BIAS)
    # The corrections of takedown requests, the largest first.
    remainder, lowered = shift.clone(), shift.masked_fill(masked, 0.0)
    for token in lowered.argsort(stable=True)[: count - len(entries)].tolist():
        if lowered[token] < 0:
            entries[token] = max(float(lowered[token]), -MAX_BIAS)
            remainder[token] -= entries[token]
    return Bias(entries, remainder)


@dataclasses.dataclass(frozen=True)
class Candidates:
    """The likeliest tokens that a provider returned, and bounds for the others."""

    ids: Int[Tensor, " candidates"]
    logprobs: Float[Tensor, " candidates"]
    """log P of each, without the bias."""
    ceiling: Float[Tensor, " vocab"]
    """Upper bound of log P for each other token."""
    ambiguous: Bool[Tensor, " candidates"]
    """Tokens that share their name with others: `logprobs` is an upper bound of theirs."""

    def best(self, shift: Float[Tensor, " vocab"]) -> tuple[int, float]:
        """Return the best candidate once steered, and the most nats by which it lies below the best of all tokens."""
        scores, others = self.logprobs + shift[self.ids], self.ceiling + shift
        others[self.ids] = -math.inf
        best = int(scores.argmax())
        if scores[best].isneginf() or self.ambiguous[best]:
            return int(self.ids[best]), math.inf
        return int(self.ids[best]), max(float(others.max() - scores[best]), 0.0)
