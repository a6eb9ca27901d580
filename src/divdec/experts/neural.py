"""A pair of neural language models with the target's vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from divdec.errors import FailedClosed, UsageError
from divdec.experts.protocol import Experts, Inputs
from divdec.fail_closed import check
from divdec.passes import check_part, count_embeddings, length_of, logit_width, logits_of, new_cache, same_weights

Steer = Callable[[Tensor, Tensor], Tensor]


class NeuralPair(Experts, nn.Module):
    """Retain auxiliary q and forget auxiliary p (paper, section 3.1).

    Their widths may differ; the divergence covers the tokens that both have.
    """

    def __init__(self, retain: PreTrainedModel, forget: PreTrainedModel) -> None:
        super().__init__()
        check_pair(retain, forget)
        self.cache_class = PairCache
        self.retain = retain
        self.forget = forget
        self.vocab_size = min(logit_width(retain), logit_width(forget))
        self.embeddings = min(count_embeddings(retain), count_embeddings(forget))

    def new_cache(self) -> PairCache:
        """Return an empty cache for both auxiliaries."""
        return PairCache(new_cache(self.retain), new_cache(self.forget))

    def compute(self, inputs: Inputs, cache: PairCache | None, logits_to_keep: int) -> Tensor:
        """Compute log q − log p (paper, eq. 1); tokens that an auxiliary has read ahead are not read again."""
        if cache is None:
            q, p = (logits_of(model, *inputs, None, logits_to_keep) for model in (self.retain, self.forget))
        else:
            q = cache.retain.logits(self.retain, inputs, logits_to_keep)
            p = cache.forget.logits(self.forget, inputs, logits_to_keep)
        return divergence_of(q, p)

    def draft_logits(self, inputs: Inputs, cache: PairCache, steer: Steer) -> Float[Tensor, "batch tokens vocab"]:
        """Run q on tokens that the target has not read, and return its logits, to draft the next token from.

        The next `divergence` must begin with these tokens; it uses the stored logits.

        Args:
            inputs: the tokens; see `Experts.divergence`.
            cache: from `new_cache`.
            steer: applies the rule to logits and a divergence; used by a pair that runs p too.
        """
        logits = logits_of(self.retain, *inputs, cache.retain.cache)
        cache.retain.store(inputs.input_ids, logits)
        return logits[..., : self.vocab_size]


def divergence_of(q_logits: Float[Tensor, "... _"], p_logits: Float[Tensor, "... _"]) -> Float[Tensor, "... vocab"]:
    """Compute log q − log p over the tokens that both have, in float32.

    This is ℓ_q − ℓ_p of the paper's eq. 1 up to a constant per position, which changes neither rule; a margin
    needs probabilities.
    """
    width = min(q_logits.shape[-1], p_logits.shape[-1])
    q, p = q_logits[..., :width].float(), p_logits[..., :width].to(q_logits.device).float()
    return q - p - (q.logsumexp(dim=-1, keepdim=True) - p.logsumexp(dim=-1, keepdim=True))


class PairCache(Cache):
    """The caches of both auxiliaries; its layers are those of both."""

    def __init__(self, retain: Cache, forget: Cache) -> None:
        self.retain, self.forget = ReadAhead(retain), ReadAhead(forget)
        layers: list[Any] = [*retain.layers, *forget.layers, self.retain, self.forget]
        super().__init__(layers=layers)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens that each of the two holds, without those read ahead."""
        return [self.retain.length, self.forget.length]


class ReadAhead:
    """One model's cache, with the tokens that the model has read ahead of the target and its logits after them.

    Speculative decoding drafts this way. The object is also one of the pair's layers: it refuses operations on the
    cache while tokens are read ahead, because their logits would belong to other sequences.
    """

    is_compileable = False
    is_sliding = False
    is_initialized = True
    keys = values = None

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.tokens: list[Int[Tensor, "batch tokens"]] = []
        self.stored_logits: list[Float[Tensor, "batch tokens width"]] = []

    @property
    def is_croppable(self) -> bool:
        """Whether no token is read ahead."""
        return not self.tokens

    @property
    def ahead(self) -> int:
        """Number of tokens read ahead."""
        return sum(tokens.shape[1] for tokens in self.tokens)

    @property
    def length(self) -> int:
        """Number of tokens in the cache, without those read ahead."""
        return length_of(self.cache) - self.ahead

    def store(self, input_ids: Int[Tensor, "batch tokens"], logits: Float[Tensor, "batch tokens width"]) -> None:
        """Store tokens that the model has read ahead, and its logits after them."""
        self.tokens.append(input_ids)
        self.stored_logits.append(logits)

    def logits(
        self, model: PreTrainedModel, inputs: Inputs, logits_to_keep: int = 0
    ) -> Float[Tensor, "batch kept width"]:
        """Return the model's logits after each token; it runs only on tokens that it has not read ahead.

        Raises:
            FailedClosed: `input_ids` does not begin with the tokens read ahead.
        """
        input_ids, mask, positions = inputs
        ahead, tokens, stored = self.ahead, self.tokens, self.stored_logits
        self.tokens, self.stored_logits = [], []
        if not ahead:
            return logits_of(model, *inputs, self.cache, logits_to_keep)
        read = torch.cat(tokens, dim=1)
        if read.shape[0] != input_ids.shape[0] or ahead > input_ids.shape[1]:
            raise FailedClosed(f"an auxiliary has read {tuple(read.shape)} tokens ahead of {tuple(input_ids.shape)}")
        same = (read == input_ids[:, :ahead].to(read.device)).all()
        check(same, "an auxiliary has read other tokens ahead than the target is given")
        if ahead < input_ids.shape[1]:
            positions = None if positions is None else positions[:, ahead:]
            stored = [*stored, logits_of(model, input_ids[:, ahead:], mask, positions, self.cache)]
        logits = stored[0] if len(stored) == 1 else torch.cat(stored, dim=1)
        return logits[:, -logits_to_keep:] if logits_to_keep else logits

    def reset(self) -> None:
        """Drop the tokens read ahead."""
        self.tokens, self.stored_logits = [], []

    def _refuse_while_ahead(self, *args: Any) -> None:
        """Do nothing, as the cache's layers handle the operation; raise an error while tokens are read ahead."""
        if self.tokens:
            raise FailedClosed("an auxiliary has read ahead of the target: ask for the divergence before anything else")

    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse_while_ahead

    def get_max_length(self) -> int:
        """Return −1: the length is unlimited."""
        return -1


def check_pair(retain: PreTrainedModel, forget: PreTrainedModel) -> None:
    """Refuse two auxiliaries that cannot decode step by step, or that are the same model."""
    check_part("retain auxiliary", retain)
    check_part("forget auxiliary", forget)
    if retain is forget or same_weights(retain, forget):
        raise UsageError("retain auxiliary and forget auxiliary are the same model: nothing would be forgotten")
