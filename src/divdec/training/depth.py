"""Gradient depth: which layers distillation would change, and how much (paper, section Distillation).

The student is the target, the teacher the same target steered. The loss is backpropagated for one example after the
other, and the L2 norm of its gradient is taken in every layer, attention and MLP apart. No weight is updated. It knows
nothing of files and plots.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm.auto import tqdm

from divdec.data.formatting import IGNORED, Example
from divdec.errors import Diverged, FailedClosed, UsageError
from divdec.evaluation.aggregate import Bootstrap, mean_interval
from divdec.experts.neural import device_of
from divdec.steering import Steering
from divdec.training.distillation_loss import Direction
from divdec.training.distillation_objective import Distillation, LiveTeacher
from divdec.training.objective import Collator

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from divdec.model.modeling import DivergenceForCausalLM

# What the parts of a decoder layer are called in transformers, the usual names first.
NAMES = {
    "attention": ("self_attn", "attn", "attention", "self_attention", "linear_attn"),
    "mlp": ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe"),
}
PARTS = tuple(NAMES)


@dataclasses.dataclass(frozen=True)
class LayerDepth:
    """The gradient of one part of one layer on one set."""

    set: str
    """'forget' or 'retain'."""
    part: str
    """'attention' or 'mlp'."""
    layer: int
    """Counted from 0, the embeddings' side."""
    mean: float
    """Mean L2 norm over the examples, in nats per token and unit of weight."""
    low: float
    """Lower end of the mean's bootstrap interval."""
    high: float
    """Upper end."""
    norms: tuple[float, ...]
    """One norm an example; one a batch, where a gradient is that of several."""

    def to_dict(self) -> dict[str, Any]:
        """The fields, with the number of norms as `n`."""
        fields = dataclasses.asdict(self)
        return {**fields, "n": len(self.norms), "norms": fields.pop("norms")}


def gradient_depth(
    model: DivergenceForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    sets: Mapping[str, Sequence[Example]],
    *,
    temperature: float = 1.0,
    direction: Direction = "teacher-student",
    batch_size: int = 1,
    bootstrap: Bootstrap = Bootstrap(),  # noqa: B008
    title: str | None = None,
) -> list[LayerDepth]:
    """Measure every layer on every set.

    Args:
        model: the teacher; its target is the student. Weights, gradients and modes are left as they were.
        tokenizer: its tokenizer, for padding.
        sets: examples by the name of their set.
        temperature: T.
        direction: 'teacher-student' or 'student-teacher'.
        batch_size: examples whose mean loss is one gradient. Gradients of different examples cancel each other in
            part, so that norms of batches are smaller than norms of examples.
        bootstrap: how the intervals of the means are drawn, from the norms.
        title: what the progress bar is called; None shows none.

    Returns:
        One entry a set, part and layer, in this order.

    Raises:
        UsageError: the steering is hard rank masking, whose KL is infinite; the target's layers have no attention or
            MLP that is known here; its weights are not of a kind that can have gradients; an example has no label.
        Diverged: logits or a gradient are not finite.
    """
    check_teacher(model.steering)
    for name, examples in sets.items():
        for place, example in enumerate(examples):
            if all(label == IGNORED for label in example.labels[1:]):
                raise UsageError(f"{name} example {place} (counted from 0) has no labelled token")
    layers = decoder_parts(model.target)
    collator = Collator(tokenizer)
    found: list[LayerDepth] = []
    with (
        tqdm(total=sum(map(len, sets.values())), desc=title, unit="example", disable=title is None) as bar,
        _Norms(model, layers) as norms,
    ):
        # The very loss that distillation minimises. Student and teacher are one module here, so that the student's
        # output layer cannot stand aside while the teacher reads: it gives its logits first.
        objective = Distillation(LiveTeacher(model, temperature, direction), head=None)
        device = device_of(model.target)
        for name, examples in sets.items():
            rows = []
            for start in range(0, len(examples), batch_size):
                some = examples[start : start + batch_size]
                batch = collator([dataclasses.asdict(example) for example in some])
                batch = {column: tensor.to(device) for column, tensor in batch.items()}
                what = f"example {start}" if len(some) == 1 else f"examples {start} to {start + len(some) - 1}"
                try:
                    row = norms.of(objective.loss(model.target, batch, None))
                except FailedClosed as error:
                    raise Diverged(f"{name} {what} (counted from 0): {error}") from None
                if not torch.isfinite(row).all():
                    raise Diverged(f"the gradient of {name} {what} (counted from 0) is not finite")
                rows.append(row)
                bar.update(len(some))
            found += _summary(name, torch.stack(rows), bootstrap)
    return found


def check_teacher(steering: Steering) -> None:
    """Refuse a rule whose KL is infinite.

    Raises:
        UsageError: hard rank masking.
    """
    if steering.rule == "rank" and steering.fill == "hard":
        raise UsageError(
            f"{steering} gives tokens the probability 0, from which no finite loss follows; accepted here: "
            f"linear:ALPHA, or the soft fill (--steering {steering}:soft)"
        )


def decoder_parts(model: PreTrainedModel) -> list[dict[str, nn.Module]]:
    """Attention and MLP of every decoder layer, found by what transformers calls them.

    Raises:
        UsageError: the layers are not found, or lack one of the two; names what a layer holds instead.
    """
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == depth]
    if not lists:
        raise UsageError(
            f"{type(model).__name__} has no list of its {depth} decoder layers; it holds "
            f"{', '.join(name for name, _ in model.named_children())}"
        )
    layers = []
    for place, layer in enumerate(lists[0]):  # the outermost; experts within a layer come later
        children = dict(layer.named_children())
        named = {part: next((name for name in names if name in children), None) for part, names in NAMES.items()}
        for part, name in named.items():
            if name is None:
                raise UsageError(
                    f"layer {place} of {type(model).__name__} ({type(layer).__name__}) has no {part} under a name "
                    f"known here ({', '.join(NAMES[part])}); its children are {', '.join(children) or 'none'}"
                )
        layers.append({part: children[str(name)] for part, name in named.items()})
    return layers


def chosen(examples: Sequence[Example], count: int, seed: int) -> Sequence[Example]:
    """So many examples at random, in their order; all of them where there are no more, or the count is 0."""
    if not 0 < count < len(examples):
        return examples
    places = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed))[:count]
    return [examples[place] for place in sorted(places.tolist())]


class _Norms(contextlib.AbstractContextManager["_Norms"]):
    """Lets gradients reach the layers' parts alone, takes their norms, and drops each as soon as it has been counted.

    At the end every weight has the gradient, and every model the mode, that it had before.
    """

    def __init__(self, model: DivergenceForCausalLM, layers: Sequence[Mapping[str, nn.Module]]) -> None:
        self._model = model
        self._shape = len(PARTS), len(layers)
        # A weight that several layers share counts for the first.
        self._places: dict[nn.Parameter, tuple[int, int]] = {}
        for layer, parts in enumerate(layers):
            for row, part in enumerate(PARTS):
                for weight in parts[part].parameters():
                    self._places.setdefault(weight, (row, layer))
        if unfit := next((weight for weight in self._places if not weight.is_floating_point()), None):
            raise UsageError(f"the target's weights are {unfit.dtype}, which have no gradients; load it unquantised")
        self._squares: dict[tuple[int, int], Tensor] = {}

    def __enter__(self) -> _Norms:
        # A weight that several modules of different parts share is listed once.
        self._before = [(weight, weight.requires_grad, weight.grad) for weight in self._model.parameters()]
        self._modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        self._model.requires_grad_(False)
        self._handles = []
        for weight in self._places:
            weight.grad = None
            weight.requires_grad_(True)
            self._handles.append(weight.register_post_accumulate_grad_hook(self._count))
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        for weight, required, gradient in self._before:
            weight.requires_grad_(required)
            weight.grad = gradient
        for module, training in self._modes:
            module.training = training

    def of(self, loss: Float[Tensor, ""]) -> Float[Tensor, "parts layers"]:
        """The L2 norm of a loss's gradient in every part of every layer, in float32."""
        self._squares = {}
        loss.backward()
        norms = torch.zeros(self._shape)
        for place, square in self._squares.items():
            norms[place] = math.sqrt(float(square))
        return norms

    def _count(self, weight: Tensor) -> None:
        assert isinstance(weight, nn.Parameter)
        assert weight.grad is not None
        place = self._places[weight]
        square = torch.linalg.vector_norm(weight.grad, dtype=torch.float32).square()
        earlier = self._squares.get(place)
        self._squares[place] = square if earlier is None else earlier + square.to(earlier.device)
        weight.grad = None


def _summary(name: str, norms: Float[Tensor, "examples parts layers"], bootstrap: Bootstrap) -> list[LayerDepth]:
    found = []
    for row, part in enumerate(PARTS):
        for layer in range(norms.shape[2]):
            values = norms[:, row, layer].tolist()
            low, high = mean_interval(values, bootstrap)
            found.append(LayerDepth(name, part, layer, math.fsum(values) / len(values), low, high, tuple(values)))
    return found
