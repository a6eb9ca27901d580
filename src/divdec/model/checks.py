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


def check_inputs(input_ids: Any, attention_mask: Any, past_length: int | None) -> None:
    """Refuse tokens and masks of another kind, and a mask that does not cover every cached and every new token.

    Args:
        input_ids: what was given as token ids.
        attention_mask: what was given as their mask; None where nothing was.
        past_length: how many tokens the cache holds; None where it is not known yet.

    Raises:
        UsageError: says what was given and what is accepted.
    """
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.int64, torch.int32) or input_ids.dim() != 2:
        raise UsageError(f"input_ids is {_shown(input_ids)}; accepted: an integer tensor of token ids, (batch, tokens)")
    if attention_mask is None:
        return
    if not isinstance(attention_mask, Tensor) or attention_mask.is_floating_point() or attention_mask.is_complex():
        raise UsageError(
            f"attention_mask is {_shown(attention_mask)}; accepted: an integer tensor, 1 for a token and 0 for padding"
        )
    if past_length is None:
        return
    expected = (input_ids.shape[0], past_length + input_ids.shape[1])
    if tuple(attention_mask.shape) != expected:
        raise UsageError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; a steered model needs {expected}: "
            "batch, and one entry for each cached and each new token"
        )


def _shown(given: object) -> str:
    if isinstance(given, Tensor):
        return f"a tensor of {str(given.dtype).removeprefix('torch.')} and shape {tuple(given.shape)}"
    return f"a {type(given).__name__}"


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
