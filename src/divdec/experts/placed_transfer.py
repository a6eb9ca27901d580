"""What of a divergence crosses to another process: all of it, the k tokens of the rank rule, or its largest entries.

Pure tensors in, tensors out: it knows nothing of processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from divdec.steering import Steering, steer_rank

_LARGEST = 600.0  # exponents beyond which float64 ends; the bound is 1 there


def packed(
    divergence: Float[Tensor, "batch kept vocab"],
    steering: Steering | None,
    eligible: Bool[Tensor, " vocab"] | None = None,
    entries: int | None = None,
) -> dict[str, Tensor]:
    """The tensors that stand for a divergence.

    Args:
        divergence: ℓ_q − ℓ_p in float32.
        steering: the rule that it is for; None for any rule, which needs all of it.
        eligible: `steering.eligible(vocab)`.
        entries: how many entries the linear rule gets; None for all, as half of them or more are.

    Returns:
        `divergence` itself; or the rank rule's `suppressed` tokens; or `tokens` with their `values`, and `middle` and
        `half` of the range that all other entries lie in. Beside the latter two `finite`, which says where the
        divergence was.
    """
    if steering is not None and steering.rule == "rank":
        finite = divergence.isfinite().all(dim=-1)
        known = divergence.masked_fill(~finite[..., None], 0.0)
        suppressed = steer_rank(torch.zeros_like(known), known, steering.k, "hard", eligible).isneginf()
        tokens = suppressed.nonzero()[:, -1].view(*divergence.shape[:-1], steering.k)
        return {"suppressed": tokens.int(), "finite": finite}
    # A token's id and value take twice as much as its value.
    if steering is None or entries is None or 2 * entries >= divergence.shape[-1]:
        return {"divergence": divergence}
    return _largest(divergence, entries)


def unpacked(tensors: Mapping[str, Tensor], vocab_size: int) -> Float[Tensor, "batch kept vocab"]:
    """A divergence that steers as the one that was packed would; NaN where that was not finite.

    By the rank rule it does so exactly: the tokens to suppress are −1, all others 0. By the linear rule entries that
    did not come are in the middle of their range.
    """
    if "divergence" in tensors:
        return tensors["divergence"]
    if "suppressed" in tensors:
        tokens = tensors["suppressed"].long()
        found = torch.zeros((*tokens.shape[:-1], vocab_size), device=tokens.device)
        found.scatter_(-1, tokens, -1.0)
    else:
        tokens = tensors["tokens"].long()
        found = tensors["middle"][..., None].expand(*tokens.shape[:-1], vocab_size).clone()
        found.scatter_(-1, tokens, tensors["values"])
    return found.masked_fill_(~tensors["finite"][..., None], torch.nan)


@dataclasses.dataclass(frozen=True)
class Tail:
    """The entries that did not come."""

    tokens: Int[Tensor, "batch kept entries"]
    """Those that did."""
    half: Float[Tensor, "batch kept"]
    """How far the others may lie from what was put in their place."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Tail | None:
        """Of a packed divergence; None where nothing that counts was left out."""
        return cls(tensors["tokens"].long(), tensors["half"]) if "half" in tensors else None

    def bound(self, logits: Float[Tensor, "batch kept vocab"], alpha: float) -> Float[Tensor, "batch kept"]:
        """The largest total variation distance between the model's distribution and the one of these steered logits."""
        weights = logits.double().softmax(dim=-1)
        omitted = weights.scatter(-1, self.tokens.to(logits.device), 0.0).sum(dim=-1)
        return total_variation_bound(omitted, abs(alpha) * self.half.to(logits.device).double())


def total_variation_bound(
    omitted: Float[Tensor, "*places"], reach: Float[Tensor, "*places"]
) -> Float[Tensor, "*places"]:
    """The most that a distribution can change when logits of some tokens change by at most `reach` each way.

    With π the known distribution, X the change (0 outside of the set O, within ±ε in it) and μ = π(O), the changed
    one is π·e^X / E_π[e^X]. The set A where it is larger lies within O, or holds all that is outside of O. In the
    first case, with a = π(A), the gain is at most a·e^ε/(1 − μ + a·e^ε + (μ − a)·e^−ε) − a; in the second the
    complement's loss, b = π(Aᶜ), at most b − b·e^−ε/(1 − μ + b·e^−ε + (μ − b)·e^ε). Both are concave, and largest where
    their derivatives vanish or at μ. Whatever μ is, the result is at most tanh(ε/2).

    Args:
        omitted: μ, in float64.
        reach: ε, in float64.
    """
    epsilon = reach.clamp(max=_LARGEST)
    up, down = epsilon.exp(), (-epsilon).exp()
    spread = (up - down).clamp(min=1e-300)
    outside = (1 - omitted).clamp(min=0)
    least, most = outside + omitted * down, outside + omitted * up
    gaining = torch.minimum(((up * least).sqrt() - least) / spread, omitted)
    losing = torch.minimum((most - (down * most).sqrt()) / spread, omitted)
    gain = gaining * up / (least + spread * gaining) - gaining
    loss = losing - losing * down / (most - spread * losing).clamp(min=1e-300)
    found = torch.maximum(gain, loss).clamp(min=0.0, max=1.0)
    return torch.where(reach > _LARGEST, (omitted > 0).double(), found)


def _largest(divergence: Float[Tensor, "batch kept vocab"], entries: int) -> dict[str, Tensor]:
    """The entries at both ends that leave the others the narrowest range: i at the lower one, the rest at the upper."""
    finite = divergence.isfinite().all(dim=-1)
    known = divergence.masked_fill(~finite[..., None], 0.0)
    low, high = (known.topk(entries + 1, dim=-1, largest=largest) for largest in (False, True))
    # With i entries taken below, the others reach from the i-th smallest to the largest but entries less i.
    ranges = high.values.flip(-1) - low.values
    below = ranges.argmin(dim=-1, keepdim=True)
    places = torch.arange(entries, device=known.device).expand(*below.shape[:-1], entries)
    taken = low.indices[..., :entries], high.indices.gather(-1, (places - below).clamp(min=0))
    tokens = torch.where(places < below, *taken)
    bottom, top = low.values.gather(-1, below)[..., 0], high.values.gather(-1, entries - below)[..., 0]
    middle = (top + bottom) / 2
    return {
        "tokens": tokens.int(),
        "values": known.gather(-1, tokens),
        "middle": middle,
        # Rounded upwards: the middle itself is rounded.
        "half": torch.maximum(top - middle, middle - bottom).nextafter(torch.full_like(middle, torch.inf)),
        "finite": finite,
    }
