"""Steering by many settings at once: the rank settings of a sweep share one sorted divergence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxtyping import Bool, Float
from torch import Tensor

from divdec.steering import Steering, check_k, mask_ineligible


def sweep(
    settings: Sequence[Steering],
    target_logits: Float[Tensor, "... vocab"],
    divergence: Float[Tensor, "... vocab"],
    eligible: Bool[Tensor, " vocab"] | None = None,
) -> Iterator[Float[Tensor, "... vocab"]]:
    """Yield the steered logits of each setting, in float32; equal to `setting.apply` of each.

    Args:
        settings: all rank settings have the same eligible vocabulary.
        target_logits: ℓ_P, of any floating dtype.
        divergence: ℓ_q − ℓ_p over the same vocabulary.
        eligible: the eligible vocabulary as a mask; None for all tokens.

    Raises:
        FailedClosed: a steered logit is NaN or +inf, or every token is excluded.
    """
    target_logits, divergence = target_logits.float(), divergence.float()
    rank = [setting for setting in settings if setting.rule == "rank"]
    smallest, largest = None, None
    if rank:
        for setting in rank:
            check_k(setting.k, target_logits.shape[-1] if eligible is None else int(eligible.sum()))
        most = max(setting.k for setting in rank)
        smallest = mask_ineligible(divergence, eligible).topk(most + 1, dim=-1, largest=False).values
        if any(setting.fill == "soft" for setting in rank):
            largest = target_logits.topk(most, dim=-1).values
    for setting in settings:
        yield setting.apply(target_logits, divergence, eligible, smallest=smallest, largest=largest)
