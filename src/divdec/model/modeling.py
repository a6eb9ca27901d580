"""The steered model: an ordinary causal language model made of a target, experts and a rule.

Its logits leave it already steered, so nothing that reads them (generation, scores, losses, servers) can see the
target's own. It knows nothing of files; `divdec.model.bundle` writes and reads them.
"""

from __future__ import annotations

import copy
import os
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from divdec.errors import FailedClosed, UsageError
from divdec.experts.combined import NoExperts
from divdec.experts.forward import device_of, logits_of, new_cache, recomputes
from divdec.experts.neural import NeuralPair, check_part, logit_width
from divdec.experts.overlap import OverlappedExperts, started_divergence
from divdec.experts.protocol import Experts
from divdec.model.cache import DivergenceCache
from divdec.model.checks import (
    check_divergence,
    check_inputs,
    check_target,
    padding_of,
    positions_of,
    refuse_unknown,
)
from divdec.model.configuration import NO_RULE, DivergenceConfig
from divdec.model.generation import SteeredGeneration
from divdec.model.output import causal_output
from divdec.steering import Steering
from divdec.takedowns.live import Takedowns

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class DivergenceForCausalLM(  # pyright: ignore[reportIncompatibleVariableOverride]
    SteeredGeneration, PreTrainedModel, GenerationMixin
):
    """Divergence Decoding (paper, eq. 1 and 2) as a transformers model.

    Takedown requests correct the target's logits first; the rule then steers what remains.

    Attributes:
        target: the model that is steered, P. What it answers alone is unsteered.
        experts: what gives the divergence; `experts.retain` is q and `experts.forget` is p in a neural pair.
        takedowns: the registry of takedown requests that is followed, or None.
        steering: the rule; assign a `Steering`, or a string such as 'rank:20', which leaves the eligible
            vocabulary as it is.
    """

    config_class = DivergenceConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    # The parts choose their own attention; whatever they support may be asked for.
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    supports_gradient_checkpointing = True

    def __init__(
        self,
        config: DivergenceConfig,
        target: PreTrainedModel | None = None,
        experts: Experts | None = None,
        takedowns: Takedowns | None = None,
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
        if takedowns is not None:
            self.vocab_size = min(self.vocab_size, takedowns.vocab_size)
        self.generation_config = copy.deepcopy(target.generation_config)
        self._cache_owner = uuid.uuid4().hex
        self._overlap: OverlappedExperts | None = None
        self._steering = Steering.from_dict(config.steering)
        self.steering = self._steering
        self.post_init()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._cache_owner = uuid.uuid4().hex  # a copy, or unpickled: what the original has read is not this model's

    @classmethod
    def from_parts(
        cls,
        target: PreTrainedModel,
        retain_auxiliary: PreTrainedModel,
        forget_auxiliary: PreTrainedModel,
        steering: Steering | str = "linear:1",
    ) -> DivergenceForCausalLM:
        """Join three models that are in memory already.

        Their tokenizers cannot be compared here; `divdec.write_bundle` compares those of checkpoints on disk.

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
        takedowns: Takedowns | None = None,
    ) -> DivergenceForCausalLM:
        """Join a model and experts of any kind (n-grams, a bridged pair, several of them).

        Args:
            target: P.
            experts: what gives the divergence, over the target's vocabulary; None where only takedowns steer.
            steering: the rule; without effect where there are no experts.
            configs: those of models among the experts that count the target's tokens, by part name: their contexts
                limit the steered model's.
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
        overlap: bool = False,
        **kwargs: Any,
    ) -> DivergenceForCausalLM:
        """Load a bundle from a folder or the hub.

        Args:
            pretrained_model_name_or_path: a bundle's folder or hub id.
            verify: compare the SHA-256 of every local weight file with the bundle's.
            steering: use this rule instead of the bundle's; a string keeps the bundle's eligible vocabulary.
            overlap: run the experts while the target runs, see the property `overlap`.
            **kwargs: what `AutoModelForCausalLM.from_pretrained` takes, for all three parts. `dtype`,
                `device_map`, `attn_implementation` and `quantization_config` may also be mappings from
                'target', 'retain_auxiliary', 'forget_auxiliary' or 'experts' (both auxiliaries) to a value each.

        Raises:
            UsageError: the bundle or one of its parts is missing, corrupt, changed or does not fit.
        """
        from divdec.model.loading import load_parts

        config, target, experts, takedowns = load_parts(pretrained_model_name_or_path, verify=verify, **kwargs)
        model = cls(config, target, experts, takedowns).eval()
        model.overlap = overlap
        model.name_or_path = str(pretrained_model_name_or_path)
        if steering is not None:
            model.steering = steering
        return model

    def save_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, save_directory: str | os.PathLike[str], **kwargs: Any
    ) -> None:
        """Write a bundle that holds the weights of all three parts as they are in memory (a packed bundle).

        `divdec.write_bundle` writes one of a few kilobytes that refers to checkpoints already on disk.
        """
        from divdec.model.bundle import save_packed

        save_packed(self, save_directory, **kwargs)

    @property
    def device(self) -> torch.device:
        """Where tokens are wanted: the target's device, also where its weights are offloaded."""
        return device_of(self.target)

    @property
    def steering(self) -> Steering:
        """The rule that steers this model."""
        return self._steering

    @steering.setter
    def steering(self, value: Steering | str | dict[str, Any]) -> None:
        steering = self._steering.revised(value) if isinstance(value, str) else Steering.parse(value)
        steering.check_vocabulary(self.vocab_size)
        if steering.rule == "rank" and isinstance(self.experts, NoExperts):
            raise UsageError(NO_RULE)
        self._steering = steering
        self._eligible = steering.eligible(self.vocab_size)
        self.config.steering = steering.to_dict()

    @property
    def rule(self) -> str:
        """What steers this model, in short: 'linear:1.5', 'takedowns', or both."""
        found = [] if isinstance(self.experts, NoExperts) else [str(self.steering)]
        return " and ".join([*found, "takedowns"] if self.takedowns is not None else found)

    @property
    def overlap(self) -> bool:
        """Whether the experts run while the target runs: on separate CUDA streams, or on a CPU in a thread."""
        return self._overlap is not None

    @overlap.setter
    def overlap(self, value: bool) -> None:
        self._overlap = (self._overlap or OverlappedExperts()) if value else None

    def new_cache(self) -> DivergenceCache:
        """An empty cache for target, experts and takedowns."""
        return self._joint_cache(new_cache(self.target), self.experts.new_cache())

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
        """Steered logits after every token (or after the last `logits_to_keep`); the same at all padding.

        Args:
            input_ids: the tokens since what the cache holds.
            attention_mask: 1 for real tokens, 0 for padding on either side, the cached ones included.
            position_ids: derived from the mask where they are not given, so that padding never shifts a token.
            past_key_values: a `DivergenceCache`, or None.
            labels: token ids, −100 where no loss is wanted; gives `loss`, the mean over the rest.
            use_cache: make and return a cache when none is given; on by default, as for any transformers model, but
                for training with gradient checkpointing.
            logits_to_keep: number of positions to return, from the end; 0 returns all.
            **kwargs: `return_dict`, `num_items_in_batch` (for the loss), and what generation and tokenizers add
                and the parts do not need (`cache_position`, `token_type_ids`).

        Raises:
            UsageError: inputs that the experts cannot see (embeddings), or outputs that would show the target.
            FailedClosed: the experts gave a divergence that is not finite, the target's logits are NaN or +inf, or
                no token is left.
        """
        refuse_unknown(input_ids, kwargs)
        assert input_ids is not None
        cache = self._own_cache(past_key_values)
        if cache is None and (use_cache or (use_cache is None and not recomputes(self))):
            cache = self.new_cache()
        _, target_logits, divergence = self._run(input_ids, attention_mask, position_ids, cache, logits_to_keep)
        if self._eligible is not None and self._eligible.device != target_logits.device:
            self._eligible = self._eligible.to(target_logits.device)
        logits = self._steering.apply(target_logits, divergence, self._eligible)
        if labels is not None and attention_mask is not None:
            # A text's first token follows padding on the left, which says nothing of it.
            before = nn.functional.pad(attention_mask[:, -labels.shape[1] : -1], (1, 0), value=1)
            labels = labels.masked_fill((before == 0).to(labels.device), -100)
        return causal_output(self, logits, cache, labels, logits_to_keep, kwargs)

    def components(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch past_and_tokens"] | None = None,
        position_ids: Int[Tensor, "batch_or_one tokens"] | None = None,
        past_key_values: DivergenceCache | None = None,
        logits_to_keep: int = 0,
    ) -> tuple[Float[Tensor, "batch kept vocab"], Float[Tensor, "batch kept vocab"]]:
        """The target's logits and the divergence, to which any rule can be applied (`steering.apply`).

        Many settings can so be measured on one pass of the three models. The first of the two is steered by takedown
        requests alone, and where there are none not at all: nothing that answers may use it alone. Both are 0 at
        padding.

        Raises:
            UsageError: the mask does not fit the tokens, or the cache belongs to another model.
            FailedClosed: the experts gave a divergence that is not finite, the target's logits are NaN or +inf, or
                the caches differ in length.
        """
        return self._run(input_ids, attention_mask, position_ids, past_key_values, logits_to_keep)[1:]

    def unsteered_components(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        past_key_values: DivergenceCache | None = None,
        logits_to_keep: int = 0,
    ) -> tuple[Float[Tensor, "batch kept vocab"], Float[Tensor, "batch kept vocab"], Float[Tensor, "batch kept vocab"]]:
        """The target's own logits, which no takedown request has corrected, and then what `components` gives.

        For what says what steering did to an answer; nothing that answers may use the first of the three.
        """
        return self._run(input_ids, None, None, past_key_values, logits_to_keep)

    def _run(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch past_and_tokens"] | None,
        position_ids: Int[Tensor, "batch_or_one tokens"] | None,
        past_key_values: DivergenceCache | None,
        logits_to_keep: int,
    ) -> tuple[Float[Tensor, "batch kept vocab"], Float[Tensor, "batch kept vocab"], Float[Tensor, "batch kept vocab"]]:
        """See `unsteered_components`."""
        if type(logits_to_keep) is not int or logits_to_keep < 0:
            raise UsageError(f"logits_to_keep is {logits_to_keep!r}; accepted: a whole number of positions, 0 for all")
        past_key_values = self._own_cache(past_key_values)
        past_length = past_key_values.check_length() if past_key_values is not None else 0
        check_inputs(input_ids, attention_mask, past_length)
        if past_key_values is not None and past_length:
            past_key_values.check_rows(len(input_ids))
        if position_ids is None:
            position_ids = positions_of(input_ids, attention_mask, past_length)
        inputs = (input_ids, attention_mask, position_ids)
        target_cache, experts_cache, takedowns_cache = None, None, None
        if past_key_values is not None:
            target_cache, experts_cache = past_key_values.target, past_key_values.experts
            takedowns_cache = past_key_values.takedowns
        with started_divergence(self.experts, self._overlap, *inputs, experts_cache, logits_to_keep) as pending:
            target_logits = logits_of(self.target, *inputs, target_cache, logits_to_keep)[..., : self.vocab_size]
            divergence = pending.result()
        padding = padding_of(attention_mask, target_logits.shape[1])
        target_logits = _without_padding(target_logits, padding)
        check_target(target_logits)
        corrected = target_logits
        if self.takedowns is not None:
            correction = self.takedowns.correction(input_ids, attention_mask, takedowns_cache, logits_to_keep)
            corrected = target_logits.float() + self._checked(correction, target_logits, padding)
        if past_key_values is not None and past_key_values.check_length() != past_length + input_ids.shape[1]:
            raise FailedClosed("a part of the steered model did not keep the tokens in its cache")
        return target_logits, corrected, self._checked(divergence, target_logits, padding)

    def _checked(
        self,
        divergence: Float[Tensor, "batch kept width"],
        target_logits: Float[Tensor, "batch kept vocab"],
        padding: Bool[Tensor, "batch kept 1"] | None,
    ) -> Float[Tensor, "batch kept vocab"]:
        divergence = _without_padding(divergence[..., : self.vocab_size].to(target_logits.device), padding)
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

    def init_weights(self) -> None:
        """Nothing: the parts come with their weights, and a steered model has none of its own."""

    def get_input_embeddings(self) -> torch.nn.Module:
        """The target's input embeddings."""
        return self.target.get_input_embeddings()

    def get_output_embeddings(self) -> None:
        """None: no single matrix gives the steered logits."""
        return None

    def set_input_embeddings(self, value: torch.nn.Module) -> None:
        """Refused: the three parts share one vocabulary."""
        raise UsageError("the embeddings of a steered model cannot be changed: its parts share one vocabulary")

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> torch.nn.Embedding:
        """Refused: the three parts share one vocabulary."""
        raise UsageError("the vocabulary of a steered model cannot be resized: its parts share one vocabulary")


def _without_padding(
    values: Float[Tensor, "batch kept vocab"], padding: Bool[Tensor, "batch kept 1"] | None
) -> Float[Tensor, "batch kept vocab"]:
    """The same values, 0 at padding: experts may say nothing there, and the target's own logits must not leave."""
    return values if padding is None else values.masked_fill(padding.to(values.device), 0.0)
