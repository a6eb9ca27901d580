"""Fail closed: stop with an error instead of answering from invalid numbers."""

from __future__ import annotations

import threading

import torch
from jaxtyping import Bool
from torch import Tensor

from divdec.errors import FailedClosed

_thread = threading.local()


def check(condition: Bool[Tensor, ""], message: str) -> None:
    """Raise an error if the condition is false. On a GPU this does not force a synchronisation.

    Raises:
        FailedClosed: the condition is false. On a GPU the error is a RuntimeError at the next synchronisation, after
            which the process cannot use the device; `wait_for_checks` makes it immediate.
    """
    if condition.device.type == "cuda" and not getattr(_thread, "waits", False):
        torch._assert_async(condition, message)
    elif not condition:
        raise FailedClosed(message)


def wait_for_checks() -> None:
    """Synchronise this thread with the GPU at each check, so that it can continue after a failed check."""
    _thread.waits = True
