"""Whether two models can be run as one stack, as far as can be told without running them.

It knows nothing of how they are stacked; `divdec.experts.stacked` also compares what the stack answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from divdec.experts.fixed_cache import DummyLayer
from divdec.experts.forward import new_cache

_CACHE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3")
_CAPTURING = "transformers.utils.output_capturing"  # hooks that do nothing unless asked
_DROPOUT = re.compile("drop|noise")
# Routed experts see rows of both halves in one list.
_ROUTED = re.compile("moe|expert|router", re.IGNORECASE)
# What a configuration says of a checkpoint's origin, and not of what the model computes.
_ORIGIN = {
    *("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range"),
}


def stackable(retain: PreTrainedModel, forget: PreTrainedModel) -> str | None:
    """Why two models cannot be stacked, in one line; None where nothing is known against it."""
    return next(_obstacles(retain, forget), None)


def _obstacles(retain: PreTrainedModel, forget: PreTrainedModel) -> Iterator[str]:
    models = (retain, forget)
    if not all(isinstance(model, PreTrainedModel) for model in models) or type(retain) is not type(forget):
        yield f"a {type(retain).__name__} and a {type(forget).__name__} are not of one architecture"
        return
    for model in models:
        yield from _own_obstacles(model)
    one, other = (dict(model.named_parameters(remove_duplicate=False)) for model in models)
    shapes = ({name: tuple(weight.shape) for name, weight in weights.items()} for weights in (one, other))
    if (name := _first_difference(*shapes)) is not None:
        yield f"{name} differs in shape"
        return
    kinds = ({path: type(module) for path, module in model.named_modules()} for model in models)
    if (name := _first_difference(*kinds)) is not None:
        yield f"{name} is a module of another kind in one of the two"
        return
    if len({(weight.dtype, weight.device) for weight in [*one.values(), *other.values()]}) > 1:
        yield "the weights are not all of one dtype on one device"
        return
    tied = ({name: _first_name(weights, name) for name in weights} for weights in (one, other))
    if (name := _first_difference(*tied)) is not None:
        yield f"{name} is tied to other weights in one of the two"
    places = {id(weight): weight.data_ptr() for weight in [*one.values(), *other.values()] if weight.numel()}
    if len(set(places.values())) < len(places) or {*map(id, one.values())} & {*map(id, other.values())}:
        yield "weights share memory without being tied"
    configs = (_computed(model.config) for model in models)
    if (name := _first_difference(*configs)) is not None:
        yield f"their configurations differ in {name}"
    buffers, others = (dict(model.named_buffers()) for model in models)
    if buffers.keys() != others.keys() or not all(torch.equal(buffers[name], others[name]) for name in buffers):
        yield "their buffers differ"


def _own_obstacles(model: PreTrainedModel) -> Iterator[str]:
    name = type(model).__name__
    weights = list(model.parameters())
    if any(type(weight) is not nn.Parameter or not weight.is_floating_point() for weight in weights):
        yield f"{name} is quantised or distributed"
    if any(weight.is_meta for weight in weights):
        yield f"{name} has weights on the meta device"
    for path, module in model.named_modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if "forward" in vars(module) or any(hook.__module__ != _CAPTURING for hook in hooks):
            yield f"{path or name} has hooks or a forward of its own (a device map, for one)"
        if type(module).__module__.startswith("peft."):
            yield f"{path} is an adapter: merge it first (merge_and_unload())"
        if _ROUTED.search(type(module).__name__):
            yield f"{path} routes tokens to experts"
        if module._parameters and module._modules:
            yield f"{path or name} holds weights beside those of its parts"
        if model.training and isinstance(module, nn.Dropout) and module.p:
            yield f"{name} is in training mode, with dropout: call eval()"
    if model.training and any(value for key, value in model.config.to_dict().items() if _DROPOUT.search(key)):
        yield f"{name} is in training mode, with dropout: call eval()"
    if (attention := model.config._attn_implementation) not in _ATTENTION:
        yield f"attention {attention!r} is not known to treat rows apart"
    if any(type(layer) not in _CACHE_LAYERS for layer in new_cache(model).layers):
        yield f"{name} keeps a state that is not keys and values"


def _computed(config: Any) -> dict[str, Any]:
    attention = {"_attn_implementation": config._attn_implementation}
    return {key: value for key, value in config.to_dict().items() if key not in _ORIGIN} | attention


def _first_difference(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    return next((key for key in [*one, *other] if key not in one or key not in other or one[key] != other[key]), None)


def _first_name(weights: dict[str, nn.Parameter], name: str) -> str:
    return next(key for key, weight in weights.items() if weight is weights[name])
