"""Registry of unlearning methods; free of torch, so that listing them is instant."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from divdec.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from divdec.research.baselines.job import Job


@dataclasses.dataclass(frozen=True)
class BuiltModel:
    """A model that a method has written."""

    folder: Path
    """Folder that `AutoModelForCausalLM.from_pretrained` loads."""
    seconds: float | None
    """Training time, whether spent now or by the run that filled the work folder; None where it is unknown."""
    notes: tuple[str, ...] = ()
    """Remarks for readers of the model's figures."""


@dataclasses.dataclass(frozen=True)
class Method:
    """An unlearning method."""

    name: str
    """Name on the command line: 'npo'."""
    title: str
    """Name in the paper's table: 'NPO'."""
    kind: Literal["gradient", "inference"]
    """'gradient' writes an ordinary checkpoint; 'inference' leaves the target's weights and wraps it."""
    settings: type
    """A frozen dataclass of its options; every option has a default."""
    source: str
    """Authors, year, title and section or equation."""
    summary: str
    """One line for the list of methods."""
    build: Callable[[Job, Any, Path], BuiltModel]
    """Trains or wraps `job.target`: `build(job, settings, output)` writes model and tokenizer into the empty folder
    `output`. Composites load after `import divdec.research.baselines.auto`."""


_METHODS: dict[str, Method] = {}


def register(method: Method) -> None:
    """Add a method to the registry."""
    _METHODS[method.name] = method


def methods() -> dict[str, Method]:
    """All methods by name, gradient methods first."""
    return dict(_METHODS)


def find(name: str) -> Method:
    """Look a method up by its name.

    Raises:
        UsageError: there is none; the known names are listed.
    """
    if name not in _METHODS:
        raise UsageError(f"method {name!r} is not known; there are: {', '.join(_METHODS)}")
    return _METHODS[name]


def method_of(settings: Any) -> Method:
    """Look a method up by an instance of its settings."""
    return next(method for method in _METHODS.values() if method.settings is type(settings))
