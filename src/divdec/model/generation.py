"""How `generate` of a steered model differs from any other model's: one cache for all parts, and speculation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import Cache, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from divdec.decoding.processors import SteeredProcessors
from divdec.decoding.speculative import Speculation, check_processors, check_search, speculate
from divdec.errors import UsageError
from divdec.experts.combined import CombinedCache, CombinedExperts
from divdec.experts.compiled import fixed_cache, keep
from divdec.experts.fixed_cache import FixedCache
from divdec.experts.forward import new_cache, stateful_types
from divdec.experts.neural import NeuralPair, PairCache
from divdec.model.cache import DivergenceCache
from divdec.model.checks import check_inputs, check_prompts

SEARCHES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
    GenerationMode.ASSISTED_GENERATION,
)
# Each drafts with the target's own layers or hidden states, or mixes an assistant's probabilities into the answer.
UNSTEERED_OPTIONS = ("assistant_early_exit", "assistant_ensemble_weight", "use_mtp", "speculation_type")


class SteeredGeneration(GenerationMixin):
    """`GenerationMixin` for a model that has experts, makes caches of its own and can speculate."""

    target: Any
    experts: Any
    takedowns: Any
    generation_config: Any
    steering: Any
    _cache_owner: str

    def new_cache(self) -> DivergenceCache:
        """An empty cache for target and experts."""
        raise NotImplementedError

    def _own_cache(self, cache: Cache | None) -> DivergenceCache | None:
        raise NotImplementedError

    def _joint_cache(self, target: Cache, experts: Cache) -> DivergenceCache:
        takedowns = None if self.takedowns is None else self.takedowns.new_cache()
        return DivergenceCache(target, experts, self._cache_owner, takedowns)

    @property
    def _plain(self) -> Any:
        return super()

    @torch.no_grad()
    def generate(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *args: Any, speculative: Speculation | bool | int | None = None, **kwargs: Any
    ) -> Any:
        """Generate as `GenerationMixin.generate` does, with all of its arguments, or several tokens a target pass.

        Args:
            *args: as there.
            speculative: draft with q and let the target judge: True, the number of tokens to draft, or a
                `Speculation` (which `custom_generate` takes, too). Greedy answers are those of plain decoding, sampled
                ones follow the same distribution.
            **kwargs: as there.

        Raises:
            UsageError: a prompt ends in padding, a search or option is not offered, or speculation was asked for
                together with beams or another search of its own.
            FailedClosed: the model cannot be steered, or the rule and the logits processors leave no token.
        """
        given = [args[0] if args else None, kwargs.get("inputs"), kwargs.get("input_ids")]
        if (ids := next((one for one in given if one is not None), None)) is not None:
            check_inputs(ids, kwargs.get("attention_mask"), None if kwargs.get("past_key_values") is not None else 0)
        if isinstance(kwargs.get("custom_generate"), Speculation):
            speculative = kwargs.pop("custom_generate")
        elif kwargs.get("custom_generate") is not None and speculative:
            raise UsageError("speculative and custom_generate are two ways to decode: give one of them")
        if speculative is None or speculative is False:
            return self._plain.generate(*args, **kwargs)
        speculation = Speculation.of(speculative)
        check_search(self.generation_config, kwargs)
        return self._plain.generate(*args, speculative=speculation, **kwargs)

    def _sample(self, *args: Any, speculative: Speculation | None = None, **kwargs: Any) -> Any:
        # Where transformers chooses to decode greedily or to sample, all of its preparations done.
        if speculative is None:
            answer = self._plain._sample(*args, **kwargs)
        else:
            answer = speculate(self, *args, speculation=speculative, **kwargs)
        if isinstance(cache := kwargs.get("past_key_values"), DivergenceCache):
            while cache.lent:
                keep(cache.lent.pop())
        return answer

    @property
    def _is_stateful(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return bool(stateful_types(self.target, self.experts))

    def _beam_search(self, input_ids: Any, logits_processor: Any, *args: Any, **kwargs: Any) -> Any:
        check_processors(logits_processor, "beam search")
        return self._plain._beam_search(input_ids, logits_processor, *args, **kwargs)

    # With the signature that transformers reads.
    @functools.wraps(GenerationMixin._assisted_decoding)  # pyright: ignore[reportAttributeAccessIssue]
    def _assisted_decoding(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Any, logits_processor: Any, *args: Any, **kwargs: Any
    ) -> Any:
        check_processors(logits_processor, "assisted decoding")
        return self._plain._assisted_decoding(input_ids, logits_processor, *args, **kwargs)

    def _get_logits_processor(
        self, generation_config: GenerationConfig, *args: Any, **kwargs: Any
    ) -> SteeredProcessors:
        mask = kwargs.get("negative_prompt_attention_mask")
        check_prompts(mask, 0 if mask is None else len(mask), "negative prompt")
        processors = self._plain._get_logits_processor(generation_config, *args, **kwargs)
        ends = getattr(generation_config, "_eos_token_tensor", None)
        length, beams = kwargs.get("input_ids_seq_length") or 0, generation_config.num_beams or 1
        return SteeredProcessors(processors, length, ends, beams)

    def _get_deprecated_gen_repo(
        self, generation_mode: GenerationMode, trust_remote_code: Any, custom_generate: Any = None
    ) -> Any:
        # Where transformers would fetch a search's code from the hub.
        if custom_generate is None and generation_mode not in SEARCHES:
            raise UsageError(
                f"{generation_mode.value.replace('_', ' ')} is not offered by a steered model; accepted: greedy "
                "decoding, sampling, beams, assisted decoding and prompt lookup"
            )
        return self._plain._get_deprecated_gen_repo(generation_mode, trust_remote_code, custom_generate)

    def _validate_generation_mode(
        self, generation_mode: GenerationMode, generation_config: GenerationConfig, generation_mode_kwargs: Any
    ) -> None:
        for name in UNSTEERED_OPTIONS:
            value = getattr(generation_config, name, None)
            if value is not None and value is not False:
                raise UsageError(
                    f"{name}={value!r} is not offered by a steered model: it reads hidden states or mixes in "
                    "probabilities that are not steered; leave it out"
                )
        if generation_mode == GenerationMode.ASSISTED_GENERATION and self._is_stateful:
            raise UsageError(
                "assisted decoding and prompt lookup are not offered for models with a recurrent state "
                f"({', '.join(stateful_types(self.target, self.experts))}): leave them out"
            )
        drafts = generation_mode == GenerationMode.ASSISTED_GENERATION and generation_mode_kwargs.get("assistant_model")
        if drafts and generation_config.do_sample and (self.steering.rule, self.steering.fill) == ("rank", "hard"):
            # transformers accepts a draft of probability 0 where it draws 0 exactly, once in 2²⁴ times.
            raise UsageError(
                "sampling with an assistant_model may keep a token that the rank rule suppresses: use speculative=True"
            )
        if generation_mode == GenerationMode.ASSISTED_GENERATION and self._is_stateful:
            raise UsageError(
                "assisted decoding and prompt lookup are not offered for models with a recurrent state "
                f"({', '.join(stateful_types(self.target, self.experts))}): leave them out"
            )
        self._plain._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)

    def heal_tokens(self, input_ids: torch.Tensor, tokenizer: Any = None) -> Any:
        """Replace the last token of a prompt by one that goes on from its text; see `GenerationMixin.heal_tokens`.

        Raises:
            UsageError: there are several prompts, or the prompt has another number of tokens then: the attention mask
                would not fit.
        """
        healed = self._plain.heal_tokens(input_ids, tokenizer) if len(input_ids) == 1 else None
        if healed is None or healed.shape != input_ids.shape:
            raise UsageError(
                "token_healing is offered for one prompt at a time, whose text has as many tokens when it is read again"
            )
        return healed

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        model_kwargs.pop("speculative", None)
        self._plain._validate_model_kwargs(model_kwargs)

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: transformers' continuous batching keeps a cache for one model only."""
        raise UsageError("continuous batching is not offered by a steered model; use generate()")

    init_continuous_batching = generate_batch
    continuous_batching_context_manager = generate_batch

    def _prepare_cache_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        check_prompts(model_kwargs.get("attention_mask"), batch_size)
        # transformers would build a cache for one model only.
        if generation_config.cache_implementation not in (None, "dynamic", "static"):
            raise UsageError(
                f"cache_implementation={generation_config.cache_implementation!r} is not offered by a steered "
                "model; accepted: 'dynamic', 'static'"
            )
        if model_kwargs.get("past_key_values") is not None:
            cache = self._own_cache(model_kwargs["past_key_values"])
            if generation_mode == GenerationMode.ASSISTED_GENERATION and cache is not None and cache.check_length():
                # transformers gives the cached tokens to the model again.
                raise UsageError(
                    "assisted decoding and prompt lookup cannot go on from a kept cache: leave past_key_values out, "
                    "or use speculative=True"
                )
            if cache is not None and self.takedowns is not None:
                self.takedowns.begin(cache.takedowns)
            room = getattr(getattr(cache, "target", None), "max_length", max_cache_length)
            if max_cache_length > room:
                raise UsageError(
                    f"past_key_values is a static cache of {room} tokens, {max_cache_length} may be needed; ask for "
                    "fewer new ones, or make it longer (max_cache_len)"
                )
            return
        if generation_config.use_cache is False:
            if self.takedowns is not None:
                raise UsageError(
                    "this model follows a registry of takedown requests, whose state an answer keeps in its cache: "
                    "leave use_cache on"
                )
            return
        if generation_config.cache_implementation == "static":
            length = max(max_cache_length, getattr(generation_config, "max_cache_len", None) or 0)
            rows = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
            model_kwargs["past_key_values"] = self._new_static_cache(length, rows, generation_config)
            return
        cache = self._joint_cache(new_cache(self.target), self.experts.new_cache())
        if generation_config.is_assistant:
            cache.activate_past_recording()
        model_kwargs["past_key_values"] = cache

    def _new_static_cache(self, max_length: int, rows: int, config: GenerationConfig) -> DivergenceCache:
        made: list[FixedCache] = []

        def make(name: str, model: PreTrainedModel) -> FixedCache:
            made.append(fixed_cache(name, model, max_length, rows, config))
            return made[-1]

        def of_pair(pair: NeuralPair) -> Cache:
            return PairCache(*(make(f"{name} auxiliary", getattr(pair, name)) for name in ("retain", "forget")))

        target = make("target", self.target)
        cache = self._joint_cache(target, _experts_cache(self.experts, of_pair))
        if not config.return_dict_in_generate:
            cache.lent = made
        return cache

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        # Each part is asked by itself, when its cache is made; what joins and checks them is not compiled.
        return False


def _experts_cache(experts: Any, of_pair: Callable[[NeuralPair], Cache]) -> Cache:
    # n-grams and bridged pairs read tokens, and keep them in their own way.
    if isinstance(experts, CombinedExperts):
        return CombinedCache([_experts_cache(part, of_pair) for part in experts.parts])
    return of_pair(experts) if isinstance(experts, NeuralPair) else experts.new_cache()
