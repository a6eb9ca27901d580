"""The steered model: a causal language model of transformers made of a target, experts and a rule.

Its logits are already steered, so nothing that reads them (generation, scores, losses, servers) sees the target's own.
"""

from __future__ import annotations

import copy
import math
import os
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Cache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from divdec.configuration import DivergenceConfig
from divdec.decoding.cache import DivergenceCache
from divdec.decoding.generation import SteeredGeneration
from divdec.errors import FailedClosed, UsageError
from divdec.experts.combined import NoExperts, check_rule, rule_name
from divdec.experts.neural import NeuralPair
from divdec.experts.protocol import Experts
from divdec.fail_closed import check_divergence, check_inputs, check_target, check_vocabulary, refuse_unknown
from divdec.passes import (
    check_part,
    count_embeddings,
    device_of,
    logit_width,
    logits_of,
    positions_of,
    uses_gradient_checkpointing,
)
from divdec.steering import Steering

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from divdec.takedowns.correction import TakedownCorrection


Logits = Float[Tensor, "batch kept vocab"]


class ModelOfParts(PreTrainedModel):
    """A causal language model that computes its logits from those of a target and other models."""

    base_model_prefix = ""
    main_input_name = "input_ids"
    # Each part selects its own attention implementation.
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    supports_gradient_checkpointing = True
    target: PreTrainedModel

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self._cache_owner = uuid.uuid4().hex

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._cache_owner = uuid.uuid4().hex  # a copy refuses the original's caches

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModelForCausalLM") -> None:
        """Do nothing: otherwise `save_pretrained` would copy the source of this module into the bundle."""

    @property
    def device(self) -> torch.device:
        """Device of the target's inputs, also if its weights are offloaded."""
        return device_of(self.target)

    def init_weights(self) -> None:
        """Do nothing: the parts are loaded with their weights."""

    def get_input_embeddings(self) -> nn.Module:
        """Return the target's input embeddings."""
        return self.target.get_input_embeddings()

    def get_output_embeddings(self) -> None:
        """Return None: no single matrix gives the logits."""
        return None

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Raise an error: the parts share one vocabulary."""
        raise UsageError("the embeddings of this model cannot be changed: its parts share one vocabulary")

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Raise an error: the parts share one vocabulary."""
        raise UsageError("the vocabulary of this model cannot be resized: its parts share one vocabulary")

    def add_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error: the adapter would change all parts."""
        raise UsageError("a model of several parts takes no adapters: all would change; load them into its target")

    load_adapter = add_adapter


class DivergenceForCausalLM(  # pyright: ignore[reportIncompatibleVariableOverride]
    SteeredGeneration, ModelOfParts, GenerationMixin
):
    """Divergence Decoding (paper, eq. 1 and 2) as a transformers model.

    Takedown requests correct the target's logits first; the rule then steers the result.

    Attributes:
        target: the target model P; its own answers are unsteered.
        experts: source of the divergence; in a neural pair `experts.retain` is q and `experts.forget` is p.
        takedowns: the registry of takedown requests that the model follows, or None.
        on_steered: called in each pass with the target's own logits and the steered ones, for counts; or None.
        steering: the rule; assign a `Steering`, or a string such as 'rank:20', which keeps the eligible vocabulary.
    """

    config_class = DivergenceConfig

    def __init__(
        self,
        config: DivergenceConfig,
        target: PreTrainedModel | None = None,
        experts: Experts | None = None,
        takedowns: TakedownCorrection | None = None,
    ) -> None:
        if target is None or (experts is None and takedowns is None) or not config.steering:
            raise UsageError(
                "a steered model is made of target, experts and rule, not of a configuration alone: "
                "use from_pretrained(BUNDLE) or DivergenceForCausalLM.from_parts(…)"
            )
        super().__init__(config)
        check_part("target", target)
        self.target = target
        self.experts = experts if experts is not None else NoExperts(logit_width(target))
        self.takedowns = takedowns
        self.vocab_size = min(logit_width(target), self.experts.vocab_size)
        self.embeddings = int(min(count_embeddings(target), getattr(self.experts, "embeddings", math.inf)))
        if takedowns is not None:
            self.vocab_size = min(self.vocab_size, takedowns.vocab_size)
        self.generation_config = copy.deepcopy(target.generation_config)
        self.on_steered: Callable[[Logits, Logits], None] | None = None
        self._steering = Steering.from_dict(config.steering)
        self.steering = self._steering
        self.post_init()

    @classmethod
    def from_parts(
        cls,
        target: PreTrainedModel,
        retain_auxiliary: PreTrainedModel,
        forget_auxiliary: PreTrainedModel,
        steering: Steering | str = "linear:1",
    ) -> DivergenceForCausalLM:
        """Create a steered model from three models in memory.

        Their tokenizers are not compared; `divdec.write_bundle` compares those of checkpoints.

        Raises:
            UsageError: the steering does not fit the common vocabulary.
        """
        experts = NeuralPair(retain_auxiliary, forget_auxiliary)
        auxiliaries = {"retain_auxiliary": retain_auxiliary.config, "forget_auxiliary": forget_auxiliary.config}
        return cls.from_experts(target, experts, steering, auxiliaries)

    @classmethod
    def from_experts(
        cls,
        target: PreTrainedModel,
        experts: Experts | None,
        steering: Steering | str = "linear:1",
        configs: Mapping[str, PreTrainedConfig] | None = None,
        takedowns: TakedownCorrection | None = None,
    ) -> DivergenceForCausalLM:
        """Create a steered model from a model and experts of any kind (n-grams, a bridged pair, a combination).

        Args:
            target: P.
            experts: source of the divergence over the target's vocabulary; None if only takedowns steer.
            steering: the rule; without effect if there are no experts.
            configs: configurations, by part name, of auxiliaries with the target's tokenizer; their contexts limit
                the steered model's.
            takedowns: a registry of takedown requests to follow.

        Raises:
            UsageError: the steering does not fit the common vocabulary.
        """
        sizes = [part.vocab_size for part in (experts, takedowns) if part is not None]
        models = {"target": target.config, **(configs or {})}
        config = DivergenceConfig.from_parts(models, Steering.parse(steering), min(logit_width(target), *sizes))
        return cls(config, target, experts, takedowns).eval()

    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *,
        verify: bool = True,
        steering: Steering | str | None = None,
        registry: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> DivergenceForCausalLM:
        """Load a bundle from a folder or the hub; no code of the bundle is executed.

        Args:
            pretrained_model_name_or_path: a bundle's folder or hub id.
            verify: compare the SHA-256 of every local weight file with the bundle's.
            steering: rule to use instead of the bundle's; a string keeps the bundle's eligible vocabulary.
            registry: folder of a registry of takedown requests to follow, if the bundle names no other.
            **kwargs: arguments of `AutoModelForCausalLM.from_pretrained`, for all three parts. `dtype`,
                `device_map`, `attn_implementation` and `quantization_config` may be mappings by part: 'target',
                'retain_auxiliary', 'forget_auxiliary', 'base' (of adapters) or 'experts' (the auxiliaries). `loaded`, a
                dictionary, holds the models of several bundles, so that one that they share is loaded once.

        Raises:
            UsageError: the bundle or one of its parts is missing, corrupt, changed or does not fit.
        """
        from divdec.model.loading import load_parts

        config, target, experts, takedowns = load_parts(
            pretrained_model_name_or_path, verify=verify, registry=registry, **kwargs
        )
        model = cls(config, target, experts, takedowns).eval()
        model.name_or_path = str(pretrained_model_name_or_path)
        if steering is not None:
            model.steering = steering
        return model

    def save_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, save_directory: str | os.PathLike[str], **kwargs: Any
    ) -> None:
        """Write a packed bundle, with the weights of all three parts as they are in memory.

        `divdec.write_bundle` writes one of a few kilobytes that refers to checkpoints on disk.
        """
        from divdec.model.bundle import save_packed

        save_packed(self, save_directory, **kwargs)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Raise an error: transformers would publish p, which has learned the forget set, in a public repository."""
        raise UsageError(
            "a steered model is not pushed; upload a packed bundle (`divdec bundle --pack`): `hf upload me/bundle "
            "BUNDLE --private`"
        )

    @property
    def steering(self) -> Steering:
        """The rule and its strength."""
        return self._steering

    @steering.setter
    def steering(self, value: Steering | str | dict[str, Any]) -> None:
        steering = self._steering.revised(value) if isinstance(value, str) else Steering.parse(value)
        steering.check_vocabulary(self.vocab_size)
        check_rule(steering, self.experts)
        self._steering = steering
        self._eligible = steering.eligible(self.vocab_size)
        self.config.steering = steering.to_dict()

    @property
    def rule(self) -> str:
        """Short description of the steering: 'linear:1.5', 'takedowns' or 'linear:1.5 and takedowns'."""
        return rule_name(self.steering, self.experts, self.takedowns)

    def forward(
        self,
        input_ids: Int[Tensor, "batch tokens"] | None = None,
        attention_mask: Int[Tensor, "batch past_and_tokens"] | None = None,
        position_ids: Int[Tensor, "batch_or_one tokens"] | None = None,
        past_key_values: Cache | None = None,
        labels: Int[Tensor, "batch tokens"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Return steered logits after every token, or after the last `logits_to_keep`.

        Args:
            input_ids: the tokens after those in the cache.
            attention_mask: 1 for tokens, 0 for padding on either side, cached tokens included.
            position_ids: derived from the mask by default.
            past_key_values: a `DivergenceCache`, or None.
            labels: token ids, −100 to ignore; gives `loss`, the mean over the others.
            use_cache: create a cache if none is given; the default, except for training with gradient checkpointing.
            logits_to_keep: number of positions to return, from the end; 0 for all.
            **kwargs: `return_dict`, `num_items_in_batch` (for the loss), and arguments without effect that generation
                and tokenizers add (`cache_position`, `token_type_ids`).

        Raises:
            UsageError: an argument would not reach the experts (embeddings), or would show the target.
            FailedClosed: the divergence or the target's logits are not finite, or no token is left.
        """
        refuse_unknown(input_ids, kwargs)
        assert input_ids is not None
        cache = self._own_cache(past_key_values)
        if cache is None and (use_cache or (use_cache is None and not uses_gradient_checkpointing(self))):
            cache = self.new_cache()
        uncorrected_logits, target_logits, divergence = self.components(
            input_ids, attention_mask, position_ids, cache, logits_to_keep
        )
        logits = self.steer(target_logits, divergence)
        if self.on_steered is not None:
            self.on_steered(uncorrected_logits, logits)
        if labels is not None and attention_mask is not None:
            # The first token of a left-padded text has no context.
            before = nn.functional.pad(attention_mask[:, -labels.shape[1] : -1], (1, 0), value=1)
            labels = labels.masked_fill((before == 0).to(labels.device), -100)
        return causal_output(self, logits, cache, labels, logits_to_keep, kwargs)

    def steer(self, logits: Float[Tensor, "... _"], divergence: Float[Tensor, "... _"]) -> Float[Tensor, "... vocab"]:
        """Apply the rule to the model's tokens; see `Steering.apply`."""
        logits, divergence = logits[..., : self.vocab_size], divergence[..., : self.vocab_size]
        if self._eligible is not None and self._eligible.device != logits.device:
            self._eligible = self._eligible.to(logits.device)
        return self._steering.apply(logits, divergence, self._eligible)

    def components(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch past_and_tokens"] | None = None,
        position_ids: Int[Tensor, "batch_or_one tokens"] | None = None,
        past_key_values: DivergenceCache | None = None,
        logits_to_keep: int = 0,
    ) -> tuple[Logits, Logits, Logits]:
        """Return the target's own logits, those after takedown requests, and the divergence, of one forward pass.

        Many settings can be applied to them. The rule has not steered the logits: never answer from them. All are 0
        at padding.

        Raises:
            UsageError: the mask does not fit the tokens, or the cache belongs to another model.
            FailedClosed: the divergence or the target's logits are not finite, or the caches differ in length.
        """
        if type(logits_to_keep) is not int or logits_to_keep < 0:
            raise UsageError(f"logits_to_keep is {logits_to_keep!r}; accepted: a whole number of positions, 0 for all")
        cache = self._own_cache(past_key_values)
        past_length = cache.check_length() if cache is not None else 0
        check_inputs(input_ids, attention_mask, past_length)
        if input_ids.device.type == "cpu":  # on a GPU only `generate` checks, once per prompt: it has to wait for them
            check_vocabulary(input_ids, self.embeddings)
        if cache is not None and past_length:
            cache.check_rows(len(input_ids))
        if position_ids is None:
            position_ids = positions_of(input_ids, attention_mask, past_length)
        inputs = (input_ids, attention_mask, position_ids)
        caches = (None, None, None) if cache is None else (cache.target, cache.experts, cache.takedowns)
        target_cache, experts_cache, takedowns_cache = caches

        if cache is not None:
            cache.is_interrupted = True
        # First: copying the inputs to the experts' devices would wait for the target's pass.
        divergence = self.experts.divergence(*inputs, experts_cache, logits_to_keep)
        target_logits = logits_of(self.target, *inputs, target_cache, logits_to_keep)[..., : self.vocab_size]
        padding = _padding_of(attention_mask, target_logits.shape[1])
        target_logits = _zero_padding(target_logits, padding)
        check_target(target_logits)
        corrected = target_logits
        if self.takedowns is not None:
            correction = self.takedowns.correction(input_ids, attention_mask, takedowns_cache, logits_to_keep)
            corrected = target_logits.float() + self._checked(correction, target_logits, padding)
        if cache is not None:
            cache.is_interrupted = False
        if cache is not None and cache.check_length() != past_length + input_ids.shape[1]:
            raise FailedClosed("a part of the steered model did not keep the tokens in its cache")
        return target_logits, corrected, self._checked(divergence, target_logits, padding)

    def _checked(
        self,
        divergence: Float[Tensor, "batch kept width"],
        target_logits: Logits,
        padding: Bool[Tensor, "batch kept 1"] | None,
    ) -> Logits:
        divergence = _zero_padding(divergence[..., : self.vocab_size].to(target_logits.device), padding)
        check_divergence(divergence)
        return divergence

    def _own_cache(self, cache: Cache | None) -> DivergenceCache | None:
        if cache is None:
            return None
        if not isinstance(cache, DivergenceCache):
            raise UsageError(
                f"past_key_values is a {type(cache).__name__}; a steered model needs model.new_cache(), which "
                "holds the experts' keys and values too"
            )
        if cache.owner != self._cache_owner:
            raise UsageError("past_key_values belongs to another steered model; make one with this model's new_cache()")
        if (cache.takedowns is None) != (self.takedowns is None):
            raise FailedClosed("past_key_values and the model do not both follow a registry of takedown requests")
        return cache


def _padding_of(
    attention_mask: Int[Tensor, "batch past_and_tokens"] | None, positions: int
) -> Bool[Tensor, "batch kept 1"] | None:
    """Return which of the last positions are padding; None if it is known that none is."""
    if attention_mask is None:
        return None
    padding = attention_mask[:, -positions:] == 0
    # On a GPU the test would force a synchronisation.
    return None if padding.device.type == "cpu" and not padding.any() else padding[..., None]


def _zero_padding(
    values: Float[Tensor, "batch kept vocab"], padding: Bool[Tensor, "batch kept 1"] | None
) -> Float[Tensor, "batch kept vocab"]:
    """Set values at padding to 0, where experts are undefined and the target's own logits must not be returned."""
    return values if padding is None else values.masked_fill(padding.to(values.device), 0.0)


def causal_output(
    model: Any,
    logits: Logits,
    cache: Cache | None,
    labels: Int[Tensor, "batch tokens"] | None,
    logits_to_keep: int,
    options: Mapping[str, Any],
) -> CausalLMOutputWithPast | tuple[Any, ...]:
    """Build the output of `forward`, whose further arguments are `options`; labels give the model's loss.

    Raises:
        UsageError: labels are given without the logits of every position.
    """
    loss = None
    if labels is not None:
        if logits_to_keep:
            raise UsageError("labels need the logits of every position: leave logits_to_keep at 0")
        count = {name: options[name] for name in ("num_items_in_batch",) if name in options}
        loss = model.loss_function(logits, labels.to(logits.device), vocab_size=model.vocab_size, **count)
    output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
    return output if options.get("return_dict") in (None, True) else output.to_tuple()


AutoModelForCausalLM.register(DivergenceConfig, DivergenceForCausalLM, exist_ok=True)
