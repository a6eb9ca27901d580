"""Stop rather than answer: what must hold of the numbers that an answer is made of."""

from __future__ import annotations

import torch
from jaxtyping import Bool
from torch import Tensor

from divdec.errors import FailedClosed


def check(holds: Bool[Tensor, ""], message: str) -> None:
    """Go on only if it holds; on a GPU this is found out at its next synchronisation instead of forcing one.

    Raises:
        FailedClosed: it does not hold. On a GPU: a RuntimeError of the next call that waits for the device.
    """
    if holds.device.type == "cuda":
        torch._assert_async(holds, message)
    elif not holds:
        raise FailedClosed(message)
