"""Registry of the other unlearning methods. Free of torch at import.

`divdec baseline list` and every `--help` read the methods' files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from divdec_research.baselines.annotations import Job
from divdec_research.baselines.decoding import CompositeDecoding
from divdec_research.baselines.objective import TargetObjective
from divdec_research.baselines.settings import BaselineSettings, HelpedSettings


@dataclasses.dataclass(frozen=True)
class BuiltModel:
    """A model that a method has written."""

    folder: Path
    """Folder that `AutoModelForCausalLM.from_pretrained` loads."""
    seconds: float | None = None
    """Training time in seconds, including earlier runs in the work folder; None if unknown."""
    notes: tuple[str, ...] = ()
    """Notes to show with the model's results."""


@dataclasses.dataclass(frozen=True)
class Method:
    """An unlearning method: either an objective that trains the target, or a function that wraps or changes it."""

    title: str
    """Name in the paper's table: 'NPO'."""
    settings: type
    """A frozen dataclass of its options; every option has a default."""
    source: str
    """Authors, year, title and section or equation."""
    summary: str
    """One line for the list of methods."""
    objective: type[TargetObjective] | None = None
    """The loss that trains the target's weights."""
    build: Callable[[Job, Any, Path], BuiltModel] | None = None
    """Writes the model into an empty folder, for methods without `objective`; takes an instance of `settings`."""
    decoding: type[CompositeDecoding] | None = None
    """Computes the logits of the composite that `build` writes, if it writes one."""

    @property
    def name(self) -> str:
        """Name on the command line, 'npo': the key in `METHODS`."""
        return next(name for name, method in METHODS.items() if method is self)

    @property
    def kind(self) -> Literal["gradient", "inference"]:
        """'gradient' trains the target with `objective`; 'inference' wraps or changes it with `build`."""
        return "inference" if self.objective is None else "gradient"

    @property
    def run_settings(self) -> type[BaselineSettings]:
        """Class of the run's options beside `settings`."""
        return HelpedSettings if self.kind == "inference" else BaselineSettings


METHODS: dict[str, Method] = {}
"""The methods by name; each method's file adds its entry."""


def method_of(settings: Any) -> Method:
    """Return the method of an instance of its settings."""
    return next(method for method in METHODS.values() if method.settings is type(settings))
