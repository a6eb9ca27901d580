"""A module that runs two models of one architecture, and its leaves: a batch's first half of rows is for the first.

It knows nothing of what the two are. One `bmm` with both matrices takes 0.56 (one row a half, width 192) to 1.02
(eight rows, width 1,024) of the time of two `linear`s, in float32 on one CPU thread; two `mm` into one preallocated
output take 0.94 to 1.41. So `bmm` is used for all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

Stack = Callable[[nn.Parameter, nn.Parameter], Tensor]


def stacked_module(first: PreTrainedModel, second: PreTrainedModel) -> PreTrainedModel:
    """A module like `first` for batches of 2B rows; the parameters of both become views of its weights."""
    weights: dict[int, Tensor] = {}

    def stack(one: nn.Parameter, other: nn.Parameter) -> Tensor:
        if id(one) not in weights:  # tied parameters share one stack
            both = torch.stack((one.data, other.data))
            one.data, other.data = both.unbind()
            weights[id(one)] = both
        return weights[id(one)]

    # The copy shares the parameters, which its leaves lose next, and has its own buffers.
    module = copy.deepcopy(first, {id(parameter): parameter for parameter in first.parameters()})
    leaves: dict[int, nn.Module] = {}
    for name, one in first.named_modules(remove_duplicate=False):
        if one._parameters:
            other = second.get_submodule(name)
            if id(one) not in leaves:
                leaves[id(one)] = _stacked_leaf(one, other, module.get_submodule(name), stack)
            parent, _, child = name.rpartition(".")
            setattr(module.get_submodule(parent), child, leaves[id(one)])
    return module


def _stacked_leaf(one: nn.Module, other: nn.Module, own: nn.Module, stack: Stack) -> nn.Module:
    weights = {
        name: stack(weight, cast(nn.Parameter, other._parameters[name]))
        for name, weight in one._parameters.items()
        if weight is not None and not isinstance(one, nn.Embedding)
    }
    if type(one) is nn.Linear:
        return _Linear(weights["weight"].transpose(1, 2), weights.get("bias"))
    if type(one) is Conv1D:
        return _Linear(weights["weight"], weights["bias"])
    if isinstance(one, nn.Embedding):
        # A token outside of one table must not be looked up in the other, and a tied head stacks the table anyway.
        return _Halves(one, other)
    if weights and all(weight.dim() == 2 for weight in weights.values()):
        vectors = {name: weight[:, None] for name, weight in weights.items()}
        norm = _LayerNorm(one, vectors) if type(one) is nn.LayerNorm else _Elementwise(own, vectors)
        if _same(norm, one, other):
            return norm
    return _Halves(one, other)


class _Linear(nn.Module):
    """x W + b with the matrices of both; the weights are no parameters, for those belong to the two models."""

    def __init__(self, weight: Float[Tensor, "2 inputs outputs"], bias: Float[Tensor, "2 outputs"] | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias[:, None] if bias is not None else None

    def forward(self, inputs: Float[Tensor, "rows *tokens inputs"]) -> Float[Tensor, "rows *tokens outputs"]:
        shape = inputs.shape
        halves = inputs.reshape(2, -1, shape[-1])
        if self.bias is None:
            return torch.bmm(halves, self.weight).view(*shape[:-1], -1)
        return torch.baddbmm(self.bias, halves, self.weight).view(*shape[:-1], -1)


class _LayerNorm(nn.Module):
    def __init__(self, norm: nn.LayerNorm, weights: dict[str, Float[Tensor, "2 1 width"]]) -> None:
        super().__init__()
        self.shape, self.eps = norm.normalized_shape, norm.eps
        self.weight, self.bias = weights["weight"], weights.get("bias")

    def forward(self, states: Float[Tensor, "rows *tokens width"]) -> Float[Tensor, "rows *tokens width"]:
        halves = functional.layer_norm(states.reshape(2, -1, states.shape[-1]), self.shape, eps=self.eps)
        scaled = halves * self.weight if self.bias is None else torch.addcmul(self.bias, halves, self.weight)
        return scaled.view(states.shape)


class _Elementwise(nn.Module):
    """A norm of any kind that multiplies its input's last dimension by its weight, which is here one for each half."""

    def __init__(self, norm: nn.Module, weights: dict[str, Float[Tensor, "2 1 width"]]) -> None:
        super().__init__()
        norm._parameters.clear()
        for name, weight in weights.items():
            setattr(norm, name, weight)
        self.norm = norm
        self.weight = weights.get("weight")

    def forward(self, states: Float[Tensor, "rows *tokens width"]) -> Float[Tensor, "rows *tokens width"]:
        return self.norm.forward(states.reshape(2, -1, states.shape[-1])).view(states.shape)


class _Halves(nn.Module):
    """Any other leaf: the two modules themselves, each on its rows."""

    def __init__(self, one: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self._pair = (one, other)

    @property
    def weight(self) -> Any:
        return self._pair[0].weight

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        first = self._pair[0](*(_half(value, 0) for value in args), **{k: _half(v, 0) for k, v in kwargs.items()})
        second = self._pair[1](*(_half(value, 1) for value in args), **{k: _half(v, 1) for k, v in kwargs.items()})
        return torch.cat((first, second))


def _half(value: Any, index: int) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if value.shape[0] % 2:
        raise ValueError(f"{value.shape[0]} rows are not those of two models")
    return value.chunk(2)[index]


def _same(stacked: nn.Module, one: nn.Module, other: nn.Module) -> bool:
    """Whether a stacked norm gives what the two give, tried on some numbers."""
    like = next(weight for weight in one._parameters.values() if weight is not None)
    states = torch.sin(torch.arange(6 * len(like), device=like.device)).view(2, 3, -1).to(like.dtype)
    try:
        got = stacked(states)
        wanted = torch.cat((one(states[:1]), other(states[1:])))
    except Exception:  # whatever a norm of unknown kind raises, it then runs on its own
        return False
    tolerance = 8 * torch.finfo(like.dtype).eps
    return torch.allclose(got, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))
