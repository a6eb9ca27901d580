"""Batch of speculative decoding, whose sequences grow at different speeds.

Logits processors, stopping criteria and streamers of transformers see it as `generate` would show it to them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput

from divdec.decoding.processors import keep_suppressed
from divdec.errors import UsageError

# Processors that read scores alone: one call processes all positions of all rows. For 8 sequences of different lengths,
# 5 positions, 49,152 tokens, top-k and top-p that takes 46 ms on a CPU core, and one call for each length 239 ms.
_CONTEXT_FREE = frozenset(
    getattr(transformers, name)
    for name in (
        "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper",
        "EpsilonLogitsWarper", "EtaLogitsWarper", "SuppressTokensLogitsProcessor", "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
    )
)  # fmt: skip
_RESERVE = 64  # columns that are added at a time


@dataclasses.dataclass
class Block:
    """Columns to draft and verify in one pass."""

    size: int
    """Number of tokens to draft; the target reads all but the last."""
    last: Int[Tensor, "rows 1"]
    """The newest token of each sequence, which no model has read yet."""
    mask: Int[Tensor, "rows past_and_block"] | None
    positions: Int[Tensor, "rows block"]

    def mask_until(self, step: int) -> Int[Tensor, "rows past_and_step"] | None:
        """Return the attention mask up to the input of a step."""
        return None if self.mask is None else self.mask[:, : self.mask.shape[1] - self.size + step + 1]

    def cut(self, size: int) -> None:
        """Leave out the last columns."""
        self.mask, self.positions, self.size = self.mask_until(size - 1), self.positions[:, :size], size


class Sequences:
    """Token ids of every sequence: the prompt and the generated tokens.

    Attributes:
        ids: one row a sequence; prompts are left-padded, columns not generated yet hold padding.
        lengths: number of filled columns of each row.
    """

    def __init__(self, input_ids: Int[Tensor, "batch tokens"], padding: int) -> None:
        self.ids, self.prompt_length = input_ids, input_ids.shape[1]
        self.lengths = [self.prompt_length] * len(input_ids)
        self._padding = padding
        self._reserve(self.prompt_length + 1)

    def __len__(self) -> int:
        return len(self.lengths)

    def last(self, rows: Sequence[int]) -> Int[Tensor, "rows 1"]:
        """Return the newest token of each row."""
        return self.ids[rows, [self.lengths[row] - 1 for row in rows]][:, None]

    def write(self, rows: Sequence[int], tokens: Int[Tensor, "rows columns"], offset: int = 0) -> None:
        """Write drafts `offset` columns behind the end of each row, without changing its length."""
        self._reserve(max(self.lengths[row] for row in rows) + offset + tokens.shape[1])
        for index, row in enumerate(rows):
            start = self.lengths[row] + offset
            self.ids[row, start : start + tokens.shape[1]] = tokens[index]

    def extend(self, row: int, tokens: Int[Tensor, " tokens"]) -> None:
        """Append tokens to a row, in place of its drafts."""
        start, end = self.lengths[row], self.lengths[row] + len(tokens)
        self._reserve(end)
        self.ids[row, start:] = self._padding
        self.ids[row, start:end] = tokens
        self.lengths[row] = end

    def cut(self, row: int, length: int) -> None:
        """Shorten a row to at most `length` columns."""
        self.ids[row, length:] = self._padding
        self.lengths[row] = min(length, self.lengths[row])

    def prefixes(self, chosen: Sequence[int], length: int) -> Int[Tensor, "batch length"]:
        """Return the first `length` columns of the batch; rows that are shorter show a chosen row instead."""
        prefixes = self.ids[:, :length]
        if len(chosen) == len(prefixes):
            return prefixes
        return prefixes[
            [row if row in chosen or self.lengths[row] >= length else chosen[0] for row in range(len(prefixes))]
        ]

    def _reserve(self, length: int) -> None:
        if (missing := length - self.ids.shape[1]) > 0:
            self.ids = torch.nn.functional.pad(self.ids, (0, missing + _RESERVE), value=self._padding)


class BatchProcessors:
    """Logits processors, each called with the whole batch at one length, as in `generate`."""

    def __init__(self, processors: LogitsProcessorList, sequences: Sequences) -> None:
        # A plain list: `divdec.sampling` checks that the tokens in use can be chosen.
        self._processors: Any = LogitsProcessorList(map(self._by_row, processors))
        self._sequences = sequences
        self._chosen: Sequence[int] = ()
        self._reads_tokens = any(type(processor) not in _CONTEXT_FREE for processor in processors)

    def __call__(
        self,
        rows: Sequence[int],
        logits: Float[Tensor, "rows block vocab"],
        offset: int = 0,
        drafts: Int[Tensor, "rows block"] | None = None,
    ) -> Float[Tensor, "rows block vocab"]:
        """Process the steered logits before each token of a block.

        Args:
            rows: row numbers.
            logits: steered logits.
            offset: columns between the end of each row and the block.
            drafts: the block's tokens, written behind the rows. Positions after an excluded draft are skipped: they
                are never used, and their text may be one that a processor cannot handle.
        """
        if not self._processors:
            return logits
        if not self._reads_tokens:
            flat = logits.flatten(0, 1)
            return self._process(self._sequences.ids[:1, :1].expand(len(flat), 1), flat.clone()).view_as(logits)
        scores = logits.clone()
        skipped: set[int] = set()
        lengths = [self._sequences.lengths[row] + offset for row in rows]
        batch = logits.new_zeros(len(self._sequences), logits.shape[-1])
        for length in range(min(lengths), max(lengths) + logits.shape[1]):
            entries = [(index, row, length - lengths[index]) for index, row in enumerate(rows)]
            entries = [entry for entry in entries if 0 <= entry[2] < logits.shape[1] and entry[0] not in skipped]
            if not entries:
                continue
            indices, chosen, columns = (list(column) for column in zip(*entries, strict=True))
            batch_logits = batch.clone()
            batch_logits[chosen] = logits[indices, columns]
            self._chosen = chosen
            scores[indices, columns] = self._process(self._sequences.prefixes(chosen, length), batch_logits)[chosen]
            if drafts is not None:
                drafted = drafts[indices, columns]
                draft_scores = scores[indices, columns].gather(1, drafted.clamp(min=0)[:, None])[:, 0]
                excluded = (draft_scores == -torch.inf) | (drafted < 0)
                skipped |= {index for index, out in zip(indices, excluded.tolist(), strict=True) if out}
        return scores

    def _process(
        self, prefixes: Int[Tensor, "some tokens"], scores: Float[Tensor, "some vocab"]
    ) -> Float[Tensor, "some vocab"]:
        suppressed = scores == -torch.inf
        return keep_suppressed(self._processors(prefixes, scores), suppressed)

    def _by_row(self, processor: Any) -> Any:
        """Call `prefix_allowed_tokens_fn` for the chosen rows alone, which show their own text."""
        if type(processor) is not PrefixConstrainedLogitsProcessor:
            return processor
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda row, text: allowed(row, text) if row in self._chosen else [0], 1)


class SpeculativeBatch:
    """State of one call to `generate`: sequences, cache, attention mask, and the outputs that the caller asked for.

    Attributes:
        sequences: token ids of all rows.
        active: rows that still grow, in the order of the cache's rows.
        finished: length at which each finished row stopped.
    """

    def __init__(
        self,
        model: Any,
        input_ids: Int[Tensor, "batch tokens"],
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
        streamer: Any = None,
    ) -> None:
        self.model, self.config, self.streamer, self._criteria = model, config, streamer, criteria
        self.cache: Any = model_kwargs["past_key_values"]
        if len(input_ids) > 1 and self.cache.check_length():
            raise UsageError("speculation can continue from a cache for one sequence only")
        padding: Any = config._pad_token_tensor
        self.sequences = Sequences(input_ids, 0 if padding is None else int(padding))
        self.processors = BatchProcessors(processors, self.sequences)
        # As in `generate`: with an end token finished rows are padded, otherwise they grow until all have finished.
        self._pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self.active = list(range(len(input_ids)))
        self.finished: dict[int, int] = {}
        self.mask: Int[Tensor, "rows past"] | None = model_kwargs.get("attention_mask")
        self._prompt_mask = self.mask
        if self.mask is None and len(input_ids) > 1:
            self.mask = torch.ones_like(input_ids)
        self._check_positions(model_kwargs.get("position_ids"))
        self._streamed = 0
        returns_dict = config.return_dict_in_generate
        self._scores: list[Tensor] | None = [] if returns_dict and config.output_scores else None
        self._logits: list[Tensor] | None = [] if returns_dict and config.output_logits else None

    def _check_positions(self, position_ids: Tensor | None) -> None:
        # Left-padded rows move while they grow, so positions must follow from the mask.
        if position_ids is None:
            return
        prompts = self.sequences.ids[:, : self.sequences.prompt_length]
        mask = torch.ones_like(prompts) if self.mask is None else self.mask
        columns = position_ids.shape[-1]
        expected, is_token = (mask.long().cumsum(-1) - 1)[:, -columns:], mask[:, -columns:] != 0
        if not torch.equal(position_ids.expand_as(expected)[is_token], expected[is_token]):
            raise UsageError("speculation derives positions from the attention mask: leave position_ids out")

    def forward(
        self, tokens: Tensor, mask: Tensor | None, positions: Tensor | None, keep: int = 0
    ) -> Float[Tensor, "rows kept vocab"]:
        """Run the model's own forward, whose logits are steered and checked."""
        output = self.model(
            input_ids=tokens.to(self.model.device),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache,
            logits_to_keep=keep,
        )
        return output.logits.to(device=self.sequences.ids.device, dtype=torch.float32)

    def read_prompts(self) -> Float[Tensor, "batch 1 vocab"]:
        """Prefill the cache, and return the logits after the prompts."""
        past = self.cache.check_length()
        prompt = self.sequences.ids[:, : self.sequences.prompt_length]
        if past >= prompt.shape[1]:
            raise UsageError(f"past_key_values holds {past} tokens already; give more of them in input_ids")
        size = self.config.prefill_chunk_size or prompt.shape[1]
        logits = torch.empty(0)
        for start in range(past, prompt.shape[1], size):
            end = min(start + size, prompt.shape[1])
            mask = None if self.mask is None else self.mask[:, :end]
            logits = self.forward(prompt[:, start:end], mask, None, keep=1)
        return logits

    def next_block(self, size: int) -> Block:
        """Return the next columns of the active rows, at most as many as the longest row has room for."""
        size = min([size, *(self.config.max_length - self.sequences.lengths[row] for row in self.active)])
        steps = torch.arange(size, device=self.sequences.ids.device)[None]
        past_length, mask = self.cache.check_length(), None
        positions = past_length + steps
        if self.mask is not None:
            mask = torch.cat([self.mask, self.mask.new_ones(len(self.active), size)], dim=1)
            positions = self.mask.long().sum(dim=1, keepdim=True) + steps
        return Block(size, self.sequences.last(self.active), mask, positions)

    def generated(self) -> list[int]:
        """Return the number of generated tokens of each active row."""
        return [self.sequences.lengths[row] - self.sequences.prompt_length for row in self.active]

    def texts(self) -> list[np.ndarray]:
        """Return all tokens of each active row without padding, int64 [tokens]."""
        texts = []
        for row in self.active:
            ids = self.sequences.ids[row, : self.sequences.lengths[row]]
            if self._prompt_mask is not None:
                real = self._prompt_mask[row].to(ids.device) != 0
                ids = torch.cat([ids[: len(real)][real], ids[len(real) :]])
            texts.append(ids.cpu().numpy().astype(np.int64))
        return texts

    def accept(
        self,
        tokens: Int[Tensor, "rows block"],
        counts: Sequence[int],
        logits: Float[Tensor, "rows block vocab"],
        scores: Float[Tensor, "rows block vocab"],
    ) -> list[int]:
        """Append the first tokens of a block to each active row, up to where a stopping criterion ends it.

        Args:
            tokens: verified tokens.
            counts: number of them to append to each row.
            logits: steered logits, and `scores` after the processors, to be returned to the caller.
            scores: see `logits`.

        Returns:
            Number of tokens that each row has grown by.
        """
        rows, sequences = self.active, self.sequences
        if not self.cache.can_shift_rows:  # the rows have to stay together
            counts = [min(counts)] * len(counts)
        starts = {row: sequences.lengths[row] for row in rows}
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            sequences.extend(row, tokens[index, :count])
            for store, values in ((self._logits, logits), (self._scores, scores)):
                if store is not None:
                    self._record(store, row, starts[row], values[index, :count])
        self.finished |= self._stops({row: start for row, start in starts.items() if row not in self.finished})
        end = max(self.finished.values()) if len(self.finished) == len(sequences) else None
        for row in rows:
            last = self.finished.get(row) if self._pads else end
            if last is not None:
                sequences.cut(row, last)
        self.active = [row for row in rows if row not in self.finished or self._grows(row, end)]
        return [sequences.lengths[row] - starts[row] for row in rows]

    def _grows(self, row: int, end: int | None) -> bool:
        return not self._pads and self.sequences.lengths[row] < (self.config.max_length if end is None else end)

    def _stops(self, starts: dict[int, int]) -> dict[int, int]:
        """Call the stopping criteria at every new length of these rows; return the length at which each stops."""
        stops: dict[int, int] = {}
        ends = {row: self.sequences.lengths[row] for row in starts}
        for length in range(min(starts.values(), default=0) + 1, max(ends.values(), default=0) + 1):
            rows = [row for row, start in starts.items() if start < length <= ends[row] and row not in stops]
            if rows:
                generated = length - self.sequences.prompt_length
                scores: Any = tuple(self._scores[:generated]) if self._scores is not None else None
                stopped = self._criteria(self.sequences.prefixes(rows, length), scores).tolist()  # pyright: ignore[reportArgumentType]
                stops |= {row: length for row in rows if stopped[row]}
        return stops

    def _record(self, store: list[Tensor], row: int, start: int, values: Float[Tensor, "count vocab"]) -> None:
        first = start - self.sequences.prompt_length
        while len(store) < first + len(values):
            store.append(values.new_zeros(len(self.sequences), values.shape[-1]))
        for step, value in enumerate(values):
            store[first + step][row] = value

    def roll_back(self, rows: list[int], block: Block, grown: list[int]) -> None:
        """Remove rejected tokens, and rows that have finished, from the cache, which has read a block.

        Args:
            rows: rows of the cache, as `active` was before `accept`.
            block: the block.
            grown: number of tokens that each row has grown by.
        """
        self.mask = block.mask
        removed = [block.size - grown[index] for index in self.drop_finished_rows(rows)]
        if not removed:
            return
        self.cache.crop(-min(removed))  # also by 0, so that a sliding window drops what it recorded
        if self.mask is None:
            return
        self.mask = mask = self.mask[:, : self.mask.shape[1] - min(removed)]
        if len(self.sequences) == 1:
            return
        shifts = torch.tensor([number - min(removed) for number in removed], device=mask.device)
        columns = torch.arange(mask.shape[1], device=mask.device) - shifts[:, None]
        mask = mask.gather(1, columns.clamp(min=0)) * (columns >= 0)
        padding = int((mask.cumsum(1) == 0).sum(1).min())  # columns that are padding in every row
        if self.cache.can_shift_rows and (padding or int(shifts.max())):
            self.cache.shift_rows(shifts, padding)
            mask = mask[:, padding:]
        self.mask = mask

    def drop_finished_rows(self, rows: list[int]) -> list[int]:
        """Remove finished rows from the cache of a batch; return the indices of the rows that stay."""
        if len(self.sequences) == 1:
            return [0]  # the caller may continue from its cache
        indices = [index for index, row in enumerate(rows) if row in self.active]
        if indices and len(indices) < len(rows):
            selected = torch.tensor(indices)
            self.cache.batch_select_indices(selected)
            self.mask = self.mask[selected.to(self.mask.device)] if self.mask is not None else None
        return indices

    def stream(self) -> None:
        """Send the streamer every position that all rows have reached."""
        if self.streamer is None:
            return
        sequences = self.sequences
        lengths = [n for row, n in enumerate(sequences.lengths) if not (self._pads and row in self.finished)]
        all_finished = len(self.finished) == len(sequences)
        ready = min([*lengths, max(self.finished.values())] if all_finished else lengths)
        while sequences.prompt_length + self._streamed < ready:
            self.streamer.put(sequences.ids[:, sequences.prompt_length + self._streamed].cpu())
            self._streamed += 1

    @contextlib.contextmanager
    def restore_cache_on_error(self) -> Iterator[None]:
        """On exit the cache of one sequence holds no unverified drafts; on an error, or for a batch, it is reset."""
        completed = False
        try:
            yield
            completed = True
        finally:
            if not completed or len(self.sequences) > 1:
                self.cache.reset()
            for layer in self.cache.layers:
                if hasattr(layer, "record_past"):
                    layer.record_past = False

    def result(self) -> GenerateDecoderOnlyOutput | Int[Tensor, "batch all_tokens"]:
        """Return what `generate` returns."""
        end = max(self.finished.values())
        ids: Any = self.sequences.ids[:, :end].clone()
        if not self.config.return_dict_in_generate:
            return ids
        for store in (self._scores, self._logits):
            if store is not None:
                del store[end - self.sequences.prompt_length :]
                self._repeat_last(store)
        scores, logits = (None if store is None else tuple(store) for store in (self._scores, self._logits))
        return GenerateDecoderOnlyOutput(
            sequences=ids,
            scores=scores,  # pyright: ignore[reportArgumentType]
            logits=logits,  # pyright: ignore[reportArgumentType]
            past_key_values=self.cache if len(self.sequences) == 1 else None,
        )

    def _repeat_last(self, store: list[Tensor]) -> None:
        # Nothing was computed for padded positions; they repeat the row's last steered values.
        for row, length in self.finished.items():
            last = length - self.sequences.prompt_length - 1
            for later in store[last + 1 :] if self._pads else ():
                later[row] = store[last][row]
