"""Lossless self-speculation: q drafts, the target and p judge several tokens in one pass.

What comes out is distributed as the steered model is: greedy answers are those of plain decoding token for token,
sampled ones follow the same distribution (paper, eq. 1 and 2, with the acceptance rule of Leviathan et al. 2023).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from typing import Any

from jaxtyping import Int
from torch import Tensor
from transformers import Cache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.configuration_utils import GenerationMode

from divdec.decoding.drafters import DRAFTERS
from divdec.decoding.loop import Decoding
from divdec.decoding.processors import REMEMBERING
from divdec.decoding.statistics import SpeculationStatistics
from divdec.errors import UsageError
from divdec.experts.forward import stateful_types
from divdec.experts.shifting import holds_tokens


@dataclasses.dataclass(frozen=True)
class Speculation:
    """How to speculate; `model.generate(…, speculative=Speculation(…))`, or True for this as it is, or γ alone."""

    gamma: int | None = None
    """How many tokens are drafted at a time; None follows the measured acceptance and time."""
    drafter: str = "auto"
    """'retain' (q), 'steered' (q, p and the rule at small scale), 'ngram', 'lookup' (what the text repeats), 'auto'."""
    statistics: SpeculationStatistics | None = None
    """Counts what is done, where it is given; every pass is then timed."""

    def __post_init__(self) -> None:
        if self.gamma is not None and (type(self.gamma) is not int or self.gamma < 1):
            raise UsageError(f"gamma is {self.gamma!r}; accepted: a whole number of drafted tokens, at least 1")
        if self.drafter not in DRAFTERS:
            raise UsageError(f"drafter is {self.drafter!r}; accepted: {', '.join(DRAFTERS)}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """For `custom_generate`, which takes what can be called; a steered model's `generate` knows it by its type."""
        raise UsageError("a Speculation is for a steered model's generate(); this model has no experts to draft with")

    @classmethod
    def of(cls, given: Any) -> Speculation:
        """Read what `generate` was given.

        Raises:
            UsageError: it is neither True, a number of tokens nor a Speculation.
        """
        if isinstance(given, Speculation):
            return given
        if given is True:
            return cls()
        if type(given) is int:
            return cls(gamma=given)
        raise UsageError(f"speculative is {given!r}; accepted: True, a number of tokens to draft, a Speculation")


def speculate(
    model: Any,
    input_ids: Int[Tensor, "batch tokens"],
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    speculation: Speculation,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | Int[Tensor, "batch all_tokens"]:
    """Decode as `GenerationMixin._sample` does, with the same arguments and the same result.

    Raises:
        UsageError: what was asked for cannot be speculated on.
    """
    _check(model, input_ids, generation_config, model_kwargs, logits_processor, synced_gpus)
    statistics = speculation.statistics
    decoding = Decoding(
        model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs,
        gamma=speculation.gamma, drafter=speculation.drafter, statistics=statistics, streamer=streamer,
    )  # fmt: skip
    timed = statistics.timed(model.target, model.experts) if statistics else contextlib.nullcontext()
    with decoding.leaving_the_cache_whole():
        decoding.prefill()
        with timed:
            while decoding.active:
                decoding.step()
    if streamer is not None:
        streamer.end()
    return decoding.result()


def check_search(generation_config: GenerationConfig, options: dict[str, Any]) -> None:
    """Refuse a search that is not made token by token, before anything is prepared for it.

    Args:
        generation_config: the model's own.
        options: what `generate` was given.

    Raises:
        UsageError: beams, contrastive or assisted search.
    """
    config = copy.deepcopy(options.get("generation_config") or generation_config)
    config.update(**{name: value for name, value in options.items() if name != "generation_config"})
    mode = config.get_generation_mode(options.get("assistant_model"))
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise UsageError(
            f"speculation is not offered with {mode.value.replace('_', ' ')}; accepted: greedy decoding and sampling "
            "(num_beams=1, no penalty_alpha, no assistant; for prompt lookup give drafter='lookup')"
        )


def check_processors(processors: LogitsProcessorList, search: str) -> None:
    """Refuse processors that follow one answer token by token, where a search tries several or goes back.

    Raises:
        UsageError: names the processor.
    """
    for processor in processors:
        if isinstance(processor, REMEMBERING):
            raise UsageError(f"{search} is not offered with {type(processor).__name__}, which remembers every token")


def check_cache(cache: Cache, model: Any) -> None:
    """Refuse a model whose cache cannot be gone back in exactly.

    Raises:
        UsageError: a part has a recurrent state (linear attention), which sums up its tokens.
    """
    found = stateful_types(model.target, model.experts)
    if found or not all(map(holds_tokens, cache.layers)):
        raise UsageError(
            f"speculation is not offered for models with a recurrent state ({', '.join(found) or 'convolutions'}): "
            "leave it out"
        )


def _check(
    model: Any,
    input_ids: Int[Tensor, "batch tokens"],
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    processors: LogitsProcessorList,
    synced_gpus: bool,
) -> None:
    if model_kwargs.get("inputs_embeds") is not None or not input_ids.shape[1]:
        raise UsageError("a steered model needs input_ids: its three parts have embeddings of their own")
    if config.output_attentions or config.output_hidden_states:
        raise UsageError("attentions and hidden states are not offered by a steered model: they would show the target")
    if synced_gpus:
        raise UsageError("speculation is not offered where processes generate in step (FSDP, DeepSpeed ZeRO 3)")
    if model_kwargs.get("past_key_values") is None:
        raise UsageError("speculation goes back in the cache: leave use_cache on")
    check_cache(model_kwargs["past_key_values"], model)
    check_processors(processors, "speculation")
