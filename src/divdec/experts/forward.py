"""One forward pass of any causal language model, and an empty cache for it."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from divdec.experts.compiled import compiled_logits, is_compiled
from divdec.experts.fixed_cache import FixedCache


def logits_of(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "batch tokens"],
    attention_mask: Int[Tensor, "batch past_and_tokens"] | None,
    position_ids: Int[Tensor, "batch_or_one tokens"] | None,
    cache: Cache | None,
    logits_to_keep: int = 0,
) -> Float[Tensor, "batch kept width"]:
    """One forward pass on the model's own device; only the arguments that its architecture takes are given.

    Raises:
        FailedClosed: a cache of fixed length has no room for the tokens.
    """
    fixed = cache if isinstance(cache, FixedCache) else None
    if fixed is not None:
        fixed.check_room(input_ids.shape[1])
    device = device_of(model)
    accepted = _forward_parameters(type(model))
    arguments: dict[str, Any] = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "past_key_values": cache,
        "use_cache": cache is not None,
        "logits_to_keep": logits_to_keep,
    }
    arguments = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
        if name in accepted and value is not None
    }
    if fixed is not None and is_compiled(fixed, input_ids.shape[1]):
        logits = compiled_logits(model, fixed, arguments)
    else:
        logits = model(**arguments).logits
    if fixed is not None:
        fixed.held.move(input_ids.shape[1])
    return logits[:, -logits_to_keep:] if logits_to_keep else logits


def device_of(model: nn.Module) -> torch.device:
    """Where a model takes its tokens: where its embeddings lie or, offloaded (accelerate), where they are brought."""
    embeddings: Any = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    device: torch.device = embeddings.weight.device
    hook = getattr(embeddings, "_hf_hook", None)
    for one in getattr(hook, "hooks", [hook]) if device.type == "meta" else ():
        if (brought := getattr(one, "execution_device", None)) is not None:
            return torch.device(brought)
    return device


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty cache whose layers fit the model's architecture (sliding windows, hybrid layers)."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def length_of(cache: Cache) -> int:
    """How many tokens a cache holds."""
    # Layers that share another's keys and values stay empty, so the fullest one tells.
    layers: list[Any] = [layer for layer in cache.layers if hasattr(layer, "get_seq_length")]
    return max((layer.get_seq_length() for layer in layers), default=0)


def lengths_of(cache: Cache) -> list[int]:
    """How many tokens each part of a cache holds, all of which must be the same."""
    lengths = getattr(cache, "lengths", None)
    return [length_of(cache)] if lengths is None else lengths


def takes_cache(model: Any) -> bool:
    """Whether all that the model keeps of what it has read is in a `DynamicCache`, which counts its tokens."""
    return (
        "past_key_values" in _forward_parameters(type(model))
        and model._supports_default_dynamic_cache()
        # RecurrentGemma's modules hold the state themselves: every sequence would see the others'.
        and not any("recurrent_states" in vars(module) for module in model.modules())
        and any(hasattr(layer, "get_seq_length") for layer in new_cache(model).layers)
    )


def recomputes(module: nn.Module) -> bool:
    """Whether a model within trains with gradient checkpointing, which computes layers anew and fills no cache."""
    return any(getattr(part, "gradient_checkpointing", False) and part.training for part in module.modules())


def stateful_types(*parts: object) -> list[str]:
    """The types of the models within `parts` that sum up what they read, so that no token can be taken back."""
    modules: list[Any] = [m for part in parts for m in (part.modules() if isinstance(part, nn.Module) else [part])]
    return sorted({module.config.model_type for module in modules if getattr(module, "_is_stateful", False)})


@functools.cache
def _forward_parameters(model_class: type[nn.Module]) -> frozenset[str]:
    return frozenset(inspect.signature(model_class.forward).parameters)
