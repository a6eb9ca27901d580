"""Map of the target's vocabulary to the auxiliaries', and the divergence that is gathered through it.

Each target token has at most one source token, so a divergence is mapped with a single gather.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from divdec.bridge.alignment import AuxiliaryInput
from divdec.bridge.auxiliary_tokenizer import AuxiliaryTokenizer
from divdec.bridge.token_bytes import describe_tokenizer, flatten_components
from divdec.errors import UsageError

NONE, EXACT, PREFIX, EXTENSION = range(4)
_KINDS = ("none", "exact", "prefix", "extension")
_MIN_COVERAGE = 0.5
# Normalizers that change characters, not words: a target token can be looked up in its normalized form.
_CHARACTER_NORMALIZERS = frozenset(("Lowercase", "StripAccents", "BertNormalizer", "NFC", "NFKC"))

TokenBytes = Sequence[bytes | None]


@dataclasses.dataclass(frozen=True)
class Coverage:
    """Shares of the target's tokens by how their source is found."""

    exact: float
    """The source has the same bytes."""
    prefix: float
    """The source is the longest auxiliary token that the target's token begins with."""
    extension: float
    """The source is the shortest auxiliary token that begins with the target's token."""
    none: float
    """No source, not steered: special tokens, padding of the vocabulary, bytes that the auxiliaries lack."""


@dataclasses.dataclass(frozen=True)
class VocabularyMap:
    """`source[t]` is the auxiliary token of target token t, −1 if it has none; `kind[t]` says how it was found."""

    source: np.ndarray
    kind: np.ndarray

    @classmethod
    def build(cls, target: TokenBytes, auxiliary: TokenBytes, width: int) -> VocabularyMap:
        """Find the source of each target token: same bytes, else the longest prefix, else the shortest extension.

        Args:
            target: bytes of the target's tokens; None for tokens that are never steered.
            auxiliary: bytes of the auxiliaries' tokens; the lowest id is used if several have the same bytes.
            width: number of entries: the number of the target's logits.
        """
        ids = _first_ids(auxiliary)
        ordered = sorted(ids)
        longest = max(map(len, ordered), default=0)
        source, kind = np.full(width, -1, np.int64), np.full(width, NONE, np.int8)
        for token, text in enumerate(target[:width]):
            if not text:
                continue
            for length in range(min(len(text), longest), 0, -1):
                if (index := ids.get(text[:length])) is not None:
                    source[token], kind[token] = index, EXACT if length == len(text) else PREFIX
                    break
            else:
                start, stop = _prefix_range(ordered, text)
                if extensions := [(len(longer), ids[longer]) for longer in ordered[start:stop]]:
                    source[token], kind[token] = min(extensions)[1], EXTENSION
        return cls(source, kind)

    def coverage(self, ids: Sequence[int] | None = None) -> Coverage:
        """Return the shares of a text, given as the target's token ids, or of the vocabulary."""
        kind = self.kind if ids is None else self.kind[np.array(ids, np.int64)]
        counts = np.bincount(kind, minlength=len(_KINDS)) / max(len(kind), 1)
        return Coverage(**{name: float(counts[index]) for index, name in enumerate(_KINDS)})


class TokenHealingMaps:
    """Sources of the target's tokens among the auxiliary tokens that extend the last token read.

    Args:
        target: bytes of the target's tokens.
        auxiliary: bytes of the auxiliaries' tokens.
        width: number of the target's logits.
    """

    def __init__(self, target: TokenBytes, auxiliary: TokenBytes, width: int) -> None:
        self._ids = _first_ids(auxiliary)
        self._ordered = sorted(self._ids)
        pairs = sorted((text, token) for token, text in enumerate(target[:width]) if text)
        self._texts = [text for text, _ in pairs]
        self._tokens = np.array([token for _, token in pairs], np.int64)
        self._width = width
        self.source_of = functools.lru_cache(maxsize=256)(self._source_of)
        self.has_extension = functools.lru_cache(maxsize=1 << 16)(self._has_extension)

    def _has_extension(self, last: bytes) -> bool:
        """Whether a longer auxiliary token begins with these bytes."""
        index = bisect.bisect_right(self._ordered, last)
        return index < len(self._ordered) and self._ordered[index].startswith(last)

    def _source_of(self, last: bytes) -> np.ndarray:
        """Return each target token's source among the auxiliary tokens that begin with `last`, −1 where none fits."""
        start, stop = _prefix_range(self._ordered, last)
        extensions = [text for text in self._ordered[start:stop] if len(text) > len(last)]
        sources = np.full(len(self._texts), -1, np.int64)
        # Target tokens with a common prefix are adjacent. The longest extension fits best, so it is written last.
        for text in sorted(extensions, key=len):
            start, stop = _prefix_range(self._texts, text[len(last) :])
            sources[start:stop] = self._ids[text]
        result = np.full(self._width, -1, np.int64)
        result[self._tokens] = sources
        return result


class DivergenceMapper:
    """Divergence over the target's vocabulary from the auxiliaries' logits over their own.

    The divergence is centered on its median, so that a token that neither auxiliary prefers has divergence 0. A target
    token without a source also has divergence 0.

    Args:
        target_bytes: bytes of the target's tokens.
        auxiliary: the auxiliaries' tokenizer.
        width: number of the target's logits.

    Raises:
        UsageError: less than half of the target's vocabulary has a source.
    """

    def __init__(self, target_bytes: TokenBytes, auxiliary: AuxiliaryTokenizer, width: int) -> None:
        self._bytes, self._auxiliary, self._width = target_bytes, auxiliary, width
        self._maps: dict[tuple[bool, bool], VocabularyMap] = {}
        self._sources: dict[tuple[bool, bool], Tensor] = {}
        self._text_tokens = torch.tensor([index for index, text in enumerate(auxiliary.bytes) if text is not None])
        # A token without a source is never steered: with most of them unsteered, nothing would be unlearned.
        text = np.array([text is not None for text in target_bytes][:width])
        kind = self.map().kind[: len(text)][text]
        covered = float(np.isin(kind, (EXACT, PREFIX)).mean()) if len(kind) else 0.0
        if covered < _MIN_COVERAGE:
            raise UsageError(
                f"the auxiliaries' tokenizer has tokens for {covered:.0%} of the target's vocabulary, at least "
                f"{_MIN_COVERAGE:.0%} are needed: the rest would not be steered"
            )

    def map(self, strip_space: bool = False, add_space: bool = False) -> VocabularyMap:
        """Return the map for a position within a text, or at the beginning of a text.

        Args:
            strip_space: the target's next token has a leading space that is not part of the text.
            add_space: the auxiliaries' next token has one.
        """
        key = (strip_space, add_space)
        if key not in self._maps:
            texts = [_at_beginning(text, *key) for text in self._normalized_bytes]
            self._maps[key] = VocabularyMap.build(texts, self._auxiliary.written_bytes, self._width)
        return self._maps[key]

    def divergence(
        self,
        retain: Float[Tensor, "inputs last width"],
        forget: Float[Tensor, "inputs last width"],
        inputs: Sequence[AuxiliaryInput],
        token_healing: bool,
    ) -> Float[Tensor, "inputs vocab"]:
        """Return ℓ_q − ℓ_p over the target's vocabulary after each input; NaN where an auxiliary is not finite.

        Args:
            retain: the retain auxiliary's logits after the last token and, with token healing, before it.
            forget: those of the forget auxiliary.
            inputs: what the auxiliaries have read.
            token_healing: use the divergence before the last token for target tokens that could extend it.
        """
        retain, forget = retain.float(), forget.to(retain.device).float()
        width = min(retain.shape[-1], forget.shape[-1])
        retain, forget = retain[..., :width], forget[..., :width]
        self._text_tokens = self._text_tokens.to(retain.device)
        finite = self._is_finite(retain[:, -1]) & self._is_finite(forget[:, -1])
        difference = retain[:, -1] - forget[:, -1]
        centered = difference - difference[:, self._text_tokens].median(dim=-1, keepdim=True).values
        result = centered.new_empty(len(inputs), self._width)
        keys = [(one.target_strips_space, one.auxiliary_adds_space) for one in inputs]
        for key in set(keys):
            rows = [row for row, own in enumerate(keys) if own == key]
            result[rows] = self._gather(centered[rows], key)
        if token_healing:
            for row, one in enumerate(inputs):
                if len(one.ids) > 1 and one.is_open:
                    self._heal(result[row], finite, row, one.ids[-1], retain[row, 0], forget[row, 0])
        # A gather may drop a value that is not finite. NaN makes the steered model raise an error.
        return result.masked_fill(~finite[:, None], torch.nan)

    def _is_finite(self, logits: Float[Tensor, "inputs width"]) -> Bool[Tensor, " inputs"]:
        """Whether all logits are finite; −inf is accepted for tokens without text, which a model may rule out."""
        ruled_out = logits.isneginf()
        ruled_out[:, self._text_tokens] = False
        return (logits.isfinite() | ruled_out).all(-1)

    def _gather(self, values: Float[Tensor, "inputs width"], key: tuple[bool, bool]) -> Float[Tensor, "inputs vocab"]:
        source = self._sources.get(key)
        if source is None or source.device != values.device:
            source = self._sources[key] = torch.from_numpy(self.map(*key).source).to(values.device)
        return values[:, source.clamp(min=0)].masked_fill(source < 0, 0.0)

    def _heal(
        self,
        result: Float[Tensor, " vocab"],
        finite: Bool[Tensor, " inputs"],
        row: int,
        last: int,
        retain: Float[Tensor, " width"],
        forget: Float[Tensor, " width"],
    ) -> None:
        """Use the divergence before the last token for target tokens that could extend it, in place.

        It is relative to the divergence of the last token itself. Normalizing over the tokens that begin with the last
        one would shift all of them equally and cancels in the difference.
        """
        text = self._auxiliary.bytes[last] if last < len(self._auxiliary.bytes) else None
        if text is None or not self._healing_maps.has_extension(text):
            return
        finite[row] &= bool((self._is_finite(retain[None]) & self._is_finite(forget[None])).all())
        source = torch.from_numpy(self._healing_maps.source_of(text)).to(result.device)
        before = retain - forget
        extends = source >= 0
        result[extends] = (before[source[extends]] - before[last]).to(result.device)

    @functools.cached_property
    def _healing_maps(self) -> TokenHealingMaps:
        return TokenHealingMaps(self._normalized_bytes, self._auxiliary.written_bytes, self._width)

    @functools.cached_property
    def _normalized_bytes(self) -> TokenBytes:
        """Bytes of the target's tokens as the auxiliaries' tokenizer would normalize them."""
        normalizers = flatten_components(describe_tokenizer(self._auxiliary.tokenizer)["normalizer"], "normalizers")
        known = bool(normalizers) and all(part["type"] in _CHARACTER_NORMALIZERS for part in normalizers)
        word_piece = self._auxiliary.is_word_piece
        if not known and not word_piece:
            return self._bytes
        normalize = self._auxiliary.tokenizer.backend_tokenizer.normalizer.normalize_str if known else str
        return [text and _normalized(text, normalize, word_piece) for text in self._bytes]


def _normalized(text: bytes, normalize: Callable[[str], str], word_piece: bool) -> bytes:
    """Normalize a target token's text; it is returned unchanged if it is not valid UTF-8 or nothing is left of it."""
    try:
        content = normalize(text.decode()).strip(" ")
    except UnicodeDecodeError:
        return text
    if not content:
        return text
    has_space = text.startswith(b" ") and (content[0].isalnum() or not word_piece)
    return (" " * has_space + content).encode()


def _at_beginning(text: bytes | None, strip_space: bool, add_space: bool) -> bytes | None:
    if strip_space and text and len(text) > 1:
        text = text.removeprefix(b" ")
    return b" " + text if add_space and text and not text.startswith(b" ") else text


def _first_ids(tokens: TokenBytes) -> dict[bytes, int]:
    """Return the lowest id of the tokens with the same bytes."""
    result: dict[bytes, int] = {}
    for index, text in enumerate(tokens):
        if text:
            result.setdefault(text, index)
    return result


def _prefix_range(ordered: list[bytes], prefix: bytes) -> tuple[int, int]:
    """Return start and end of the strings that begin with a prefix, in a sorted list."""
    start = bisect.bisect_left(ordered, prefix)
    stripped = prefix.rstrip(b"\xff")
    if not stripped:
        return start, len(ordered)
    return start, bisect.bisect_left(ordered, stripped[:-1] + bytes([stripped[-1] + 1]), start)
