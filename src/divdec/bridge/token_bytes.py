"""The bytes that each token of a tokenizer stands for, read from the tokenizer's own structure.

A decoded string will not do: a token may hold a part of a character. It knows nothing of models.
"""

from __future__ import annotations

import json
import re
from typing import Any

from divdec.errors import UsageError

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "▁"  # as SentencePiece writes it


def structure(tokenizer: Any) -> dict[str, Any]:
    """The JSON description of a tokenizer: model, normalizer, pre-tokenizer, decoder and added tokens.

    Raises:
        UsageError: it is none of the `tokenizers` library.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "to_str"):
        raise UsageError(
            f"{type(tokenizer).__name__} does not say which bytes its tokens stand for; accepted: a tokenizer with a "
            "backend of the `tokenizers` library (a fast tokenizer, with a tokenizer.json)"
        )
    return json.loads(backend.to_str())


def token_bytes(tokenizer: Any) -> list[bytes | None]:
    """What each token stands for, by token id.

    Args:
        tokenizer: a `PreTrainedTokenizerFast`, or whatever else has a `backend_tokenizer`.

    Returns:
        One entry for each id up to the largest; None for special tokens and for ids without a token. A token that
        begins a word has its space in front where the tokenizer writes one (`Ġ`, `▁`, or no `##`).

    Raises:
        UsageError: the tokenizer has no backend, or its vocabulary cannot be read as bytes.
    """
    description = structure(tokenizer)
    model = description["model"]
    vocabulary = _vocabulary(model)
    read = _reader(description)
    special = special_tokens(tokenizer)
    added = {token["id"]: token["content"] for token in description["added_tokens"]}
    found: list[bytes | None] = [None] * (max([*vocabulary.values(), *added, *special], default=-1) + 1)
    for token, place in vocabulary.items():
        if place not in special and place not in added and token != model.get("unk_token"):
            found[place] = read(token)
    for place, content in added.items():
        if place not in special:
            # Added tokens are written as they are, except for bytes, which some vocabularies list among them.
            byte = BYTE_TOKEN.fullmatch(content) if model.get("byte_fallback") else None
            found[place] = bytes([int(byte[1], 16)]) if byte else content.encode()
    if isinstance(unknown := model.get("unk_id"), int):
        found[unknown] = None
    if not any(found):
        raise UsageError(f"the vocabulary of the tokenizer (model {model['type']}) holds no token that stands for text")
    return [token or None for token in found]


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """The special tokens' ids and what they are written as."""
    found = {token["id"]: token["content"] for token in structure(tokenizer)["added_tokens"] if token["special"]}
    for place in getattr(tokenizer, "all_special_ids", ()):
        found.setdefault(place, str(tokenizer.convert_ids_to_tokens(place)))
    return found


def parts(component: Any, inner: str) -> list[dict[str, Any]]:
    """The elements of a normalizer, pre-tokenizer or decoder, sequences taken apart."""
    if component is None:
        return []
    if component["type"] != "Sequence":
        return [component]
    return [part for element in component[inner] for part in parts(element, inner)]


def _vocabulary(model: dict[str, Any]) -> dict[str, int]:
    vocabulary = model.get("vocab")
    if model["type"] in ("BPE", "WordPiece") and isinstance(vocabulary, dict):
        return vocabulary
    if model["type"] == "Unigram" and isinstance(vocabulary, list):
        return {token: place for place, (token, _) in enumerate(vocabulary)}
    raise UsageError(
        f"the tokenizer's model {model['type']} does not say which bytes its tokens stand for; accepted: byte-level "
        "BPE, BPE or Unigram with ▁ for spaces (SentencePiece), WordPiece"
    )


def _reader(description: dict[str, Any]) -> Any:
    model = description["model"]
    before = parts(description["pre_tokenizer"], "pretokenizers")
    after = parts(description["decoder"], "decoders")
    normalizers = parts(description["normalizer"], "normalizers")
    affixes = model.get("end_of_word_suffix") or model.get("continuing_subword_prefix")
    if any(part["type"] == "ByteLevel" for part in [*before, *after, *normalizers]) and not affixes:
        return _read_byte_level
    if model["type"] == "WordPiece":
        prefix = model["continuing_subword_prefix"]
        return lambda token: _read_word_piece(token, prefix)
    spaces = any(
        part["type"] == "Metaspace" or (part["type"] == "Replace" and SPACE in json.dumps(part, ensure_ascii=False))
        for part in [*before, *after, *normalizers]
    )
    if spaces and not affixes:
        return lambda token: _read_sentence_piece(token, bool(model.get("byte_fallback")))
    kind = "that marks the ends of words" if affixes else "without ByteLevel or Metaspace"
    raise UsageError(
        f"the tokenizer ({model['type']} {kind}) does not say where its tokens have spaces; "
        "accepted: byte-level BPE, BPE or Unigram with ▁ for spaces (SentencePiece), WordPiece"
    )


def _alphabet() -> dict[str, int]:
    """GPT-2's way of writing each byte as a visible character."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_BYTE_OF = _alphabet()


def _read_byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:  # an entry that was added by hand
        return token.encode()


def _read_sentence_piece(token: str, byte_fallback: bool) -> bytes:
    if byte_fallback and (byte := BYTE_TOKEN.fullmatch(token)):
        return bytes([int(byte[1], 16)])
    return token.replace(SPACE, " ").encode()


def _read_word_piece(token: str, prefix: str) -> bytes:
    if prefix and token.startswith(prefix) and token != prefix:
        return token[len(prefix) :].encode()
    # Punctuation stands alone whether or not there was a space before it.
    return (f" {token}" if token[0].isalnum() else token).encode() if token else b""
