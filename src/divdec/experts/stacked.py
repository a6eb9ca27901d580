"""Both auxiliaries in one forward pass: a module of their architecture whose weights are those of both, stacked.

Rows come in two halves, retain auxiliary first. It knows nothing of target or divergence; two models of different
architecture are not for it. Small models spend their time in Python and kernel launches, which one pass halves.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from divdec.errors import UsageError, first_line
from divdec.experts.forward import logits_of, new_cache
from divdec.experts.stackable import stackable
from divdec.experts.stacked_modules import stacked_module

__all__ = ["StackedCache", "StackedPair", "stackable"]
_STACKING = threading.RLock()  # a model may belong to two pairs, and each moves its weights


class StackedPair(nn.Module):
    """Retain auxiliary q and forget auxiliary p of one architecture, run as one batch of 2B rows.

    The parameters of both become views of the stacked weights, so nothing is held twice and a change in place
    shows in both. Where they are replaced (`.to(…)`, a new module), the next pass stacks them again. Hooks added
    later to q or p do not run, and no gradient reaches their weights. A model belongs to one stack at a time.
    """

    def __init__(self, retain: PreTrainedModel, forget: PreTrainedModel) -> None:
        """Stack two models.

        Raises:
            UsageError: they cannot be stacked; `stackable` says why, or one pass gave other logits than two.
        """
        super().__init__()
        # In a tuple, so that neither weights nor modules are listed twice in the model that holds pair and stack.
        self._models = (retain, forget)
        self._stack()

    def holds(self, retain: PreTrainedModel, forget: PreTrainedModel) -> bool:
        """Whether it is these two that were stacked."""
        return self._models[0] is retain and self._models[1] is forget

    def refresh(self) -> None:
        """Stack again what was changed since.

        Raises:
            UsageError: the two can no longer be stacked.
        """
        if self._is_stale():
            self._stack()

    def new_cache(self) -> StackedCache:
        """An empty cache for both."""
        return StackedCache(self._models[0])

    def logits(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch past_and_tokens"] | None = None,
        position_ids: Int[Tensor, "batch_or_one tokens"] | None = None,
        cache: StackedCache | None = None,
        logits_to_keep: int = 0,
    ) -> tuple[Float[Tensor, "batch kept width"], Float[Tensor, "batch kept width"]]:
        """ℓ_q and ℓ_p of the same tokens; see `divdec.experts.forward.logits_of`.

        Positions that are not given count from the cache's length, padding included.

        Raises:
            UsageError: q or p was changed since, and the two can no longer be stacked.
        """
        self.refresh()
        return self._run(input_ids, attention_mask, position_ids, cache, logits_to_keep)

    @torch.no_grad()
    def _run(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: StackedCache | None,
        logits_to_keep: int = 0,
    ) -> tuple[Tensor, Tensor]:
        rows, tokens = input_ids.shape
        if position_ids is None:
            past = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(past, past + tokens, device=input_ids.device)[None]
        both = logits_of(
            self._module[0],
            input_ids.repeat(2, 1),
            attention_mask.repeat(2, 1) if attention_mask is not None else None,
            position_ids.repeat(2 * rows // len(position_ids), 1),
            cache,
            logits_to_keep,
        )
        return both[:rows], both[rows:]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _stack(self) -> None:
        with _STACKING:
            self._stack_alone()

    def _stack_alone(self) -> None:
        self._training: list[bool] = []  # stale until all is done
        retain, forget = self._models
        reason = stackable(retain, forget)
        if reason is None:
            try:
                self._module = (stacked_module(retain, forget),)
                reason = self._difference()
            except Exception as error:  # an architecture may fail in any way of its own
                reason = f"{type(retain).__name__} fails with {first_line(error)}"
        if reason is not None:
            raise UsageError(f"the auxiliaries cannot run as one stack: {reason}")
        # Every edge between modules and every weight's place: what a change of either alters.
        modules = [module for model in self._models for module in model.modules()]
        self._children = [(m._modules, name, child) for m in modules for name, child in m._modules.items()]
        self._weights = [
            (m._parameters, name, weight.data_ptr())
            for m in modules
            for name, weight in m._parameters.items()
            if weight is not None
        ]
        self._training = [model.training for model in self._models]

    def _is_stale(self) -> bool:
        return (
            [model.training for model in self._models] != self._training
            or any(children.get(name) is not child for children, name, child in self._children)
            or any((w := weights.get(name)) is None or w.data_ptr() != place for weights, name, place in self._weights)
        )

    def _difference(self) -> str | None:
        """Why one pass does not stand for two, from a few tokens with padding, and one more from the cache."""
        retain = self._models[0]
        embeddings: Any = retain.get_input_embeddings()
        ids = (torch.arange(12) * 7919 + 11).remainder(embeddings.weight.shape[0]).view(2, 6)
        mask = torch.ones_like(ids)
        mask[1, :2] = 0
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        stacked, separate = self.new_cache(), [new_cache(model) for model in self._models]
        for step in (slice(0, 5), slice(5, 6)):
            inputs = ids[:, step], mask[:, : step.stop], positions[:, step]
            got = torch.stack(self._run(*inputs, stacked))
            pairs = zip(self._models, separate, strict=True)
            wanted = torch.stack([logits_of(model, *inputs, cache) for model, cache in pairs])
            real = mask[:, step].bool().to(got.device)
            if (reason := _far(got[:, real], wanted[:, real])) is not None:
                return reason
        return None


class StackedCache(DynamicCache):
    """Keys and values of both halves; from outside, a cache of B sequences."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(config=model.config.get_text_config(decoder=True))
        for layer in self.layers:
            layer.__class__ = _PAIRED.get(type(layer), type(layer))


class _PairedLayer(DynamicLayer):
    """A layer of 2B rows that is selected from as one of B; all else that is done to a layer suits any rows."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        _select(self, beam_idx)

    def batch_select_indices(self, indices: Tensor | list[int]) -> None:
        _select(self, indices)


class _PairedSlidingWindowLayer(DynamicSlidingWindowLayer):
    reorder_cache = _PairedLayer.reorder_cache
    batch_select_indices = _PairedLayer.batch_select_indices


def _select(layer: Any, indices: Int[Tensor, " selected"] | Bool[Tensor, " batch"] | list[int]) -> None:
    if layer.get_seq_length() > 0:
        # Indexed within its half, an index out of range is an error and not the other model's row.
        indices = torch.as_tensor(indices, device=layer.keys.device)
        layer.keys, layer.values = (
            states.unflatten(0, (2, -1))[:, indices].flatten(0, 1) for states in (layer.keys, layer.values)
        )


_PAIRED = {DynamicLayer: _PairedLayer, DynamicSlidingWindowLayer: _PairedSlidingWindowLayer}


def _far(got: Float[Tensor, "2 places width"], wanted: Float[Tensor, "2 places width"]) -> str | None:
    """Whether logits of both models differ more than rounding does, or more than the models do."""
    tolerance = 1e-4 if got.dtype in (torch.float32, torch.float64) else 5e-2
    got, wanted = got.float(), wanted.float()
    error = (got - wanted).abs()
    if not error.max() <= tolerance * wanted.abs().max().clamp(min=1):
        return f"one pass gives logits that differ by {float(error.max()):.2g} from those of two"
    if not error.mean() < (wanted[0] - wanted[1]).abs().mean() / 2:
        return "they answer too much alike to tell whether one pass gives what two do"
    return None
