"""Stop rather than answer: what must hold of the numbers that an answer is made of."""

from __future__ import annotations

import threading

import torch
from jaxtyping import Bool
from torch import Tensor

from divdec.errors import FailedClosed

_thread = threading.local()


def check(holds: Bool[Tensor, ""], message: str) -> None:
    """Go on only if it holds; on a GPU this is found out at its next synchronisation instead of forcing one.

    Raises:
        FailedClosed: it does not hold. On a GPU, unless this thread waits: a RuntimeError of the next call that waits
            for the device, which is of no use to this process any longer.
    """
    if holds.device.type == "cuda" and not getattr(_thread, "waits", False):
        torch._assert_async(holds, message)
    elif not holds:
        raise FailedClosed(message)


def wait_for_checks() -> None:
    """Let this thread wait for the device at each check, for who must answer others after one has failed."""
    _thread.waits = True
