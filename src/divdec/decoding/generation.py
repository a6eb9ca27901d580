"""`generate` of a steered model: one cache for all parts, checked arguments, and speculative decoding."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache, GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from divdec.decoding.cache import DivergenceCache
from divdec.decoding.processors import SteeredProcessors, check_processors
from divdec.errors import UsageError
from divdec.fail_closed import check_inputs, check_prompts, check_vocabulary
from divdec.passes import device_of, new_cache, rotary_types_by_length, stateful_types

if TYPE_CHECKING:
    from transformers.generation import BaseStreamer

    from divdec.decoding.speculative import Speculation

SEARCHES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
    GenerationMode.ASSISTED_GENERATION,
)
# Options that draft with the target's own layers or hidden states, mix an assistant's probabilities into the answer, or
# change a prompt so that its mask does not fit.
UNSTEERED_OPTIONS = (
    "assistant_early_exit",
    "assistant_ensemble_weight",
    "use_mtp",
    "speculation_type",
    "token_healing",
)


@contextlib.contextmanager
def plain_decoding(model: Any) -> Iterator[None]:
    """Use only the special tokens of a model's generation config within the block.

    Penalties and sampling defaults of a checkpoint, such as the repetition penalty of Qwen's, then have no effect:
    commands, servers and measurements decode alike, with the options of the caller.
    """
    generation_config = model.generation_config
    tokens = {name: getattr(generation_config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**tokens)
    try:
        yield
    finally:
        model.generation_config = generation_config


def generate_stream(model: Any, prompt: Sequence[int], streamer: BaseStreamer | None, **options: Any) -> Any:
    """Continue one prompt of token ids, and send the tokens to a streamer; returns the output of `generate`.

    Of the generation config only special tokens are used; `options` are those of `generate`.
    """
    input_ids = torch.tensor([prompt], device=device_of(model))
    with torch.inference_mode(), plain_decoding(model):
        return model.generate(input_ids, attention_mask=torch.ones_like(input_ids), streamer=streamer, **options)


class SteeredGeneration(GenerationMixin):
    """`GenerationMixin` of a steered model."""

    target: Any
    experts: Any
    takedowns: Any
    config: Any
    generation_config: Any
    name_or_path: str
    steering: Any
    vocab_size: int
    embeddings: int
    _cache_owner: str

    def _own_cache(self, cache: Cache | None) -> DivergenceCache | None:
        raise NotImplementedError

    def new_cache(self) -> DivergenceCache:
        """Create an empty cache for target, experts and takedowns."""
        takedowns = None if self.takedowns is None else self.takedowns.new_cache()
        return DivergenceCache(new_cache(self.target), self.experts.new_cache(), self._cache_owner, takedowns)

    def follow_registry(self, cache: DivergenceCache) -> None:
        """Let the next pass apply the takedown requests that are in force now."""
        if self.takedowns is not None:
            assert cache.takedowns is not None
            self.takedowns.begin(cache.takedowns)

    @property
    def _plain(self) -> Any:
        return super()

    @torch.no_grad()
    def generate(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *args: Any, speculative: Speculation | bool | int | None = None, **kwargs: Any
    ) -> Any:
        """Generate as `GenerationMixin.generate` does, with all of its arguments, optionally with speculation.

        Args:
            *args: see `GenerationMixin.generate`.
            speculative: True, the number of tokens to draft, or a `Speculation`: q drafts for one sequence. A batch
                of several decodes without drafts. Greedy answers do not change, and sampled ones follow the same
                distribution.
            **kwargs: see `GenerationMixin.generate`.

        Raises:
            UsageError: a prompt ends in padding or holds a token without an embedding, or an option or search is not
                supported.
            FailedClosed: the model cannot be steered, or the rule and the logits processors leave no token.
        """
        from divdec.decoding.speculative import Speculation, drafting_pair

        inputs = [args[0] if args else None, kwargs.get("inputs"), kwargs.get("input_ids")]
        if (ids := next((value for value in inputs if value is not None), None)) is not None:
            check_inputs(ids, kwargs.get("attention_mask"), None if kwargs.get("past_key_values") is not None else 0)
            check_vocabulary(ids, self.embeddings)
        if kwargs.get("custom_generate") is not None and speculative:
            raise UsageError("speculative and custom_generate are two ways to decode: give one of them")
        if speculative is None or speculative is False:
            return self._plain.generate(*args, **kwargs)
        speculation = Speculation.of(speculative)
        drafting_pair(self, self.new_cache())
        return self._plain.generate(*args, speculative=speculation, **kwargs)

    def _sample(self, *args: Any, speculative: Speculation | None = None, **kwargs: Any) -> Any:
        # transformers calls it for greedy decoding and sampling, after all preparations.
        from divdec.decoding.speculative import speculate

        # In a batch drafts take as long as they save.
        if speculative is None or len(args[0] if args else kwargs["input_ids"]) > 1:
            return self._plain._sample(*args, **kwargs)
        return speculate(self, *args, speculation=speculative, **kwargs)

    @property
    def _is_stateful(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return bool(stateful_types(self.target, self.experts))

    def _beam_search(self, input_ids: Any, logits_processor: Any, *args: Any, **kwargs: Any) -> Any:
        check_processors(logits_processor, "beam search")
        return self._plain._beam_search(input_ids, logits_processor, *args, **kwargs)

    @functools.wraps(GenerationMixin._assisted_decoding)  # pyright: ignore[reportAttributeAccessIssue]
    def _assisted_decoding(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Any, logits_processor: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # transformers reads the signature of the wrapped method.
        check_processors(logits_processor, "assisted decoding")
        return self._plain._assisted_decoding(input_ids, logits_processor, *args, **kwargs)

    def _get_logits_processor(
        self, generation_config: GenerationConfig, *args: Any, **kwargs: Any
    ) -> SteeredProcessors:
        mask = kwargs.get("negative_prompt_attention_mask")
        check_prompts(mask, 0 if mask is None else len(mask), "negative prompt")
        processors = self._plain._get_logits_processor(generation_config, *args, **kwargs)
        if (self.steering.rule, self.steering.fill) == ("rank", "hard") and any(
            isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor) for processor in processors
        ):
            raise UsageError("guidance_scale is not offered with the rank rule: use a linear rule, or leave it out")
        ends = getattr(generation_config, "_eos_token_tensor", None)
        length, beams = kwargs.get("input_ids_seq_length") or 0, generation_config.num_beams or 1
        return SteeredProcessors(processors, length, ends, beams)

    def _get_deprecated_gen_repo(
        self, generation_mode: GenerationMode, trust_remote_code: Any, custom_generate: Any = None
    ) -> Any:
        # transformers would download the code of other searches from the hub here.
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
                    f"{name}={value!r} is not offered by a steered model: it reads hidden states, mixes in "
                    "probabilities that are not steered, or changes the prompt; leave it out"
                )
        assisted = generation_mode == GenerationMode.ASSISTED_GENERATION
        types = [*stateful_types(self.target, self.experts), *rotary_types_by_length(self)]
        if assisted and types:
            raise UsageError(
                "assisted decoding and prompt lookup are not offered for models with a recurrent state, or a rotary "
                f"embedding that depends on the length of the text ({', '.join(types)}): leave them out"
            )
        samples_drafts = assisted and generation_mode_kwargs.get("assistant_model") and generation_config.do_sample
        if samples_drafts and (self.steering.rule, self.steering.fill) == ("rank", "hard"):
            # transformers accepts a draft of probability 0 if it draws exactly 0, once in 2²⁴ times.
            raise UsageError(
                "sampling with an assistant_model may keep a token that the rank rule suppresses: use speculative=True"
            )
        self._plain._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        model_kwargs.pop("speculative", None)
        self._plain._validate_model_kwargs(model_kwargs)

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error: transformers' continuous batching has a cache for one model only."""
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
        """Check `past_key_values`, or create a cache for all parts; transformers would create one for one model."""
        check_prompts(model_kwargs.get("attention_mask"), batch_size)
        if model_kwargs.get("speculative") and generation_mode not in SEARCHES[:2]:
            raise UsageError(
                f"speculation is not offered with {generation_mode.value.replace('_', ' ')}; accepted: greedy decoding "
                "and sampling (num_beams=1; leave out speculative= for an assistant_model or prompt lookup)"
            )
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise UsageError(
                f"cache_implementation={generation_config.cache_implementation!r} is not offered by a steered "
                "model; accepted: 'dynamic'"
            )
        given = model_kwargs.get("past_key_values")
        if generation_config.use_cache is False and (given is not None or self.takedowns is not None):
            # transformers would read the text after a given cache at wrong positions.
            raise UsageError("leave use_cache on: a cache is given, or holds the state of the takedown requests")
        if given is not None:
            cache = self._own_cache(given)
            assert cache is not None
            if generation_mode == GenerationMode.ASSISTED_GENERATION and cache.check_length():
                # transformers would pass the cached tokens to the model again.
                drafts = "assisted decoding and prompt lookup"
                raise UsageError(f"{drafts} cannot go on from a kept cache: leave it out, or use speculative=True")
            self.follow_registry(cache)
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = cache = self.new_cache()
            if generation_config.is_assistant:
                cache.activate_past_recording()
