"""Token ids as numbers of ±1, which every floating dtype holds exactly, and back. It knows nothing of vLLM."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from divdec.experts.token_cache import PADDING
from divdec.fail_closed import check

TOLERANCE = 0.1  # of a bit read back, which is ±1
# What stands in front of the codes of a token. vLLM tries its sampler on random numbers from [0, 1] before it serves.
GENUINE, TRIAL = 2.0, 0.5


def bits_for(numbers: int) -> int:
    """How many bits tell so many numbers from 0 apart."""
    return max(numbers - 1, 1).bit_length()


def encode(numbers: Int[Tensor, "*shape"], bits: int, dtype: torch.dtype) -> Float[Tensor, "*shape {bits}"]:
    """The binary code of each number, the lowest bit first, as ±1."""
    places = torch.arange(bits, device=numbers.device)
    return (((numbers[..., None] >> places) & 1) * 2 - 1).to(dtype)


class ContextReader:
    """Reads contexts out of codes; rows on which the engine tries its sampler are let pass until it serves."""

    def __init__(self, length: int) -> None:
        """Begin before the engine serves; `length` is how many tokens a context has."""
        self.length = length
        self._serves: Bool[Tensor, ""] | None = None

    def __call__(self, codes: Float[Tensor, "rows width"]) -> Int[Tensor, "rows length"]:
        """The contexts of these rows: see `contexts`.

        Raises:
            FailedClosed: what was read back is no code, or is a trial although real tokens have come before, whose
                answer would be that of n-grams without a context.
        """
        found = contexts(codes, self.length)
        trials = _is_trial(codes).any()
        # Kept on the device: to look at it would be to wait for it.
        serves = torch.zeros_like(trials) if self._serves is None else self._serves.to(trials.device)
        self._serves = serves | ~_is_trial(codes).all()
        check(~(trials & self._serves), "the memory of the last tokens was not written; nothing is answered unsteered")
        return found


def contexts(codes: Float[Tensor, "rows width"], length: int) -> Int[Tensor, "rows length"]:
    """The last tokens at each row, oldest first; −1 where a sequence has not so many, and in a trial.

    Args:
        codes: a mark, for each of `length` − 1 steps back whether there is a token (±1), then the code of each token,
            the current one first.
        length: how many tokens a context has.

    Raises:
        FailedClosed: what was read back is no code. Nothing may be answered then.
    """
    mark, exists = codes[:, 0], codes[:, 1:length] > 0
    exists = torch.cat([torch.ones_like(mark[:, None], dtype=torch.bool), exists], dim=1)
    bits = codes[:, length:].reshape(len(codes), length, -1)
    legible = ((bits.abs() - 1).abs() < TOLERANCE).all(dim=-1) | ~exists
    trial = _is_trial(codes)
    holds = trial | ((mark == GENUINE) & legible.all(dim=-1))
    check(holds.all(), "the memory of the last tokens cannot be read; nothing is answered unsteered")
    powers = 2 ** torch.arange(bits.shape[-1], device=codes.device)
    ids = ((bits > 0) * powers).sum(dim=-1)
    return ids.masked_fill(~exists | trial[:, None], PADDING).flip(1)


def _is_trial(codes: Float[Tensor, "rows width"]) -> Bool[Tensor, " rows"]:
    return (codes[:, 0] >= 0) & (codes[:, 0] <= 1)
