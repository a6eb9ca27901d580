"""Canonical text: the form in which takedown requests are counted and in which a model's context is looked up.

The same text has many spellings and many tokenizations: two spaces for one, a no-break space, a zero-width character
inside a word, a decomposed accent, another split into tokens. Counts of token ids miss all but one of them. So both
sides are folded first: the texts of a request, and the text of the tokens before each position.
"""

from __future__ import annotations

import codecs
import copy
import functools
import itertools
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import regex

from divdec.bridge.token_bytes import BYTE_TOKEN, special_tokens, token_bytes
from divdec.data.formatting import BATCH
from divdec.data.records import RecordSet
from divdec.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

WINDOW = 32  # tokens that a context is folded from at least; vLLM's token memory holds no more
MARGIN = 2  # canonical tokens before a context: the first of a window may begin inside a word
MAX_WINDOWS = 4096  # whose canonical tokens are kept
PADDING = -1  # in place of padding tokens, and before contexts that are shorter

# U+2800 is a blank in Braille.
_IGNORABLE = regex.compile(r"[\p{Default_Ignorable_Code_Point}\p{Cf}\u2800[\p{Cc}--\s]]", regex.V1)
_SPACES = regex.compile(r"\s+")
# Between characters of scripts that are written without spaces, a space or line break is layout.
_UNSPACED = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\u3000-\u303f\uff00-\uffef]"
_LAYOUT = regex.compile(rf"(?<={_UNSPACED}) (?={_UNSPACED})")
# Full-width letters and digits, Latin ligatures, and the presentation forms of Arabic. Other compatibility characters
# stay: their canonical text may have no token, and then nothing would lower theirs.
_FORMS = regex.compile(r"[\uff10-\uff19\uff21-\uff3a\uff41-\uff5a\ufb00-\ufb06\ufb50-\ufdff\ufe70-\ufefc]+")
_FOLDED = str.maketrans(
    dict.fromkeys("‘’‚‛′ʼ`´", "'") | dict.fromkeys("“”„‟″«»", '"') | dict.fromkeys("‐‑‒–—―−", "-") | {"…": "..."}
)


def canonical_text(text: str) -> str:
    """Fold a text: NFC, no invisible characters, plain quotes and dashes, one space for each run of white space.

    Full-width letters, ligatures and Arabic presentation forms become the letters that they stand for. Between
    characters of scripts without spaces, such as Chinese and Thai, there is no space. White space at both ends is kept
    as one space.
    """
    if text.isascii():
        return _SPACES.sub(" ", _IGNORABLE.sub("", text).translate(_FOLDED))
    text = _IGNORABLE.sub("", unicodedata.normalize("NFC", text))
    text = _FORMS.sub(lambda match: unicodedata.normalize("NFKC", match[0]), text)
    # Removing a character can bring a letter and its accent together.
    return _LAYOUT.sub("", _SPACES.sub(" ", unicodedata.normalize("NFC", text).translate(_FOLDED)))


def lower_case(text: str) -> str:
    """Lower each character that has one lower-case form: a text in lower case keeps its tokens."""
    if text.isascii():
        return text.lower()
    lowered = (lower if len(lower := character.lower()) == 1 else character for character in text)
    return unicodedata.normalize("NFC", "".join(lowered))


class CanonicalReader:
    """Canonical tokens of texts, and canonical contexts of token ids, for one tokenizer.

    A text begins as if a space came before it, so that its first word has the tokens that it has elsewhere.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        """Read the bytes of each token; `vocab_size` is the width of the corrections.

        A tokenizer that does not say which bytes its tokens stand for is read as it is: contexts are token ids.
        """
        self._tokenizer: Any = tokenizer
        self._bytes: list[bytes | None] | None = None
        self._case: Callable[[str], str] = str
        self._vocab_size = vocab_size
        self._vocabulary = functools.cache(self._read_vocabulary)  # of both readings
        self._fold = functools.lru_cache(MAX_WINDOWS)(self._fold_window)
        try:
            self._bytes = token_bytes(tokenizer)
        except UsageError:
            return
        # A text may name special tokens: '<s>' in HTML, '<|endoftext|>' between documents. Those beyond the logits,
        # which no measurement can read, are refused later.
        names = [regex.escape(name) for token, name in special_tokens(tokenizer).items() if name and token < vocab_size]
        self._special = regex.compile("|".join(names) or "(?!)")
        first = self._encode(["a"])[0][:1]
        self._adds_space = bool(first) and (self._bytes[first[0]] or b"").startswith(b" ")

    def in_lower_case(self) -> CanonicalReader:
        """Return a reader of the same texts in lower case."""
        reader = copy.copy(self)
        reader._case = lower_case
        reader._fold = functools.lru_cache(MAX_WINDOWS)(reader._fold_window)
        return reader

    def documents(self, records: RecordSet) -> Iterator[list[int]]:
        """Tokenize the canonical form of each text, and of each turn but the system's, without their layout.

        Raises:
            UsageError: a record has no token.
        """
        for start in range(0, len(records), BATCH):
            batch = records.records[start : start + BATCH]
            texts = [
                [
                    *(turn.content for turn in record.messages if turn.role != "system"),
                    f"{record.prompt or ''}{record.answer}",
                ]
                for record in batch
            ]
            ids = iter(self._encode([self._canonical(text) for turns in texts for text in turns]))
            for record, turns in zip(batch, texts, strict=True):
                encoded = [tokens for _ in turns if (tokens := next(ids))]
                if not encoded:
                    raise UsageError(f"{record.location or 'a record'}: the text is empty")
                if (largest := max(map(max, encoded))) >= self._vocab_size:
                    raise UsageError(
                        f"{record.location or 'a record'}: token id {largest}, which the text names, lies outside the "
                        f"vocabulary of {self._vocab_size} tokens"
                    )
                yield from encoded

    def _canonical(self, text: str) -> str:
        return text if self._bytes is None else self._lead(self._fold_text(text).strip())

    def _fold_text(self, text: str) -> str:
        # Folding may write the name of a special token: "</S>" in lower case.
        return _SPACES.sub(" ", self._special.sub(" ", self._case(canonical_text(self._special.sub(" ", text)))))

    def read(
        self, tokens: np.ndarray, number: int, length: int, *, windows: bool = False
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the canonical context of each of the last positions.

        Args:
            tokens: int64 [batch, tokens], −1 for padding.
            number: number of positions, counted from the end.
            length: number of tokens of each context.
            windows: the rows hold the last `WINDOW` tokens; a row without padding is not a whole sequence.

        Returns:
            Contexts, int64 [batch · number, length], −1 in front of shorter ones; the contexts without the white space
            at their end, of the same shape; and bool [batch · number]: whether white space, or nothing, comes after
            them.
        """
        batch, width = tokens.shape
        contexts, words = (np.full((batch * number, length), PADDING, dtype=np.int64) for _ in range(2))
        spaces = np.zeros(batch * number, dtype=bool)
        for row in range(batch):
            columns = np.flatnonzero(tokens[row] != PADDING)
            ids = tokens[row, columns].tolist()
            ends = np.searchsorted(columns, np.arange(width - number, width), side="right").tolist()
            for index, end in enumerate(ends, start=row * number):
                context, word, spaces[index] = self._read_context(ids, end, length, windows)
                for array, values in ((contexts, context), (words, word)):
                    if values:
                        array[index, -len(values) :] = values
        return contexts, words, spaces

    def scores(
        self, contexts: np.ndarray, words: np.ndarray, spaces: np.ndarray, score: Callable[[np.ndarray], Tensor]
    ) -> Tensor:
        """Return the scores of the next token, in every spelling of it, after the contexts that `read` returns.

        `score` returns those of canonical tokens after contexts, float32 [contexts, vocab].
        """
        import torch

        result = score(contexts)
        if self._bytes is None:
            return result
        ids, sources = self._spellings
        result[:, ids] = torch.minimum(result[:, ids], result[:, sources])
        if spaces.any():  # a word without a space now continues the text as the word with one does
            rows = torch.from_numpy(np.flatnonzero(spaces))
            after_words = score(words[spaces])
            ids, sources = self._words
            after_words[:, ids] = torch.minimum(after_words[:, ids], after_words[:, sources])
            result[rows] = torch.minimum(result[rows], after_words)
        return result

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        return self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]

    def _lead(self, text: str) -> str:
        return text if self._adds_space or not text else f" {text}"

    def _read_context(
        self, ids: list[int], end: int, length: int, windows: bool
    ) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        if self._bytes is None:
            context = tuple(ids[max(end - length, 0) : end])
            return context, context, False
        size = WINDOW
        while True:
            start = max(end - size, 0)
            folded = self._fold(tuple(ids[start:end]), start == 0 and not (windows and end >= WINDOW))
            # A run of invisible characters must not empty the context.
            if start == 0 or len(folded[1]) >= length + MARGIN:
                return folded[0][-length:], folded[1][-length:], folded[2]
            size *= 2

    def _fold_window(self, ids: tuple[int, ...], is_start: bool) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        """Return the canonical tokens of a window, those without the space at its end, and whether it has one."""
        assert self._bytes is not None
        pieces = [(self._bytes[token] or b"") if token < len(self._bytes) else b"" for token in ids]
        whole = len(pieces)
        data = b"".join(pieces)
        while codecs.utf_8_decode(data, "ignore", False)[1] < len(data):  # the last tokens are parts of a character
            whole -= 1
            data = data[: len(data) - len(pieces[whole])]
        rest = [token for token, piece in zip(ids[whole:], pieces[whole:], strict=True) if piece]
        text = self._fold_text(data.decode("utf-8", "ignore"))
        if is_start or text.startswith(" "):
            text = self._lead(text.lstrip())
        tokens = [*self._encode([text])[0], *rest] if text else rest
        body = text.rstrip()
        if rest or body == text != "":
            return tuple(tokens), tuple(tokens), False
        return tuple(tokens), tuple(self._encode([body])[0]) if body else (), True

    @functools.cached_property
    def _spellings(self) -> tuple[Tensor, Tensor]:
        """Ids of tokens whose text is not canonical, and of the tokens that their canonical text begins with."""
        return self._pair_tokens(lambda text: text)

    @functools.cached_property
    def _words(self) -> tuple[Tensor, Tensor]:
        """Ids of tokens without a space before their text, and of the tokens that have one."""
        return self._pair_tokens(lambda text: f" {text.lstrip()}")

    def _read_vocabulary(self) -> tuple[list[str], dict[str, int]]:
        """Return the canonical text of each token, and the first token of each text."""
        texts = [_decoded(piece) for piece in (self._bytes or ())[: self._vocab_size]]
        names = self._tokenizer.convert_ids_to_tokens(list(range(len(texts))))
        # No text is written with <0x2C>.
        written = [token for token, name in enumerate(names) if not BYTE_TOKEN.fullmatch(name or "")]
        return [canonical_text(text) for text in texts], {texts[token]: token for token in reversed(written)}

    def _pair_tokens(self, change: Callable[[str], str]) -> tuple[Tensor, Tensor]:
        import torch

        texts, first = self._vocabulary()
        cased = [self._case(text) for text in texts]
        folded = {token: change(text) for token, text in enumerate(cased) if text.strip()}
        # A word may have no token in lower case: " Obama" is lowered as " ob" is, which begins " obama".
        lowered = (folded[token] for token in folded if cased[token] != texts[token])
        words = [text for text in lowered if text.startswith(" ") and text not in first]
        begun = self._encode([self._lead(text.strip()) for text in words])
        # A bare space, or a part of a character, begins many words.
        heads = {text: ids[0] for text, ids in zip(words, begun, strict=True) if ids and ids[0] < len(texts)}
        first = first | {text: token for text, token in heads.items() if any(map(str.isalnum, texts[token]))}
        pairs = [(token, first[text]) for token, text in folded.items() if first.get(text, token) != token]
        ids, sources = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).T
        return ids, sources


READINGS = 2


class Readings:
    """Texts and contexts as they are, and in lower case: they have other tokens, such as " AUTH" and "ORS", " authors".

    Both are counted in one table, apart: token t is entry 2t of the first reading, and 2t + 1 of the second.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        reader = CanonicalReader(tokenizer, vocab_size)
        self.readers = (reader, reader.in_lower_case())
        self.table_size = READINGS * vocab_size

    def documents(self, records: RecordSet) -> list[Iterator[np.ndarray]]:
        """Return for each reading the entries of the documents; see `CanonicalReader.documents`."""
        return [map(functools.partial(_entries, i), each.documents(records)) for i, each in enumerate(self.readers)]

    def scores(
        self, tokens: np.ndarray, number: int, length: int, score: Callable[[np.ndarray, int], Tensor], *, windows: bool
    ) -> Tensor:
        """Return the lower of both readings' scores of the next token; see `CanonicalReader.read` for the arguments.

        `score` returns those of a reading after contexts of its entries, float32 [contexts, vocab].
        """
        import torch

        def scores(i: int, reader: CanonicalReader) -> Tensor:
            contexts = reader.read(tokens, number, length, windows=windows)
            return reader.scores(*contexts, lambda each: score(_entries(i, each), i))

        return torch.minimum(*itertools.starmap(scores, enumerate(self.readers)))


def _entries(reading: int, tokens: Any) -> np.ndarray:
    """Return the entries of token ids in the table of a reading, 0 or 1."""
    return np.where(np.equal(tokens, PADDING), PADDING, READINGS * np.asarray(tokens) + reading)


def _decoded(piece: bytes | None) -> str:
    """Return the text of a token; nothing for a special token and for a part of a character."""
    try:
        return (piece or b"").decode()
    except UnicodeDecodeError:
        return ""
