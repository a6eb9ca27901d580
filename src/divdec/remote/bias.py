"""What a limited `logit_bias` can do: which entries to send, what the answer to them proves, how far it may be off.

ℓ are the target's logits, which stay with its provider; w is what the rule wants added to them (linear: α·(ℓ_q − ℓ_p),
rank: −∞ for k tokens and 0 for the others), s what is sent, 0 for most tokens. Wanted is softmax((ℓ + w)/T), the
provider draws from softmax((ℓ + s)/T), and e = w − s, up to a constant, is what is missing. It knows nothing of
requests.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from divdec.errors import FailedClosed


@dataclasses.dataclass(frozen=True)
class BiasLimits:
    """What a provider accepts as `logit_bias`."""

    entries: int = 300
    """Most entries in one request."""
    largest: float = 100.0
    """Largest absolute value of an entry."""


@dataclasses.dataclass(frozen=True)
class Bias:
    """What is sent, and what is missing then."""

    entries: dict[int, float]
    """s by token id, without the zeros."""
    missing: Float[Tensor, " vocab"]
    """e = w − s up to a constant, in float64; −∞ for tokens that the rank rule suppresses and no entry does."""

    @property
    def sent(self) -> Float[Tensor, " vocab"]:
        """S for every token."""
        found = torch.zeros_like(self.missing)
        if self.entries:
            found[list(self.entries)] = torch.tensor(list(self.entries.values()), dtype=found.dtype)
        return found

    def gap(self, token: int) -> float:
        """How far, in nats, the first choice under s may lie below the first choice that is wanted; 0: it is that.

        ℓ_a + s_a ≥ ℓ_v + s_v for all v gives ℓ_v + w_v ≤ ℓ_a + w_a + (e_v − e_a).
        """
        return float(self.missing.max() - self.missing[token])

    def acceptance(self, token: int, temperature: float) -> float:
        """Probability to keep a token drawn under s; what is kept is distributed as wanted (rejection sampling)."""
        return math.exp(-self.gap(token) / temperature)

    def total_variation(self, temperature: float) -> float:
        """Most that the distribution under s can differ from the wanted one, whatever ℓ is: tanh((max e − min e)/4T).

        Weights between exp(min e/T) and exp(max e/T) multiply the odds of any set of tokens by at most their ratio r;
        a probability x becomes at most rx/(rx + 1 − x), and the difference is largest, (√r − 1)/(√r + 1), at
        x = 1/(1 + √r).
        """
        return math.tanh(float(self.missing.max() - self.missing.min()) / (4 * temperature))


def choose_bias(
    wanted: Float[Tensor, " vocab"], limits: BiasLimits, known: Collection[int] = (), *, closest: bool = False
) -> Bias:
    """The entries to send where not all that is wanted can be.

    Args:
        wanted: w in float64, −∞ for tokens that are to be suppressed.
        limits: what the provider accepts.
        known: tokens that the target is known to like here; they come first.
        closest: send what makes the bound on the total variation smallest. Otherwise what proves most: nothing that is
            left out wants more than it gets, so that every token with an entry that wins is the wanted choice.

    Raises:
        FailedClosed: what is wanted is not a number.
    """
    if wanted.isnan().any():
        raise FailedClosed("the experts' divergence is not finite (an auxiliary overflowed); nothing is asked for")
    ruled_out = wanted.isneginf()
    if ruled_out.any():
        return _suppressing(wanted, ruled_out, limits, known)
    order = wanted.argsort(stable=True)
    left_out = max(len(wanted) - limits.entries, 0)
    if closest and left_out:
        # Those left out all get one value; the best are neighbours in the order, that value in their middle.
        values = wanted[order]
        start = int((values[left_out - 1 :] - values[: len(values) - left_out + 1]).argmin())
        window = values[start : start + left_out]
        base = float((window[0] + window[-1]) / 2)
        chosen = torch.cat([order[:start], order[start + left_out :]])
        return _bias(wanted, chosen, base, limits)
    first = torch.tensor(sorted(known)[: limits.entries], dtype=torch.long)
    fresh = order[~torch.isin(order, first)]
    room = min(limits.entries - len(first), len(fresh))
    chosen = torch.cat([first, fresh[: (room + 1) // 2], fresh[len(fresh) - room // 2 :]])
    omitted = torch.ones(len(wanted), dtype=torch.bool)
    omitted[chosen] = False
    base = float(wanted[omitted].max()) if omitted.any() else 0.0
    return _bias(wanted, chosen, base, limits)


def _suppressing(
    wanted: Float[Tensor, " vocab"], ruled_out: Tensor, limits: BiasLimits, known: Collection[int]
) -> Bias:
    """As many of the suppressed tokens as go in, those first that the target is known to like; then the others."""
    suppressed = [token for token in sorted(known) if ruled_out[token]]
    suppressed += [token for token in ruled_out.nonzero().flatten().tolist() if token not in set(suppressed)]
    entries = dict.fromkeys(suppressed[: limits.entries], -limits.largest)
    # What takedown requests want of the others, the most first.
    missing, lowered = wanted.clone(), wanted.masked_fill(ruled_out, 0.0)
    for token in lowered.argsort(stable=True)[: limits.entries - len(entries)].tolist():
        if lowered[token] < 0:
            entries[token] = max(float(lowered[token]), -limits.largest)
            missing[token] -= entries[token]
    return Bias(entries, missing)


def _bias(wanted: Float[Tensor, " vocab"], chosen: Int[Tensor, " entries"], base: float, limits: BiasLimits) -> Bias:
    values = (wanted[chosen] - base).clamp(-limits.largest, limits.largest)
    missing = wanted - base
    missing[chosen] -= values
    entries = {token: value for token, value in zip(chosen.tolist(), values.tolist(), strict=True) if value}
    return Bias(entries, missing)


@dataclasses.dataclass(frozen=True)
class Candidates:
    """The likeliest tokens that a provider has told, and what is known of the others."""

    ids: Int[Tensor, " told"]
    logprobs: Float[Tensor, " told"]
    """log P of each, without the bias."""
    ceiling: Float[Tensor, " vocab"]
    """log P of each token that was not told is at most this."""
    unsure: Bool[Tensor, " told"]
    """Of which it is not sure that they were told, and not others with their name; `logprobs` is at least theirs."""

    def _scores(self, wanted: Float[Tensor, " vocab"]) -> tuple[Tensor, Tensor]:
        others = self.ceiling + wanted
        others[self.ids] = -math.inf
        return self.logprobs + wanted[self.ids], others

    def first(self, wanted: Float[Tensor, " vocab"]) -> tuple[int, float]:
        """The best of them once steered, and how far, in nats, it may lie below the best of all; 0: it is that."""
        scores, others = self._scores(wanted)
        best = int(scores.argmax())
        if scores[best].isneginf() or self.unsure[best]:
            return int(self.ids[best]), math.inf
        return int(self.ids[best]), max(float(others.max() - scores[best]), 0.0)

    def draw(
        self, wanted: Float[Tensor, " vocab"], temperature: float, uniform: Float[Tensor, ""]
    ) -> tuple[int, float]:
        """One of them drawn from the steered probabilities, and the total variation at most: that of the others.

        Raises:
            FailedClosed: none of them has a probability once steered.
        """
        from divdec.sampling import pick

        scores, others = (part / temperature for part in self._scores(wanted))
        token = int(self.ids[int(pick((scores - scores.max()).exp(), uniform))])
        # Without those that are not sure, and then with them, their names' other tokens and all that was not told.
        sure = scores.masked_fill(self.unsure, -math.inf)
        parts = (sure.logsumexp(0), others.logsumexp(0), scores.logsumexp(0), torch.cat([scores, others]).logsumexp(0))
        told_sure, untold, told, all_of_them = (float(part) for part in parts)
        if told_sure == told:
            return token, math.exp(untold - all_of_them)
        return token, min(2 - math.exp(told_sure - told) - math.exp(told_sure - all_of_them), 1.0)
