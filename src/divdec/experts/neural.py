"""A pair of neural language models with the target's vocabulary, and one forward pass of any causal LM.

It knows nothing of the target: widths may differ, and the divergence is narrowed to what both models have.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from divdec.errors import UsageError
from divdec.experts.protocol import own_cache


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
        """ℓ_q − ℓ_p; see `divdec.experts.protocol.Experts.divergence`."""
        retain_cache, forget_cache = None, None
        if (own := own_cache(cache, PairCache)) is not None:
            retain_cache, forget_cache = own.retain, own.forget
        inputs = (input_ids, attention_mask, position_ids)
        retain_logits = logits_of(self.retain, *inputs, retain_cache, logits_to_keep)[..., : self.vocab_size]
        forget_logits = logits_of(self.forget, *inputs, forget_cache, logits_to_keep)[..., : self.vocab_size]
        return retain_logits.float() - forget_logits.to(retain_logits.device).float()


class PairCache(Cache):
    """The caches of two models; what is done to it is done to every layer of both."""

    def __init__(self, retain: Cache, forget: Cache) -> None:
        super().__init__(layers=[*retain.layers, *forget.layers])
        self.retain = retain
        self.forget = forget

    @property
    def parts(self) -> tuple[Cache, Cache]:
        """The caches that must hold the same tokens."""
        return self.retain, self.forget


def logits_of(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "batch tokens"],
    attention_mask: Int[Tensor, "batch past_and_tokens"] | None,
    position_ids: Int[Tensor, "batch_or_one tokens"] | None,
    cache: Cache | None,
    logits_to_keep: int = 0,
) -> Float[Tensor, "batch kept width"]:
    """One forward pass on the model's own device; only the arguments that its architecture takes are given."""
    device: Any = model.get_input_embeddings().weight.device
    accepted = _forward_parameters(type(model))
    arguments: dict[str, Any] = {
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "past_key_values": cache,
        "use_cache": cache is not None,
        "logits_to_keep": logits_to_keep,
    }
    arguments = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
        if name in accepted and value is not None
    }
    logits = model(input_ids=input_ids.to(device), **arguments).logits
    return logits[:, -logits_to_keep:] if logits_to_keep else logits


def same_weights(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    """Whether two models hold the same numbers under the same names; the first that differs ends the search."""
    first, second = dict(one.named_parameters()), dict(other.named_parameters())
    if first.keys() != second.keys():
        return False
    return all(
        not tensor.is_meta
        and tensor.shape == second[name].shape
        and torch.equal(tensor, second[name].to(tensor.device))
        for name, tensor in first.items()
    )


def takes_cache(model: nn.Module) -> bool:
    """Whether the model can go on from keys and values that it has computed before."""
    return "past_key_values" in _forward_parameters(type(model))


def check_part(name: str, model: nn.Module) -> None:
    """Refuse a model that cannot decode step by step from keys and values, as the three parts must together.

    Raises:
        UsageError: it is wrapped (PEFT), or recurrent with a state of its own kind (Mamba, RWKV).
    """
    if not isinstance(model, PreTrainedModel) or not takes_cache(model):
        raise UsageError(
            f"{name} is a {type(model).__name__}, whose forward takes no past_key_values; accepted: a causal language "
            "model of transformers with a key-value cache (merge adapters first: merge_and_unload())"
        )


def logit_width(model: PreTrainedModel) -> int:
    """How many logits the model gives per position; its vocabulary, perhaps padded."""
    head = model.get_output_embeddings()
    return head.weight.shape[0] if head is not None else model.config.get_text_config().vocab_size


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty cache whose layers fit the model's architecture (sliding windows, hybrid layers)."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


@functools.cache
def _forward_parameters(model_class: type[nn.Module]) -> frozenset[str]:
    return frozenset(inspect.signature(model_class.forward).parameters)
