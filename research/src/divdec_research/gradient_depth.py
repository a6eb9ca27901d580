"""Gradient depth: the L2 norm of the distillation loss's gradient in each layer (paper, section Distillation).

The student is the target, and the teacher is the target with steering. No weight is updated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm.auto import tqdm

from divdec.data.formatting import IGNORED, Example
from divdec.errors import Diverged, FailedClosed, UsageError
from divdec.passes import device_of
from divdec.steering import Steering
from divdec.training.distillation_loss import Direction, Distillation, SteeredTeacher
from divdec.training.inputs import Collator
from divdec_research.suites.aggregate import Bootstrap, mean_interval

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from divdec.model.modeling import DivergenceForCausalLM

# Names of a decoder layer's modules in transformers, the common ones first.
NAMES = {
    "attention": ("self_attn", "attn", "attention", "self_attention", "linear_attn"),
    "mlp": ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe"),
}
PARTS = tuple(NAMES)


def gradient_depth(
    model: DivergenceForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    sets: Mapping[str, Sequence[Example]],
    *,
    temperature: float = 1.0,
    direction: Direction = "teacher-student",
    bootstrap: Bootstrap = Bootstrap(),  # noqa: B008
    title: str | None = None,
) -> list[dict[str, Any]]:
    """Measure the gradient norm of every layer on every set.

    Args:
        model: the teacher; its target is the student. It is left in evaluation mode.
        tokenizer: its tokenizer, for padding.
        sets: examples by the name of their set.
        temperature: T.
        direction: see `divdec.training.distillation_loss.divergence`.
        bootstrap: settings of the means' intervals.
        title: title of the progress bar; None shows none.

    Returns:
        One row for each set, part ('attention' or 'mlp') and layer (0 is next to the embeddings), in this order: its
        mean L2 norm (in nats per token and unit of weight), low and high (ends of the mean's bootstrap interval), n,
        and the norms of the examples.

    Raises:
        UsageError: the steering is hard rank masking, whose KL is infinite; the layers have no attention or MLP under
            a known name; the weights cannot have gradients; an example has no label.
        Diverged: logits or a gradient are not finite.
    """
    check_teacher(model.steering)
    for name, examples in sets.items():
        for index, example in enumerate(examples):
            if all(label == IGNORED for label in example.labels[1:]):
                raise UsageError(f"{name} example {index} (counted from 0) has no labelled token")
    layers = decoder_parts(model.target)
    collator, device = Collator(tokenizer), device_of(model.target)
    # Student and teacher share the output layer, so the student computes its logits as a whole first.
    objective = Distillation(SteeredTeacher(model, temperature, direction), head=None)
    result: list[dict[str, Any]] = []
    with (
        tqdm(total=sum(map(len, sets.values())), desc=title, unit="example", disable=title is None) as bar,
        _trainable_layers(model, layers) as weights,
    ):
        for name, examples in sets.items():
            rows = []
            for index, example in enumerate(examples):
                batch = collator([dataclasses.asdict(example)])
                batch = {column: tensor.to(device) for column, tensor in batch.items()}
                try:
                    norms = _norms(objective.loss(model.target, batch, None), weights, len(layers))
                except FailedClosed as error:
                    raise Diverged(f"{name} example {index} (counted from 0): {error}") from None
                if not torch.isfinite(norms).all():
                    raise Diverged(f"the gradient of {name} example {index} (counted from 0) is not finite")
                rows.append(norms)
                bar.update()
            result += _summarize(name, torch.stack(rows), bootstrap)
    return result


def check_teacher(steering: Steering) -> None:
    """Raise UsageError for hard rank masking, whose KL is infinite."""
    if steering.rule == "rank" and steering.fill == "hard":
        raise UsageError(
            f"{steering} gives tokens the probability 0, from which no finite loss follows; accepted here: "
            f"linear:ALPHA, or the soft fill (--steering {steering}:soft)"
        )


def decoder_parts(model: PreTrainedModel) -> list[dict[str, nn.Module]]:
    """Find attention and MLP of every decoder layer by their names in transformers.

    Raises:
        UsageError: there is no list of layers, or a layer lacks one of the two.
    """
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == depth]
    if not lists:
        raise UsageError(
            f"{type(model).__name__} has no list of its {depth} decoder layers; it holds "
            f"{', '.join(name for name, _ in model.named_children())}"
        )
    layers = []
    for index, layer in enumerate(lists[0]):  # the outermost; experts within a layer come later
        children = dict(layer.named_children())
        known = {part: [children[name] for name in names if name in children] for part, names in NAMES.items()}
        for part, modules in known.items():
            if not modules:
                raise UsageError(
                    f"layer {index} of {type(model).__name__} ({type(layer).__name__}) has no {part} under a known "
                    f"name ({', '.join(NAMES[part])}); its children are {', '.join(children) or 'none'}"
                )
        layers.append({part: modules[0] for part, modules in known.items()})
    return layers


@contextlib.contextmanager
def _trainable_layers(
    model: DivergenceForCausalLM, layers: Sequence[Mapping[str, nn.Module]]
) -> Iterator[dict[nn.Parameter, tuple[int, int]]]:
    """Give gradients to the weights of the layers alone, in evaluation mode; yields part and layer of each weight."""
    weights: dict[nn.Parameter, tuple[int, int]] = {}
    for layer, parts in enumerate(layers):
        for row, part in enumerate(PARTS):
            for weight in parts[part].parameters():
                weights.setdefault(weight, (row, layer))  # a weight that layers share counts for the first
    if unfit := next((weight for weight in weights if not weight.is_floating_point()), None):
        raise UsageError(f"the target's weights are {unfit.dtype}, which have no gradients; load it unquantised")
    requires_grad = [(weight, weight.requires_grad) for weight in model.parameters()]
    try:
        model.eval().requires_grad_(False)
        for weight in weights:
            weight.requires_grad_(True)
        yield weights
    finally:
        for weight, required in requires_grad:
            weight.requires_grad_(required)


def _norms(
    loss: Float[Tensor, ""], weights: Mapping[nn.Parameter, tuple[int, int]], layers: int
) -> Float[Tensor, "parts layers"]:
    """The L2 norm of a loss's gradient in every part of every layer, in float32."""
    squares = torch.zeros((len(PARTS), layers), dtype=torch.float64)
    gradients = torch.autograd.grad(loss, list(weights), allow_unused=True)
    for index, gradient in zip(weights.values(), gradients, strict=True):
        if gradient is not None:
            squares[index] += float(torch.linalg.vector_norm(gradient, dtype=torch.float32).square())
    return squares.sqrt().float()


def _summarize(name: str, norms: Float[Tensor, "examples parts layers"], bootstrap: Bootstrap) -> list[dict[str, Any]]:
    result = []
    for index, part in enumerate(PARTS):
        for layer in range(norms.shape[2]):
            values = norms[:, index, layer].tolist()
            low, high = mean_interval(values, bootstrap)
            row = {"set": name, "part": part, "layer": layer, "mean": math.fsum(values) / len(values)}
            result.append({**row, "low": low, "high": high, "n": len(values), "norms": values})
    return result
