"""What the experts say after a growing, sometimes shortened, sequence of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from divdec.errors import UsageError
from divdec.experts.protocol import Experts
from divdec.experts.shifting import can_roll_back
from divdec.model.checks import check_divergence, positions_of
from divdec.steering import Steering
from divdec.takedowns.correction import TakedownCorrection


class Context:
    """One sequence and the experts' cache for it."""

    def __init__(
        self,
        experts: Experts,
        steering: Steering,
        width: int,
        size: int,
        longest: int | None = None,
        takedowns: TakedownCorrection | None = None,
    ) -> None:
        """Begin with no token.

        Args:
            experts: what gives the divergence.
            steering: the rule.
            width: of the vocabulary that is steered, which may hold more than tokens.
            size: how many tokens the provider's tokenizer has, at most `width`.
            longest: most tokens that the experts can read.
            takedowns: a registry to follow, as it is now.
        """
        self._takedowns = takedowns
        self._taken_down = None if takedowns is None else takedowns.new_cache()
        self._experts, self._steering, self._longest = experts, steering, longest
        self._width, self._size = width, size
        self._eligible = steering.eligible(width)
        self._cache = experts.new_cache()
        self._ids: list[int] = []

    @torch.inference_mode()
    def wanted(self, ids: Sequence[int], last: int = 1) -> Float[Tensor, "last vocab"]:
        """What the rule wants added to the target's logits after each of the last tokens, in float64.

        Args:
            ids: the whole sequence.
            last: how many positions, counted from the end.

        Raises:
            UsageError: the sequence is longer than the experts can read.
            FailedClosed: the divergence is not finite.
        """
        if self._longest is not None and len(ids) > self._longest:
            raise UsageError(f"{len(ids)} tokens are too many for {self._longest} positions of the auxiliaries")
        same = next((place for place, pair in enumerate(zip(ids, self._ids, strict=False)) if pair[0] != pair[1]), None)
        keep = min(len(ids) - last, len(self._ids) if same is None else same)
        self._keep(keep)
        given = torch.tensor([list(ids[keep:])])
        self._ids = list(ids)
        divergence = self._experts.divergence(given, None, positions_of(given, None, keep), self._cache, last)
        divergence = divergence[0, :, : self._width].cpu()
        check_divergence(divergence)
        correction = torch.zeros_like(divergence)
        if self._takedowns is not None:
            correction = self._takedowns.correction(given, None, self._taken_down, last)[0, :, : self._width].cpu()
            check_divergence(correction)
        return self._steering.apply(correction, divergence, self._eligible)[:, : self._size].double()

    def _keep(self, length: int) -> None:
        removed = len(self._ids) - length
        if removed and self._taken_down is not None:
            self._taken_down.crop(-removed)
        if removed:
            if all(map(can_roll_back, self._cache.layers)):
                self._cache.crop(-removed)
            else:  # a sliding window or a recurrent state: all is read anew
                self._cache = self._experts.new_cache()
                if length:
                    kept = torch.tensor([self._ids[:length]])
                    self._experts.divergence(kept, None, positions_of(kept, None, 0), self._cache, 1)
        self._ids = self._ids[:length]
