"""A registry of named entries; free of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from divdec.errors import UsageError

T = TypeVar("T")


class NameRegistry(dict[str, T]):
    """Entries by name, in the order of their registration."""

    def __init__(self, noun: str, entries: Iterable[tuple[str, T]] = ()) -> None:
        super().__init__(entries)
        self.noun = noun
        """Kind of an entry, for errors."""

    def find(self, name: str) -> T:
        """Return an entry.

        Raises:
            UsageError: there is none; the known names are listed.
        """
        if name not in self:
            raise UsageError(f"{self.noun} {name!r} is not known; there are: {', '.join(self)}")
        return self[name]

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers what it decorates, and leaves it unchanged."""

        def add(entry: T) -> T:
            self[name] = entry
            return entry

        return add
