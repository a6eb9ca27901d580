"""Text as an auxiliary's tokenizer reads it: always exactly what tokenising the whole text would give.

Where the tokenizer's structure allows, only the last words are tokenised again. It knows nothing of target tokens.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer

from divdec.bridge.token_bytes import SPACE, parts, structure, token_bytes
from divdec.errors import UsageError

# What lies before the last characters of a text is settled; this is how many are left open at least.
OPEN = 32
_SETTLE_ABOVE = 96  # shorter texts are tokenised as they are
# A space between words: no tokenizer of the kinds below lets a token reach over its left side.
_ANCHOR = re.compile(r"(?<=[^\W_]) (?=[^\W\d_])")

_NORMALIZERS = frozenset(("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer"))
_SPLITTERS = frozenset(("BertPreTokenizer", "Whitespace", "WhitespaceSplit"))
_HARMLESS = frozenset(("Digits", "Punctuation"))
_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
)
_MARKS, _BREAKS, _SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)|\s+"
_REGEXES = frozenset(
    (
        # GPT-2; GPT-4 and Llama 3; Qwen 2 and 3; GPT-4o. None has a space anywhere but at its beginning.
        rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}",
        rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_MARKS}|{_BREAKS}|{_SPACES}",
        rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_MARKS}|{_BREAKS}|{_SPACES}",
        rf"{_WORDS[0]}|{_WORDS[1]}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BREAKS}|{_SPACES}",
    )
)
_PROBE = (
    "The author's first novel, written in 1987, was called 'The Silent Garden' (it sold 1,234 copies).\n\n"
    "Ünsere Straße führt nach Köln; ещё одна строка о море и людях\tand then some more words follow here."
)


class AuxiliaryTokenizer:
    """A tokenizer as a function from text to ids, with nothing of a call's settings left in it."""

    def __init__(self, tokenizer: Any) -> None:
        description = structure(tokenizer)
        # Cutting, padding and dropping merges at random are for training batches.
        description["truncation"] = description["padding"] = None
        if description["model"].get("dropout") is not None:
            description["model"]["dropout"] = None
        self.tokenizer = tokenizer
        self.bytes = token_bytes(tokenizer)
        # In a text, what looks like a special token is text: only a chat template may write special tokens.
        self._names = _rename_special(description)
        self._tokenizer = Tokenizer.from_str(json.dumps(description))
        ids = {token["content"]: token["id"] for token in description["added_tokens"]}
        if any(self._tokenizer.token_to_id(name) != ids[name] for name in self._names.values()):
            raise UsageError("the special tokens of the auxiliaries' tokenizer cannot be told from text")
        self._special = _any_of(structure(tokenizer)["added_tokens"])
        self.single_byte: dict[int, int] = {}
        for place, text in enumerate(self.bytes):
            if text and len(text) == 1:
                self.single_byte.setdefault(text[0], place)
        self.word_piece = description["model"]["type"] == "WordPiece"
        self.adds_space = adds_space(self.bytes, self.encode("a"))
        self.head = _head(tokenizer, self.encode("a"))
        self.preferred = self._preferred({token["id"] for token in description["added_tokens"]})
        normalizer = tokenizer.backend_tokenizer.normalizer
        self.settles = splits_at_words(description, normalizer.normalize_str if normalizer else str) and all(
            self.encode(_PROBE[: found.start()]) + self.encode(_PROBE[found.start() :]) == self.encode(_PROBE)
            for found in _ANCHOR.finditer(_PROBE)
        )

    def encode(self, text: str) -> list[int]:
        """The ids of a text by itself, without special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids if text else []

    def encode_rendered(self, pieces: Sequence[str]) -> list[int]:
        """The ids of what a chat template has written and, between that, of the contents: template, content, ….

        Special tokens are recognised in what the template has written only.
        """
        named = (
            piece if place % 2 else self._special.sub(lambda found: self._names[found[0]], piece)
            for place, piece in enumerate(pieces)
        )
        return self.encode("".join(named))

    def pending(self, unfinished: bytes) -> list[int]:
        """The ids of the bytes of an unfinished character; none where the vocabulary lacks one of them."""
        found = [self.single_byte.get(byte, -1) for byte in unfinished]
        return [] if -1 in found else found

    def _preferred(self, added: set[int]) -> frozenset[int]:
        """Of the tokens that stand for the same bytes, those that texts are written with."""
        same: dict[bytes, list[int]] = {}
        for place, text in enumerate(self.bytes):
            if text:
                same.setdefault(text, []).append(place)
        found = set()
        for text, places in same.items():
            if len(places) > 1:
                ids = self.encode(text.decode(errors="replace"))
                # SentencePiece lists every byte first; its token for the letter a is never that of the byte.
                other = places[-1] if len(text) == 1 else places[0]
                found.add(ids[0] if len(ids) == 1 and ids[0] in places else max(added & set(places), default=other))
        return frozenset(found)

    def settled(self, text: str) -> int:
        """How many characters of a text are tokenised the same by themselves, whatever follows the text."""
        if not self.settles or len(text) <= _SETTLE_ABOVE:
            return 0
        for start in (max(len(text) - 512, 0), 0):
            places = [found.start() for found in _ANCHOR.finditer(text, start, len(text) - OPEN)]
            if places:
                return places[-1]
        return 0


def adds_space(texts: list[bytes | None], ids: list[int]) -> bool:
    """Whether the tokens of a text that begins with a letter stand for a space before it."""
    return next((text for place in ids if (text := texts[place])), b"").startswith(b" ")


def splits_at_words(description: dict[str, Any], normalize: Callable[[str], str] = str) -> bool:
    """Whether a tokenizer's structure guarantees that no token reaches over the left side of a space between words.

    A space between words: one space, a letter or digit before it, a letter after it. What it does not know it does
    not trust: the whole text is then tokenised each time.

    Args:
        description: the tokenizer's structure.
        normalize: its normalizer, which is applied to added tokens as well.
    """
    for part in parts(description["normalizer"], "normalizers"):
        if part["type"] not in _NORMALIZERS and not _replaces_spaces(part):
            return False
    for token in description["added_tokens"]:
        content = token["content"] + normalize(token["content"])
        spaced = any(character.isspace() or character == SPACE for character in content)
        if not token["special"] and (spaced or token["lstrip"] or token["rstrip"]):
            return False
    before = parts(description["pre_tokenizer"], "pretokenizers")
    return any(map(_splits, before)) and all(_splits(part) or _is_harmless(part) for part in before)


def _replaces_spaces(part: dict[str, Any]) -> bool:
    return part["type"] == "Replace" and part["pattern"] in ({"String": " "}, {"Regex": " {2,}"})


def _splits(part: dict[str, Any]) -> bool:
    match part["type"]:
        case "ByteLevel":
            return part["use_regex"]
        case "Metaspace":
            return part.get("split", True)
        case "Split":
            regex = part["pattern"].get("Regex")
            plain = part["behavior"] == "Isolated" and not part["invert"]
            return regex in _REGEXES and (plain or (part["behavior"] == "Removed" and part["invert"]))
        case kind:
            return kind in _SPLITTERS


def _is_harmless(part: dict[str, Any]) -> bool:
    return part["type"] in _HARMLESS or (part["type"] == "ByteLevel" and not part["use_regex"])


def _rename_special(description: dict[str, Any]) -> dict[str, str]:
    """Give the special tokens names that no text contains, in place; the ids stay.

    To leave them unrecognised is not enough: Unigram and WordPiece have them in their vocabulary like others.

    Returns:
        The new names.
    """
    secret = secrets.token_hex(8)
    special = [token for token in description["added_tokens"] if token["special"]]
    names = {token["content"]: f"<{secret}.{token['id']}>" for token in special}
    for token in special:
        token["content"] = names[token["content"]]
        token["single_word"] = False  # decided where the name is put in
    model = description["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(token, token): place for token, place in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [
            [one, other] for one, other in model["merges"] if not {one, other, one + other} & names.keys()
        ]
    return names


def _any_of(added: list[dict[str, Any]]) -> re.Pattern[str]:
    """Finds the special tokens among the added ones, the longest first."""
    special = sorted((token for token in added if token["special"]), key=lambda token: -len(token["content"]))
    found = (re.escape(token["content"]) for token in special)
    alone = (
        rf"(?<!\w){text}(?!\w)" if token["single_word"] else text for token, text in zip(special, found, strict=True)
    )
    return re.compile("|".join(alone) or "(?!)")


def _head(tokenizer: Any, ids: list[int]) -> tuple[int, ...]:
    """The special tokens that the tokenizer itself puts before a text; those that it puts after it are left out."""
    given = list(tokenizer("a")["input_ids"])
    for start in range(len(given) - len(ids) + 1):
        if given[start : start + len(ids)] == ids:
            return tuple(given[:start])
    special = set(tokenizer.all_special_ids)
    return tuple(given[: next((place for place, token in enumerate(given) if token not in special), 0)])
