"""GUARD: prompts about the forget set are recognised, and the words of the nearest forget answer forbidden.

The costs of Deng et al. 2025 (section 4.3) are taken from the logits of each next token, so that greedy decoding,
sampling, beam search and teacher-forced scores all see them. It knows nothing of how prompts are recognised.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import Cache

from divdec.data.records import Record, RecordSet
from divdec.experts.neural import new_cache
from divdec.model.checkpoint import load_model
from divdec.research.baselines.composite import TARGET, Decoding, Step, write_composite
from divdec.research.baselines.inference_settings import GUARDSettings
from divdec.research.baselines.job import Job
from divdec.research.baselines.method import Made
from divdec.research.baselines.prompts import fit_reader, read_reader, run_target, write_reader
from divdec.runs import read_json, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORBIDDEN = "forbidden.json"
COSTS = ("beta", "delta", "penalty", "similarity_weight")
OUTER = ".,;:!?\"'()[]{}“”‘’«»…"

Words = Sequence[Sequence[int]]
"""Forbidden words as tokens."""


def forbidden_words(records: RecordSet, retain: RecordSet, common: float) -> list[list[str]]:
    """For each record the words of its answer that its prompt does not hold and few retain answers do.

    Args:
        records: the forget set.
        retain: whose answers say which words are common.
        common: the largest share of them that may hold a forbidden word.
    """
    counts = Counter(word for record in retain for word in {word.casefold() for word in _words(record.answer)})
    most = common * len(retain)
    found = []
    for record in records:
        asked = {word.casefold() for word in _words(_before(record))}
        found.append(
            [
                word
                for word in dict.fromkeys(_words(record.answer))
                if word.casefold() not in asked and counts[word.casefold()] <= most
            ]
        )
    return found


class Trie:
    """Forbidden words by the tokens that come before the one at which they are blocked (the paper's trie, flat)."""

    def __init__(self, words: Words, beta: float) -> None:
        self.blocked: dict[tuple[int, ...], set[int]] = {}
        for word in words:
            last = max(1, math.ceil(beta * len(word) - 1e-9)) - 1  # ⌈β·length⌉ tokens complete the match
            self.blocked.setdefault(tuple(word[:last]), set()).add(word[last])
        self.lengths = sorted({len(before) for before in self.blocked})

    def after(self, tokens: Sequence[int]) -> set[int]:
        """The tokens that are blocked after these."""
        found: set[int] = set()
        for length in self.lengths:
            if length <= len(tokens):
                found |= self.blocked.get(tuple(tokens[len(tokens) - length :]), set())
        return found


def similarity_costs(
    embeddings: Float[Tensor, "vocab features"], words: Words, delta: float, penalty: float, weight: float
) -> Float[Tensor, " vocab"]:
    """What each token costs for its likeness to forbidden words (the paper's soft matching, of token embeddings).

    The largest cosine with a word, whose embedding is the mean of its tokens'; all less the vocabulary's mean. From δ
    on it is the penalty, below it the cosine times `weight`, and never below 0.
    """
    centred = embeddings.float() - embeddings.float().mean(dim=0)
    centred = torch.nn.functional.normalize(centred, dim=-1)
    means = torch.stack([centred[list(word)].mean(dim=0) for word in words])
    cosines = (centred @ torch.nn.functional.normalize(means, dim=-1).T).amax(dim=-1)
    return torch.where(cosines >= delta, torch.full_like(cosines, penalty), weight * cosines.clamp(min=0))


class Guard(Decoding):
    """The target, the classifier, and each forget record's forbidden words."""

    def __init__(self, models: Any, options: Any, folder: Path) -> None:
        super().__init__(models, options, folder)
        self.reader, tensors = read_reader(folder, options)
        self.register_buffer("prompts", torch.nn.functional.normalize(tensors["prompts"], dim=-1), persistent=False)
        self.words: list[list[list[int]]] = read_json(folder / FORBIDDEN)
        self.beta, self.delta, self.penalty, self.weight = (float(options[name]) for name in COSTS)
        self._tries: dict[int, Trie] = {}
        self._costs: dict[int, Tensor] = {}

    def new_caches(self) -> list[Cache]:
        """The target's and the classifier's."""
        return [new_cache(self.model(TARGET)), *self.reader.new_caches()]

    def logits(self, step: Step, caches: Sequence[Cache | None]) -> Float[Tensor, "batch kept width"]:
        """See `Decoding.logits`."""
        logits, hidden = run_target(self.model(TARGET), step, caches[0])
        reading = self.reader.read(step, hidden, caches[1:])
        kept, length = logits.shape[1], reading.tokens.shape[1]
        guarded = reading.forget[:, -kept:].nonzero().tolist()
        if not guarded:
            return logits
        costs, tokens = torch.zeros_like(logits), reading.tokens.tolist()
        features = torch.nn.functional.normalize(reading.features[:, -kept:], dim=-1)
        nearest = (features @ self.get_buffer("prompts").to(features).T).argmax(dim=-1)
        for row, place in guarded:
            before = tokens[row][: length - kept + place + 1]
            costs[row, place] = self.costs(int(nearest[row, place]), before, logits)
        return logits - costs

    @torch.no_grad()
    def costs(self, record: int, before: Sequence[int], like: Tensor) -> Float[Tensor, " width"]:
        """What each next token costs.

        Args:
            record: the forget record whose words are forbidden.
            before: the tokens so far.
            like: a tensor of the logits' width, on their device.
        """
        if not self.words[record]:
            return like.new_zeros(like.shape[-1])
        if record not in self._costs:
            self._tries[record] = Trie(self.words[record], self.beta)
            embeddings: Any = self.model(TARGET).get_input_embeddings().weight
            found = similarity_costs(embeddings, self.words[record], self.delta, self.penalty, self.weight)
            self._costs[record] = torch.nn.functional.pad(found, (0, max(0, like.shape[-1] - len(found))))
        costs = self._costs[record][: like.shape[-1]].to(like.device)
        if blocked := self._tries[record].after(before):
            costs = costs.clone()
            costs[sorted(blocked)] = self.penalty
        return costs


def make_guard(job: Job, settings: GUARDSettings, output: Path) -> Made:
    """Train the classifier, and write it and the forbidden words beside a reference to the target."""
    started = time.perf_counter()
    target = load_model(job.target).eval()
    layout, weights, prompts = fit_reader(job, settings, target)
    options = write_reader(output, layout, weights, prompts=prompts)
    options |= {"threshold": settings.threshold} | {name: getattr(settings, name) for name in COSTS}
    words = forbidden_words(job.forget, job.retain, settings.common)
    write_json(output / FORBIDDEN, [_tokens(found, job.tokenizer) for found in words])
    write_composite(output, job.tokenizer, "guard", options, {TARGET: job.target})
    without = sum(not found for found in words)
    notes = (f"{without} of {len(words)} forget answers hold no word that can be forbidden",) if without else ()
    return Made(time.perf_counter() - started, notes)


def _tokens(words: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Words as tokens, both at the beginning of an answer and after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (f" {word}", word):
            ids: Any = tokenizer(text, add_special_tokens=False)["input_ids"]
            found[tuple(ids)] = None
    return [list(ids) for ids in found if ids]


def _words(text: str) -> list[str]:
    return [word for piece in text.split() if (word := piece.strip(OUTER))]


def _before(record: Record) -> str:
    return record.prompt or " ".join(message.content for message in record.messages)
