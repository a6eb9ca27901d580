"""A model's cache, and what the model has read before the others were asked: the draft of speculative decoding.

It knows nothing of drafts or of what is done with them.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache, PreTrainedModel

from divdec.errors import FailedClosed
from divdec.experts.forward import length_of, logits_of
from divdec.fail_closed import check


class ReadAhead:
    """A cache of one model with the tokens that it has read ahead and its logits after them.

    It also stands among a pair's layers, where it hears what is done to them: while something is read ahead nothing
    may be, since the logits would then belong to other sequences.
    """

    is_compileable = False
    is_sliding = False
    is_initialized = True
    keys = values = None

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.tokens: list[Int[Tensor, "batch tokens"]] = []
        self.found: list[Float[Tensor, "batch tokens width"]] = []

    @property
    def is_croppable(self) -> bool:
        """Whether nothing is read ahead."""
        return not self.tokens

    @property
    def ahead(self) -> int:
        """How many tokens were read ahead."""
        return sum(tokens.shape[1] for tokens in self.tokens)

    @property
    def length(self) -> int:
        """How many tokens the cache holds, what was read ahead not counted."""
        return length_of(self.cache) - self.ahead

    def read_ahead(
        self,
        model: PreTrainedModel,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch past_and_tokens"] | None,
        position_ids: Int[Tensor, "batch_or_one tokens"] | None,
    ) -> Float[Tensor, "batch tokens width"]:
        """The model's logits after tokens that go on from all it has read, which are kept."""
        found = logits_of(model, input_ids, attention_mask, position_ids, self.cache)
        self.tokens.append(input_ids)
        self.found.append(found)
        return found

    def logits(
        self,
        model: PreTrainedModel,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch past_and_tokens"] | None,
        position_ids: Int[Tensor, "batch_or_one tokens"] | None,
        logits_to_keep: int = 0,
    ) -> Float[Tensor, "batch kept width"]:
        """The model's logits after each token; only those that it has not read ahead are read.

        Raises:
            FailedClosed: other tokens were read ahead than are now given.
        """
        ahead, tokens, found = self.ahead, self.tokens, self.found
        self.tokens, self.found = [], []
        if not ahead:
            return logits_of(model, input_ids, attention_mask, position_ids, self.cache, logits_to_keep)
        read = torch.cat(tokens, dim=1)
        if read.shape[0] != input_ids.shape[0] or ahead > input_ids.shape[1]:
            raise FailedClosed(f"an auxiliary has read {tuple(read.shape)} tokens ahead of {tuple(input_ids.shape)}")
        same = (read == input_ids[:, :ahead].to(read.device)).all()
        check(same, "an auxiliary has read other tokens ahead than the target is given")
        if ahead < input_ids.shape[1]:
            positions = position_ids if position_ids is None else position_ids[:, ahead:]
            found = [*found, logits_of(model, input_ids[:, ahead:], attention_mask, positions, self.cache)]
        logits = found[0] if len(found) == 1 else torch.cat(found, dim=1)
        return logits[:, -logits_to_keep:] if logits_to_keep else logits

    def reset(self) -> None:
        """Forget what was read ahead."""
        self.tokens, self.found = [], []

    def crop(self, tokens_to_remove: int) -> None:
        """Refused while something is read ahead; otherwise nothing, the layers crop themselves."""
        self._refuse()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Likewise."""
        self._refuse()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Likewise."""
        self._refuse()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Likewise."""
        self._refuse()

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1

    def offload(self) -> None:
        """Nothing."""

    prefetch = offload

    def _refuse(self) -> None:
        if self.tokens:
            raise FailedClosed("an auxiliary has read ahead of the target: ask for the divergence before anything else")
