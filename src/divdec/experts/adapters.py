"""A pair of LoRA adapters on one base: the base is loaded once, and one pass runs q and p.

In decoding, reading the weights takes the time, so q and p together cost about as much as the base alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from divdec.checkpoint import check_header
from divdec.errors import FailedClosed, UsageError
from divdec.experts.neural import NeuralPair, PairCache, Steer, divergence_of
from divdec.experts.protocol import Inputs
from divdec.passes import logits_of, new_cache, share_weights
from divdec.runs import read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
MAX_ROWS = 32  # of a product of a few rows
# Fields of PEFT's LoraConfig that change what an adapter computes, and the values that are supported.
SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    "init_lora_weights": (True, False, "gaussian"),  # others, such as pissa, change the base's weights too
    "use_qalora": (False,),
    "alora_invocation_tokens": (None, []),
}

Factors = dict[str, tuple[Tensor, Tensor]]
"""Matrices A [rank, features_in] and B [features_out, rank] by the name of the linear layer; B is multiplied by the
adapter's scale."""


class AdapterPair(NeuralPair):
    """q and p as two LoRA adapters on one base.

    `retain` and `forget` are models that share the base's weights. A pass over both doubles the batch; each half of
    it has its own low-rank products.
    """

    def __init__(self, base: PreTrainedModel, retain: Factors, forget: Factors) -> None:
        check_products_differ(retain, forget, base.dtype)
        sides = [with_adapters(base, [factors]) for factors in (retain, forget)]
        super().__init__(*sides)
        layers = new_cache(base).layers
        # Other layers, such as recurrent states, do not hold keys and values that two caches can lend to one pass.
        self.joint = None
        if all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
            self.joint = with_adapters(base, [retain, forget])
            head = self.joint.get_output_embeddings()
            if type(head) is nn.Linear:
                self.joint.set_output_embeddings(AdaptedLinear(head))

    @classmethod
    def load(cls, base: PreTrainedModel, retain: Path, forget: Path) -> AdapterPair:
        """Load both adapters from folders in PEFT's format."""
        return cls(base, *(read_adapter(folder, base) for folder in (retain, forget)))

    def compute(self, inputs: Inputs, cache: PairCache | None, logits_to_keep: int) -> Tensor:
        """Compute log q − log p (paper, eq. 1) in one pass, or in two if an auxiliary has read ahead."""
        if self.joint is None or (cache is not None and (cache.retain.ahead or cache.forget.ahead)):
            return super().compute(inputs, cache, logits_to_keep)
        return divergence_of(*self._joint_logits(self.joint, inputs, cache, logits_to_keep))

    def draft_logits(self, inputs: Inputs, cache: PairCache, steer: Steer) -> Float[Tensor, "batch tokens vocab"]:
        """Run q and p on tokens that the target has not read; return q's logits, steered by the rule."""
        if self.joint is None:
            return super().draft_logits(inputs, cache, steer)
        q, p = self._joint_logits(self.joint, inputs, cache, 0)
        cache.retain.store(inputs.input_ids, q)
        cache.forget.store(inputs.input_ids, p)
        return steer(q, divergence_of(q, p))

    def _joint_logits(
        self, joint: PreTrainedModel, inputs: Inputs, cache: PairCache | None, logits_to_keep: int
    ) -> tuple[Tensor, ...]:
        """Return the logits of q and of p after one pass of a batch of both."""
        ids, mask, positions = inputs
        logits = logits_of(
            joint,
            torch.cat([ids, ids]),
            None if mask is None else torch.cat([mask, mask]),
            positions if positions is None or len(positions) == 1 else torch.cat([positions, positions]),
            None if cache is None else JointCache(cache),
            logits_to_keep,
        )
        return logits.chunk(2)


class AdaptedLinear(nn.Module):
    """A linear layer with the low-rank products of adapters, each on its own part of the batch.

    Without adapters it computes the layer alone.
    """

    def __init__(
        self,
        linear: nn.Linear,
        down: Float[Tensor, "adapters rank features_in"] | None = None,
        up: Float[Tensor, "adapters features_out rank"] | None = None,
    ) -> None:
        super().__init__()
        self.linear = linear
        self.down = None if down is None else nn.Parameter(down, requires_grad=False)
        self.up = None if up is None else nn.Parameter(up, requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """The linear layer's own weight, without the adapters."""
        return self.linear.weight

    def forward(self, states: Float[Tensor, "... features_in"]) -> Float[Tensor, "... features_out"]:
        """Apply the layer, and add Bᵢ·Aᵢ·x to the i-th part of the batch."""
        output = linear_of_rows(self.linear, states)
        if self.down is None or self.up is None:
            return output
        adapters = len(self.down)
        if adapters > 1 and (states.dim() != 3 or len(states) % adapters):
            raise FailedClosed(
                f"a layer of the base received states of shape {tuple(states.shape)}, so the rows of the adapters "
                "cannot be told apart; merge them into two checkpoints (divdec bundle … --merge)"
            )
        rows = states.reshape(adapters, -1, states.shape[-1])
        sums = torch.baddbmm(
            output.reshape(adapters, -1, output.shape[-1]), rows @ self.down.transpose(1, 2), self.up.transpose(1, 2)
        )
        return sums.view(output.shape)


def linear_of_rows(linear: nn.Linear, states: Float[Tensor, "... features_in"]) -> Float[Tensor, "... features_out"]:
    """Apply a linear layer; on a CPU with AVX2 and not AVX-512, as W·xᵀ for a few rows in float32.

    There MKL needs 0.34 to 0.78 times as long as for x·Wᵀ with 2 to 32 rows, and no longer
    for two rows than for one.
    """
    rows = states.numel() // states.shape[-1]
    fits = states.dtype == torch.float32 and states.device.type == "cpu" and 2 <= rows <= MAX_ROWS
    if not fits or torch.backends.cpu.get_cpu_capability() != "AVX2":
        return linear(states)
    product = (linear.weight @ states.reshape(rows, -1).T).T
    product = product if linear.bias is None else product + linear.bias
    return product.reshape(*states.shape[:-1], -1)


class JointCache(Cache):
    """Both auxiliaries' caches as one of doubled batch, for one pass; it stores nothing itself."""

    def __init__(self, pair: PairCache) -> None:
        layers = zip(pair.retain.cache.layers, pair.forget.cache.layers, strict=True)
        both: list[Any] = [JointLayer(q, p) for q, p in layers]
        super().__init__(layers=both)


class JointLayer(CacheLayerMixin):
    """A layer of both auxiliaries' caches: rows of q, then rows of p."""

    def __init__(self, retain: Any, forget: Any) -> None:
        super().__init__()
        self.retain, self.forget = retain, forget
        self.is_sliding = retain.is_sliding

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the two layers do it."""

    def update(self, keys: Tensor, values: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Add each half of the keys and values to its cache; return those of both."""
        halves = zip(keys.chunk(2), values.chunk(2), strict=True)
        layers = self.retain, self.forget
        stored = [layer.update(*half, *args, **options) for layer, half in zip(layers, halves, strict=True)]
        both_keys, both_values = (torch.cat(states) for states in zip(*stored, strict=True))
        return both_keys, both_values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and offset of the keys, which are the same for both."""
        return self.retain.get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        """Return the number of tokens in each cache."""
        return self.retain.get_seq_length()

    def get_max_length(self) -> int:
        """Return the largest number of tokens; −1 if it is unlimited."""
        return self.retain.get_max_length()


def with_adapters(base: PreTrainedModel, adapters: list[Factors]) -> PreTrainedModel:
    """Return a model that shares the base's weights and adds the adapters' products, each for its part of the batch.

    Raises:
        UsageError: the base lacks a layer of an adapter, or one has another shape.
    """
    model = share_weights(base)
    for name in sorted({name for factors in adapters for name in factors}):
        linear = _linear(model, name)
        rank = max(factors[name][0].shape[0] for factors in adapters if name in factors)
        pairs = [_padded(factors.get(name), rank, linear) for factors in adapters]
        down, up = (torch.stack(matrices) for matrices in zip(*pairs, strict=True))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, AdaptedLinear(linear, down, up))
    return model


def check_products_differ(retain: Factors, forget: Factors, dtype: torch.dtype = torch.float32) -> None:
    """Refuse two adapters that change every layer alike in `dtype`; untrained ones change none: their B is 0.

    Raises:
        UsageError: the divergence would be 0 everywhere, and the answers unsteered.
    """
    for name in (*retain, *forget):
        sides = ([factor.to(dtype).float() for factor in of.get(name, ())] for of in (retain, forget))
        q, p = (factors[1] @ factors[0] if factors else torch.zeros(()) for factors in sides)
        if not torch.equal(*torch.broadcast_tensors(q, p)):
            return
    raise UsageError(
        "retain auxiliary and forget auxiliary are the same model (adapters with equal products; untrained ones have "
        "none): nothing would be forgotten"
    )


@torch.no_grad()
def merge_adapter(base: PreTrainedModel, factors: Factors) -> None:
    """Add an adapter's products to the weights of its base, in place."""
    embeddings: Any = base.get_input_embeddings()
    for name, (down, up) in factors.items():
        weight = _linear(base, name).weight
        if weight is embeddings.weight:
            raise UsageError(f"the adapter changes {name}, whose weights are the input embeddings too: use it unmerged")
        weight += (up @ down).to(weight)


def _linear(model: nn.Module, name: str) -> nn.Linear:
    try:
        linear = model.get_submodule(name)
    except AttributeError:
        linear = None
    if not isinstance(linear, nn.Linear):
        kind = "lacks it" if linear is None else f"has a {type(linear).__name__} there"
        raise UsageError(f"the adapter changes the linear layer {name}, but the base {kind}; give the adapter's base")
    return linear


def _padded(factors: Any, rank: int, linear: nn.Linear) -> tuple[Tensor, Tensor]:
    """Return A and B with `rank` rows and columns, in the layer's dtype; zeros for an adapter without the layer."""
    weight = linear.weight
    if weight.is_meta:
        raise UsageError(
            "the adapters' base is offloaded to CPU or disk (device_map), where its layers take no adapters; load it "
            "whole, or make two checkpoints (divdec bundle … --merge)"
        )
    down, up = weight.new_zeros(rank, linear.in_features), weight.new_zeros(linear.out_features, rank)
    if factors is not None:
        down[: len(factors[0])] = factors[0].to(down)
        up[:, : factors[1].shape[1]] = factors[1].to(up)
    return down, up


def read_adapter(folder: Path, base: PreTrainedModel) -> Factors:
    """Read an adapter in PEFT's format, and compare its shapes with the base's.

    Raises:
        UsageError: the adapter is incomplete, corrupt or of an unsupported kind, or belongs to another base.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    scale = adapter_scale(folder)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{folder / WEIGHTS} is missing or corrupt ({error}); copy it again") from None
    downs = {name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")}
    ups = {name.removesuffix(".lora_B.weight") for name in tensors if name.endswith(".lora_B.weight")}
    others = [name for name in tensors if not name.endswith((".lora_A.weight", ".lora_B.weight"))]
    if others or downs != ups or not downs:
        named = others or sorted(downs ^ ups) or ["no matrices"]
        raise UsageError(f"{folder / WEIGHTS} holds {named[0]}; accepted: a LoRA adapter of linear layers alone")
    factors: Factors = {}
    for name in sorted(downs):
        down, up = tensors[f"{name}.lora_A.weight"].float(), tensors[f"{name}.lora_B.weight"].float()
        if down.dim() != 2 or up.dim() != 2 or len(down) != up.shape[1] or not len(down):
            raise UsageError(
                f"{folder / WEIGHTS}: the factors of {name} have the shapes {tuple(down.shape)} and {tuple(up.shape)}; "
                "accepted: matrices A and B of the same rank, 1 or more; copy it again"
            )
        layer = name.removeprefix(PREFIX)
        linear = _linear(base, layer)
        expected, actual = (linear.in_features, linear.out_features), (down.shape[1], up.shape[0])
        if actual != expected:
            raise UsageError(
                f"{folder}: the adapter's matrices for {layer} have {actual[0]} inputs and {actual[1]} outputs, the "
                f"base's layer {expected[0]} and {expected[1]}; give the adapter's own base"
            )
        factors[layer] = down, up * scale(down.shape[0])
    return factors


def check_adapter(folder: Path) -> None:
    """Refuse an adapter that is incomplete or of an unsupported kind; reads headers only."""
    adapter_scale(folder)
    check_header(folder / WEIGHTS)


def adapter_scale(folder: Path) -> Any:
    """Return a function from rank to the factor of an adapter's products, after checking the kind of adapter.

    Raises:
        UsageError: the folder holds no adapter, or one of an unsupported kind.
    """
    if not (folder / CONFIG).is_file():
        raise UsageError(f"{folder} holds no adapter ({CONFIG}), but the bundle names a base; write the bundle again")
    config = read_json(folder / CONFIG, dict)
    for name, accepted in SUPPORTED.items():
        if name in config and config[name] not in accepted:
            raise UsageError(
                f"{folder / CONFIG}: {name} is {config[name]!r}; accepted for an adapter pair: {accepted[0]!r}; merge "
                "the adapter into its base (merge_and_unload) and give the two checkpoints"
            )
    alpha, root = config.get("lora_alpha"), config.get("use_rslora", False)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not (math.isfinite(alpha) and alpha):
        raise UsageError(f"{folder / CONFIG}: lora_alpha is {alpha!r}; accepted: a number, not 0")
    return lambda rank: alpha / (math.sqrt(rank) if root else rank)
