"""What a steered model's inputs and divergence must be, checked before anything is answered."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from divdec.errors import UsageError
from divdec.fail_closed import check

# What forward may be given beside its own arguments: the first two are used, the others change nothing.
ACCEPTED = frozenset(
    ("return_dict", "num_items_in_batch", "cache_position", "token_type_ids", "tokenizer", "assistant_tokenizer")
)


def refuse_unknown(input_ids: object, kwargs: dict[str, Any]) -> None:
    """Refuse what the parts would not all be given: it would be ignored, or change one of them only."""
    if input_ids is None:
        raise UsageError("a steered model needs input_ids: its three parts have embeddings of their own")
    for name, value in kwargs.items():
        if name not in ACCEPTED and value is not None and value is not False:
            raise UsageError(
                f"{name} is not offered by a steered model, where it would not reach target and experts alike; "
                "model.target and model.experts have their own"
            )


def check_mask(input_ids: Int[Tensor, "batch tokens"], attention_mask: Tensor | None, past_length: int) -> None:
    """Refuse a mask that does not cover every cached and every new token."""
    expected = (input_ids.shape[0], past_length + input_ids.shape[1])
    if attention_mask is not None and tuple(attention_mask.shape) != expected:
        raise UsageError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; a steered model needs {expected}: "
            "batch, and one entry for each cached and each new token"
        )


def positions_of(
    input_ids: Int[Tensor, "batch tokens"],
    attention_mask: Int[Tensor, "batch past_and_tokens"] | None,
    past_length: int,
) -> Int[Tensor, "batch_or_one tokens"]:
    """Each token's place in its sequence, padding not counted."""
    tokens = input_ids.shape[1]
    if attention_mask is None:
        return torch.arange(past_length, past_length + tokens, device=input_ids.device)[None]
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)[:, -tokens:]


def check_finite(
    divergence: Float[Tensor, "batch kept vocab"], attention_mask: Int[Tensor, "batch past_and_tokens"] | None
) -> None:
    """Fail closed: a divergence that is NaN or infinite would leave some token unsteered."""
    finite = divergence.isfinite().all(dim=-1)
    if attention_mask is not None:
        # What stands after a padding token is read by nobody and may be anything.
        finite = finite | (attention_mask[:, -divergence.shape[1] :] == 0).to(finite.device)
    message = "the experts' divergence is not finite (an auxiliary overflowed); nothing is answered unsteered"
    check(finite.all(), message)
