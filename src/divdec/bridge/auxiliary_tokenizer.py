"""The auxiliaries' tokenizer as a pure function from text to ids, also for text that grows.

Where the tokenizer's structure allows it, only the last words of a growing text are tokenized again; the result always
equals tokenizing the whole text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer

from divdec.bridge.token_bytes import SPACE, describe_tokenizer, flatten_components, token_bytes
from divdec.errors import UsageError

# Later text can change the tokenization of the last characters. At least this many stay in the unstable tail.
_MIN_TAIL = 32
_MAX_UNSPLIT = 96  # shorter texts are tokenized whole
_SEARCH_WINDOW = 512  # characters at the end in which a split is looked for first
# A space between words. In the tokenizers accepted below, no token spans its left side.
_WORD_BOUNDARY = re.compile(r"(?<=[^\W_]) (?=[^\W\d_])")

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
        # GPT-2; GPT-4 and Llama 3; Qwen 2 and 3; GPT-4o. All match a space only at the beginning.
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
    """A tokenizer as a pure function from text to ids.

    Truncation, padding and BPE dropout, which are meant for training, are switched off.

    Attributes:
        tokenizer: the transformers tokenizer.
        bytes: bytes of each token, by id; None for special tokens.
        written_bytes: the same, but None for a token if texts are written with another token of the same bytes.
        is_word_piece: the tokens contain no spaces; those that begin a word imply one.
        adds_space: the tokenizer puts a space before a text.
        prefix_ids: special tokens that the tokenizer puts before a text.
        is_incremental: no token spans the left side of a space between words, so a growing text can be split there.
    """

    def __init__(self, tokenizer: Any) -> None:
        description = describe_tokenizer(tokenizer)
        description["truncation"] = description["padding"] = None
        if description["model"].get("dropout") is not None:
            description["model"]["dropout"] = None
        self.tokenizer = tokenizer
        self.bytes = token_bytes(tokenizer)
        self._special_pattern = _special_token_pattern(description["added_tokens"])
        # A text that contains the name of a special token stays text: only a chat template may write special tokens.
        self._names = _rename_special_tokens(description)
        self._tokenizer = Tokenizer.from_str(json.dumps(description))
        ids = {token["content"]: token["id"] for token in description["added_tokens"]}
        if any(self._tokenizer.token_to_id(name) != ids[name] for name in self._names.values()):
            raise UsageError("the special tokens of the auxiliaries' tokenizer cannot be told from text")
        self._byte_tokens: dict[int, int] = {}
        for index, text in enumerate(self.bytes):
            if text and len(text) == 1:
                self._byte_tokens.setdefault(text[0], index)
        self.written_bytes = self._written_bytes(set(ids.values()))
        self.is_word_piece = description["model"]["type"] == "WordPiece"
        self.adds_space = begins_with_space(self.bytes, self.encode("a"))
        self.prefix_ids = _prefix_ids(tokenizer, self.encode("a"))
        normalizer = tokenizer.backend_tokenizer.normalizer
        self.is_incremental = splits_at_words(description, normalizer.normalize_str if normalizer else str) and all(
            self.encode(_PROBE[: match.start()]) + self.encode(_PROBE[match.start() :]) == self.encode(_PROBE)
            for match in _WORD_BOUNDARY.finditer(_PROBE)
        )

    def encode(self, text: str) -> list[int]:
        """Tokenize a text without special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids if text else []

    def encode_pieces(self, pieces: Sequence[str]) -> list[int]:
        """Tokenize a rendered chat template; special tokens are recognized in the template, not in the contents.

        Args:
            pieces: text of the template and contents of the messages in turn: template, content, template, ….
        """
        renamed = (
            piece if index % 2 else self._special_pattern.sub(lambda match: self._names[match[0]], piece)
            for index, piece in enumerate(pieces)
        )
        return self.encode("".join(renamed))

    def encode_bytes(self, data: bytes) -> list[int]:
        """Return the byte tokens of an incomplete character; none if the vocabulary lacks one of them."""
        ids = [self._byte_tokens.get(byte, -1) for byte in data]
        return [] if -1 in ids else ids

    def stable_length(self, text: str) -> int:
        """Return the length of a prefix, in characters, whose tokens do not change whatever follows the text."""
        if not self.is_incremental or len(text) <= _MAX_UNSPLIT:
            return 0
        for start in (max(len(text) - _SEARCH_WINDOW, 0), 0):
            boundaries = [match.start() for match in _WORD_BOUNDARY.finditer(text, start, len(text) - _MIN_TAIL)]
            if boundaries:
                return boundaries[-1]
        return 0

    def _written_bytes(self, added: set[int]) -> list[bytes | None]:
        tokens_of: dict[bytes, list[int]] = {}
        for index, text in enumerate(self.bytes):
            if text:
                tokens_of.setdefault(text, []).append(index)
        result = list(self.bytes)
        for text, tokens in tokens_of.items():
            if len(tokens) > 1:
                ids = self.encode(text.decode(errors="replace"))
                # SentencePiece lists byte tokens first and never writes a letter with its byte token.
                default = tokens[-1] if len(text) == 1 else tokens[0]
                default = max(added & set(tokens), default=default)
                preferred = ids[0] if len(ids) == 1 and ids[0] in tokens else default
                for token in tokens:
                    result[token] = text if token == preferred else None
        return result


def begins_with_space(texts: list[bytes | None], ids: list[int]) -> bool:
    """Whether the first token with text begins with a space; `texts` are the bytes of each token."""
    return next((text for index in ids if (text := texts[index])), b"").startswith(b" ")


def splits_at_words(description: dict[str, Any], normalize: Callable[[str], str] = str) -> bool:
    """Whether a tokenizer's structure guarantees that no token spans the left side of a space between words.

    A space between words is a single space after a letter or digit and before a letter. Unknown components count as
    unsafe: the whole text is then tokenized each time.

    Args:
        description: contents of tokenizer.json.
        normalize: its normalizer, which also applies to added tokens.
    """
    for component in flatten_components(description["normalizer"], "normalizers"):
        if component["type"] not in _NORMALIZERS and not _replaces_spaces(component):
            return False
    for token in description["added_tokens"]:
        content = token["content"] + normalize(token["content"])
        has_space = any(character.isspace() or character == SPACE for character in content)
        if not token["special"] and (has_space or token["lstrip"] or token["rstrip"]):
            return False
    components = flatten_components(description["pre_tokenizer"], "pretokenizers")
    return any(map(_splits, components)) and all(_splits(part) or _is_harmless(part) for part in components)


def _replaces_spaces(component: dict[str, Any]) -> bool:
    return component["type"] == "Replace" and component["pattern"] in ({"String": " "}, {"Regex": " {2,}"})


def _splits(component: dict[str, Any]) -> bool:
    match component["type"]:
        case "ByteLevel":
            return component["use_regex"]
        case "Metaspace":
            return component.get("split", True)
        case "Split":
            behavior = (component["behavior"], component["invert"])
            known = component["pattern"].get("Regex") in _REGEXES
            return known and behavior in (("Isolated", False), ("Removed", True))
        case kind:
            return kind in _SPLITTERS


def _is_harmless(component: dict[str, Any]) -> bool:
    return component["type"] in _HARMLESS or (component["type"] == "ByteLevel" and not component["use_regex"])


def _rename_special_tokens(description: dict[str, Any]) -> dict[str, str]:
    """Give the special tokens random names that no text contains, in place; their ids stay the same.

    Removing them from the added tokens is not enough: Unigram and WordPiece have them in their vocabulary.

    Returns:
        The new name of each special token.
    """
    secret = secrets.token_hex(8)
    special = [token for token in description["added_tokens"] if token["special"]]
    names = {token["content"]: f"<{secret}.{token['id']}>" for token in special}
    for token in special:
        token["content"] = names[token["content"]]
        token["single_word"] = False  # `_special_token_pattern` applies it
    model = description["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(token, token): index for token, index in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        merges = model["merges"]
        model["merges"] = [
            [first, other] for first, other in merges if not {first, other, first + other} & names.keys()
        ]
    return names


def _special_token_pattern(added: list[dict[str, Any]]) -> re.Pattern[str]:
    """Return a pattern that matches the special tokens among the added ones, the longest first."""
    special = sorted((token for token in added if token["special"]), key=lambda token: -len(token["content"]))
    patterns = []
    for token in special:
        text = re.escape(token["content"])
        patterns.append(rf"(?<!\w){text}(?!\w)" if token["single_word"] else text)
    return re.compile("|".join(patterns) or "(?!)")


def _prefix_ids(tokenizer: Any, ids: list[int]) -> tuple[int, ...]:
    """Return the special tokens that the tokenizer puts before the text "a"; `ids` are the tokens of the text alone."""
    with_special = list(tokenizer("a")["input_ids"])
    for start in range(len(with_special) - len(ids) + 1):
        if with_special[start : start + len(ids)] == ids:
            return tuple(with_special[:start])
    special = set(tokenizer.all_special_ids)
    return tuple(with_special[: next((i for i, token in enumerate(with_special) if token not in special), 0)])
