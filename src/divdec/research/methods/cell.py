"""A cell of the grid: a method under one setting. It knows nothing of torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divdec.runs import settings_hash

if TYPE_CHECKING:
    from divdec.research.methods.arena import Arena


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is made and measured at once."""

    method: str
    """A baseline, 'linear', 'rank' or 'distill', or one of the references."""
    options: tuple[tuple[str, Any], ...] = ()
    """Settings that differ from the method's own defaults."""
    steering: str | None = None
    """The rule, for 'linear' and 'rank'."""
    constant: tuple[tuple[str, Any], ...] = ()
    """Further settings that differ from the defaults, but not from cell to cell: tables leave them out."""

    @property
    def settings(self) -> dict[str, Any]:
        """All that differs from the method's defaults."""
        return dict((*self.options, *self.constant))

    @property
    def label(self) -> str:
        """The setting as tables show it."""
        if self.steering is not None:
            return self.steering
        return ", ".join(f"{name} {_short(value)}" for name, value in self.options)

    @property
    def folder(self) -> Path:
        """Where its results lie, within a seed's folder."""
        setting = self.label.replace(", ", "_").replace(" ", "-").replace(":", "-").replace("/", "-") or "default"
        # Other grids may hold other things constant.
        return Path(self.method) / (f"{setting}-{settings_hash(self.constant)[:4]}" if self.constant else setting)

    def fingerprint(self, arena: Arena) -> str:
        """Changes with all that decides the cell's figures, apart from the code."""
        return settings_hash([self.method, self.options, self.constant, self.steering, arena.identity])


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
