"""A model that processes have trained in pieces (FSDP), whole again in every one of them.

It knows nothing of what is trained, nor on what.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import PartialState, init_empty_weights
from torch import Tensor
from transformers import AutoModelForCausalLM

from divdec.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, Trainer


def is_sharded(trainer: Trainer) -> bool:
    """Whether each process holds a part of every weight.

    Raises:
        UsageError: FSDP was asked for in its first version, in which a model cannot be looked at while it is trained.
    """
    plugin: Any = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        return False
    if plugin.fsdp_version != 2:
        raise UsageError("FSDP version 1 is not offered: give `--fsdp_version 2` to accelerate launch")
    return True


def whole(
    trainer: Trainer, config: PreTrainedConfig, wrap: Callable[[PreTrainedModel], Any] | None = None
) -> PreTrainedModel:
    """The trained model with all of its weights on the CPU; every process must ask.

    Args:
        trainer: has trained it in pieces.
        config: the model's.
        wrap: adds what was trained beside it (adapters).
    """
    weights = _everywhere(trainer.accelerator.get_state_dict(trainer.model_wrapped))
    # Buffers are computed from the configuration; weights need no memory before they come.
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(config)
        model = model if wrap is None else wrap(model)
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    if unexpected or any(weight.is_meta for weight in model.parameters()):
        raise RuntimeError(f"the trained weights do not fit the model: {[*missing, *unexpected][:3]}")
    return model


def _everywhere(weights: Mapping[str, Any]) -> dict[str, Tensor]:
    """The main process's weights in all of them, one tensor at a time."""
    state = PartialState()
    about: list[Any] = [[(name, weight.shape, weight.dtype) for name, weight in weights.items()]]
    dist.broadcast_object_list(about, 0, device=state.device)
    found = {}
    for name, shape, dtype in about[0]:
        if state.is_main_process:
            weight = weights[name].to(state.device)
        else:
            weight = torch.empty(shape, dtype=dtype, device=state.device)
        dist.broadcast(weight, 0)
        found[name] = weight.cpu()
    return found
