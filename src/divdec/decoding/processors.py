"""Logits processors after which a token that the rule suppresses stays suppressed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from divdec.errors import UsageError
from divdec.fail_closed import NO_TOKEN, check

REMEMBERING = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)
"""Processors with a state that follows one sequence token by token."""


class SteeredProcessors(LogitsProcessorList):
    """List of logits processors that keeps suppressed tokens at −inf and fails if no token is left.

    Processors can assign any score: some of transformers' own raise −inf where all other tokens are excluded, or turn
    it into NaN, which `argmax` would choose.
    """

    def __init__(
        self,
        processors: Iterable[Any] = (),
        prompt_length: int = 0,
        ends: Int[Tensor, " ends"] | None = None,
        num_beams: int = 1,
    ) -> None:
        """Create the list.

        Args:
            processors: in order of application.
            prompt_length: number of tokens before the answer.
            ends: ids of end tokens; rows that contain one need no further token.
            num_beams: rows per prompt, of which one must have a token left.
        """
        super().__init__(processors)
        self._prompt_length, self._ends, self._num_beams = prompt_length, ends, num_beams
        self._before: tuple[Tensor, Tensor] | None = None  # the last rows, and which tokens could follow them

    def __call__(
        self, input_ids: Int[Tensor, "rows tokens"], scores: Float[Tensor, "rows vocab"], **kwargs: Any
    ) -> Float[Tensor, "rows vocab"]:
        """Process scores.

        Raises:
            FailedClosed: a processed score is NaN or +inf, or no token is left.
        """
        if not self:  # `Steering.apply` has checked the logits
            return scores
        suppressed = scores == -torch.inf
        processed = keep_suppressed(super().__call__(input_ids, scores, **kwargs), suppressed)  # pyright: ignore[reportArgumentType]
        if self._num_beams > 1:
            processed = processed.masked_fill(self._impossible(input_ids)[:, None], -torch.inf)
            self._before = input_ids, processed > -torch.inf
        largest = processed.amax(dim=-1)  # NaN where any is
        goes_on = largest > -torch.inf
        if self._ends is not None:
            ended = torch.isin(input_ids[:, self._prompt_length :], self._ends.to(input_ids.device)).any(dim=-1)
            goes_on = goes_on | ended.to(goes_on.device)
        check((largest < torch.inf).all() & goes_on.view(-1, self._num_beams).any(dim=-1).all(), NO_TOKEN)
        return processed

    def _impossible(self, input_ids: Int[Tensor, "rows tokens"]) -> Bool[Tensor, " rows"]:
        """Find beams that end in an excluded token: the search fills up with them where too few tokens are left."""
        if self._before is None:
            return torch.zeros_like(input_ids[:, 0], dtype=torch.bool)
        earlier, possible = self._before
        continued = (input_ids[:, None, :-1] == earlier[None]).all(dim=-1)
        return ~(continued & possible[:, input_ids[:, -1]].T).any(dim=-1)


def keep_suppressed(scores: Tensor, suppressed: Tensor) -> Tensor:
    """Reset suppressed tokens to −inf after processing.

    Raises:
        UsageError: a processor changed the shape of the scores.
    """
    if scores.shape != suppressed.shape:
        raise UsageError(
            f"a logits processor gave scores of shape {tuple(scores.shape)}; a steered model needs "
            f"{tuple(suppressed.shape)}: one row for each sequence, one score for each token"
        )
    return scores.masked_fill(suppressed, -torch.inf)


def check_processors(processors: LogitsProcessorList, search: str) -> None:
    """Refuse processors with a state that follows one sequence, for searches that try several or go back."""
    for processor in processors:
        if isinstance(processor, REMEMBERING):
            raise UsageError(f"{search} is not offered with {type(processor).__name__}, which remembers every token")
