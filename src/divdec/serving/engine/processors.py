"""The logits processors that a request asks for: transformers' own, and those that only the OpenAI API has."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from divdec.decoding.processors import SteeredProcessors
from divdec.serving.engine.requests import Sampling


class Bias(LogitsProcessor):
    """`logit_bias`: numbers added to the logits of some tokens. What a rule has ruled out stays so."""

    def __init__(self, bias: dict[int, float]) -> None:
        self._tokens, self._values = torch.tensor(list(bias)), torch.tensor(list(bias.values()))

    def __call__(
        self, input_ids: Int[Tensor, "rows tokens"], scores: Float[Tensor, "rows vocab"]
    ) -> Float[Tensor, "rows vocab"]:
        """Scores with the bias."""
        return scores.index_add(
            1, self._tokens.to(scores.device), self._values.to(scores).expand(len(scores), -1).contiguous()
        )


class CountPenalty(LogitsProcessor):
    """`frequency_penalty` times how often a token was answered, and `presence_penalty` if it was at all."""

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self._presence, self._frequency, self._prompt_length = presence, frequency, prompt_length

    def __call__(
        self, input_ids: Int[Tensor, "rows tokens"], scores: Float[Tensor, "rows vocab"]
    ) -> Float[Tensor, "rows vocab"]:
        """Scores less the penalties."""
        answered = input_ids[:, self._prompt_length :].to(scores.device)
        counts = torch.zeros_like(scores).scatter_add(1, answered, torch.ones_like(answered, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)


def processors_of(sampling: Sampling, prompt_length: int) -> SteeredProcessors:
    """What changes the steered logits before a token is drawn, in vLLM's order: biases, penalties, warpers."""
    found: list[Any] = []
    if sampling.logit_bias:
        found.append(Bias(dict(sampling.logit_bias)))
    if sampling.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.presence_penalty or sampling.frequency_penalty:
        found.append(CountPenalty(sampling.presence_penalty, sampling.frequency_penalty, prompt_length))
    if sampling.temperature > 0:
        if sampling.temperature != 1:
            found.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.min_p > 0:
            found.append(MinPLogitsWarper(float(sampling.min_p)))
        if sampling.top_k > 0:
            found.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            found.append(TopPLogitsWarper(float(sampling.top_p)))
    return SteeredProcessors(found)
