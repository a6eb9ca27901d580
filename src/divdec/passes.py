"""Passes of any causal language model: logits, positions, caches, and the properties that a part must have."""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from divdec.errors import UsageError


def logits_of(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "batch tokens"],
    attention_mask: Int[Tensor, "batch past_and_tokens"] | None,
    position_ids: Int[Tensor, "batch_or_one tokens"] | None,
    cache: Cache | None,
    logits_to_keep: int = 0,
) -> Float[Tensor, "batch kept width"]:
    """Run one forward pass on the model's device, with the arguments that its architecture accepts."""
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
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
        if name in accepted and value is not None
    }
    logits = model(**arguments).logits
    return logits[:, -logits_to_keep:] if logits_to_keep else logits


def positions_of(
    input_ids: Int[Tensor, "batch tokens"],
    attention_mask: Int[Tensor, "batch past_and_tokens"] | None,
    past_length: int,
) -> Int[Tensor, "batch_or_one tokens"]:
    """Return each token's position in its sequence, without padding."""
    tokens = input_ids.shape[1]
    if attention_mask is None:
        return torch.arange(past_length, past_length + tokens, device=input_ids.device)[None]
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)[:, -tokens:]


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """Return an empty cache whose layers fit the model's architecture (sliding windows, hybrid layers)."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's embeddings; if they are offloaded, the device that accelerate runs them on."""
    embeddings: Any = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    device: torch.device = embeddings.weight.device
    hook = getattr(embeddings, "_hf_hook", None)
    for candidate in getattr(hook, "hooks", [hook]) if device.type == "meta" else ():
        if (execution_device := getattr(candidate, "execution_device", None)) is not None:
            return torch.device(execution_device)
    return device


def logit_width(model: PreTrainedModel) -> int:
    """Return the number of logits per position: the size of the vocabulary, possibly padded."""
    head = model.get_output_embeddings()
    return head.weight.shape[0] if head is not None else model.config.get_text_config().vocab_size


def count_embeddings(model: PreTrainedModel) -> int:
    """Return the number of token ids that a model reads. Some models of images read ids that they never predict."""
    embeddings: Any = model.get_input_embeddings()
    return int(embeddings.weight.shape[0])


def check_part(name: str, model: nn.Module) -> None:
    """Refuse a model that cannot decode step by step with a `DynamicCache`.

    Raises:
        UsageError: it is wrapped (PEFT), or stores its state elsewhere (Mamba, RWKV, MiniMax, RecurrentGemma).
    """
    if not isinstance(model, PreTrainedModel) or not takes_cache(model):
        raise UsageError(
            f"{name} is a {type(model).__name__}, which does not store its state in a DynamicCache; accepted: a "
            "causal language model of transformers with a key-value cache (merge adapters first: merge_and_unload())"
        )


def takes_cache(model: Any) -> bool:
    """Whether the model stores everything it has read in a `DynamicCache` that counts tokens."""
    return (
        "past_key_values" in _forward_parameters(type(model))
        and model._supports_default_dynamic_cache()
        # RecurrentGemma's modules hold the state themselves, so sequences would share it.
        and not any("recurrent_states" in vars(module) for module in model.modules())
        and any(hasattr(layer, "get_seq_length") for layer in new_cache(model).layers)
    )


def uses_gradient_checkpointing(module: nn.Module) -> bool:
    """Whether a model within trains with gradient checkpointing, which recomputes layers and fills no cache."""
    return any(getattr(child, "gradient_checkpointing", False) and child.training for child in module.modules())


def stateful_types(*models: object) -> list[str]:
    """Return the types of the models, or models within, with a recurrent state, from which no token can be removed."""
    modules: list[Any] = [m for model in models for m in (model.modules() if isinstance(model, nn.Module) else [model])]
    return sorted({module.config.model_type for module in modules if getattr(module, "_is_stateful", False)})


def rotary_types_by_length(model: Any) -> list[str]:
    """Return the types of rotary embeddings within that choose their factors by the largest position of a pass."""
    kinds = {str(getattr(module, "rope_type", "")) for module in model.modules()}  # some have one type per layer type
    return [kind for kind in ("dynamic", "longrope") if any(kind in text for text in kinds)]


def share_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model whose parameters and buffers are those of the original."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, tensors)


def same_weights(first_model: PreTrainedModel, other: PreTrainedModel) -> bool:
    """Whether two models have equal parameters under equal names; stops at the first difference."""
    first, second = (
        {name for name, _ in model.named_parameters(remove_duplicate=False)} for model in (first_model, other)
    )
    if first != second:
        return False
    modules = dict(other.named_modules(remove_duplicate=False))
    return all(
        _same_own_weights(child, modules[name]) for name, child in first_model.named_modules() if child._parameters
    )


def _same_own_weights(module: nn.Module, other: nn.Module) -> bool:
    from accelerate.utils.modeling import align_module_device

    with align_module_device(module), align_module_device(other):  # loads weights that accelerate has offloaded
        second = dict(other.named_parameters(recurse=False))
        return all(
            not tensor.is_meta
            and tensor.shape == second[name].shape
            and torch.equal(tensor, second[name].to(tensor.device))
            for name, tensor in module.named_parameters(recurse=False)
        )


@functools.cache
def _forward_parameters(model_class: type[nn.Module]) -> frozenset[str]:
    return frozenset(inspect.signature(model_class.forward).parameters)


def length_of(cache: Cache) -> int:
    """Return the number of tokens that a cache holds."""
    # Layers that share another layer's keys and values stay empty.
    layers: list[Any] = [layer for layer in cache.layers if hasattr(layer, "get_seq_length")]
    return max((layer.get_seq_length() for layer in layers), default=0)


def lengths_of(cache: Cache) -> list[int]:
    """Return the number of tokens that each model's cache holds; they must all be equal."""
    lengths = getattr(cache, "lengths", None)
    return [length_of(cache)] if lengths is None else lengths
