"""A pair of neural language models with the target's vocabulary, and one forward pass of any causal language model."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from divdec.errors import FailedClosed, UsageError
from divdec.experts.protocol import BaseExperts, Inputs, length_of
from divdec.fail_closed import check


class NeuralPair(BaseExperts, nn.Module):
    """Retain auxiliary q and forget auxiliary p (paper, section 3.1).

    Their widths may differ; the divergence covers the tokens that both have.
    """

    def __init__(self, retain: PreTrainedModel, forget: PreTrainedModel) -> None:
        super().__init__()
        check_pair(retain, forget)
        self.cache_class = PairCache
        self.retain = retain
        self.forget = forget
        self.vocab_size = min(logit_width(retain), logit_width(forget))
        self.embeddings = min(count_embeddings(retain), count_embeddings(forget))

    def new_cache(self) -> PairCache:
        """Return an empty cache for both auxiliaries."""
        return PairCache(new_cache(self.retain), new_cache(self.forget))

    def compute(self, inputs: Inputs, cache: PairCache | None, logits_to_keep: int) -> Tensor:
        """Compute log q − log p (paper, eq. 1); tokens that an auxiliary has read ahead are not read again."""
        if cache is None:
            q, p = (logits_of(model, *inputs, None, logits_to_keep) for model in (self.retain, self.forget))
        else:
            q = cache.retain.logits(self.retain, *inputs, logits_to_keep)
            p = cache.forget.logits(self.forget, *inputs, logits_to_keep)
        return divergence_of(q, p)

    def read_ahead(
        self,
        name: str,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch past_and_tokens"] | None,
        position_ids: Int[Tensor, "batch_or_one tokens"] | None,
        cache: PairCache,
    ) -> Float[Tensor, "batch tokens vocab"]:
        """Run one auxiliary, 'retain' or 'forget', on tokens that the target has not read, and store its logits.

        The next `divergence` must begin with these tokens; it uses the stored logits.
        """
        model, own = (self.retain, cache.retain) if name == "retain" else (self.forget, cache.forget)
        return own.read_ahead(model, input_ids, attention_mask, position_ids)[..., : self.vocab_size]


def divergence_of(q_logits: Float[Tensor, "... _"], p_logits: Float[Tensor, "... _"]) -> Float[Tensor, "... vocab"]:
    """Compute log q − log p over the tokens that both have, in float32.

    This is ℓ_q − ℓ_p of the paper's eq. 1 up to a constant per position, which changes neither rule; a margin
    needs probabilities.
    """
    width = min(q_logits.shape[-1], p_logits.shape[-1])
    q, p = q_logits[..., :width].float(), p_logits[..., :width].to(q_logits.device).float()
    return q - p - (q.logsumexp(dim=-1, keepdim=True) - p.logsumexp(dim=-1, keepdim=True))


class PairCache(Cache):
    """The caches of both auxiliaries; its layers are those of both."""

    def __init__(self, retain: Cache, forget: Cache) -> None:
        self.retain, self.forget = ReadAhead(retain), ReadAhead(forget)
        layers: list[Any] = [*retain.layers, *forget.layers, self.retain, self.forget]
        super().__init__(layers=layers)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens that each of the two holds, without those read ahead."""
        return [self.retain.length, self.forget.length]


class ReadAhead:
    """One model's cache, with the tokens that the model has read ahead of the target and its logits after them.

    Speculative decoding drafts this way. The object is also one of the pair's layers: it refuses operations on the
    cache while tokens are read ahead, because their logits would belong to other sequences.
    """

    is_compileable = False
    is_sliding = False
    is_initialized = True
    keys = values = None

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.tokens: list[Int[Tensor, "batch tokens"]] = []
        self.stored_logits: list[Float[Tensor, "batch tokens width"]] = []

    @property
    def is_croppable(self) -> bool:
        """Whether no token is read ahead."""
        return not self.tokens

    @property
    def ahead(self) -> int:
        """Number of tokens read ahead."""
        return sum(tokens.shape[1] for tokens in self.tokens)

    @property
    def length(self) -> int:
        """Number of tokens in the cache, without those read ahead."""
        return length_of(self.cache) - self.ahead

    def read_ahead(
        self,
        model: PreTrainedModel,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch past_and_tokens"] | None,
        position_ids: Int[Tensor, "batch_or_one tokens"] | None,
    ) -> Float[Tensor, "batch tokens width"]:
        """Run the model on further tokens; store and return its logits after them."""
        logits = logits_of(model, input_ids, attention_mask, position_ids, self.cache)
        self.tokens.append(input_ids)
        self.stored_logits.append(logits)
        return logits

    def logits(
        self,
        model: PreTrainedModel,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch past_and_tokens"] | None,
        position_ids: Int[Tensor, "batch_or_one tokens"] | None,
        logits_to_keep: int = 0,
    ) -> Float[Tensor, "batch kept width"]:
        """Return the model's logits after each token; it runs only on tokens that it has not read ahead.

        Raises:
            FailedClosed: `input_ids` does not begin with the tokens read ahead.
        """
        ahead, tokens, stored = self.ahead, self.tokens, self.stored_logits
        self.tokens, self.stored_logits = [], []
        if not ahead:
            return logits_of(model, input_ids, attention_mask, position_ids, self.cache, logits_to_keep)
        read = torch.cat(tokens, dim=1)
        if read.shape[0] != input_ids.shape[0] or ahead > input_ids.shape[1]:
            raise FailedClosed(f"an auxiliary has read {tuple(read.shape)} tokens ahead of {tuple(input_ids.shape)}")
        same = (read == input_ids[:, :ahead].to(read.device)).all()
        check(same, "an auxiliary has read other tokens ahead than the target is given")
        if ahead < input_ids.shape[1]:
            positions = position_ids if position_ids is None else position_ids[:, ahead:]
            stored = [*stored, logits_of(model, input_ids[:, ahead:], attention_mask, positions, self.cache)]
        logits = stored[0] if len(stored) == 1 else torch.cat(stored, dim=1)
        return logits[:, -logits_to_keep:] if logits_to_keep else logits

    def reset(self) -> None:
        """Drop the tokens read ahead."""
        self.tokens, self.stored_logits = [], []

    def _refuse_while_ahead(self, *args: Any) -> None:
        """Do nothing, as the cache's layers handle the operation; raise an error while tokens are read ahead."""
        if self.tokens:
            raise FailedClosed("an auxiliary has read ahead of the target: ask for the divergence before anything else")

    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = take_columns = _refuse_while_ahead

    def get_max_length(self) -> int:
        """Return −1: the length is unlimited."""
        return -1

    def offload(self) -> None:
        """Do nothing."""

    prefetch = offload


def logits_of(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "batch tokens"],
    attention_mask: Int[Tensor, "batch past_and_tokens"] | None,
    position_ids: Int[Tensor, "batch_or_one tokens"] | None,
    cache: Cache | None,
    logits_to_keep: int = 0,
    *,
    embeddings: Float[Tensor, "batch tokens features"] | None = None,
) -> Float[Tensor, "batch kept width"]:
    """Run one forward pass on the model's device, with the arguments that its architecture accepts.

    `embeddings` replace those of the tokens.
    """
    device = device_of(model)
    accepted = _forward_parameters(type(model))
    arguments: dict[str, Any] = {
        "input_ids": input_ids if embeddings is None else None,
        "inputs_embeds": embeddings,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "past_key_values": cache,
        "use_cache": cache is not None,
        "logits_to_keep": logits_to_keep,
    }
    arguments = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
        if name in accepted and value is not None
    }
    logits = model(**arguments).logits
    return logits[:, -logits_to_keep:] if logits_to_keep else logits


def positions_of(
    input_ids: Int[Tensor, "batch tokens"],
    attention_mask: Int[Tensor, "batch past_and_tokens"] | None,
    past_length: int,
) -> Int[Tensor, "batch_or_one tokens"]:
    """Return each token's position in its sequence, without padding."""
    tokens = input_ids.shape[1]
    if attention_mask is None:
        return torch.arange(past_length, past_length + tokens, device=input_ids.device)[None]
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)[:, -tokens:]


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """Return an empty cache whose layers fit the model's architecture (sliding windows, hybrid layers)."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's embeddings; if they are offloaded, the device that accelerate runs them on."""
    embeddings: Any = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    device: torch.device = embeddings.weight.device
    hook = getattr(embeddings, "_hf_hook", None)
    for one in getattr(hook, "hooks", [hook]) if device.type == "meta" else ():
        if (execution_device := getattr(one, "execution_device", None)) is not None:
            return torch.device(execution_device)
    return device


def logit_width(model: PreTrainedModel) -> int:
    """Return the number of logits per position: the size of the vocabulary, possibly padded."""
    head = model.get_output_embeddings()
    return head.weight.shape[0] if head is not None else model.config.get_text_config().vocab_size


def count_embeddings(model: PreTrainedModel) -> int:
    """Return the number of token ids that a model reads. Some models of images read ids that they never predict."""
    embeddings: Any = model.get_input_embeddings()
    return int(embeddings.weight.shape[0])


def check_part(name: str, model: nn.Module) -> None:
    """Refuse a model that cannot decode step by step with a `DynamicCache`.

    Raises:
        UsageError: it is wrapped (PEFT), or stores its state elsewhere (Mamba, RWKV, MiniMax, RecurrentGemma).
    """
    if not isinstance(model, PreTrainedModel) or not takes_cache(model):
        raise UsageError(
            f"{name} is a {type(model).__name__}, which does not store its state in a DynamicCache; accepted: a "
            "causal language model of transformers with a key-value cache (merge adapters first: merge_and_unload())"
        )


def check_pair(retain: PreTrainedModel, forget: PreTrainedModel) -> None:
    """Refuse two auxiliaries that cannot decode step by step, or that are the same model.

    Raises:
        UsageError: see `check_part`; or they have equal weights.
    """
    check_part("retain auxiliary", retain)
    check_part("forget auxiliary", forget)
    if retain is forget or same_weights(retain, forget):
        raise UsageError("retain auxiliary and forget auxiliary are the same model: nothing would be forgotten")


def takes_cache(model: Any) -> bool:
    """Whether the model stores everything it has read in a `DynamicCache` that counts tokens."""
    return (
        "past_key_values" in _forward_parameters(type(model))
        and model._supports_default_dynamic_cache()
        # RecurrentGemma's modules hold the state themselves, so sequences would share it.
        and not any("recurrent_states" in vars(module) for module in model.modules())
        and any(hasattr(layer, "get_seq_length") for layer in new_cache(model).layers)
    )


def uses_gradient_checkpointing(module: nn.Module) -> bool:
    """Whether a model within trains with gradient checkpointing, which recomputes layers and fills no cache."""
    return any(getattr(child, "gradient_checkpointing", False) and child.training for child in module.modules())


def stateful_types(*models: object) -> list[str]:
    """Return the types of the models, or models within, with a recurrent state, from which no token can be removed."""
    modules: list[Any] = [m for model in models for m in (model.modules() if isinstance(model, nn.Module) else [model])]
    return sorted({module.config.model_type for module in modules if getattr(module, "_is_stateful", False)})


def same_weights(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    """Whether two models have equal parameters under equal names; stops at the first difference."""
    first, second = ({name for name, _ in model.named_parameters(remove_duplicate=False)} for model in (one, other))
    if first != second:
        return False
    modules = dict(other.named_modules(remove_duplicate=False))
    return all(_same_own_weights(child, modules[name]) for name, child in one.named_modules() if child._parameters)


def _same_own_weights(one: nn.Module, other: nn.Module) -> bool:
    with _on_execution_device(one), _on_execution_device(other):
        second = dict(other.named_parameters(recurse=False))
        return all(
            not tensor.is_meta
            and tensor.shape == second[name].shape
            and torch.equal(tensor, second[name].to(tensor.device))
            for name, tensor in one.named_parameters(recurse=False)
        )


def _on_execution_device(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Load a module's own weights if accelerate has offloaded them."""
    if not any(weight.is_meta for weight in module.parameters(recurse=False)):
        return contextlib.nullcontext()
    from accelerate.utils.modeling import align_module_device

    return align_module_device(module)


@functools.cache
def _forward_parameters(model_class: type[nn.Module]) -> frozenset[str]:
    return frozenset(inspect.signature(model_class.forward).parameters)
