"""The auxiliaries' tokenizer as a pure function from text to ids."""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from divdec.bridge.token_bytes import describe_tokenizer, token_bytes
from divdec.errors import UsageError


class AuxiliaryTokenizer:
    """A tokenizer as a pure function from text to ids.

    Truncation, padding and BPE dropout, which are meant for training, are switched off.

    Attributes:
        tokenizer: the transformers tokenizer.
        bytes: bytes of each token, by id; None for special tokens.
        written_bytes: the same, but None for a token if texts are written with another token of the same bytes.
        adds_space: the tokenizer puts a space before a text.
        prefix_ids: special tokens that the tokenizer puts before a text.
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
        if self.encode("A") == self.encode("a"):  # the target's tokens with capitals would not be steered
            raise UsageError("the auxiliaries' tokenizer reads capitals as small letters; choose one that keeps them")
        self.adds_space = begins_with_space(self.bytes, self.encode("a"))
        self.prefix_ids = tuple(itertools.takewhile({*ids.values()}.__contains__, tokenizer("a").input_ids))

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


def _rename_special_tokens(description: dict[str, Any]) -> dict[str, str]:
    """Give the special tokens random names that no text contains, in place; their ids stay the same.

    Removing them from the added tokens is not enough: models have them in their vocabulary too.

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
