"""Rules that apply a divergence to the target's logits, and the setting that names one of them.

Pure tensors in, tensors out: this module knows nothing of models, tokenizers or decoding.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import math
import numbers
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from divdec.errors import UsageError
from divdec.fail_closed import check

RULES = ("linear", "rank")
FILLS = ("hard", "soft")
UNDEFINED = "the steered logits are NaN or +inf, or rule out every token; nothing is answered from them"
LARGEST_ALPHA = 1000.0  # beyond it logits overflow, or somebody mistyped
ACCEPTED = "accepted: 'linear:ALPHA' (such as linear:1.5), 'rank:K' (rank:20) or 'rank:K:soft'"


def steer_linear(
    target_logits: Float[Tensor, "... vocab"], divergence: Float[Tensor, "... vocab"], alpha: float
) -> Float[Tensor, "... vocab"]:
    """Add the divergence to the target's logits: ℓ_P + α·(ℓ_q − ℓ_p) (paper, eq. 1).

    Args:
        target_logits: ℓ_P, of any floating dtype.
        divergence: ℓ_q − ℓ_p over the same vocabulary.
        alpha: strength; 0 leaves the target as it is, 1 replaces its p by q.

    Returns:
        Steered logits in float32.
    """
    return torch.add(target_logits.float(), divergence.float(), alpha=alpha)


def steer_rank(
    target_logits: Float[Tensor, "... vocab"],
    divergence: Float[Tensor, "... vocab"],
    k: int,
    fill: str = "hard",
    eligible: Bool[Tensor, " vocab"] | None = None,
) -> Float[Tensor, "... vocab"]:
    """Suppress the k tokens that p prefers most over q (paper, eq. 2 and the section on privacy).

    Ties in the divergence are resolved by token id, the lowest first, so that results are reproducible.

    Args:
        target_logits: ℓ_P, of any floating dtype.
        divergence: ℓ_q − ℓ_p over the same vocabulary.
        k: how many tokens are suppressed at every position.
        fill: what a suppressed logit becomes: 'hard' −inf (decoding), 'soft' the k-th largest target logit
            of the position (likelihoods stay finite).
        eligible: tokens that may be suppressed at all; every token where it is None.

    Returns:
        Steered logits in float32. A NaN divergence gives NaN logits, never the target's own.

    Raises:
        UsageError: k is not between 1 and the number of eligible tokens less one.
    """
    return _Ranking.of(target_logits, divergence, (k,), eligible).suppress(k, fill)


@dataclasses.dataclass(frozen=True)
class _Ranking:
    """The vocabulary's order by divergence, as far as the rank rule needs it, for one or many k."""

    target_logits: Float[Tensor, "... vocab"]
    ranked: Float[Tensor, "... vocab"]
    """The divergence, +∞ where a token is not eligible."""
    smallest: Float[Tensor, "... some"]
    """The smallest of them in order, one more than the largest k."""
    undefined: Bool[Tensor, "... 1"]
    """Where the divergence is NaN somewhere."""
    eligible: Bool[Tensor, " vocab"] | None

    @classmethod
    def of(
        cls,
        target_logits: Float[Tensor, "... vocab"],
        divergence: Float[Tensor, "... vocab"],
        ks: Sequence[int],
        eligible: Bool[Tensor, " vocab"] | None,
    ) -> _Ranking:
        target_logits, ranked = target_logits.float(), divergence.float()
        for k in ks:
            check_k(k, target_logits.shape[-1] if eligible is None else int(eligible.sum()))
        undefined = ranked.amax(dim=-1, keepdim=True).isnan()
        if eligible is not None:
            ranked = ranked.masked_fill(~eligible.to(ranked.device), math.inf)
        smallest = ranked.topk(max(ks) + 1, dim=-1, largest=False).values
        return cls(target_logits, ranked, smallest, undefined, eligible)

    @functools.cached_property
    def largest(self) -> Float[Tensor, "... some"]:
        """The largest target logits in order."""
        return self.target_logits.topk(self.smallest.shape[-1] - 1, dim=-1).values

    def suppress(self, k: int, fill: str) -> Float[Tensor, "... vocab"]:
        """The target's logits without the first k tokens of the order."""
        kth, following = self.smallest[..., k - 1 : k], self.smallest[..., k : k + 1]
        filling = self.largest[..., k - 1 : k] if fill == "soft" else torch.full_like(kth, -math.inf)
        special = self.undefined | (kth == following)
        if special.device.type == "cpu" and not special.any():  # on a GPU asking would cost more than the rest
            return torch.where(self.ranked <= kth, filling, self.target_logits)
        # All strictly below the k-th smallest, and of those equal to it the first ids: a stable sort's answer
        # without sorting the vocabulary.
        below, tied = self.ranked < kth, self.ranked == kth
        if self.eligible is not None:
            tied = tied & self.eligible.to(tied.device)
        open_places = k - below.sum(dim=-1, keepdim=True)
        suppressed = below | (tied & (tied.cumsum(dim=-1) <= open_places))
        return torch.where(suppressed, filling, self.target_logits).masked_fill(self.undefined, math.nan)


def check_k(k: int, eligible_size: int) -> None:
    """Refuse a k with which the rank rule would suppress nothing or every eligible token."""
    if not 1 <= k < eligible_size:
        raise UsageError(
            f"rank rule: k is {k}, but with {eligible_size} eligible tokens it must lie between 1 and "
            f"{eligible_size - 1}"
        )


@dataclasses.dataclass(frozen=True)
class Steering:
    """Which rule steers the target, and how strongly."""

    rule: str = "linear"
    """'linear' adds α times the divergence; 'rank' suppresses the k tokens that p prefers most over q."""
    alpha: float = 1.0
    """Strength of the linear rule."""
    k: int = 20
    """How many tokens the rank rule suppresses."""
    fill: str = "hard"
    """What the rank rule sets a suppressed logit to: 'hard' −inf, 'soft' the k-th largest target logit."""
    vocabulary: tuple[int, ...] | None = None
    """Token ids that the rank rule may suppress, ascending; None means every token."""
    allow_negative: bool = False
    """Whether a negative α, which steers towards the forget set, is accepted."""

    def __post_init__(self) -> None:
        # jsonargparse and JSON give whatever a user wrote, so that types alone do not protect.
        if self.rule not in RULES:
            raise UsageError(f"unknown steering rule {self.rule!r}; {ACCEPTED}")
        if self.fill not in FILLS:
            raise UsageError(f"unknown fill {self.fill!r} of the rank rule; accepted: 'hard', 'soft'")
        if not isinstance(self.allow_negative, bool):
            raise UsageError(f"allow_negative is {self.allow_negative!r}; accepted: true, false")
        if not _is_number(self.alpha, numbers.Real):
            raise UsageError(f"alpha is {self.alpha!r}; accepted: a number")
        try:
            alpha = float(self.alpha)
        except OverflowError:
            alpha = math.inf
        if not abs(alpha) <= LARGEST_ALPHA:
            raise UsageError(f"alpha is {alpha:g}; accepted: a finite number, at most {LARGEST_ALPHA:g}")
        if alpha < 0 and not self.allow_negative:
            raise UsageError(
                f"alpha is {alpha:g}: a negative alpha steers towards the forget set; "
                "give allow_negative (--allow-negative on the command line) if that is meant"
            )
        if not _is_number(self.k, numbers.Integral) or self.k < 1:
            raise UsageError(f"k is {self.k!r}; accepted: a whole number of at least 1")
        object.__setattr__(self, "alpha", alpha)
        object.__setattr__(self, "k", int(self.k))
        if self.vocabulary is not None:
            object.__setattr__(self, "vocabulary", _token_ids(self.vocabulary))

    @classmethod
    def parse(cls, given: Any, *, allow_negative: bool = False) -> Steering:
        """Read a setting from a string ('linear:1.5', 'rank:20', 'rank:20:soft'), a mapping or a Steering.

        Raises:
            UsageError: the rule is unknown, its value is not a number or lies out of range.
        """
        if isinstance(given, Steering):
            return given
        if isinstance(given, Mapping):
            return cls.from_dict({**given, **({"allow_negative": True} if allow_negative else {})})
        if not isinstance(given, str):
            raise UsageError(f"steering is {given!r}; {ACCEPTED}")
        rule, *values = given.strip().split(":")
        if rule == "linear" and len(values) == 1:
            return cls(rule="linear", alpha=_number(values[0], given), allow_negative=allow_negative)
        if rule == "rank" and len(values) in (1, 2):
            fill = values[1] if len(values) == 2 else "hard"
            return cls(rule="rank", k=_whole_number(values[0], given), fill=fill)
        raise UsageError(f"steering is {given!r}; {ACCEPTED}")

    def revised(self, text: str, *, allow_negative: bool = False) -> Steering:
        """Another rule or strength, read from a string, with this setting's eligible vocabulary.

        Raises:
            UsageError: see `parse`.
        """
        return dataclasses.replace(Steering.parse(text, allow_negative=allow_negative), vocabulary=self.vocabulary)

    def __str__(self) -> str:
        if self.rule == "linear":
            return f"linear:{self.alpha:g}"
        return f"rank:{self.k}" + (":soft" if self.fill == "soft" else "")

    def to_dict(self) -> dict[str, Any]:
        """The setting as JSON values; the eligible vocabulary becomes a compressed bitmap."""
        fields = dataclasses.asdict(self)
        fields["vocabulary"] = None if self.vocabulary is None else _to_bitmap(self.vocabulary)
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Steering:
        """The inverse of `to_dict`; a vocabulary may also be a plain list of token ids.

        Raises:
            UsageError: a field is unknown or holds a value that is not accepted.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(map(str, set(fields) - known)):
            raise UsageError(f"steering has unknown fields {unknown}; accepted: {sorted(known)}")
        values = dict(fields)
        vocabulary = values.get("vocabulary")
        if isinstance(vocabulary, str):
            values["vocabulary"] = _from_bitmap(vocabulary)
        elif isinstance(vocabulary, list):
            values["vocabulary"] = tuple(vocabulary)
        return cls(**values)

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
        """The eligible vocabulary as a mask over token ids, or None where every token is eligible."""
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
        """Steer the target's logits by this rule; `eligible` is `self.eligible(vocab)`, made once by the caller.

        Raises:
            FailedClosed: a steered logit is NaN or +inf, or no token is left.
        """
        if eligible is None:
            eligible = self.eligible(target_logits.shape[-1])
        return next(sweep([self], target_logits, divergence, eligible))


def sweep(
    settings: Sequence[Steering],
    target_logits: Float[Tensor, "... vocab"],
    divergence: Float[Tensor, "... vocab"],
    eligible: Bool[Tensor, " vocab"] | None = None,
) -> Iterator[Float[Tensor, "... vocab"]]:
    """Steer by one setting after the other, as each would alone; those of the rank rule share one ordering.

    Args:
        settings: those of the rank rule all have one eligible vocabulary.
        target_logits: ℓ_P, of any floating dtype.
        divergence: ℓ_q − ℓ_p over the same vocabulary.
        eligible: that vocabulary as a mask, where there is one.

    Yields:
        Steered logits of each setting, in float32.

    Raises:
        FailedClosed: a steered logit is NaN or +inf, or no token is left.
    """
    ks = [setting.k for setting in settings if setting.rule == "rank"]
    ranking = _Ranking.of(target_logits, divergence, ks, eligible) if ks else None
    for setting in settings:
        if ranking is not None and setting.rule == "rank":
            steered = ranking.suppress(setting.k, setting.fill)
        else:
            steered = steer_linear(target_logits, divergence, setting.alpha)
        # The largest is NaN where any is. A choice among tokens that are all ruled out would be the first of them.
        check(steered.detach().amax(dim=-1).isfinite().all(), UNDEFINED)
        yield steered


def _is_number(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _token_ids(given: Any) -> tuple[int, ...]:
    listed = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)
    ids: list[Any] = list(given) if listed else []
    if not listed or not all(type(token) is int or _is_number(token, numbers.Integral) for token in ids):
        raise UsageError("the eligible vocabulary of the rank rule must be a bitmap or a list of token ids")
    if not ids or min(ids) < 0:
        raise UsageError("the eligible vocabulary of the rank rule must name at least one token id ≥ 0")
    return tuple(sorted({int(token) for token in ids}))


def _number(text: str, given: str) -> float:
    try:
        return float(text.replace("_", "?"))  # Python reads 1_5 as 15, which nobody means here
    except ValueError:
        raise UsageError(f"alpha in {given!r} is not a number; {ACCEPTED}") from None


def _whole_number(text: str, given: str) -> int:
    try:
        return int(text.replace("_", "?"))
    except ValueError:
        raise UsageError(f"k in {given!r} is not a whole number; {ACCEPTED}") from None


def _to_bitmap(ids: Iterable[int]) -> str:
    ids = list(ids)
    bits = bytearray(ids[-1] // 8 + 1)
    for token in ids:
        bits[token // 8] |= 1 << token % 8
    return base64.b64encode(zlib.compress(bytes(bits), 9)).decode()


def _from_bitmap(text: str) -> tuple[int, ...]:
    try:
        bits = zlib.decompress(base64.b64decode(text, validate=True))
    except (ValueError, zlib.error):
        raise UsageError("the eligible vocabulary of the rank rule is not a readable bitmap") from None
    return tuple(8 * place + bit for place, byte in enumerate(bits) for bit in range(8) if byte >> bit & 1)
