"""The loop of speculative decoding: draft, judge, keep, go back; sequences of a batch at their own speed."""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from divdec.decoding.drafters import Block, make_drafter
from divdec.decoding.pace import Pace
from divdec.decoding.rows import Criteria, Processors, Rows
from divdec.decoding.statistics import SpeculationStatistics
from divdec.decoding.uniform import Uniform
from divdec.errors import UsageError
from divdec.sampling import first_choice, pick, verify_greedy, verify_sampled

LARGEST = 8  # tokens that are drafted at most where the number is not given


class Decoding:
    """The state of one call: sequences of different lengths, their common cache, and who is still going on."""

    def __init__(
        self,
        model: Any,
        input_ids: Int[Tensor, "batch tokens"],
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
        *,
        gamma: int | None,
        drafter: str,
        statistics: SpeculationStatistics | None,
        streamer: Any,
        seed: int | None = None,
    ) -> None:
        self.model, self.config, self.streamer = model, config, streamer
        self.gamma, self.statistics = gamma, statistics
        self.cache: Any = model_kwargs["past_key_values"]
        if len(input_ids) > 1 and self.cache.check_length():
            raise UsageError("speculation goes on from a kept cache for one sequence only")
        padding: Any = config._pad_token_tensor
        self.rows = Rows(input_ids, config.max_length, 0 if padding is None else int(padding))
        self.processors = Processors(processors, self.rows)
        self.criteria = Criteria(criteria, self.rows)
        # A sequence that is done is padded if a token ends it; otherwise it goes on as long as any other does.
        self.pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self.active = list(range(len(input_ids)))
        self.done: dict[int, int] = {}  # the length at which a row was
        self.mask: Int[Tensor, "rows past"] | None = model_kwargs.get("attention_mask")
        self.first_mask = self.mask
        if self.mask is None and len(input_ids) > 1:
            self.mask = torch.ones_like(input_ids)
        self._check_positions(model_kwargs.get("position_ids"))
        self.drafter = make_drafter(drafter, model.experts, model.steering, model.takedowns)
        self.pace = _pace(model, self.drafter.name, len(input_ids))
        self.uniform = Uniform(len(input_ids), input_ids.device, seed)
        self.streamed = 0
        wanted = config.return_dict_in_generate
        self.scores: list[Tensor] | None = [] if wanted and config.output_scores else None
        self.logits: list[Tensor] | None = [] if wanted and config.output_logits else None
        if statistics is not None:
            statistics.drafter = self.drafter.name

    def _check_positions(self, position_ids: Tensor | None) -> None:
        # Left-padded rows are moved as they grow: only positions that the mask implies can be kept.
        if position_ids is None:
            return
        mask = torch.ones_like(self.rows.ids[:, : self.rows.prompt_length]) if self.mask is None else self.mask
        expected = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -position_ids.shape[-1] :]
        real = mask[:, -position_ids.shape[-1] :] != 0
        if not torch.equal(position_ids.expand_as(expected)[real], expected[real]):
            raise UsageError("speculation counts positions from the attention mask: leave position_ids out")

    def prefill(self) -> None:
        """Read the prompts, and take the first token of each answer."""
        past = self.cache.check_length()
        prompt = self.rows.ids[:, : self.rows.prompt_length]
        if past >= prompt.shape[1]:
            raise UsageError(f"the kept cache holds {past} tokens already; give more of them in input_ids")
        size = self.config.prefill_chunk_size or prompt.shape[1]
        logits = torch.empty(0)
        for start in range(past, prompt.shape[1], size):
            end = min(start + size, prompt.shape[1])
            mask = None if self.mask is None else self.mask[:, :end]
            logits = self._forward(prompt[:, start:end], mask, None, keep=1)
        scores = self.processors(self.active, logits)
        if self.config.do_sample:
            tokens = pick(scores.softmax(dim=-1), self.uniform(self.active, [0] * len(self.active), 1)[..., 2])
        else:
            tokens = first_choice(scores)
        before = list(self.active)
        self._take(tokens, [1] * len(before), logits, scores)
        self._let_go(before)
        self._stream()

    def _forward(
        self, tokens: Tensor, mask: Tensor | None, positions: Tensor | None, keep: int = 0
    ) -> Float[Tensor, "rows kept vocab"]:
        # The model's own forward: what leaves it is steered, and checked, as in plain decoding.
        output = self.model(
            input_ids=tokens.to(self.model.device),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache,
            logits_to_keep=keep,
        )
        return output.logits.to(device=self.rows.ids.device, dtype=torch.float32)

    def step(self) -> None:
        """Draft a block, judge it in one pass, and keep what stands."""
        started = time.perf_counter()
        room = min(self.config.max_length - self.rows.lengths[row] for row in self.active)
        wanted = self.gamma if self.gamma is not None else self.pace.choose()
        block = self._block(min(wanted + 1, room))
        self.cache.activate_past_recording()  # of windows, which could not be rolled back otherwise
        drafts, draft_scores = self.drafter.draft(block)
        read = drafts.clamp(min=0)  # something has to be read where nothing is proposed; it is never kept
        if self.processors.reads_tokens:
            self.rows.write(self.active, read)
        read = torch.cat([block.last, read[:, :-1]], dim=1)
        logits = self._forward(read, block.mask, block.positions)
        scores = self.processors(self.active, logits, drafts=drafts)
        if self.config.do_sample:
            uniform = self.uniform(self.active, self._generated(), block.size)[..., 1:]
            verdict = verify_sampled(scores, drafts, draft_scores, uniform)
        else:
            verdict = verify_greedy(scores, drafts)
        accepted, kept = verdict.accepted.tolist(), verdict.kept.tolist()  # what the host has to wait for
        if not (len(kept) == 1 or self.cache.can_shift_rows):
            kept = [min(kept)] * len(kept)
        self.mask = block.mask
        before = {row: self.rows.lengths[row] + block.size for row in self.active}
        self._take(verdict.tokens, kept, logits, scores)
        removed = [length - self.rows.lengths[row] for row, length in before.items()]
        self._roll_back(list(before), removed)
        self._stream()  # last: whoever stops here has heard what the cache holds
        grown = [block.size - number for number in removed]
        self._tell(block.size - 1, accepted, grown, time.perf_counter() - started)

    def _block(self, size: int) -> Block:
        rows = len(self.active)
        past = self.cache.check_length()
        steps = torch.arange(size, device=self.rows.ids.device)[None]
        if self.mask is None:
            mask, positions = None, past + steps
        else:
            mask = torch.cat([self.mask, self.mask.new_ones(rows, size)], dim=1)
            positions = self.mask.long().sum(dim=1, keepdim=True) + steps
        last = self.rows.last(self.active)
        choose, texts = functools.partial(self._choose, self.active), functools.partial(self._texts, self.active)
        return Block(size, last, mask, positions, self.cache.experts, self.model.vocab_size, choose, texts)

    def _generated(self) -> list[int]:
        return [self.rows.lengths[row] - self.rows.prompt_length for row in self.active]

    def _choose(self, rows: Sequence[int], step: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.processors(rows, logits.to(self.rows.ids.device), offset=step)
        if self.config.do_sample:
            places = [number + step for number in self._generated()]
            token = pick(scores.softmax(dim=-1), self.uniform(rows, places, 1)[..., 0])
        else:
            token = scores.argmax(dim=-1)
        if self.processors.reads_tokens:
            self.rows.write(rows, token, offset=step)
        return token, scores

    def _texts(self, rows: Sequence[int]) -> list[np.ndarray]:
        found = []
        for row in rows:
            ids = self.rows.ids[row, : self.rows.lengths[row]]
            if self.first_mask is not None:
                real = self.first_mask[row].to(ids.device) != 0
                ids = torch.cat([ids[: len(real)][real], ids[len(real) :]])
            found.append(ids.cpu().numpy().astype(np.int64))
        return found

    def _take(
        self,
        tokens: Int[Tensor, "rows block"],
        kept: Sequence[int],
        logits: Float[Tensor, "rows block vocab"],
        scores: Float[Tensor, "rows block vocab"],
    ) -> None:
        """Make each sequence longer, as far as no criterion stops it."""
        starts = {row: self.rows.lengths[row] for row in self.active}
        written = tokens.shape[1] if self.processors.reads_tokens else 0
        for place, (row, number) in enumerate(zip(self.active, kept, strict=True)):
            self.rows.extend(row, tokens[place, :number], written)
            for store, values in ((self.logits, logits), (self.scores, scores)):
                if store is not None:
                    self._record(store, row, starts[row], values[place, :number])
        undecided = {row: start for row, start in starts.items() if row not in self.done}
        if undecided:
            self.done |= self.criteria.stops(undecided, self.scores)
        end = max(self.done.values()) if len(self.done) == len(self.rows) else None
        for row in self.active:
            # Where nothing pads, a sequence that is done goes on until all are.
            last = self.done.get(row) if self.pads else end
            if last is not None:
                self.rows.cut(row, last)
        self.active = [row for row in self.active if row not in self.done or self._goes_on(row, end)]

    def _goes_on(self, row: int, end: int | None) -> bool:
        return not self.pads and self.rows.lengths[row] < (self.config.max_length if end is None else end)

    def _record(self, store: list[Tensor], row: int, start: int, values: Float[Tensor, "kept vocab"]) -> None:
        first = start - self.rows.prompt_length
        while len(store) < first + len(values):
            store.append(values.new_zeros(len(self.rows), values.shape[-1]))
        for step, value in enumerate(values):
            store[first + step][row] = value

    def _stream(self) -> None:
        if self.streamer is None:
            return
        # A row that is padded has all that is to come.
        lengths = [n for row, n in enumerate(self.rows.lengths) if not (self.pads and row in self.done)]
        all_done = len(self.done) == len(self.rows)
        ready = min([*lengths, max(self.done.values())] if all_done else lengths)
        while self.rows.prompt_length + self.streamed < ready:
            self.streamer.put(self.rows.ids[:, self.rows.prompt_length + self.streamed].cpu())
            self.streamed += 1

    @contextlib.contextmanager
    def leaving_the_cache_whole(self) -> Iterator[None]:
        """Whatever happens within, nobody finds drafts in the cache afterwards, nor rows that were moved or left.

        A cache that cannot be given back as plain decoding would leave it is emptied: who goes on from it with the
        whole text reads it anew.
        """
        whole = False
        try:
            yield
            whole = True
        finally:
            if not whole or len(self.rows) > 1:
                self.cache.reset()
            for layer in self.cache.layers:
                if hasattr(layer, "record_past"):
                    layer.record_past = False  # whoever goes on may not crop

    def _roll_back(self, before: list[int], removed: list[int]) -> None:
        """Take back what was read and not kept; sequences that are done leave the cache."""
        if len(self.rows) == 1:
            self._crop(removed[0])
            return
        removed = [removed[place] for place in self._let_go(before)]
        if not removed:
            return
        self._crop(min(removed))
        shifts = torch.tensor([number - min(removed) for number in removed], device=self.rows.ids.device)
        assert self.mask is not None
        columns = self.mask.shape[1]
        mask = torch.stack([row.roll(int(shift)) for row, shift in zip(self.mask, shifts.tolist(), strict=True)])
        mask = mask * (torch.arange(columns, device=mask.device)[None] >= shifts[:, None].to(mask.device))
        padding = int((mask.cumsum(1) == 0).sum(1).min())  # columns that are padding in every row
        if padding or int(shifts.max()):
            if self.cache.can_shift_rows:
                self.cache.shift_rows(shifts, padding)
                mask = mask[:, padding:]
            self.mask = mask

    def _let_go(self, before: list[int]) -> list[int]:
        """Remove sequences that are done from the cache of a batch; the places of those that go on."""
        places = [place for place, row in enumerate(before) if row in self.active]
        if places and len(places) < len(before):
            index = torch.tensor(places, device=self.rows.ids.device)
            self.cache.batch_select_indices(index)
            self.mask = self.mask[index.to(self.mask.device)] if self.mask is not None else None
        return places

    def _crop(self, number: int) -> None:
        self.cache.crop(-number)  # also by 0: a window then drops what it recorded
        if self.mask is not None:
            self.mask = self.mask[:, : self.mask.shape[1] - number]

    def _tell(self, drafted: int, accepted: list[list[bool]], grown: list[int], seconds: float) -> None:
        """Count what was judged: drafts up to and with the first that was rejected, none behind an answer's end."""
        right = [int(np.cumprod(row[:number]).sum()) for row, number in zip(accepted, grown, strict=True)]
        self.pace.tell(drafted, sum(right), sum(grown), seconds)
        if self.statistics is not None:
            self.statistics.count(drafted, right, grown)

    def result(self) -> GenerateDecoderOnlyOutput | Int[Tensor, "batch all_tokens"]:
        """What `generate` returns."""
        end = max(self.done.values())
        sequences = self.rows.ids[:, :end].clone()
        if not self.config.return_dict_in_generate:
            return sequences
        for store in (self.scores, self.logits):
            if store is not None:
                del store[end - self.rows.prompt_length :]
                self._repeat_last(store)
        return GenerateDecoderOnlyOutput(
            sequences=sequences,  # pyright: ignore[reportArgumentType]
            scores=tuple(self.scores) if self.scores is not None else None,  # pyright: ignore[reportArgumentType]
            logits=tuple(self.logits) if self.logits is not None else None,  # pyright: ignore[reportArgumentType]
            # The cache of a batch has been emptied: its rows were moved, and some have left it.
            past_key_values=self.cache if len(self.rows) == 1 else None,
        )

    def _repeat_last(self, store: list[Tensor]) -> None:
        # Where a sequence is padded nothing was computed; its last steered values stand there.
        for row, length in self.done.items():
            last = length - self.rows.prompt_length - 1
            for later in store[last + 1 :] if self.pads else ():
                later[row] = store[last][row]


_PACES: weakref.WeakKeyDictionary[Any, dict[tuple[str, int], Pace]] = weakref.WeakKeyDictionary()


def _pace(model: Any, drafter: str, rows: int) -> Pace:
    """What is known of a model's speed, which is kept from one call to the next."""
    return _PACES.setdefault(model, {}).setdefault((drafter, rows), Pace(LARGEST))
