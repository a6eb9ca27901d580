"""Sequences that decode together: one cache, one forward pass a step; they join and leave between steps.

It knows nothing of threads, queues or clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from divdec.model.cache import DivergenceCache, can_join, drop_columns, join
from divdec.model.modeling import DivergenceForCausalLM
from divdec.serving.engine.requests import Piece, TokenLogprob
from divdec.serving.engine.sequence import Running, token_logprob

Told = list[tuple[Running, Piece | Exception]]


class Batch:
    """Answers that grow by one token a step."""

    def __init__(
        self,
        model: DivergenceForCausalLM,
        sequences: list[Running],
        cache: DivergenceCache,
        mask: Int[Tensor, "rows past"],
    ) -> None:
        self.sequences = sequences
        self._model, self._cache, self._mask = model, cache, mask

    @property
    def is_open(self) -> bool:
        """Whether other sequences can join."""
        return can_join(self._cache)

    def step(self) -> Told:
        """Add a token to every answer."""
        last = torch.tensor([[sequence.answer[-1]] for sequence in self.sequences])
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(last), 1)], dim=1)
        logits = forward(self._model, last, self._mask, self._cache)[:, -1]
        return _extend(self.sequences, logits)

    def join(self, other: Batch) -> None:
        """Go on together with another batch, which is no longer to be used."""
        left, other_left = join(self._cache, other._cache)
        masks = ((self._mask, left), (other._mask, other_left))
        self._mask = torch.cat([torch.nn.functional.pad(mask, (columns, 0)) for mask, columns in masks])
        self.sequences = self.sequences + other.sequences

    def drop(self, sequences: Sequence[Running]) -> None:
        """Let these leave, whole or not."""
        gone = {id(sequence) for sequence in sequences}
        places = [place for place, sequence in enumerate(self.sequences) if id(sequence) not in gone]
        if len(places) == len(self.sequences):
            return
        self.sequences = [self.sequences[place] for place in places]
        if not places:
            return
        index = torch.tensor(places)
        self._cache.batch_select_indices(index)
        self._mask = self._mask[index]
        padding = int((self._mask.cumsum(1) == 0).sum(1).min())
        if padding and self.is_open:
            drop_columns(self._cache, padding)
            self._mask = self._mask[:, padding:]


class Prefill:
    """Prompts that are being read, a part at a time where they are long, so that answers do not wait for them."""

    def __init__(self, model: DivergenceForCausalLM, sequences: list[Running], columns: int) -> None:
        """Begin to read.

        Args:
            model: the steered model.
            sequences: several only if their longest prompt is read in one part: no row may be padding alone.
            columns: how many tokens of each are read at a time.
        """
        self.sequences = sequences
        self._model, self._columns = model, columns
        texts = [tuple(sequence.tokens) for sequence in sequences]
        distinct = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        self._rows = [distinct[text] for text in texts]
        self._width = max(map(len, distinct))
        assert len(distinct) == 1 or self._width <= columns
        self._ids = torch.tensor([[0] * (self._width - len(text)) + list(text) for text in distinct])
        self._mask = torch.tensor([[0] * (self._width - len(text)) + [1] * len(text) for text in distinct])
        self._cache = model.new_cache()
        self._read = 0
        # By row and number of likeliest tokens: several answers to one prompt share what is told of it.
        self._found: dict[tuple[int, int], list[TokenLogprob | None]] = {
            (row, sequence.sampling.prompt_logprobs): [None]
            for row, sequence in zip(self._rows, sequences, strict=True)
            if sequence.wants_all and sequence.sampling.prompt_logprobs is not None
        }

    def step(self) -> tuple[Told, Batch] | None:
        """Read the next part; once all is read, the answers' first tokens, and the batch in which they go on."""
        start, end = self._read, min(self._read + self._columns, self._width)
        keep = 0 if self._found else 1
        logits = forward(self._model, self._ids[:, start:end], self._mask[:, :end], self._cache, keep)
        self._read = end
        self._score(logits, start, end)
        if end < self._width:
            return None
        told = {key: tuple(found) for key, found in self._found.items()}
        for row, sequence in zip(self._rows, self.sequences, strict=True):
            if sequence.wants_all and sequence.sampling.prompt_logprobs is not None:
                sequence.prompt_logprobs = told[row, sequence.sampling.prompt_logprobs]
        if self._rows != list(range(len(self._ids))):  # several answers to one prompt
            index = torch.tensor(self._rows)
            self._cache.batch_select_indices(index)
            self._mask = self._mask[index]
        batch = Batch(self._model, self.sequences, self._cache, self._mask)
        return _extend(self.sequences, logits[torch.tensor(self._rows, device=logits.device), -1]), batch

    def _score(self, logits: Float[Tensor, "rows part vocab"], start: int, end: int) -> None:
        """Log-probabilities of the tokens that follow those of this part."""
        for (row, number), found in self._found.items():
            first = int((self._mask[row] == 0).sum())
            for column in range(max(start, first), min(end, self._width - 1)):
                logprobs = logits[row, column - start].float().log_softmax(dim=-1)
                found.append(token_logprob(logprobs, int(self._ids[row, column + 1]), number))


def forward(
    model: DivergenceForCausalLM,
    input_ids: Int[Tensor, "rows tokens"],
    mask: Int[Tensor, "rows past_and_tokens"],
    cache: DivergenceCache,
    keep: int = 1,
) -> Float[Tensor, "rows kept vocab"]:
    """Steered logits, by the model's own forward; a registry of takedown requests is followed from step to step."""
    follow_registry(model, cache)
    device = model.device
    output: Any = model(
        input_ids=input_ids.to(device), attention_mask=mask.to(device), past_key_values=cache, logits_to_keep=keep
    )
    return output.logits


def follow_registry(model: DivergenceForCausalLM, cache: DivergenceCache) -> None:
    """Let what comes next be steered by the takedown requests that are in force now."""
    if model.takedowns is not None:
        assert cache.takedowns is not None
        model.takedowns.begin(cache.takedowns)


def _extend(sequences: Sequence[Running], logits: Float[Tensor, "rows vocab"]) -> Told:
    greedy = logits.argmax(dim=-1).tolist()  # all at once, since most requests ask for nothing else
    told: Told = []
    for place, sequence in enumerate(sequences):
        try:
            plain = sequence.sampling.temperature == 0 and not sequence.processors
            if sequence.most <= 0:
                piece: Piece | Exception = sequence.end_empty()
            else:
                token = greedy[place] if plain else sequence.choose(logits[place])
                piece = sequence.take(token, logits[place])
        except Exception as error:  # of this request alone: the others have their tokens
            piece = error
        told.append((sequence, piece))
    return told
