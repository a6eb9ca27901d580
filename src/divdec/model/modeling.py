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
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from divdec.errors import FailedClosed, UsageError
from divdec.experts.forward import device_of, logits_of, new_cache, recomputes
from divdec.experts.neural import NeuralPair, check_part, logit_width
from divdec.experts.placed import Placement, started
from divdec.experts.placed_beside import Beside, Pending
from divdec.experts.placed_pass import RemotePass
from divdec.experts.protocol import Experts
from divdec.model.cache import DivergenceCache
from divdec.model.checks import check_finite, check_inputs, positions_of, refuse_unknown
from divdec.model.configuration import NO_RANK, DivergenceConfig
from divdec.model.generation import SteeredGeneration
from divdec.model.output import causal_output
from divdec.steering import Steering

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class DivergenceForCausalLM(  # pyright: ignore[reportIncompatibleVariableOverride]
    SteeredGeneration, PreTrainedModel, GenerationMixin
):
    """Divergence Decoding (paper, eq. 1 and 2) as a transformers model.

    Attributes:
        target: the model that is steered, P. What it answers alone is unsteered.
        experts: what gives the divergence; `experts.retain` is q and `experts.forget` is p in a neural pair.
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
        self, config: DivergenceConfig, target: PreTrainedModel | None = None, experts: Experts | None = None
    ) -> None:
        if target is None or experts is None or not config.steering:
            raise UsageError(
                "a steered model is made of target, experts and rule, not of a configuration alone: "
                "use from_pretrained(BUNDLE) or DivergenceForCausalLM.from_parts(…)"
            )
        super().__init__(config)
        check_part("target", target)
        self.target = target
        self.experts = experts
        self.vocab_size = min(logit_width(target), experts.vocab_size)
        self.generation_config = copy.deepcopy(target.generation_config)
        self._cache_owner = uuid.uuid4().hex
        self._beside: Beside | None = None
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
        experts: Experts,
        steering: Steering | str = "linear:1",
        configs: Mapping[str, PreTrainedConfig] | None = None,
    ) -> DivergenceForCausalLM:
        """Join a model and experts of any kind (n-grams, a registry, a bridged pair, several of them).

        Args:
            target: P.
            experts: what gives the divergence, over the target's vocabulary.
            steering: the rule.
            configs: those of models among the experts that count the target's tokens, by part name: their contexts
                limit the steered model's.

        Raises:
            UsageError: the steering does not fit the common vocabulary.
        """
        vocab_size = min(logit_width(target), experts.vocab_size)
        models = {"target": target.config, **(configs or {})}
        config = DivergenceConfig.from_parts(models, Steering.parse(steering), vocab_size)
        return cls(config, target, experts).eval()

    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *,
        verify: bool = True,
        steering: Steering | str | None = None,
        experts_placement: Placement | str | None = None,
        **kwargs: Any,
    ) -> DivergenceForCausalLM:
        """Load a bundle from a folder or the hub.

        Args:
            pretrained_model_name_or_path: a bundle's folder or hub id.
            verify: compare the SHA-256 of every local weight file with the bundle's.
            steering: use this rule instead of the bundle's; a string keeps the bundle's eligible vocabulary.
            experts_placement: 'inside' (the default) runs the experts after the target, 'beside' at the same time in
                this process, 'processes' in the other processes that torchrun has started. Then this returns in the
                first process alone: the others serve it, and leave with SystemExit once it has ended.
            **kwargs: what `AutoModelForCausalLM.from_pretrained` takes, for all three parts. `dtype`,
                `device_map`, `attn_implementation` and `quantization_config` may also be mappings from
                'target', 'retain_auxiliary', 'forget_auxiliary' or 'experts' (both auxiliaries) to a value each.

        Raises:
            UsageError: the bundle or one of its parts is missing, corrupt, changed or does not fit.
        """
        from divdec.model.loading import load_parts

        placement = Placement.parse(experts_placement)
        config, target, experts = load_parts(
            pretrained_model_name_or_path, verify=verify, placement=placement, **kwargs
        )
        model = cls(config, target, experts).eval()
        model.overlap = placement.where == "beside"
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
        if steering.rule == "rank" and getattr(self.experts, "changes", False):
            raise UsageError(NO_RANK)
        self._steering = steering
        self._eligible = steering.eligible(self.vocab_size)
        self.config.steering = steering.to_dict()

    @property
    def overlap(self) -> bool:
        """Whether experts of this process run while the target does: on CUDA streams of their own, or in a thread."""
        return self._beside is not None

    @overlap.setter
    def overlap(self, value: bool) -> None:
        self._beside = (self._beside or Beside()) if value else None

    def new_cache(self) -> DivergenceCache:
        """An empty cache for target and experts."""
        return DivergenceCache(new_cache(self.target), self.experts.new_cache(), self._cache_owner)

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
        """Steered logits after every token (or after the last `logits_to_keep`).

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
            FailedClosed: the experts gave a divergence that is not finite.
        """
        refuse_unknown(input_ids, kwargs)
        assert input_ids is not None
        cache = self._own_cache(past_key_values)
        if cache is None and (use_cache or (use_cache is None and not recomputes(self))):
            cache = self.new_cache()
        given = input_ids, attention_mask, position_ids, cache, logits_to_keep
        steering = self._steering  # once: what comes from other processes may be for this rule alone
        target_logits, divergence, found = self._run(*given, steering=steering)
        logits = self._steer(target_logits, divergence, steering)
        if (whole := found.complete(logits)) is not None:
            logits = self._steer(target_logits, self._checked(whole, target_logits, attention_mask), steering)
        return causal_output(self, logits, cache, labels, logits_to_keep, kwargs)

    def components(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch past_and_tokens"] | None = None,
        position_ids: Int[Tensor, "batch_or_one tokens"] | None = None,
        past_key_values: DivergenceCache | None = None,
        logits_to_keep: int = 0,
    ) -> tuple[Float[Tensor, "batch kept vocab"], Float[Tensor, "batch kept vocab"]]:
        """The target's own logits and the divergence, to which any rule can be applied (`steering.apply`).

        Many settings can so be measured on one pass of the three models. The first of the two is unsteered:
        nothing that answers may use it alone.

        Raises:
            UsageError: the mask does not fit the tokens, or the cache belongs to another model.
            FailedClosed: the experts gave a divergence that is not finite, or the caches differ in length.
        """
        return self._run(input_ids, attention_mask, position_ids, past_key_values, logits_to_keep)[:2]

    def _run(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch past_and_tokens"] | None,
        position_ids: Int[Tensor, "batch_or_one tokens"] | None,
        past_key_values: DivergenceCache | None,
        logits_to_keep: int,
        steering: Steering | None = None,
    ) -> tuple[Float[Tensor, "batch kept vocab"], Float[Tensor, "batch kept vocab"], Pending | RemotePass]:
        """See `components`; given the only rule that will be applied, other processes need not send more than that."""
        if type(logits_to_keep) is not int or logits_to_keep < 0:
            raise UsageError(f"logits_to_keep is {logits_to_keep!r}; accepted: a whole number of positions, 0 for all")
        past_key_values = self._own_cache(past_key_values)
        past_length = past_key_values.check_length() if past_key_values is not None else 0
        check_inputs(input_ids, attention_mask, past_length)
        if position_ids is None:
            position_ids = positions_of(input_ids, attention_mask, past_length)
        inputs = (input_ids, attention_mask, position_ids)
        target_cache, experts_cache = None, None
        if past_key_values is not None:
            target_cache, experts_cache = past_key_values.target, past_key_values.experts
        with started(self.experts, self._beside, *inputs, experts_cache, logits_to_keep, steering) as found:
            target_logits = logits_of(self.target, *inputs, target_cache, logits_to_keep)[..., : self.vocab_size]
            divergence = found.finish()
        if past_key_values is not None and past_key_values.check_length() != past_length + input_ids.shape[1]:
            raise FailedClosed("a part of the steered model did not keep the tokens in its cache")
        return target_logits, self._checked(divergence, target_logits, attention_mask), found

    def _checked(
        self,
        divergence: Float[Tensor, "batch kept width"],
        target_logits: Float[Tensor, "batch kept vocab"],
        attention_mask: Int[Tensor, "batch past_and_tokens"] | None,
    ) -> Float[Tensor, "batch kept vocab"]:
        divergence = divergence[..., : self.vocab_size].to(target_logits.device)
        check_finite(divergence, attention_mask)
        return divergence

    def _steer(
        self,
        target_logits: Float[Tensor, "batch kept vocab"],
        divergence: Float[Tensor, "batch kept vocab"],
        steering: Steering,
    ) -> Float[Tensor, "batch kept vocab"]:
        if self._eligible is not None and self._eligible.device != target_logits.device:
            self._eligible = self._eligible.to(target_logits.device)
        return steering.apply(target_logits, divergence, self._eligible)

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
