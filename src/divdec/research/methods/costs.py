"""Time per token of a model beside the target's, measured in turns on the same prompts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NEW_TOKENS = 32
ROUNDS = 3


def time_ratio(model: PreTrainedModel, target: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> float:
    """How many times the target's time a token takes, one prompt at a time: the median over prompts and rounds.

    Args:
        model: whose time is measured.
        target: what it is compared with.
        prompts: token ids.
    """
    ratios = []
    for number in range(ROUNDS + 1):
        for prompt in prompts:
            # In turns, so that a machine that is slow for a while is slow for both.
            own, whole = (_seconds_per_token(one, prompt) for one in (model, target))
            if number:  # the first round only warms up
                ratios.append(own / whole)
    return statistics.median(ratios)


@torch.inference_mode()
def _seconds_per_token(model: PreTrainedModel, prompt: Sequence[int]) -> float:
    ids = torch.tensor([list(prompt)], device=model.device)
    started = time.perf_counter()
    found = model.generate(  # pyright: ignore[reportCallIssue]
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=NEW_TOKENS,
        max_new_tokens=NEW_TOKENS,
    )
    if ids.device.type == "cuda":
        torch.cuda.synchronize(ids.device)
    return (time.perf_counter() - started) / (found.shape[1] - ids.shape[1])
