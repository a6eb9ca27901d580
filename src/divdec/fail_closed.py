"""Checks of inputs, logits and divergence: stop with an error instead of answering from invalid numbers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from divdec.errors import FailedClosed, UsageError

# Further arguments that a steered model's forward accepts; the first two are used, the others have no effect.
ACCEPTED = frozenset(
    ("return_dict", "num_items_in_batch", "cache_position", "token_type_ids", "tokenizer", "assistant_tokenizer")
)
NO_TOKEN = "no token can be chosen: a score is NaN or +inf, or the rule and the logits processors rule out every token"

_thread = threading.local()


def check(condition: Bool[Tensor, ""], message: str) -> None:
    """Raise an error if the condition is false. On a GPU this does not force a synchronisation.

    Raises:
        FailedClosed: the condition is false. On a GPU the error is a RuntimeError at the next synchronisation, after
            which the process cannot use the device; `wait_for_checks` makes it immediate.
    """
    if condition.device.type == "cuda" and not getattr(_thread, "waits", False):
        torch._assert_async(condition, message)
    elif not condition:
        raise FailedClosed(message)


def wait_for_checks() -> None:
    """Synchronise this thread with the GPU at each check, so that it can continue after a failed check."""
    _thread.waits = True


def check_target(target_logits: Float[Tensor, "... vocab"]) -> None:
    """Fail closed if the target's logits contain NaN or +inf, or are all −inf."""
    largest = target_logits.detach().amax(dim=-1)  # NaN where any logit is
    check(largest.isfinite().all(), "the target's logits are not finite (it overflowed); nothing is answered from them")


def check_divergence(divergence: Float[Tensor, "... vocab"]) -> None:
    """Fail closed if the divergence contains NaN or an infinity, which would leave some token unsteered."""
    divergence = divergence.detach()
    finite = divergence.amax(dim=-1).isfinite() & divergence.amin(dim=-1).isfinite()
    message = "the experts' divergence is not finite (an auxiliary overflowed); nothing is answered unsteered"
    check(finite.all(), message)


def refuse_unknown(input_ids: object, kwargs: dict[str, Any]) -> None:
    """Refuse arguments that would not reach all parts."""
    if input_ids is None:
        raise UsageError("a steered model needs input_ids: target, q and p have different embeddings")
    for name, value in kwargs.items():
        if name not in ACCEPTED and value is not None and value is not False:
            raise UsageError(
                f"{name} is not offered by a steered model, where it would not reach target and experts alike; "
                "model.target and model.experts have their own"
            )


def check_inputs(input_ids: Any, attention_mask: Any, past_length: int | None) -> None:
    """Refuse tokens and masks of other types, and a mask that does not cover every cached and every new token.

    `past_length` is the number of cached tokens; None if it is not known yet.
    """
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.int64, torch.int32) or input_ids.dim() != 2:
        raise UsageError(
            f"input_ids is {_describe(input_ids)}; accepted: an integer tensor of token ids, (batch, tokens)"
        )
    if not input_ids.shape[1]:
        raise UsageError("input_ids holds no token; begin with the tokenizer's begin or end token")
    if attention_mask is None:
        return
    if not isinstance(attention_mask, Tensor) or attention_mask.is_floating_point() or attention_mask.is_complex():
        raise UsageError(
            f"attention_mask is {_describe(attention_mask)}; accepted: an integer tensor, 1 for a token and 0 for "
            "padding"
        )
    # On a GPU the values would have to be waited for.
    if attention_mask.device.type == "cpu" and not set(attention_mask.unique().tolist()) <= {0, 1}:
        raise UsageError("attention_mask holds other values than 1 for a token and 0 for padding")
    if past_length is None:
        return
    expected = (input_ids.shape[0], past_length + input_ids.shape[1])
    if tuple(attention_mask.shape) != expected:
        raise UsageError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; a steered model needs {expected}: "
            "batch, and one entry for each cached and each new token"
        )


def check_vocabulary(token_ids: Sequence[int] | Tensor, vocab_size: int, name: str = "input_ids") -> None:
    """Refuse token ids for which the model has no embedding. On a GPU such an id would end the process.

    Ids of a tensor on a GPU are waited for. The error message names `name`, which holds them.
    """
    ids = token_ids if isinstance(token_ids, Tensor) else torch.tensor(token_ids)
    for token in (int(ids.min()), int(ids.max())) if ids.numel() else ():
        if not 0 <= token < vocab_size:
            raise UsageError(
                f"{name} holds token id {token}, for which the model has no embedding; accepted: 0 to {vocab_size - 1}"
            )


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} and shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def check_prompts(
    attention_mask: Int[Tensor, "rows past_and_tokens"] | None, prompts: int, name: str = "prompt"
) -> None:
    """Refuse prompts that end in padding; each of `prompts` prompts may have several rows."""
    if attention_mask is None:
        return
    padded = (attention_mask[:, -1] == 0).nonzero()
    if len(padded):
        number = int(padded[0]) * prompts // len(attention_mask)
        raise UsageError(
            f'{name} {number} ends in padding; generation needs padding on the left (tokenizer.padding_side = "left")'
        )
