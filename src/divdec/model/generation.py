"""How `generate` of a steered model differs from any other model's: one cache for all parts, and speculation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import Cache, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from divdec.decoding.speculative import Speculation, check_search, speculate
from divdec.errors import UsageError
from divdec.experts.combined import CombinedCache, CombinedExperts
from divdec.experts.compiled import fixed_cache, keep
from divdec.experts.fixed_cache import FixedCache
from divdec.experts.forward import new_cache, stateful_types
from divdec.experts.neural import NeuralPair, PairCache
from divdec.model.cache import DivergenceCache
from divdec.model.checks import check_inputs


class SteeredGeneration(GenerationMixin):
    """`GenerationMixin` for a model that has experts, makes caches of its own and can speculate."""

    target: Any
    experts: Any
    generation_config: Any
    _cache_owner: str

    def new_cache(self) -> DivergenceCache:
        """An empty cache for target and experts."""
        raise NotImplementedError

    def _own_cache(self, cache: Cache | None) -> DivergenceCache | None:
        raise NotImplementedError

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
            UsageError: speculation was asked for together with beams or another search of its own.
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

    def _validate_generation_mode(self, generation_mode: GenerationMode, *args: Any, **kwargs: Any) -> None:
        if generation_mode == GenerationMode.ASSISTED_GENERATION and self._is_stateful:
            raise UsageError(
                "assisted decoding and prompt lookup are not offered for models with a recurrent state "
                f"({', '.join(stateful_types(self.target, self.experts))}): leave them out"
            )
        self._plain._validate_generation_mode(generation_mode, *args, **kwargs)

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
        # transformers would build a cache for one model only.
        if model_kwargs.get("past_key_values") is not None:
            cache = self._own_cache(model_kwargs["past_key_values"])
            if cache is not None and hasattr(self.experts, "begin"):
                self.experts.begin(cache.experts)  # pyright: ignore[reportAttributeAccessIssue]
            room = getattr(getattr(cache, "target", None), "max_length", max_cache_length)
            if max_cache_length > room:
                raise UsageError(
                    f"past_key_values is a static cache of {room} tokens, {max_cache_length} may be needed; ask for "
                    "fewer new ones, or make it longer (max_cache_len)"
                )
            return
        if generation_config.use_cache is False:
            if getattr(self.experts, "changes", False):
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
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise UsageError(
                f"cache_implementation={generation_config.cache_implementation!r} is not offered by a steered "
                "model; accepted: 'dynamic', 'static'"
            )
        # Nobody who gets the cache back, or goes back in it, should have to know that two models were run as one.
        kept = generation_config.return_dict_in_generate or generation_config.is_assistant
        stack = not (kept or model_kwargs.get("speculative"))
        of_pair = NeuralPair.new_decoding_cache if stack else NeuralPair.new_cache
        cache = DivergenceCache(new_cache(self.target), _experts_cache(self.experts, of_pair), self._cache_owner)
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
        cache = DivergenceCache(target, _experts_cache(self.experts, of_pair), self._cache_owner)
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
