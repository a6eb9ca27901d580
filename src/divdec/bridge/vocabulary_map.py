"""For every token of the target's vocabulary, the auxiliary token that its divergence is taken from.

One source each, so that the map is applied as a single gather. It knows tokens only as bytes.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import hashlib
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from divdec.runs import write_durably

NONE, EXACT, PREFIX, EXTENSION = range(4)
KINDS = ("none", "exact", "prefix", "extension")
_FORMAT = 2  # part of the cache file's name: raise it when the rule changes

Tokens = Sequence[bytes | None]


@dataclasses.dataclass(frozen=True)
class Coverage:
    """Shares of the target's tokens by how their divergence is found."""

    exact: float
    """An auxiliary token has the same bytes."""
    prefix: float
    """The longest auxiliary token that the target's begins with stands in."""
    extension: float
    """The shortest auxiliary token that begins with the target's stands in."""
    none: float
    """Nothing fits: special tokens, padding of the vocabulary, bytes that the auxiliary does not know."""

    def __str__(self) -> str:
        return (
            f"exact {self.exact:.1%}, by prefix {self.prefix:.1%}, by extension {self.extension:.1%}, "
            f"not steered {self.none:.1%}"
        )


@dataclasses.dataclass(frozen=True)
class VocabularyMap:
    """`source[t]` is the auxiliary token that stands for target token t, −1 where none does; `kind[t]` says why."""

    source: np.ndarray
    kind: np.ndarray

    @classmethod
    def build(cls, target: Tokens, auxiliary: Tokens, width: int | None = None) -> VocabularyMap:
        """Find the source of each target token: same bytes, else the longest prefix, else the shortest extension.

        Args:
            target: bytes of the target's tokens; None for tokens that are never steered.
            auxiliary: bytes of the auxiliary's tokens; the lowest id counts where several have the same.
            width: number of entries, where the target gives more logits than it has tokens.
        """
        place_of = _places(auxiliary)
        ordered = sorted(place_of)
        longest = max(map(len, ordered), default=0)
        width = len(target) if width is None else width
        source, kind = np.full(width, -1, np.int64), np.full(width, NONE, np.int8)
        for token, text in enumerate(target[:width]):
            if not text:
                continue
            for length in range(min(len(text), longest), 0, -1):
                if (place := place_of.get(text[:length])) is not None:
                    source[token], kind[token] = place, EXACT if length == len(text) else PREFIX
                    break
            else:
                if (place := _shortest_extension(text, ordered, place_of)) is not None:
                    source[token], kind[token] = place, EXTENSION
        return cls(source, kind)

    def coverage(self) -> Coverage:
        """Shares of the vocabulary."""
        return _shares(self.kind)

    def coverage_of(self, ids: Iterable[int]) -> Coverage:
        """Shares of a text, given as the target's token ids."""
        return _shares(self.kind[np.fromiter(ids, np.int64)])


def cached(
    name: str, folder: Path, build: Callable[[], VocabularyMap], width: int | None = None, sources: int | None = None
) -> VocabularyMap:
    """The map kept under this name, built where there is none that can be read.

    Args:
        name: what it is kept under.
        folder: where; a folder that cannot be written to keeps nothing.
        build: makes it.
        width: number of entries that it must have.
        sources: number of tokens that its entries may name.
    """
    path = folder / f"{name}.npz"
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as content:
            found = VocabularyMap(content["source"], content["kind"])
            checksum = str(content["checksum"])
        if checksum == _checksum(name, found) and _fits(found, width, sources):
            return found
    except Exception:
        pass  # absent or damaged; a damaged archive raises whatever it likes
    built = build()
    with contextlib.suppress(OSError):
        _keep(name, path, built)
    return built


def _keep(name: str, path: Path, built: VocabularyMap) -> None:
    content = io.BytesIO()
    np.savez(content, source=built.source, kind=built.kind, checksum=np.array(_checksum(name, built)))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, content.getvalue())


def _fits(found: VocabularyMap, width: int | None, sources: int | None) -> bool:
    if found.source.ndim != 1 or found.source.shape != found.kind.shape:
        return False
    if found.source.dtype != np.int64 or found.kind.dtype != np.int8 or found.source.min(initial=0) < -1:
        return False
    return width in (None, len(found.source)) and (sources is None or found.source.max(initial=-1) < sources)


def map_name(target: Any, auxiliary: Any, *settings: object) -> str:
    """What a map of two tokenizers is kept under."""
    told = [_FORMAT, target.backend_tokenizer.to_str(), auxiliary.backend_tokenizer.to_str()]
    told += [sorted(getattr(tokenizer, "all_special_ids", ())) for tokenizer in (target, auxiliary)]
    return hashlib.sha256(repr([*told, *settings]).encode()).hexdigest()[:32]


class HealingMaps:
    """Which auxiliary tokens go on with a token that has begun, and which target tokens each of them stands for."""

    def __init__(self, target: Tokens, auxiliary: Tokens, width: int, kept: int = 256) -> None:
        self._place_of = _places(auxiliary)
        self._ordered = sorted(self._place_of)
        pairs = sorted((text, token) for token, text in enumerate(target[:width]) if text)
        self._texts = [text for text, _ in pairs]
        self._tokens = np.array([token for _, token in pairs], np.int64)
        self._width = width
        self.of = functools.lru_cache(maxsize=kept)(self._of)
        self.open = functools.lru_cache(maxsize=1 << 16)(self._open)

    def _open(self, pending: bytes) -> bool:
        """Whether a longer auxiliary token begins with these bytes."""
        place = bisect.bisect_right(self._ordered, pending)
        return place < len(self._ordered) and self._ordered[place].startswith(pending)

    def _of(self, pending: bytes) -> np.ndarray:
        """Each target token's source among the auxiliary tokens that go on from these bytes; −1 where none does."""
        going_on = _range(self._ordered, pending)
        candidates = [text for text in self._ordered[slice(*going_on)] if len(text) > len(pending)]
        ranked = np.full(len(self._texts), -1, np.int64)
        # A longer continuation fits better and overwrites a shorter one; tokens that share a prefix lie side by side.
        for text in sorted(candidates, key=len):
            start, stop = _range(self._texts, text[len(pending) :])
            ranked[start:stop] = self._place_of[text]
        source = np.full(self._width, -1, np.int64)
        source[self._tokens] = ranked
        return source


def _places(tokens: Tokens) -> dict[bytes, int]:
    found: dict[bytes, int] = {}
    for place, text in enumerate(tokens):
        if text:
            found.setdefault(text, place)
    return found


def _shortest_extension(text: bytes, ordered: list[bytes], place_of: dict[bytes, int]) -> int | None:
    start, stop = _range(ordered, text)
    candidates = ((len(longer), place_of[longer]) for longer in ordered[start:stop])
    return min(candidates, default=(0, None))[1]


def _range(ordered: list[bytes], prefix: bytes) -> tuple[int, int]:
    """Where the strings that begin with a prefix lie."""
    start = bisect.bisect_left(ordered, prefix)
    stripped = prefix.rstrip(b"\xff")
    if not stripped:
        return start, len(ordered)
    return start, bisect.bisect_left(ordered, stripped[:-1] + bytes([stripped[-1] + 1]), start)


def _shares(kind: np.ndarray) -> Coverage:
    counts = np.bincount(kind, minlength=len(KINDS)) / max(len(kind), 1)
    return Coverage(**{name: float(counts[place]) for place, name in enumerate(KINDS)})


def _checksum(name: str, found: VocabularyMap) -> str:
    return hashlib.sha256(name.encode() + found.source.tobytes() + found.kind.tobytes()).hexdigest()
