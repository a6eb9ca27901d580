"""Steering rules of Divergence Decoding (paper, eq. 1 and 2) and the `Steering` setting that selects one."""

from __future__ import annotations

import base64
import dataclasses
import math
import numbers
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from divdec.errors import UsageError
from divdec.fail_closed import check

RULES = ("linear", "rank")
FILLS = ("hard", "soft")
MAX_ALPHA = 1000.0  # larger values overflow logits, or are typing errors
MAX_MARGIN = 20.0  # p and q hardly differ by a factor of 5e8; a larger margin would mask nothing
ACCEPTED = (
    "accepted: 'linear:ALPHA' (such as linear:1.5), 'linear:ALPHA:MARGIN' (linear:1.5:3), 'linear:ALPHA:MARGIN:full', "
    "'rank:K' (rank:20), 'rank:K:MARGIN' (rank:20:3), and for likelihoods 'rank:K:soft' or 'rank:K:MARGIN:soft'"
)
# Without experts every divergence is 0, and the rank rule would still mask the first k tokens.
NO_RULE = (
    "a registry of takedown requests has a separate strength and needs no rule; leave the steering out, or give "
    "a pair or n-grams for it to apply to"
)
NOT_FINITE = "the steered logits contain NaN or +inf, or rule out every token; no answer is given"


def steer_linear(
    target_logits: Float[Tensor, "... vocab"],
    divergence: Float[Tensor, "... vocab"],
    alpha: float,
    *,
    margin: float | None = None,
    full: bool = False,
) -> Float[Tensor, "... vocab"]:
    """Add the scaled divergence to the target's logits: ℓ_P + α·(ℓ_q − ℓ_p) (paper, eq. 1).

    The margin is not in the paper: without it, tokens on which q and p differ by noise move too, and what q alone
    prefers rises.

    Args:
        target_logits: ℓ_P, of any floating dtype.
        divergence: ℓ_q − ℓ_p over the same vocabulary, up to a constant per position; with a margin, log q − log p.
        alpha: strength; 0 leaves the target unchanged, 1 replaces its p by q.
        margin: lower only the tokens whose divergence is at most −margin (nats, for neural auxiliaries), and leave all
            others as they are.
        full: move all tokens wherever the target's first choice is one to lower, so that what q answers rises there.

    Returns:
        Steered logits in float32.
    """
    divergence = divergence.float()
    if margin is not None:
        left = divergence > -margin  # not NaN, which stays
        if full:
            left &= left.gather(-1, target_logits.argmax(dim=-1, keepdim=True))
        divergence = divergence.masked_fill(left, 0.0)
    return torch.add(target_logits.float(), divergence, alpha=alpha)


def steer_rank(
    target_logits: Float[Tensor, "... vocab"],
    divergence: Float[Tensor, "... vocab"],
    k: int,
    fill: str = "hard",
    eligible: Bool[Tensor, " vocab"] | None = None,
    *,
    margin: float | None = None,
) -> Float[Tensor, "... vocab"]:
    """Mask the k tokens that p prefers most over q (paper, eq. 2 and the section on privacy).

    Ties in the divergence are resolved by token id, lowest first. The margin is not in the paper: without it, k tokens
    are masked even where p and q agree.

    Args:
        target_logits: ℓ_P, of any floating dtype.
        divergence: ℓ_q − ℓ_p over the same vocabulary; with a margin, log q − log p.
        k: number of tokens masked at every position.
        fill: value of a masked logit: 'hard' is −inf (decoding), 'soft' the k-th largest target logit of the
            position (likelihoods stay finite).
        eligible: tokens that may be masked; None for all.
        margin: mask only those of the k tokens whose divergence is at most −margin (nats, for neural auxiliaries). The
            soft fill then raises no logit.

    Returns:
        Steered logits in float32; all NaN where the divergence contains NaN.

    Raises:
        UsageError: k is not between 1 and the number of eligible tokens less one.
    """
    target_logits, ranked = target_logits.float(), divergence.float()
    check_k(k, target_logits.shape[-1] if eligible is None else int(eligible.sum()))
    undefined = ranked.amax(dim=-1, keepdim=True).isnan()
    if eligible is not None:
        ranked = ranked.masked_fill(~eligible.to(ranked.device), math.inf)
    smallest = ranked.topk(k + 1, dim=-1, largest=False).values
    kth, following = smallest[..., k - 1 : k], smallest[..., k : k + 1]
    soft = fill == "soft"
    filling = target_logits.topk(k, dim=-1).values[..., k - 1 :] if soft else torch.full_like(kth, -math.inf)
    if margin is not None:
        filling = torch.minimum(filling, target_logits)
    special = undefined | (kth == following)
    if special.device.type == "cpu" and not special.any():  # on a GPU the test would cost more than the general case
        kth = kth if margin is None else kth.clamp(max=-margin)
        return torch.where(ranked <= kth, filling, target_logits)
    # Entries below the k-th smallest, then the lowest ids of those equal to it: a stable sort without the sort.
    below, tied = ranked < kth, ranked == kth
    if eligible is not None:
        tied = tied & eligible.to(tied.device)
    remaining = k - below.sum(dim=-1, keepdim=True)
    masked = below | (tied & (tied.cumsum(dim=-1) <= remaining))
    if margin is not None:
        masked = masked & (ranked <= -margin)
    return torch.where(masked, filling, target_logits).masked_fill(undefined, math.nan)


def check_k(k: int, eligible_size: int) -> None:
    """Refuse a k with which the rank rule would mask no eligible token or all of them."""
    if not 1 <= k < eligible_size:
        raise UsageError(
            f"rank rule: k is {k}, but with {eligible_size} eligible tokens it must lie between 1 and "
            f"{eligible_size - 1}"
        )


@dataclasses.dataclass(frozen=True)
class Steering:
    """A steering rule and its strength."""

    rule: str = "linear"
    """'linear' adds α times the divergence; 'rank' masks the k tokens that p prefers most over q."""
    alpha: float = 1.0
    """Strength of the linear rule."""
    k: int = 20
    """Number of tokens that the rank rule masks."""
    margin: float | None = None
    """Least log p − log q of a token that the rule lowers, so that none is raised unless `full`; None for any token."""
    full: bool = False
    """With a margin, let the linear rule act on all tokens wherever it lowers the target's first choice."""
    fill: str = "hard"
    """Value of a logit masked by the rank rule: 'hard' is −inf, 'soft' the k-th largest target logit."""
    vocabulary: tuple[int, ...] | None = None
    """Token ids that the rank rule may mask, ascending; None for all."""

    def __post_init__(self) -> None:
        # Values come unchecked from JSON and the command line.
        if self.rule not in RULES:
            raise UsageError(f"unknown steering rule {self.rule!r}; {ACCEPTED}")
        if self.fill not in FILLS:
            raise UsageError(f"unknown fill {self.fill!r} of the rank rule; accepted: 'hard', 'soft'")
        if not is_number(self.alpha) or not 0 <= self.alpha <= MAX_ALPHA:
            raise UsageError(
                f"alpha is {self.alpha!r}; accepted: a number from 0 to {MAX_ALPHA:g} (a negative one would steer "
                "towards the forget set)"
            )
        if not is_number(self.k, numbers.Integral) or self.k < 1:
            raise UsageError(f"k is {self.k!r}; accepted: a whole number of at least 1")
        if self.margin is not None:
            if not is_number(self.margin) or not 0 <= self.margin <= MAX_MARGIN:
                raise UsageError(f"margin is {self.margin!r}; accepted: a number from 0 to {MAX_MARGIN:g}")
            object.__setattr__(self, "margin", float(self.margin))
        if self.full is not False and (self.full is not True or self.rule != "linear" or self.margin is None):
            raise UsageError(f"full is {self.full!r}; accepted: false, and true for a linear rule with a margin")
        object.__setattr__(self, "alpha", float(self.alpha))
        object.__setattr__(self, "k", int(self.k))
        if self.vocabulary is not None:
            object.__setattr__(self, "vocabulary", _token_ids(self.vocabulary))

    @classmethod
    def parse(cls, value: Any) -> Steering:
        """Read a setting from a string such as 'linear:1.5', 'linear:1.5:3' or 'rank:20:soft', a mapping or itself.

        Raises:
            UsageError: the rule is unknown, or its value is not a number or out of range.
        """
        if isinstance(value, Steering):
            return value
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        if not isinstance(value, str):
            raise UsageError(f"steering is {value!r}; {ACCEPTED}")
        rule, *values = value.strip().split(":")
        fill = values.pop() if rule == "rank" and (len(values) == 3 or values[-1:] in (["hard"], ["soft"])) else "hard"
        full = rule == "linear" and values[2:] == ["full"] and bool(values.pop())
        if rule not in RULES or len(values) not in (1, 2):
            raise UsageError(f"steering is {value!r}; {ACCEPTED}")
        margin = None if len(values) == 1 else _parse_number(values[1], float, f"margin in {value!r} is not a number")
        if rule == "linear":
            alpha = _parse_number(values[0], float, f"alpha in {value!r} is not a number")
            return cls(rule="linear", alpha=alpha, margin=margin, full=full)
        k = _parse_number(values[0], int, f"k in {value!r} is not a whole number")
        return cls(rule="rank", k=k, margin=margin, fill=fill).refused_if_idle()

    def refused_if_idle(self) -> Steering:
        """Return a rule that somebody gave, and refuse one under which the target's first choice always stays."""
        if (self.rule, self.k, self.fill) == ("rank", 1, "soft"):
            raise UsageError(f"{self} steers nothing: the soft fill of one token is the largest logit; give k above 1")
        return self

    def revised(self, text: str) -> Steering:
        """Parse another rule or strength and keep this setting's eligible vocabulary.

        Raises:
            UsageError: see `parse`.
        """
        return dataclasses.replace(Steering.parse(text), vocabulary=self.vocabulary)

    def __str__(self) -> str:
        margin = "" if self.margin is None else f":{self.margin:g}"
        if self.rule == "linear":
            return f"linear:{self.alpha:g}{margin}" + (":full" if self.full else "")
        return f"rank:{self.k}{margin}" + (":soft" if self.fill == "soft" else "")

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values; the eligible vocabulary becomes a compressed bitmap."""
        fields = dataclasses.asdict(self)
        fields["vocabulary"] = None if self.vocabulary is None else _to_bitmap(self.vocabulary)
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Steering:
        """Read the output of `to_dict`; the vocabulary may also be a list of token ids.

        Raises:
            UsageError: a field is unknown or its value is invalid.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(map(str, set(fields) - known)):
            raise UsageError(f"steering has unknown fields {unknown}; accepted: {sorted(known)}")
        vocabulary = fields.get("vocabulary")
        if isinstance(vocabulary, str):
            vocabulary = _from_bitmap(vocabulary)
        elif isinstance(vocabulary, list):
            vocabulary = tuple(vocabulary)
        return cls(**{**fields, "vocabulary": vocabulary}).refused_if_idle()

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse a setting that cannot steer a vocabulary of this size.

        Raises:
            UsageError: k is out of range, or an eligible token id lies beyond the vocabulary.
        """
        if self.vocabulary is not None and self.vocabulary[-1] >= vocab_size:
            raise UsageError(
                f"the eligible vocabulary names token {self.vocabulary[-1]}, "
                f"but the model's vocabulary has only {vocab_size} tokens"
            )
        if self.rule == "rank":
            check_k(self.k, vocab_size if self.vocabulary is None else len(self.vocabulary))

    def eligible(self, vocab_size: int) -> Bool[Tensor, " vocab"] | None:
        """Return the eligible vocabulary as a mask over token ids; None if every token is eligible."""
        if self.vocabulary is None:
            return None
        mask = torch.zeros(vocab_size, dtype=torch.bool)
        mask[list(self.vocabulary)] = True
        return mask

    def apply(
        self,
        target_logits: Float[Tensor, "... vocab"],
        divergence: Float[Tensor, "... vocab"],
        eligible: Bool[Tensor, " vocab"] | None = None,
    ) -> Float[Tensor, "... vocab"]:
        """Steer the target's logits by this rule.

        Args:
            target_logits: ℓ_P, of any floating dtype.
            divergence: log q − log p over the same vocabulary.
            eligible: `self.eligible(vocab_size)`, if the caller has it already.

        Returns:
            Steered logits in float32.

        Raises:
            FailedClosed: a steered logit is NaN or +inf, or every token is excluded.
        """
        if self.rule == "rank":
            eligible = self.eligible(target_logits.shape[-1]) if eligible is None else eligible
            steered = steer_rank(target_logits, divergence, self.k, self.fill, eligible, margin=self.margin)
        else:
            steered = steer_linear(target_logits, divergence, self.alpha, margin=self.margin, full=self.full)
        # The maximum is NaN where any logit is. If all are excluded, argmax would return token 0.
        check(steered.detach().amax(dim=-1).isfinite().all(), NOT_FINITE)
        return steered


def is_number(value: object, kind: type = numbers.Real) -> bool:
    """Whether a value from a file or a client is a number, which true and false are not."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _token_ids(value: Any) -> tuple[int, ...]:
    iterable = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    ids: list[Any] = list(value) if iterable else [None]
    if not all(type(token) is int or is_number(token, numbers.Integral) for token in ids):
        raise UsageError("the eligible vocabulary of the rank rule must be a bitmap or a list of token ids")
    if not ids or min(ids) < 0:
        raise UsageError("the eligible vocabulary of the rank rule must name at least one token id ≥ 0")
    return tuple(sorted({int(token) for token in ids}))


def _parse_number(text: str, kind: type[Any], problem: str) -> Any:
    try:
        return kind(text.replace("_", "?"))  # Python reads 1_5 as 15
    except ValueError:
        raise UsageError(f"{problem}; {ACCEPTED}") from None


def _to_bitmap(ids: tuple[int, ...]) -> str:
    mask = np.zeros(ids[-1] + 1, dtype=bool)
    mask[list(ids)] = True
    return base64.b64encode(zlib.compress(np.packbits(mask, bitorder="little").tobytes(), 9)).decode()


def _from_bitmap(text: str) -> tuple[int, ...]:
    try:
        content = zlib.decompress(base64.b64decode(text, validate=True))
    except (ValueError, zlib.error):
        raise UsageError("the eligible vocabulary of the rank rule is not a readable bitmap") from None
    return tuple(np.flatnonzero(np.unpackbits(np.frombuffer(content, np.uint8), bitorder="little")).tolist())
