"""Share of the target's probability that steering took from a reply: `divdec serve --on-suppressed`.

Where the target's answer is forgotten, a steered model invents another one. The share that steering took is the total
variation distance between the target's and the steered distribution of the next token, at the token of the reply where
it is largest: 0 where steering changed nothing, near 1 where it took a token that the target was sure of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from divdec.model.modeling import DivergenceForCausalLM


class SuppressionPass:
    """A pass over prompt and reply that measures what steering took, by chunks, so that other requests do not wait.

    Attributes:
        chunk: tokens in one step.
    """

    def __init__(self, model: DivergenceForCausalLM, tokens: Sequence[int], prompt_length: int, chunk: int) -> None:
        """Prepare.

        Args:
            model: the steered model.
            tokens: prompt and reply.
            prompt_length: tokens of the prompt, at least 1.
            chunk: tokens in one step.
        """
        self.chunk = chunk
        self._model, self._prompt_length = model, prompt_length
        self._cache = model.new_cache()
        self._ids = torch.tensor([list(tokens[:-1])], device=model.device)
        self._largest = torch.zeros((), device=model.device)
        self._read = 0

    @torch.inference_mode()
    def step(self) -> float | None:
        """Read the next chunk. After the last one, return the largest share that steering took at one token.

        Raises:
            FailedClosed: a logit is not finite.
        """
        model, start = self._model, self._read
        self._read = end = min(start + self.chunk, self._ids.shape[1])
        if start < end:
            keep = min(end - start, end - self._prompt_length + 1)  # after the prompt's last token, the reply's first
            model.follow_registry(self._cache)
            chunk = self._ids[:, start:end]
            target, corrected, divergence = model.unsteered_components(
                chunk, past_key_values=self._cache, logits_to_keep=max(keep, 1)
            )
            if keep > 0:
                steered = model.steer(corrected, divergence)
                removed_probability = (target.float().softmax(-1) - steered.float().softmax(-1)).clamp(min=0).sum(-1)
                # NaN stays NaN, which is refused.
                self._largest = torch.maximum(self._largest, removed_probability.max().to(self._largest.device))
        return float(self._largest) if end == self._ids.shape[1] else None


def suppressed_share(model: DivergenceForCausalLM, tokens: Sequence[int], prompt_length: int, chunk: int) -> float:
    """Return the largest share of probability that steering took at one token of a reply; see `SuppressionPass`."""
    measurement = SuppressionPass(model, tokens, prompt_length, chunk)
    while (share := measurement.step()) is None:
        pass
    return share
