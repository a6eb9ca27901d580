"""The methods by name. It knows nothing of torch, so that listing them is instant."""

from __future__ import annotations

from divdec.errors import UsageError
from divdec.research.baselines.gradient_settings import GRADIENT_METHODS
from divdec.research.baselines.inference_settings import INFERENCE_METHODS
from divdec.research.baselines.method import Method


def methods() -> dict[str, Method]:
    """All methods by name, gradient methods first."""
    return {method.name: method for method in (*GRADIENT_METHODS, *INFERENCE_METHODS)}


def find(name: str) -> Method:
    """A method by its name.

    Raises:
        UsageError: there is none; the known are listed.
    """
    known = methods()
    if name not in known:
        raise UsageError(f"method {name!r} is not known; there are: {', '.join(known)}")
    return known[name]
