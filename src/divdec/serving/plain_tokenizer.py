"""A tokenizer read from its file alone, where that is all there is to it: without torch, in a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divdec.errors import UsageError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def is_plain(tokenizer: PreTrainedTokenizerBase, folder: Path) -> bool:
    """Whether the file that a tokenizer was saved to gives the same tokens without the tokenizer's class."""
    pipeline = _pipeline(tokenizer)
    return pipeline is not None and pipeline == _pipeline(load_plain(folder))


def load_plain(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer as its file says it, without its class.

    Raises:
        UsageError: it cannot be read.
    """
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise UsageError(f"{folder}: the tokenizer cannot be read ({first_line(error)})") from None


def _pipeline(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    """All that decides a tokenizer's tokens; None where it is not told."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    return {name: part for name, part in json.loads(backend.to_str()).items() if name not in ("padding", "truncation")}
