"""What an unlearning method is called, where it comes from and how it is made. It knows nothing of torch."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pathlib import Path

    from divdec.research.baselines.job import Job


@dataclasses.dataclass(frozen=True)
class Method:
    """An unlearning method: what it is called, where it comes from, and how it is made."""

    name: str
    """As on the command line: 'npo'."""
    title: str
    """As in the paper's table: 'NPO'."""
    kind: Literal["gradient", "inference"]
    """'gradient' gives an ordinary checkpoint; 'inference' leaves the target's weights and wraps it."""
    settings: type
    """A frozen dataclass of its options, every one with a default and a docstring."""
    source: str
    """Authors, year, title and section or equation."""
    summary: str
    """One line for the list."""
    builder: str
    """'module:function' that makes it: `function(job, settings, output) -> Made`."""

    def make(self, job: Job, settings: Any, output: Path) -> Made:
        """Train or wrap, and write what `AutoModelForCausalLM.from_pretrained` loads after `import divdec`.

        Args:
            job: target and data.
            settings: an instance of `self.settings`.
            output: an empty folder that exists; tokenizer included in what is written.
        """
        module, _, function = self.builder.partition(":")
        build: Callable[[Any, Any, Any], Made] = getattr(importlib.import_module(module), function)
        return build(job, settings, output)


@dataclasses.dataclass(frozen=True)
class Made:
    """What making a method cost."""

    seconds: float
    """Of training, whether it was done now or taken from the work folder."""
    notes: tuple[str, ...] = ()
    """What a reader of its figures has to know."""
