"""Bytes that each token of a tokenizer represents, and maps between two vocabularies by these bytes.

The bytes are read from the tokenizer's own description. Decoding a token to a string is not enough: a token may contain
only part of a character. A map gives each target token at most one source token, so that a divergence is mapped with a
single gather.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from divdec.errors import UsageError

TokenBytes = Sequence[bytes | None]

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "▁"  # SentencePiece's character for a space
_ACCEPTED = "byte-level BPE, BPE or Unigram with ▁ for spaces (SentencePiece)"


def describe_tokenizer(tokenizer: Any) -> dict[str, Any]:
    """Return the contents of tokenizer.json: model, normalizer, pre-tokenizer, decoder and added tokens.

    Raises:
        UsageError: the tokenizer is not backed by the `tokenizers` library.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "to_str"):
        raise UsageError(
            f"{type(tokenizer).__name__} does not say which bytes its tokens stand for; accepted: a tokenizer with a "
            "backend of the `tokenizers` library (a fast tokenizer, with a tokenizer.json)"
        )
    return json.loads(backend.to_str())


def token_bytes(tokenizer: Any) -> list[bytes | None]:
    """Return the bytes of each token, by token id; None for special tokens and for ids without a token.

    A token that begins a word starts with a space where the tokenizer marks one (`Ġ`, `▁`).

    Raises:
        UsageError: the tokenizer has no backend, or its vocabulary cannot be read as bytes.
    """
    description = describe_tokenizer(tokenizer)
    model = description["model"]
    vocabulary = _vocabulary(model)
    to_bytes = _byte_decoder(description)
    special = special_tokens(tokenizer)
    added = {token["id"]: token["content"] for token in description["added_tokens"]}
    result: list[bytes | None] = [None] * (max([*vocabulary.values(), *added, *special], default=-1) + 1)
    for token, index in vocabulary.items():
        if index not in special and index not in added and token != model.get("unk_token"):
            result[index] = to_bytes(token)
    for index, content in added.items():
        if index not in special:
            # Added tokens are stored as text, except for byte tokens, which some vocabularies list among them.
            # Gemma's runs of spaces are added tokens, too, and marked as in the vocabulary.
            byte = BYTE_TOKEN.fullmatch(content) if model.get("byte_fallback") else None
            marked = SPACE in content and to_bytes is not _decode_byte_level
            result[index] = bytes([int(byte[1], 16)]) if byte else to_bytes(content) if marked else content.encode()
    if isinstance(unknown := model.get("unk_id"), int):
        result[unknown] = None
    if not any(result):
        raise UsageError(f"the vocabulary of the tokenizer (model {model['type']}) holds no token that stands for text")
    return [text or None for text in result]


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the content of each special token, by token id."""
    added = describe_tokenizer(tokenizer)["added_tokens"]
    result = {token["id"]: token["content"] for token in added if token["special"]}
    for index in getattr(tokenizer, "all_special_ids", ()):
        result.setdefault(index, str(tokenizer.convert_ids_to_tokens(index)))
    return result


def flatten_components(component: Any, key: str) -> list[dict[str, Any]]:
    """List the elements of a normalizer, pre-tokenizer or decoder; nested sequences (under `key`) are flattened."""
    if component is None:
        return []
    if component["type"] != "Sequence":
        return [component]
    return [inner for element in component[key] for inner in flatten_components(element, key)]


def _vocabulary(model: dict[str, Any]) -> dict[str, int]:
    vocabulary = model.get("vocab")
    if model["type"] == "BPE" and isinstance(vocabulary, dict):
        return vocabulary
    if model["type"] == "Unigram" and isinstance(vocabulary, list):
        return {token: index for index, (token, _) in enumerate(vocabulary)}
    raise UsageError(
        f"the tokenizer's model {model['type']} does not say which bytes its tokens stand for; accepted: {_ACCEPTED}"
    )


def _byte_decoder(description: dict[str, Any]) -> Callable[[str], bytes]:
    """Return the function from a vocabulary entry to its bytes."""
    model = description["model"]
    components = [
        *flatten_components(description["pre_tokenizer"], "pretokenizers"),
        *flatten_components(description["decoder"], "decoders"),
        *flatten_components(description["normalizer"], "normalizers"),
    ]
    affixes = model.get("end_of_word_suffix") or model.get("continuing_subword_prefix")
    if any(component["type"] == "ByteLevel" for component in components) and not affixes:
        return _decode_byte_level
    marks_spaces = any(
        component["type"] == "Metaspace"
        or (component["type"] == "Replace" and SPACE in json.dumps(component, ensure_ascii=False))
        for component in components
    )
    if marks_spaces and not affixes:
        return lambda token: _decode_sentence_piece(token, bool(model.get("byte_fallback")))
    kind = "that marks the ends of words" if affixes else "without ByteLevel or Metaspace"
    raise UsageError(
        f"the tokenizer ({model['type']} {kind}) does not say where its tokens have spaces; accepted: {_ACCEPTED}"
    )


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's mapping from visible characters to bytes."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()


def _decode_byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:  # an entry that was added by hand
        return token.encode()


def _decode_sentence_piece(token: str, byte_fallback: bool) -> bytes:
    if byte_fallback and (byte := BYTE_TOKEN.fullmatch(token)):
        return bytes([int(byte[1], 16)])
    return token.replace(SPACE, " ").encode()


def source_tokens(target: TokenBytes, auxiliary: TokenBytes, width: int) -> np.ndarray:
    """Find the auxiliary token of each target token: the one with the same bytes, else with the longest prefix of them.

    Args:
        target: bytes of the target's tokens; None for tokens that are never steered.
        auxiliary: bytes of the auxiliaries' tokens; the lowest id is used if several have the same bytes.
        width: number of entries: the number of the target's logits.

    Returns:
        Token ids, [width]; −1 for tokens that are not steered: special ones, padding, bytes that the auxiliaries lack.
    """
    ids: dict[bytes, int] = {}
    for index, text in enumerate(auxiliary):
        if text:
            ids.setdefault(text, index)
    longest = max(map(len, ids), default=0)
    source = np.full(width, -1, np.int64)
    for token, text in enumerate(target[:width]):
        if text:
            prefixes = (ids.get(text[:length]) for length in range(min(len(text), longest), 0, -1))
            source[token] = next((index for index in prefixes if index is not None), -1)
    return source
