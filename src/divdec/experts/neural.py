"""A pair of neural language models with the target's vocabulary.

It knows nothing of the target: widths may differ, and the divergence is narrowed to what both models have.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from divdec.errors import UsageError
from divdec.experts.forward import logits_of, new_cache, takes_cache
from divdec.experts.protocol import own_cache
from divdec.experts.read_ahead import ReadAhead


class NeuralPair(nn.Module):
    """Retain auxiliary q and forget auxiliary p (paper, section 3.1)."""

    def __init__(self, retain: PreTrainedModel, forget: PreTrainedModel) -> None:
        super().__init__()
        check_part("retain auxiliary", retain)
        check_part("forget auxiliary", forget)
        if retain is forget or same_weights(retain, forget):
            raise UsageError("retain auxiliary and forget auxiliary are the same model: nothing would be forgotten")
        self.retain = retain
        self.forget = forget
        self.vocab_size = min(logit_width(retain), logit_width(forget))

    def new_cache(self) -> PairCache:
        """An empty cache for both auxiliaries."""
        return PairCache(new_cache(self.retain), new_cache(self.forget))

    def divergence(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch past_and_tokens"] | None = None,
        position_ids: Int[Tensor, "batch_or_one tokens"] | None = None,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
    ) -> Float[Tensor, "batch kept vocab"]:
        """ℓ_q − ℓ_p; see `divdec.experts.protocol.Experts.divergence`.

        What an auxiliary has read ahead is not read again.
        """
        inputs = (input_ids, attention_mask, position_ids)
        own = own_cache(cache, PairCache)
        retain_logits, forget_logits = (
            logits_of(model, *inputs, None, logits_to_keep)
            if own is None
            else own.part(name).logits(model, *inputs, logits_to_keep)
            for name, model in (("retain", self.retain), ("forget", self.forget))
        )
        retain_logits, forget_logits = retain_logits[..., : self.vocab_size], forget_logits[..., : self.vocab_size]
        return retain_logits.float() - forget_logits.to(retain_logits.device).float()

    def read_ahead(
        self,
        name: str,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch past_and_tokens"] | None,
        position_ids: Int[Tensor, "batch_or_one tokens"] | None,
        cache: PairCache,
    ) -> Float[Tensor, "batch tokens vocab"]:
        """Let one auxiliary read tokens that the other parts have not seen, and keep its logits with the cache.

        The next `divergence` must begin with those tokens; it then takes the logits from there.

        Args:
            name: 'retain' or 'forget'.
            input_ids: the tokens since what this auxiliary has read.
            attention_mask: 1 for real tokens, 0 for padding, what it has read included.
            position_ids: place of each token in its sequence.
            cache: the pair's.
        """
        model = self.retain if name == "retain" else self.forget
        logits = cache.part(name).read_ahead(model, input_ids, attention_mask, position_ids)
        return logits[..., : self.vocab_size]


class PairCache(Cache):
    """The caches of two models; what is done to it is done to every layer of both."""

    def __init__(self, retain: Cache, forget: Cache) -> None:
        self.retain, self.forget = ReadAhead(retain), ReadAhead(forget)
        layers: list[Any] = [*retain.layers, *forget.layers, self.retain, self.forget]
        super().__init__(layers=layers)

    def part(self, name: str) -> ReadAhead:
        """One model's cache, with what it has read ahead."""
        return self.retain if name == "retain" else self.forget

    @property
    def lengths(self) -> list[int]:
        """How many tokens each of the two holds, what was read ahead not counted."""
        return [self.retain.length, self.forget.length]


def same_weights(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    """Whether two models hold the same numbers under the same names; the first that differs ends the search."""
    first, second = ({name for name, _ in model.named_parameters(remove_duplicate=False)} for model in (one, other))
    if first != second:
        return False
    modules = dict(other.named_modules(remove_duplicate=False))
    return all(_same_own_weights(part, modules[name]) for name, part in one.named_modules() if part._parameters)


def _same_own_weights(one: nn.Module, other: nn.Module) -> bool:
    with _brought(one), _brought(other):
        second = dict(other.named_parameters(recurse=False))
        return all(
            not tensor.is_meta
            and tensor.shape == second[name].shape
            and torch.equal(tensor, second[name].to(tensor.device))
            for name, tensor in one.named_parameters(recurse=False)
        )


def _brought(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Have a module's own weights at hand, offloaded or not."""
    if not any(weight.is_meta for weight in module.parameters(recurse=False)):
        return contextlib.nullcontext()
    from accelerate.utils.modeling import align_module_device

    return align_module_device(module)


def check_part(name: str, model: nn.Module) -> None:
    """Refuse a model that cannot decode step by step from keys and values, as the three parts must together.

    Raises:
        UsageError: it is wrapped (PEFT), or keeps what it has read outside of a `DynamicCache` (Mamba, RWKV, MiniMax,
            RecurrentGemma).
    """
    if not isinstance(model, PreTrainedModel) or not takes_cache(model):
        raise UsageError(
            f"{name} is a {type(model).__name__}, which does not keep what it has read in a DynamicCache; accepted: a "
            "causal language model of transformers with a key-value cache (merge adapters first: merge_and_unload())"
        )


def logit_width(model: PreTrainedModel) -> int:
    """How many logits the model gives per position; its vocabulary, perhaps padded."""
    head = model.get_output_embeddings()
    return head.weight.shape[0] if head is not None else model.config.get_text_config().vocab_size
