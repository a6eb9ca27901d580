"""From logits to what transformers expects of a causal language model: with a loss where labels are given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxtyping import Float, Int
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from divdec.errors import UsageError

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel


def causal_output(
    model: PreTrainedModel,
    logits: Float[Tensor, "batch kept vocab"],
    cache: Cache | None,
    labels: Int[Tensor, "batch tokens"] | None,
    logits_to_keep: int,
    options: Mapping[str, Any],
) -> CausalLMOutputWithPast | tuple[Any, ...]:
    """What `forward` returns.

    Args:
        model: whose loss function is used, over `model.vocab_size` tokens.
        logits: all that may leave it.
        cache: of all parts, or None.
        labels: token ids, −100 where no loss is wanted; None for no loss.
        logits_to_keep: as `forward` was given it.
        options: `return_dict` and `num_items_in_batch` among what else `forward` was given.

    Raises:
        UsageError: labels need the logits of every position.
    """
    loss = None
    if labels is not None:
        if logits_to_keep:
            raise UsageError("labels need the logits of every position: leave logits_to_keep at 0")
        count = {name: options[name] for name in ("num_items_in_batch",) if name in options}
        loss = model.loss_function(logits, labels.to(logits.device), vocab_size=model.vocab_size, **count)
    output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
    return output if options.get("return_dict") in (None, True) else output.to_tuple()
