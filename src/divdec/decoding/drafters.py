"""Drafters of speculative decoding: the retain auxiliary q, or repetitions in the text.

A drafter decides how many tokens are accepted, never which tokens an answer has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache

from divdec.decoding.batch import Block, SpeculativeBatch
from divdec.errors import UsageError
from divdec.experts.combined import CombinedCache, CombinedExperts
from divdec.experts.neural import NeuralPair, PairCache
from divdec.experts.protocol import Inputs
from divdec.sampling import NONE

DRAFTERS = ("auto", "retain", "lookup")
MAX_MATCH = 3  # tokens of the text's end that are searched for in it
_log = logging.getLogger(__name__)
_warned = False

Choose = Callable[[int, Float[Tensor, "rows 1 vocab"]], tuple[Int[Tensor, "rows 1"], Float[Tensor, "rows 1 vocab"]]]
"""Chooses a token from logits at a step of the block; returns it with the processed scores."""
Draft = tuple[Int[Tensor, "rows block"], Float[Tensor, "rows block vocab"] | None]
"""Tokens, −1 for none, and the scores that they were drawn from; None if they were not drawn."""
WantsMore = Callable[[Float[Tensor, " rows"]], bool]
"""Whether to draft another token, given the probabilities of the newest ones."""


class RetainDrafter:
    """Drafts with q, whose logits are stored, so that verification does not read the tokens again.

    Two adapters on one base run in one pass, so their drafts are steered too.
    """

    name = "retain"

    def __init__(self, pair: NeuralPair, cache_of: Callable[[Cache], PairCache]) -> None:
        self._pair = pair
        self._cache_of = cache_of

    def draft(self, batch: SpeculativeBatch, block: Block, choose: Choose, wants_more: WantsMore | None) -> Draft:
        """Draw each token of the block from q."""
        tokens, scores, token = [], [], block.last
        cache = self._cache_of(batch.cache.experts)
        for step in range(block.size):
            positions = block.positions[:, step : step + 1]
            inputs = Inputs(token, block.mask_until(step), positions)
            logits = self._pair.draft_logits(inputs, cache, batch.model.steering).float()
            token, score = choose(step, logits[..., : batch.model.vocab_size])
            tokens.append(token)
            scores.append(score)
            if wants_more is not None and not wants_more(score[:, 0].softmax(dim=-1).amax(dim=-1)):
                break
        return torch.cat(tokens, dim=1), torch.cat(scores, dim=1)


class LookupDrafter:
    """Drafts the latest continuation in the text; a draft depends on the tokens before it, not on the block."""

    name = "lookup"

    def draft(self, batch: SpeculativeBatch, block: Block, choose: Choose, wants_more: WantsMore | None) -> Draft:
        """Continue each text, up to the first token without a known continuation."""
        texts = batch.texts()
        drafts = np.full((len(texts), block.size), NONE, dtype=np.int64)
        for row, text in enumerate(texts):
            extended = np.concatenate([text, np.zeros(block.size, dtype=np.int64)])
            for step in range(block.size):
                token = repeated(extended[: len(text) + step])
                if not 0 <= token < batch.model.vocab_size:
                    break
                drafts[row, step] = extended[len(text) + step] = token
        tokens = torch.from_numpy(drafts)
        if wants_more is not None:
            columns = enumerate(tokens.ne(NONE).float().T, start=1)
            tokens = tokens[:, : next((size for size, column in columns if not wants_more(column)), block.size)]
        return tokens.to(block.last.device), None


def repeated(text: np.ndarray) -> int:
    """Return the token after the latest earlier occurrence of the text's longest repeated end; −1 for none."""
    for length in range(min(MAX_MATCH, len(text) - 1), 0, -1):
        windows = np.lib.stride_tricks.sliding_window_view(text[:-1], length)
        matches = np.flatnonzero((windows == text[-length:]).all(axis=1))
        if len(matches):
            return int(text[matches[-1] + length])
    return NONE


def make_drafter(name: str, experts: Any) -> RetainDrafter | LookupDrafter:
    """Create a drafter; 'auto' is q, or with a warning 'lookup' if no auxiliary has the target's tokens.

    Raises:
        UsageError: the drafter is 'retain', and no auxiliary has the target's tokens.
    """
    global _warned
    pair = None if name == "lookup" else _find_pair(experts)
    if pair is not None:
        return RetainDrafter(*pair)
    if name == "retain":
        raise UsageError(
            "drafter 'retain' needs auxiliaries with the target's own tokens, which these experts do not have; "
            "accepted: 'auto', 'lookup'"
        )
    if name == "auto" and not _warned:
        _warned = True
        _log.warning("no auxiliary has the target's own tokens: drafts come from repetitions in the text")
    return LookupDrafter()


def _find_pair(experts: Any) -> tuple[NeuralPair, Callable[[Cache], PairCache]] | None:
    """Return the neural pair among the experts, and a function that finds its cache in theirs."""
    if isinstance(experts, NeuralPair):
        return experts, lambda cache: cache  # pyright: ignore[reportReturnType]
    for index, member in enumerate(experts.parts if isinstance(experts, CombinedExperts) else ()):
        if isinstance(member, NeuralPair):

            def cache_of(cache: Cache, index: int = index) -> PairCache:
                assert isinstance(cache, CombinedCache)
                return cache.caches[index]  # pyright: ignore[reportReturnType]

            return member, cache_of
    return None
