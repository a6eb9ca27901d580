"""From the auxiliaries' logits over their own vocabulary to a divergence over the target's.

It knows nothing of caches or positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from divdec.bridge.context import View
from divdec.bridge.retokenize import AuxiliaryTokenizer
from divdec.bridge.token_bytes import parts, structure, token_bytes
from divdec.bridge.vocabulary_map import EXACT, PREFIX, HealingMaps, VocabularyMap, cached, map_name
from divdec.errors import UsageError

Center = Literal["median", "none", "log_softmax"]
CENTERS = ("median", "none", "log_softmax")
_LEAST_COVERED = 0.5
_REWRITING = frozenset(("Lowercase", "StripAccents", "BertNormalizer", "NFC", "NFKC"))


class Divergence:
    """The divergence of two auxiliaries, gathered for the target's tokens.

    A token that neither auxiliary prefers has divergence 0 after centering, and so has every token without a source:
    it is left as it is.
    """

    def __init__(self, target: Any, auxiliary: AuxiliaryTokenizer, width: int, *, center: Center, folder: Path) -> None:
        if center not in CENTERS:
            raise UsageError(f"center is {center!r}; accepted: {', '.join(CENTERS)}")
        self.center = center
        self._target, self._auxiliary, self._width, self._folder = target, auxiliary, width, folder
        self._maps: dict[tuple[bool, bool], VocabularyMap] = {}
        self._sources: dict[tuple[bool, bool], Tensor] = {}
        self._healing: HealingMaps | None = None
        self._real = torch.tensor([place for place, text in enumerate(auxiliary.bytes) if text is not None])
        self._known = _sources(auxiliary.bytes, auxiliary.preferred)
        self._check_coverage()

    def _check_coverage(self) -> None:
        # What has no source is never steered: a model would answer, and nothing would be forgotten.
        text = np.array([text is not None for text in token_bytes(self._target)][: self._width])
        kind = self.map(False, False).kind[: len(text)][text]
        covered = float(np.isin(kind, (EXACT, PREFIX)).mean()) if len(kind) else 0.0
        if covered < _LEAST_COVERED:
            raise UsageError(
                f"the auxiliaries' tokenizer has tokens for {covered:.0%} of the target's vocabulary, at least "
                f"{_LEAST_COVERED:.0%} are needed: the rest would not be steered"
            )

    def map(self, strips: bool, adds: bool) -> VocabularyMap:
        """The map in the middle of a text or, where one of the tokenizers puts a space before it, at its beginning.

        Args:
            strips: the target's tokens have a space in front that is not part of the text.
            adds: the auxiliary's have.
        """
        if (strips, adds) not in self._maps:
            name = map_name(self._target, self._auxiliary.tokenizer, self._width, strips, adds)

            def build() -> VocabularyMap:
                texts = [_at_beginning(text, strips, adds) for text in self._target_bytes()]
                return VocabularyMap.build(texts, self._known, self._width)

            self._maps[strips, adds] = cached(name, self._folder, build, self._width, len(self._known))
        return self._maps[strips, adds]

    def __call__(
        self,
        retain: Float[Tensor, "views back width"],
        forget: Float[Tensor, "views back width"],
        views: Sequence[View],
        heal: bool,
    ) -> Float[Tensor, "views vocab"]:
        """The divergence at each view; a row of NaN where an auxiliary's logits are not finite."""
        retain, forget = retain.float(), forget.to(retain.device).float()
        width = min(retain.shape[-1], forget.shape[-1])
        retain, forget = retain[..., :width], forget[..., :width]
        self._real = self._real.to(retain.device)
        finite = self._finite(retain[:, -1]) & self._finite(forget[:, -1])
        centred = self._centred(retain[:, -1], forget[:, -1])
        found = centred.new_empty(len(views), self._width)
        for key in {(view.strips, view.adds) for view in views}:
            rows = [row for row, view in enumerate(views) if (view.strips, view.adds) == key]
            found[rows] = self._gathered(centred[rows], key)
        if heal:
            for row, view in enumerate(views):
                if len(view.ids) > 1 and view.open:
                    self._heal(found[row], finite, row, view, retain[row, 0], forget[row, 0])
        # Neither the gather nor a 0 may hide it: the steered model then fails closed.
        return found.masked_fill(~finite[:, None], torch.nan)

    def _finite(self, logits: Float[Tensor, "views width"]) -> Bool[Tensor, " views"]:
        """Whether the logits can be trusted; tokens that stand for no text may have been ruled out."""
        ruled_out = logits.isneginf()
        ruled_out[:, self._real] = False
        return (logits.isfinite() | ruled_out).all(-1)

    def _centred(
        self, retain: Float[Tensor, "views width"], forget: Float[Tensor, "views width"]
    ) -> Float[Tensor, "views width"]:
        if self.center == "log_softmax":
            retain, forget = retain.log_softmax(-1), forget.log_softmax(-1)
        difference = retain - forget
        if self.center == "median":
            difference = difference - difference[:, self._real].median(dim=-1, keepdim=True).values
        return difference

    def _gathered(self, values: Float[Tensor, "views width"], key: tuple[bool, bool]) -> Float[Tensor, "views vocab"]:
        source = self._sources.get(key)
        if source is None or source.device != values.device:
            source = self._sources[key] = torch.from_numpy(self.map(*key).source).to(values.device)
        return values[:, source.clamp(min=0)].masked_fill(source < 0, 0.0)

    def _heal(
        self,
        row: Float[Tensor, " vocab"],
        finite: Bool[Tensor, " views"],
        place: int,
        view: View,
        retain: Float[Tensor, " width"],
        forget: Float[Tensor, " width"],
    ) -> None:
        """Take the divergence of tokens that the last one could become from before it, in place.

        It is counted from the divergence of the last token as it is, so that a token with which a new one begins
        keeps what it has, and so does one that is never steered.
        """
        last = view.ids[-1]
        pending = self._auxiliary.bytes[last] if last < len(self._auxiliary.bytes) else None
        if self._healing is None:
            self._healing = HealingMaps(self._target_bytes(), self._known, self._width)
        if pending is None or not self._healing.open(pending):
            return
        finite[place] &= bool((self._finite(retain[None]) & self._finite(forget[None])).all())
        source = torch.from_numpy(self._healing.of(pending)).to(row.device)
        # Renormalising over the tokens that begin so moves all of them alike, and goes out in the difference.
        before = retain - forget
        going_on = source >= 0
        row[going_on] = (before[source[going_on]] - before[last]).to(row.device)

    def _target_bytes(self) -> list[bytes | None]:
        texts = token_bytes(self._target)
        description = structure(self._auxiliary.tokenizer)
        normalizers = parts(description["normalizer"], "normalizers")
        normalizer = self._auxiliary.tokenizer.backend_tokenizer.normalizer
        rewrites = bool(normalizers) and all(part["type"] in _REWRITING for part in normalizers)
        if not rewrites and not self._auxiliary.word_piece:
            return texts
        rewrite = normalizer.normalize_str if rewrites else str
        return [text and _as_read(text, rewrite, self._auxiliary.word_piece) for text in texts]


def _as_read(text: bytes, rewrite: Any, word_piece: bool) -> bytes:
    """A target token's text as the auxiliary's tokenizer reads it: in its case, without accents it does not know."""
    try:
        read = rewrite(text.decode()).strip(" ")
    except UnicodeDecodeError:
        return text
    if not read:
        return text
    space = text.startswith(b" ") and (read[0].isalnum() or not word_piece)
    return (" " * space + read).encode()


def _at_beginning(text: bytes | None, strips: bool, adds: bool) -> bytes | None:
    if strips and text and len(text) > 1:
        text = text.removeprefix(b" ")
    return b" " + text if adds and text and not text.startswith(b" ") else text


def _sources(texts: list[bytes | None], preferred: frozenset[int]) -> list[bytes | None]:
    """The tokens that a divergence is taken from: of those for the same bytes, that which texts are written with."""
    decided = {texts[place] for place in preferred}
    return [None if text in decided and place not in preferred else text for place, text in enumerate(texts)]
