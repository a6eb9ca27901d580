"""Membership inference attacks: a score per item, high where the model seems not to have seen it (OpenUnlearning)."""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from divdec.data.formatting import IGNORED, Example
from divdec.evaluation.scoring import ItemScore
from divdec.experts.neural import logits_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARE = 0.4  # of an item's tokens that min-k and min-k++ look at
SMALLEST_VARIANCE = 1e-6


def loss(item: ItemScore) -> float:
    """Mean loss per token, the one that ends the answer included."""
    return item.loss


def zlib_ratio(item: ItemScore, text: str) -> float:
    """Loss over the compressed size of the text in bytes."""
    return item.loss / len(zlib.compress(text.encode()))


def min_k(item: ItemScore, share: float = SHARE) -> float:
    """Minus the mean log-probability of the least likely tokens; the last labelled token is left out."""
    return _least(item.log_probabilities[:-1], share)


def min_k_plus_plus(item: ItemScore, share: float = SHARE) -> float:
    """The same of log-probabilities standardised by the vocabulary's: z = (log p − μ) / σ.

    Args:
        item: scored with `moments`.
        share: of the tokens that are looked at.
    """
    standardised = [
        (log_p - mean) / math.sqrt(max(variance, SMALLEST_VARIANCE))
        for log_p, (mean, variance) in zip(item.log_probabilities[:-1], item.vocabulary_moments[:-1], strict=True)
    ]
    return _least(standardised, share)


def gradient_norm(model: PreTrainedModel, example: Example) -> float:
    """Mean over the model's parameters of the 2-norm of the loss's gradient; the last labelled token is left out.

    0 where there is no other. Of a steered model the parameters of target and auxiliaries count alike.
    """
    if all(label == IGNORED for label in example.labels[1:-1]):
        return 0.0
    # Only what is read is computed: nothing is predicted by the last two tokens.
    input_ids = torch.tensor([example.input_ids[:-2]])
    kept = input_ids.shape[1] + 1 - max(example.prompt_length, 1)
    with torch.enable_grad():
        logits = logits_of(model, input_ids, torch.ones_like(input_ids), None, None, kept)[0]
        labels = torch.tensor(example.labels[1:-1][-kept:], device=logits.device)
        chosen = labels != IGNORED
        log_p = logits[chosen].float().log_softmax(dim=-1)
        mean_loss = -log_p.gather(1, labels[chosen][:, None]).mean()
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(mean_loss, parameters, allow_unused=True)
    norms = [gradient.norm(p=2).to(model.device) for gradient in gradients if gradient is not None]
    return statistics.fmean(torch.stack(norms).tolist())


def _least(values: Sequence[float], share: float) -> float:
    if not values:
        return 0.0
    count = max(1, int(share * len(values)))
    return -statistics.fmean(sorted(values)[:count])
