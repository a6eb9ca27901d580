"""Takedown requests: a registry of texts that a model shall not repeat, and the correction of its logits.

Importing the package loads no torch, and lets bundles name a registry.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from divdec.experts.correction import register_registry

if TYPE_CHECKING:
    from divdec.takedowns.correction import TakedownCorrection


def open_correction(folder: Path) -> TakedownCorrection:
    """Open a registry as a correction of the target's logits; see `TakedownCorrection`."""
    from divdec.takedowns.correction import TakedownCorrection

    return TakedownCorrection(folder)


register_registry(open_correction)
