"""Experts give a divergence over the target's vocabulary; `protocol.py` says how.

Importing the room loads no torch: counts of n-grams and a registry's log are read without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from divdec.experts.protocol import Experts

__all__ = ["Experts"]


def __getattr__(name: str) -> Any:
    if name == "Experts":
        return importlib.import_module("divdec.experts.protocol").Experts
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
