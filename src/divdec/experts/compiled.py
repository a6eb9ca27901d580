"""Compiled passes of a few tokens over a cache of fixed length: one graph a shape, replayed however long the context.

It knows nothing of what the logits are for. What is built from the growing context (mask, positions) is built
outside of the graph, at the cache's own length.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import CompileConfig
from transformers.masking_utils import create_masks_for_generate

from divdec.experts.fixed_cache import FixedCache

LONGEST = 32  # tokens of a pass that is compiled; prompts are longer, and each of another length
ROUND = 64  # slots by which compiled caches differ in length, so that prompts of like length share their graphs
_HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
)  # fmt: skip

_compiled: weakref.WeakKeyDictionary[nn.Module, tuple[Any, Callable[..., Tensor]]] = weakref.WeakKeyDictionary()
_kept: weakref.WeakKeyDictionary[nn.Module, FixedCache] = weakref.WeakKeyDictionary()


def compile_config(model: PreTrainedModel, cache: FixedCache, config: GenerationConfig) -> CompileConfig | None:
    """How transformers would compile this model for a generation; None where it would not.

    On CUDA that is inductor with CUDA graphs unless `disable_compile` or a `compile_config` says otherwise; on a CPU
    nothing, unless `compile_config._compile_all_devices` asks for it.
    """
    criteria: Any = getattr(model, "_valid_auto_compile_criteria", None)
    if criteria is None or not criteria({"past_key_values": cache}, config):
        return None
    return config.compile_config or model._default_compile_config()


def fixed_cache(
    name: str, model: PreTrainedModel, max_length: int, rows: int, config: GenerationConfig | None = None
) -> FixedCache:
    """An empty cache: the one kept from an earlier answer, whose addresses CUDA graphs know, or a new one.

    Args:
        name: the model's part, for messages.
        model: whose cache it is.
        max_length: how many tokens it must hold.
        rows: how many sequences.
        config: says whether passes are compiled; None compiles nothing.

    Raises:
        UsageError: the model cannot have one.
    """
    cache = FixedCache(name, model, max_length)
    if config is None or (wanted := compile_config(model, cache, config)) is None:
        return cache
    # Taken, so that an answer made at the same time gets one of its own.
    kept = _kept.pop(model, None)
    if kept is not None and kept.rows == rows and kept.max_length >= max_length and kept.fits(model):
        cache = kept
    else:
        cache = FixedCache(name, model, -(-max_length // ROUND) * ROUND)
    cache.compile_config = wanted
    return cache


def keep(cache: FixedCache) -> None:
    """Keep a compiled cache that nobody else holds for the next answer; nothing of this answer stays in it."""
    model = cache.model()
    if model is not None and cache.compile_config is not None and not torch.is_inference_mode_enabled():
        cache.reset()
        _kept[model] = cache


def is_compiled(cache: FixedCache, tokens: int) -> bool:
    """Whether a pass of so many tokens is compiled: not a prompt's, and not one that gradients go through."""
    return (
        cache.compile_config is not None
        and cache.held.tokens > 0
        and tokens <= LONGEST
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )


def compiled_logits(
    model: PreTrainedModel, cache: FixedCache, arguments: dict[str, Any]
) -> Float[Tensor, "batch tokens width"]:
    """A compiled pass; what comes back belongs to the caller and is not overwritten by the next one.

    Args:
        model: the model.
        cache: its cache, which `arguments` holds, too.
        arguments: what its forward takes, tensors on its device.
    """
    input_ids = arguments["input_ids"]
    batch, tokens = input_ids.shape
    arguments = arguments | {"attention_mask": _masks(model, cache, arguments, (batch, tokens))}
    arguments.pop("logits_to_keep", None)  # few positions, and one graph less
    # Strides of a slice would be a shape of their own.
    arguments = {name: _plain(value) for name, value in arguments.items()}
    forward = _forward_of(model, cache.compile_config)
    if any(getattr(model, name) for name in _HOOKS):
        return _Hooked(model, forward)(model, **arguments).clone()
    return forward(model, **arguments).clone()  # CUDA graphs write the next logits into the same place


def _masks(model: PreTrainedModel, cache: FixedCache, arguments: dict[str, Any], shape: tuple[int, int]) -> Any:
    """Which slots each token sees, as the model itself would find; a tensor, or one for each kind of layer."""
    create = getattr(model, "create_masks_for_generate", create_masks_for_generate)
    return create(
        config=model.config,
        # Only shape, kind and device are read.
        inputs_embeds=torch.empty((*shape, 0), dtype=model.dtype, device=arguments["input_ids"].device),
        attention_mask=arguments.get("attention_mask"),
        past_key_values=cache,
        position_ids=arguments.get("position_ids"),
    )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value.clone(memory_format=torch.contiguous_format) if isinstance(value, torch.Tensor) else value


def _forward(model: PreTrainedModel, **arguments: Any) -> Tensor:
    return model.forward(**arguments).logits


def _forward_of(model: PreTrainedModel, config: CompileConfig) -> Callable[..., Tensor]:
    known, forward = _compiled.get(model, (None, None))
    if forward is None or known != config:
        # A code object of its own: Dynamo counts recompilations by it, and models would use up each other's.
        plain: Any = inspect.unwrap(_forward)
        own = types.FunctionType(plain.__code__.replace(co_name=f"forward_{id(model)}"), plain.__globals__)
        forward = torch.compile(own, **config.to_dict())
        _compiled[model] = (config, forward)
    return forward


class _Hooked(nn.Module):
    """Runs a model's own hooks (clocks, for one) around its compiled pass, which would otherwise trace them."""

    def __init__(self, model: PreTrainedModel, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.__dict__.update({name: getattr(model, name) for name in _HOOKS})
        self.forward = forward
