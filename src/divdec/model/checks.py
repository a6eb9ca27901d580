"""What a steered model's inputs and divergence must be, checked before anything is answered."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
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


def padding_of(
    attention_mask: Int[Tensor, "batch past_and_tokens"] | None, kept: int
) -> Bool[Tensor, "batch kept 1"] | None:
    """Which of the last positions are padding; None where it is known that none is."""
    if attention_mask is None:
        return None
    padding = attention_mask[:, -kept:] == 0
    # Asking a GPU would make the host wait for it.
    return None if padding.device.type == "cpu" and not padding.any() else padding[..., None]


def check_target(target_logits: Float[Tensor, "... vocab"]) -> None:
    """Fail closed where the target's logits are NaN or +inf, or all −inf; it may rule out some tokens by −inf."""
    largest = target_logits.detach().amax(dim=-1)  # NaN where any is
    check(largest.isfinite().all(), "the target's logits are not finite (it overflowed); nothing is answered from them")


def check_divergence(divergence: Float[Tensor, "... vocab"]) -> None:
    """Fail closed: a divergence that is NaN or infinite would leave some token unsteered."""
    divergence = divergence.detach()
    finite = divergence.amax(dim=-1).isfinite() & divergence.amin(dim=-1).isfinite()
    message = "the experts' divergence is not finite (an auxiliary overflowed); nothing is answered unsteered"
    check(finite.all(), message)


def check_prompts(
    attention_mask: Int[Tensor, "rows past_and_tokens"] | None, prompts: int, name: str = "prompt"
) -> None:
    """Refuse prompts that end in padding: the token after it would be no continuation of the text.

    Args:
        attention_mask: 1 for real tokens, 0 for padding; None where there is no padding.
        prompts: how many there are, each of which may stand in several rows.
        name: what they are called in the error.

    Raises:
        UsageError: names the first that does.
    """
    if attention_mask is None:
        return
    padded = (attention_mask[:, -1] == 0).nonzero()
    if len(padded):
        number = int(padded[0]) * prompts // len(attention_mask)
        raise UsageError(
            f'{name} {number} ends in padding; generation needs padding on the left (tokenizer.padding_side = "left")'
        )
