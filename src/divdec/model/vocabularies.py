"""Whether models and counts speak of the same tokens. It knows nothing of weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from divdec.errors import UsageError
from divdec.model.checkpoint import load_config, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


def vocabulary_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest of a tokenizer's tokens and their ids: whatever holds token ids belongs to one of these."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary, ensure_ascii=False).encode()).hexdigest()


def vocabulary_width(config: PreTrainedConfig) -> int:
    """How many logits a model of this configuration gives; its vocabulary, perhaps padded."""
    return config.get_text_config(decoder=True).vocab_size


def common_vocabulary(
    widths: Mapping[str, int], tokenizers: Mapping[str, PreTrainedTokenizerBase], places: Mapping[str, Path]
) -> int:
    """The vocabulary that target and auxiliaries share: the narrowest width, once all tokenizers agree.

    Args:
        widths: logits per position, by part.
        tokenizers: by part; the first is the one that the others are compared with.
        places: the folders, for messages.

    Raises:
        UsageError: a tokenizer has other tokens, or a model is narrower than its tokenizer.
    """
    check_same_vocabulary(tokenizers, places)
    check_widths(widths, tokenizers, places)
    return min(widths.values())


def common_vocabulary_of(places: Mapping[str, Path]) -> int:
    """The same, of checkpoints on disk.

    Args:
        places: their folders by part, the first as above.
    """
    configs = {part: load_config(place) for part, place in places.items()}
    widths = {part: vocabulary_width(config) for part, config in configs.items()}
    return common_vocabulary(widths, {part: load_tokenizer(place) for part, place in places.items()}, places)


def check_widths(
    widths: Mapping[str, int], tokenizers: Mapping[str, PreTrainedTokenizerBase], places: Mapping[str, Path]
) -> None:
    """Refuse a model that is narrower than its tokenizer.

    Raises:
        UsageError: it has no logit for some token.
    """
    for part, width in widths.items():
        needed = max(tokenizers[part].get_vocab().values()) + 1
        if width < needed:
            raise UsageError(
                f"{part} ({places[part]}) has {width} logits, but its tokenizer has token ids up to {needed - 1}"
            )


def check_same_vocabulary(tokenizers: Mapping[str, PreTrainedTokenizerBase], places: Mapping[str, Path]) -> None:
    """Refuse tokenizers of different tokens, or of the same under other ids.

    Raises:
        UsageError: names a token that differs.
    """
    (first, reference), *others = tokenizers.items()
    vocabulary = reference.get_vocab()
    for part, tokenizer in others:
        other = tokenizer.get_vocab()
        if other != vocabulary:
            differing = next(token for token in {**vocabulary, **other} if vocabulary.get(token) != other.get(token))
            raise UsageError(
                f"{part} ({places[part]}) has another vocabulary than the {first} ({places[first]}): "
                f"{len(other)} tokens against {len(vocabulary)}, and token {differing!r} is "
                f"{other.get(differing)} against {vocabulary.get(differing)}; "
                "auxiliaries must share it (those of another tokenizer than the target's steer it with --bridge)"
            )
