"""Lossless speculative decoding of one sequence: q drafts tokens, the steered model verifies them in one pass.

Greedy answers equal those of plain decoding; sampled ones follow the same distribution (Leviathan et al. 2023).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.configuration_utils import GenerationMode

from divdec.decoding.cache import DivergenceCache, holds_tokens
from divdec.decoding.processors import check_processors, keep_suppressed
from divdec.decoding.statistics import DraftController, SpeculationStatistics
from divdec.errors import UsageError
from divdec.experts.combined import CombinedExperts
from divdec.experts.neural import NeuralPair, PairCache
from divdec.experts.protocol import Inputs
from divdec.passes import rotary_types_by_length, stateful_types
from divdec.sampling import first_choice, pick, verify_greedy, verify_sampled

MAX_DRAFT_LENGTH = 8  # drafted tokens, where `gamma` is None
_CHUNK = 64  # positions for which random numbers are drawn at a time
_CONTROLLERS: weakref.WeakKeyDictionary[Any, DraftController] = weakref.WeakKeyDictionary()
"""Controllers by model: later calls start from what was measured."""


@dataclasses.dataclass(frozen=True)
class Speculation:
    """Settings of `model.generate(…, speculative=…)`, which also takes True (the defaults) or γ alone."""

    gamma: int | None = None
    """Number of drafted tokens γ; None drafts as long as another token is likely to gain more than it costs."""
    statistics: SpeculationStatistics | None = None
    """Collects the acceptance rates."""

    def __post_init__(self) -> None:
        if self.gamma is not None and (type(self.gamma) is not int or self.gamma < 1):
            raise UsageError(f"gamma is {self.gamma!r}; accepted: a whole number of drafted tokens, at least 1")

    @classmethod
    def of(cls, value: Any) -> Speculation:
        """Convert the argument `speculative` of `generate`.

        Raises:
            UsageError: it is neither True, a number of tokens nor a Speculation.
        """
        if isinstance(value, Speculation):
            return value
        if value is True:
            return cls()
        if type(value) is int:
            return cls(gamma=value)
        accepted = "True, a number of tokens to draft, a Speculation; another drafting model is an assistant_model"
        raise UsageError(f"speculative is {value!r}; accepted: {accepted}")


class SpeculativeSequence:
    """State of one sequence: its tokens and cache, and the outputs that the caller asked for.

    Logits processors, stopping criteria and streamers of transformers see it as `generate` would show it to them.

    Attributes:
        ids: prompt and answer; the cache holds all but the newest token.
        finished: whether a stopping criterion has ended the answer.
    """

    def __init__(
        self,
        model: Any,
        input_ids: Int[Tensor, "1 tokens"],
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
        streamer: Any = None,
    ) -> None:
        self.model, self.config, self.ids, self.finished = model, config, input_ids, False
        self.cache: Any = model_kwargs["past_key_values"]
        # A plain list: `divdec.sampling` checks that the tokens in use can be chosen.
        self._processors: Any = LogitsProcessorList(processors)
        self._criteria, self._streamer, self._streamed = criteria, streamer, input_ids.shape[1]
        self._prompt_length = input_ids.shape[1]
        self._mask: Int[Tensor, "1 tokens"] | None = model_kwargs.get("attention_mask")
        self._padding = 0 if self._mask is None else int((self._mask == 0).sum())
        self._check_positions(model_kwargs.get("position_ids"))
        returns_dict = config.return_dict_in_generate
        self._scores: list[Tensor] | None = [] if returns_dict and config.output_scores else None
        self._logits: list[Tensor] | None = [] if returns_dict and config.output_logits else None

    @property
    def generated(self) -> int:
        """Number of generated tokens."""
        return self.ids.shape[1] - self._prompt_length

    def _check_positions(self, position_ids: Tensor | None) -> None:
        if position_ids is None:
            return
        mask = torch.ones_like(self.ids) if self._mask is None else self._mask
        columns = position_ids.shape[-1]
        expected, is_token = (mask.long().cumsum(-1) - 1)[:, -columns:], mask[:, -columns:] != 0
        if not torch.equal(position_ids.expand_as(expected)[is_token], expected[is_token]):
            raise UsageError("speculation derives positions from the attention mask: leave position_ids out")

    def inputs(self, ids: Int[Tensor, "1 all_tokens"], read: int) -> Inputs:
        """Return the input of a pass over the tokens of `ids` after the first `read`, with mask and positions."""
        length = ids.shape[1]
        mask = None if self._mask is None else nn.functional.pad(self._mask, (0, length - self._mask.shape[1]), value=1)
        return Inputs(ids[:, read:], mask, torch.arange(read, length, device=ids.device)[None] - self._padding)

    def forward(
        self, tokens: Tensor, mask: Tensor | None, positions: Tensor | None, keep: int = 0
    ) -> Float[Tensor, "1 kept vocab"]:
        """Run the model's own forward, whose logits are steered and checked."""
        output = self.model(
            input_ids=tokens.to(self.model.device),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache,
            logits_to_keep=keep,
        )
        return output.logits.to(device=self.ids.device, dtype=torch.float32)

    def read_prompt(self) -> Float[Tensor, "1 1 vocab"]:
        """Prefill the cache, and return the logits after the prompt."""
        past, length = self.cache.check_length(), self.ids.shape[1]
        if past >= length:
            raise UsageError(f"past_key_values holds {past} tokens already; give more of them in input_ids")
        size = self.config.prefill_chunk_size or length
        logits = torch.empty(0)
        for start in range(past, length, size):
            tokens, mask, _ = self.inputs(self.ids[:, : start + size], start)
            logits = self.forward(tokens, mask, None, keep=1)
        return logits

    def process(
        self, ids: Int[Tensor, "1 all_tokens"], logits: Float[Tensor, "1 1 vocab"]
    ) -> Float[Tensor, "1 1 vocab"]:
        """Process the logits of the token after `ids`."""
        if not self._processors:
            return logits
        scores = logits[:, 0].clone()
        suppressed = scores == -torch.inf
        return keep_suppressed(self._processors(ids, scores), suppressed)[:, None]

    def process_drafts(
        self, ids: Int[Tensor, "1 all_tokens"], logits: Float[Tensor, "1 block vocab"]
    ) -> Float[Tensor, "1 processed vocab"]:
        """Process the steered logits of the drafts at the end of `ids`, up to the first excluded draft.

        It is rejected, so that the scores after it are not used, and a processor may not be able to handle its text.
        """
        if not self._processors:
            return logits
        scores: list[Tensor] = []
        for column in range(ids.shape[1] - logits.shape[1], ids.shape[1]):
            step = len(scores)
            scores.append(self.process(ids[:, :column], logits[:, step : step + 1]))
            if scores[-1][0, 0, ids[0, column]] == -torch.inf:
                break
        return torch.cat(scores, dim=1)

    def accept(
        self,
        tokens: Int[Tensor, "1 kept"],
        logits: Float[Tensor, "1 block vocab"],
        scores: Float[Tensor, "1 processed vocab"],
    ) -> int:
        """Append verified tokens, up to where a stopping criterion ends the answer.

        Args:
            tokens: the tokens.
            logits: their steered logits, and `scores` after the processors, to be returned to the caller.
            scores: see `logits`.

        Returns:
            Number of tokens that were appended.
        """
        for step in range(tokens.shape[1]):
            self.ids = torch.cat([self.ids, tokens[:, step : step + 1].to(self.ids)], dim=1)
            for store, values in ((self._logits, logits), (self._scores, scores)):
                if store is not None:
                    store.append(values[:, step])
            stored: Any = None if self._scores is None else tuple(self._scores)
            if bool(self._criteria(self.ids, stored)):  # pyright: ignore[reportArgumentType]
                self.finished = True
                return step + 1
        return tokens.shape[1]

    def stream(self) -> None:
        """Send new tokens to the streamer."""
        while self._streamer is not None and self._streamed < self.ids.shape[1]:
            self._streamer.put(self.ids[:, self._streamed].cpu())
            self._streamed += 1

    @contextlib.contextmanager
    def restore_cache_on_error(self) -> Iterator[None]:
        """On exit the cache holds no unverified drafts; on an error it is reset."""
        completed = False
        try:
            yield
            completed = True
        finally:
            if not completed:
                self.cache.reset()
            self.cache.deactivate_past_recording()

    def result(self) -> GenerateDecoderOnlyOutput | Int[Tensor, "1 all_tokens"]:
        """Return what `generate` returns."""
        if not self.config.return_dict_in_generate:
            return self.ids
        scores, logits = (None if store is None else tuple(store) for store in (self._scores, self._logits))
        return GenerateDecoderOnlyOutput(
            sequences=self.ids,  # pyright: ignore[reportArgumentType]
            scores=scores,  # pyright: ignore[reportArgumentType]
            logits=logits,  # pyright: ignore[reportArgumentType]
            past_key_values=self.cache,
        )


def decode(sequence: SpeculativeSequence, speculation: Speculation, seed: int | None = None) -> Iterator[list[int]]:
    """Decode until the sequence has ended; each step reads the prompt or verifies one block of drafts.

    The number of drafted tokens decides how fast an answer comes, never which tokens it has.

    Args:
        sequence: the sequence, which grows with each step. The cache may hold the beginning of the prompt.
        speculation: number of drafted tokens γ.
        seed: of the random numbers; None draws one from torch's global generator.

    Yields:
        The new tokens.
    """
    model, cache, samples = sequence.model, sequence.cache, sequence.config.do_sample
    pair, pair_cache = drafting_pair(model, cache)
    controller, statistics = _CONTROLLERS.setdefault(model, DraftController()), speculation.statistics
    random = PositionalRandom(sequence.ids.device, seed)
    ends = getattr(sequence.config, "_eos_token_tensor", None)
    ends = [] if ends is None else ends.tolist()

    # Prefill: the prompt's logits give the first token.
    if cache.check_length() != sequence.ids.shape[1] - 1:
        logits = sequence.read_prompt()
        scores = sequence.process(sequence.ids, logits)
        token = pick(scores.softmax(dim=-1), random(0, 1)[..., 2]) if samples else first_choice(scores)
        sequence.accept(token, logits, scores)
        sequence.stream()
        yield token[0].tolist()

    while not sequence.finished:
        started = time.perf_counter()

        # Draft some tokens, and one for the position of the token that the steered model adds itself.
        controller.start()
        cache.activate_past_recording()  # sliding windows cannot be rolled back otherwise
        ids, length, draft_scores = sequence.ids, sequence.ids.shape[1], []
        size = min((speculation.gamma or MAX_DRAFT_LENGTH) + 1, sequence.config.max_length - length)
        uniform = random(sequence.generated, size) if samples else None
        for step in range(size):
            inputs = sequence.inputs(ids, length - 1 + step)
            logits = pair.draft_logits(inputs, pair_cache, model.steer).to(ids.device, torch.float32)
            scores = sequence.process(ids, logits[..., : model.vocab_size])
            probabilities = scores.softmax(dim=-1)
            token = scores.argmax(dim=-1) if uniform is None else pick(probabilities, uniform[:, step : step + 1, 0])
            ids = torch.cat([ids, token], dim=1)
            draft_scores.append(scores)
            more = speculation.gamma is not None or controller.wants_more(float(probabilities.amax()))
            if not more or (ends and int(token) in ends):  # processors may not be able to handle text behind an end
                break

        # Verify: one pass over the newest token and all drafts but the last.
        read = ids.shape[1] - length
        logits = sequence.forward(*sequence.inputs(ids[:, :-1], length - 1))
        scores = sequence.process_drafts(ids, logits)
        block = scores.shape[1]
        drafts = ids[:, length : length + block]
        if uniform is None:
            verdict = verify_greedy(scores, drafts)
        else:
            verdict = verify_sampled(scores, drafts, torch.cat(draft_scores[:block], dim=1), uniform[:, :block, 1:])

        # Accept: the cache then drops what was read and rejected.
        accepted = verdict.accepted[0].tolist()  # waits for the GPU
        grown = sequence.accept(verdict.tokens[:, : int(verdict.kept)], logits, scores)
        cache.crop(grown - read)  # also by 0, so that a sliding window drops what it recorded
        sequence.stream()

        controller.record(accepted[:grown], read - 1, grown, time.perf_counter() - started)
        if statistics is not None:
            # Count drafts up to the first rejected one, and none after the answer's end.
            statistics.count(read - 1, [*accepted[:grown], False].index(False), grown)
        yield sequence.ids[0, length:].tolist()


class PositionalRandom:
    """Uniform random numbers by position, independent of how positions are grouped into blocks."""

    def __init__(self, device: torch.device, seed: int | None = None) -> None:
        """Create a source of random numbers.

        Args:
            device: device of the numbers.
            seed: None draws one from the global generator, at the first call.
        """
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)
        self._drawn = torch.empty(1, 0, 3, dtype=torch.float64, device=device)

    def __call__(self, position: int, size: int) -> Float[Tensor, "1 size 3"]:
        """Return numbers that draft, accept and replace, for `size` positions."""
        if self._generator is None:
            self._generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        while self._drawn.shape[1] < position + size:
            more = torch.rand(1, _CHUNK, 3, generator=self._generator, dtype=torch.float64)
            self._drawn = torch.cat([self._drawn, more.to(self._drawn.device)], dim=1)
        return self._drawn[:, position : position + size]


def speculate(
    model: Any,
    input_ids: Int[Tensor, "1 tokens"],
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    speculation: Speculation,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | Int[Tensor, "1 all_tokens"]:
    """Decode with the arguments and the result of `GenerationMixin._sample`.

    Raises:
        UsageError: an argument is not supported with speculation.
    """
    config = generation_config
    if model_kwargs.get("inputs_embeds") is not None or not input_ids.shape[1]:
        raise UsageError("a steered model needs input_ids: target, q and p have different embeddings")
    if config.output_attentions or config.output_hidden_states:
        raise UsageError("attentions and hidden states are not offered by a steered model: they would show the target")
    if synced_gpus:
        raise UsageError("speculation is not offered where processes generate in step (FSDP, DeepSpeed ZeRO 3)")
    if model_kwargs.get("past_key_values") is None:
        raise UsageError("speculation goes back in the cache: leave use_cache on")
    check_processors(logits_processor, "speculation")
    sequence = SpeculativeSequence(
        model, input_ids, logits_processor, stopping_criteria, config, model_kwargs, streamer
    )
    with sequence.restore_cache_on_error():
        for _ in decode(sequence, speculation):
            pass
    if streamer is not None:
        streamer.end()
    return sequence.result()


def check_search(generation_config: GenerationConfig, options: dict[str, Any]) -> None:
    """Refuse searches other than greedy decoding and sampling.

    Args:
        generation_config: the model's.
        options: arguments of `generate`.
    """
    config = copy.deepcopy(options.get("generation_config") or generation_config)
    config.update(**{name: value for name, value in options.items() if name != "generation_config"})
    mode = config.get_generation_mode(options.get("assistant_model"))
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise UsageError(
            f"speculation is not offered with {mode.value.replace('_', ' ')}; accepted: greedy decoding and sampling "
            "(num_beams=1, no penalty_alpha; leave out speculative= for an assistant_model or prompt lookup)"
        )


def drafting_pair(model: Any, cache: DivergenceCache) -> tuple[NeuralPair, PairCache]:
    """Return the pair whose q drafts, and its cache within that of the model.

    Raises:
        UsageError: the model has a recurrent state (linear attention), whose cache cannot be rolled back exactly, or
            a rotary embedding that depends on the other tokens of a pass; or no auxiliary has the target's tokens.
    """
    types = stateful_types(model.target, model.experts)
    if types or not all(map(holds_tokens, cache.layers)):
        raise UsageError(
            f"speculation is not offered for models with a recurrent state ({', '.join(types) or 'convolutions'}): "
            "leave it out"
        )
    if types := rotary_types_by_length(model):
        raise UsageError(
            f"speculation is not offered for models whose rotary embedding ({', '.join(types)}) depends on the length "
            "of the text: leave it out"
        )
    experts, experts_cache = model.experts, cache.experts
    combined = isinstance(experts, CombinedExperts)
    parts: Any = zip(experts.parts, experts_cache.caches, strict=True) if combined else [(experts, experts_cache)]  # pyright: ignore[reportAttributeAccessIssue]
    for part, part_cache in parts:
        if isinstance(part, NeuralPair):
            return part, part_cache
    raise UsageError(
        "speculation needs a retain auxiliary with the target's own tokens, which these experts lack: leave it out"
    )
