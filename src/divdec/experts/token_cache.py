"""A cache of token ids, for experts that read tokens instead of keys and values.

Its layer has the interface of transformers' cache layers, so that cropping, reordering and selecting rows reach it.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from divdec.errors import FailedClosed, UsageError

PADDING = -1  # in place of padding tokens


class TokenLayer(CacheLayerMixin):
    """The tokens of each sequence, padding included."""

    is_croppable = True
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.tokens: Int[Tensor, "batch tokens"] | None = None

    def extend(
        self, input_ids: Int[Tensor, "batch tokens"], attention_mask: Int[Tensor, "batch past_and_tokens"] | None
    ) -> Int[Tensor, "batch past_and_tokens"]:
        """Append tokens and return all tokens, −1 for padding; the newest mask applies to earlier tokens, too.

        Raises:
            UsageError: the number of sequences differs from the cache's.
        """
        added = input_ids.cpu().long()
        if self.tokens is None:
            self.tokens = added
        elif len(self.tokens) != len(added):
            raise UsageError(f"the cache holds {len(self.tokens)} sequences, {len(added)} were given")
        else:
            self.tokens = torch.cat([self.tokens, added], dim=1)
        self.is_initialized = True
        if attention_mask is None:
            return self.tokens
        return self.tokens.masked_fill(attention_mask[:, -self.tokens.shape[1] :].cpu() == 0, PADDING)

    def get_seq_length(self) -> int:
        """Return the number of tokens of each row, padding included."""
        return 0 if self.tokens is None else self.tokens.shape[1]

    def get_max_length(self) -> int:
        """Return −1: the length is unlimited."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of a mask over all tokens."""
        return self.get_seq_length() + query_length, 0

    def reset(self) -> None:
        """Remove all tokens."""
        self.tokens = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens."""
        if tokens_to_remove and self.tokens is not None:
            self.tokens = self.tokens[:, : -abs(tokens_to_remove)]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the rows by those with these indices, for beam search."""
        if self.tokens is not None:
            self.tokens = self.tokens.index_select(0, beam_idx.to(self.tokens.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        if self.tokens is not None:
            self.tokens = self.tokens.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows with these indices."""
        if self.tokens is not None:
            self.tokens = self.tokens[indices.to(self.tokens.device)]

    def join(self, other: TokenLayer) -> None:
        """Append the rows of another layer; shorter rows are padded on the left, which the mask must exclude."""
        if self.tokens is None or other.tokens is None:
            raise FailedClosed("a cache that holds no tokens cannot be joined")
        length = max(self.get_seq_length(), other.get_seq_length())
        tokens = (nn.functional.pad(ids, (length - ids.shape[1], 0)) for ids in (self.tokens, other.tokens))
        self.tokens = torch.cat(list(tokens))

    def drop_columns(self, number: int) -> None:
        """Drop columns on the left, which must be padding in every row."""
        if self.tokens is not None:
            self.tokens = self.tokens[:, number:]

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Raise an error: the layer stores no keys and values."""
        raise NotImplementedError("a cache of tokens holds no keys and values")

    lazy_initialization = update  # pyright: ignore[reportAssignmentType]


class TokenCache(Cache):
    """A cache with a single layer of tokens."""

    def __init__(self) -> None:
        self.token_layer = TokenLayer()
        super().__init__(layers=[self.token_layer])
