"""The interface of a registry of takedown requests, which corrects the target's logits.

`divdec.takedowns` implements it and registers its function here; `divdec.model` calls it. Importing this module loads
no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from divdec.errors import FailedClosed

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Cache


@runtime_checkable
class Correction(Protocol):
    """A tensor that is added to the target's logits before the rule and the experts steer them."""

    folder: Path
    """The registry's folder."""
    id: str
    """Identifies the registry, also after its folder has moved."""
    tokenizer_sha256: str
    """Digest of the vocabulary of its n-grams."""
    vocab_size: int
    """Width of the correction."""
    window: int
    """Number of tokens that `correction_after` reads."""

    def new_cache(self) -> Cache:
        """Return an empty cache, which `correction` fills."""
        ...

    def begin(self, cache: Cache) -> None:
        """Let an answer that continues from a cache follow the newest state of the registry."""
        ...

    def snapshot(self) -> Any:
        """Return the newest state of the registry."""
        ...

    def state_digest(self) -> str:
        """Return a digest of the newest state of the registry, which every change changes."""
        ...

    def correction(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """Return the correction after each of the last `logits_to_keep` tokens, float32 [batch, positions, vocab]."""
        ...

    def correction_after(self, windows: Tensor) -> Tensor:
        """Return the correction after windows of tokens, int64 [rows, window], −1 before a sequence's first token."""
        ...


_functions: list[Callable[[Path], Correction]] = []


def register_registry(function: Callable[[Path], Correction]) -> None:
    """Set the function that opens the folder of a registry."""
    _functions[:] = [function]


def open_registry(folder: Path) -> Correction:
    """Open the folder of a registry.

    Raises:
        UsageError: it is no registry, or its key is missing or another one's.
        FailedClosed: it is damaged, or nothing here can open registries.
    """
    if not _functions:
        raise FailedClosed(f"{folder} is a registry of takedown requests; `import divdec.takedowns` before loading it")
    return _functions[0](folder)
