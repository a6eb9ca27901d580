"""Lossless speculative decoding: a drafter proposes tokens, the steered model verifies several in one pass.

Greedy answers equal those of plain decoding; sampled ones follow the same distribution (Leviathan et al. 2023).
"""

from __future__ import annotations

import copy
import dataclasses
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.configuration_utils import GenerationMode

from divdec.decoding.batch import SpeculativeBatch
from divdec.decoding.cache import holds_tokens
from divdec.decoding.drafters import DRAFTERS, make_drafter
from divdec.decoding.processors import check_processors
from divdec.decoding.statistics import DraftController, SpeculationStatistics
from divdec.errors import UsageError
from divdec.passes import stateful_types
from divdec.sampling import first_choice, pick, verify_greedy, verify_sampled

MAX_DRAFT_LENGTH = 8  # drafted tokens, where `gamma` is None
_CHUNK = 64  # positions for which random numbers are drawn at a time
_CONTROLLERS: weakref.WeakKeyDictionary[Any, dict[tuple[str, int], DraftController]] = weakref.WeakKeyDictionary()
"""Controllers by model, drafter and number of unfinished sequences: later calls start from what was measured."""


@dataclasses.dataclass(frozen=True)
class Speculation:
    """Settings of `model.generate(…, speculative=…)`, which also takes True (the defaults) or γ alone."""

    gamma: int | None = None
    """Number of drafted tokens γ; None drafts as long as another token is likely to gain more than it costs."""
    drafter: str = "auto"
    """'retain' (q), 'lookup' (repetitions in the text), or 'auto': q if it has the target's tokens, else 'lookup'."""
    statistics: SpeculationStatistics | None = None
    """Collects the acceptance rates."""

    def __post_init__(self) -> None:
        if self.gamma is not None and (type(self.gamma) is not int or self.gamma < 1):
            raise UsageError(f"gamma is {self.gamma!r}; accepted: a whole number of drafted tokens, at least 1")
        if self.drafter not in DRAFTERS:
            raise UsageError(f"drafter is {self.drafter!r}; accepted: {', '.join(DRAFTERS)}")

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


def decode(batch: SpeculativeBatch, speculation: Speculation, seed: int | None = None) -> Iterator[None]:
    """Decode until every sequence has ended; each step reads the prompts or verifies one block of drafts.

    The number of drafted tokens and the drafter decide how fast an answer comes, never which tokens it has.

    Args:
        batch: the sequences, which grow with each step.
        speculation: drafter and number of drafted tokens γ.
        seed: of the random numbers; None draws one from torch's global generator.
    """
    model, samples, statistics = batch.model, batch.config.do_sample, speculation.statistics
    drafter = make_drafter(speculation.drafter, model.experts)
    controllers = _CONTROLLERS.setdefault(model, {})
    random = PositionalRandom(len(batch.sequences), batch.sequences.ids.device, seed)
    if statistics is not None:
        statistics.drafter = drafter.name

    # Prefill: the prompts' logits give every sequence its first token.
    rows, logits = batch.active, batch.read_prompts()
    scores = batch.processors(rows, logits)
    if samples:
        tokens = pick(scores.softmax(dim=-1), random(rows, batch.generated(), 1)[..., 2])
    else:
        tokens = first_choice(scores)
    batch.accept(tokens, [1] * len(rows), logits, scores)
    batch.drop_finished_rows(rows)
    batch.stream()
    yield

    def choose(step: int, logits: Float[Tensor, "rows 1 vocab"]) -> tuple[Tensor, Tensor]:
        """Choose a draft; return it with the scores that it was chosen from."""
        scores = batch.processors(batch.active, logits.to(batch.sequences.ids.device), offset=step)
        if samples:
            positions = [number + step for number in batch.generated()]
            token = pick(scores.softmax(dim=-1), random(batch.active, positions, 1)[..., 0])
        else:
            token = scores.argmax(dim=-1)
        batch.sequences.write(batch.active, token, offset=step)
        return token, scores

    while batch.active:
        started = time.perf_counter()
        rows = batch.active

        # Draft some tokens, and one column for the token that the steered model adds itself.
        # The time of a pass depends on the sequences in it.
        controller = controllers.setdefault((drafter.name, len(rows)), DraftController())
        controller.start()
        block = batch.next_block((speculation.gamma or MAX_DRAFT_LENGTH) + 1)
        batch.cache.activate_past_recording()  # sliding windows cannot be rolled back otherwise
        wants_more = controller.wants_more if speculation.gamma is None else None
        drafts, draft_scores = drafter.draft(batch, block, choose, wants_more)
        block.cut(drafts.shape[1])

        # Verify: one pass over the newest token and all drafts but the last. A missing draft is read as token 0.
        read = drafts.clamp(min=0)
        batch.sequences.write(rows, read)
        logits = batch.forward(torch.cat([block.last, read[:, :-1]], dim=1), block.mask, block.positions)
        scores = batch.processors(rows, logits, drafts=drafts)
        if samples:
            uniform = random(rows, batch.generated(), block.size)[..., 1:]
            verdict = verify_sampled(scores, drafts, draft_scores, uniform)
        else:
            verdict = verify_greedy(scores, drafts)

        # Accept: the cache then drops what was read and rejected.
        accepted, counts = verdict.accepted.tolist(), verdict.kept.tolist()  # waits for the GPU
        grown = batch.accept(verdict.tokens, counts, logits, scores)
        batch.roll_back(rows, block, grown)
        batch.stream()  # last, so that a streamer that stops decoding leaves the cache consistent

        # Count drafts up to the first rejected one, and none after an answer's end.
        right = [[*row[:number], False].index(False) for row, number in zip(accepted, grown, strict=True)]
        controller.record(accepted, grown, time.perf_counter() - started)
        if statistics is not None:
            statistics.count(block.size - 1, right, grown)
        yield


class PositionalRandom:
    """Uniform random numbers by row and position, independent of how positions are grouped into blocks."""

    def __init__(self, rows: int, device: torch.device, seed: int | None = None) -> None:
        """Create a source of random numbers.

        Args:
            rows: number of sequences.
            device: device of the numbers.
            seed: None draws one from the global generator, at the first call.
        """
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)
        self._drawn = torch.empty(rows, 0, 3, dtype=torch.float64, device=device)

    def __call__(self, rows: Sequence[int], positions: Sequence[int], size: int) -> Float[Tensor, "rows size 3"]:
        """Return numbers that draft, accept and replace, for `size` positions from each row's position."""
        if self._generator is None:
            self._generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        while self._drawn.shape[1] < max(positions) + size:
            more = torch.rand(len(self._drawn), _CHUNK, 3, generator=self._generator, dtype=torch.float64)
            self._drawn = torch.cat([self._drawn, more.to(self._drawn.device)], dim=1)
        columns = torch.tensor(positions)[:, None] + torch.arange(size)[None]
        return self._drawn[torch.tensor(rows)[:, None], columns]


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
    """Decode with the arguments and the result of `GenerationMixin._sample`.

    Raises:
        UsageError: an argument is not supported with speculation.
    """
    config, cache = generation_config, model_kwargs.get("past_key_values")
    if model_kwargs.get("inputs_embeds") is not None or not input_ids.shape[1]:
        raise UsageError("a steered model needs input_ids: target, q and p have different embeddings")
    if config.output_attentions or config.output_hidden_states:
        raise UsageError("attentions and hidden states are not offered by a steered model: they would show the target")
    if synced_gpus:
        raise UsageError("speculation is not offered where processes generate in step (FSDP, DeepSpeed ZeRO 3)")
    if cache is None:
        raise UsageError("speculation goes back in the cache: leave use_cache on")
    check_cache(cache, model)
    check_processors(logits_processor, "speculation")
    batch = SpeculativeBatch(model, input_ids, logits_processor, stopping_criteria, config, model_kwargs, streamer)
    with batch.restore_cache_on_error():
        for _ in decode(batch, speculation):
            pass
    if streamer is not None:
        streamer.end()
    return batch.result()


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
            "(num_beams=1, no penalty_alpha, no assistant; for prompt lookup give drafter='lookup')"
        )


def check_cache(cache: Cache, model: Any) -> None:
    """Refuse a model with a recurrent state (linear attention), whose cache cannot be rolled back exactly."""
    types = stateful_types(model.target, model.experts)
    if types or not all(map(holds_tokens, cache.layers)):
        raise UsageError(
            f"speculation is not offered for models with a recurrent state ({', '.join(types) or 'convolutions'}): "
            "leave it out"
        )
