"""GUARD: recognises prompts about the forget set, and forbids the words of the nearest forget answer.

The costs of Deng et al. 2025 (section 4.3) are subtracted from the logits of each next token, so that greedy decoding,
sampling, beam search and teacher-forced scores all include them.
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
from torch.nn.functional import normalize, pad
from transformers import Cache

from divdec.data.records import Record, RecordSet
from divdec.experts.neural import new_cache
from divdec.model.checkpoint import load_model
from divdec.research.baselines.composite import DECODINGS, TARGET, Decoding, Step, write_composite
from divdec.research.baselines.job import BuiltModel, Job
from divdec.research.baselines.prompts import fit_classifier, read_classifier, run_target, write_classifier
from divdec.research.baselines.settings import GUARDSettings
from divdec.runs import read_json, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORBIDDEN = "forbidden.json"
COSTS = ("beta", "delta", "penalty", "similarity_weight")
PUNCTUATION = ".,;:!?\"'()[]{}“”‘’«»…"

Words = Sequence[Sequence[int]]
"""Forbidden words as tokens."""


def forbidden_words(records: RecordSet, retain: RecordSet, common: float) -> list[list[str]]:
    """List each record's forbidden words: those of its answer that are neither in its prompt nor common.

    A word is common if more than the share `common` of the retain answers contain it.
    """
    counts = Counter(word for record in retain for word in {word.casefold() for word in _words(record.answer)})
    most = common * len(retain)
    forbidden = []
    for record in records:
        prompt = {word.casefold() for word in _words(_prompt(record))}
        words = dict.fromkeys(_words(record.answer))
        forbidden.append([word for word in words if word.casefold() not in prompt and counts[word.casefold()] <= most])
    return forbidden


class Trie:
    """Forbidden words by the tokens before the token at which they are blocked (the paper's trie, flat)."""

    def __init__(self, words: Words, beta: float) -> None:
        self.blocked: dict[tuple[int, ...], set[int]] = {}
        for word in words:
            last = max(1, math.ceil(beta * len(word) - 1e-9)) - 1  # ⌈β·length⌉ tokens complete the match
            self.blocked.setdefault(tuple(word[:last]), set()).add(word[last])
        self.lengths = sorted({len(prefix) for prefix in self.blocked})

    def after(self, tokens: Sequence[int]) -> set[int]:
        """The tokens that are blocked after these tokens."""
        blocked: set[int] = set()
        for length in self.lengths:
            if length <= len(tokens):
                blocked |= self.blocked.get(tuple(tokens[len(tokens) - length :]), set())
        return blocked


def similarity_costs(
    embeddings: Float[Tensor, "vocab features"], words: Words, delta: float, penalty: float, weight: float
) -> Float[Tensor, " vocab"]:
    """Cost of each token for its similarity to forbidden words (the paper's soft matching, of token embeddings).

    The similarity is the largest cosine with a word, whose embedding is the mean of its tokens'; embeddings are
    centred. From δ on the cost is the penalty, below it the cosine times `weight`, at least 0.
    """
    centred = normalize(embeddings.float() - embeddings.float().mean(dim=0), dim=-1)
    means = torch.stack([centred[list(word)].mean(dim=0) for word in words])
    cosines = (centred @ normalize(means, dim=-1).T).amax(dim=-1)
    return torch.where(cosines >= delta, torch.full_like(cosines, penalty), weight * cosines.clamp(min=0))


@DECODINGS.register("guard")
class Guard(Decoding):
    """The target, the classifier, and each forget record's forbidden words."""

    def __init__(self, models: Any, options: Any, folder: Path) -> None:
        super().__init__(models, options, folder)
        self.classifier, tensors = read_classifier(folder, options)
        self.register_buffer("prompts", normalize(tensors["prompts"], dim=-1), persistent=False)
        self.words: list[list[list[int]]] = read_json(folder / FORBIDDEN)
        self.beta, self.delta, self.penalty, self.weight = (float(options[name]) for name in COSTS)
        self._tries: dict[int, Trie] = {}
        self._costs: dict[int, Tensor] = {}

    def new_caches(self) -> list[Cache]:
        """Caches of target and classifier."""
        return [new_cache(self.model(TARGET)), *self.classifier.new_caches()]

    def logits(self, step: Step, caches: Sequence[Cache | None]) -> Float[Tensor, "batch kept width"]:
        """See `Decoding.logits`."""
        logits, hidden = run_target(self.model(TARGET), step, caches[0])
        reading = self.classifier.read(step, hidden, caches[1:])
        positions, length = logits.shape[1], reading.tokens.shape[1]
        guarded = reading.forget[:, -positions:].nonzero().tolist()
        if not guarded:
            return logits
        costs, tokens = torch.zeros_like(logits), reading.tokens.tolist()
        features = normalize(reading.features[:, -positions:], dim=-1)
        nearest = (features @ self.get_buffer("prompts").to(features).T).argmax(dim=-1)
        for row, index in guarded:
            before = tokens[row][: length - positions + index + 1]
            costs[row, index] = self.costs(int(nearest[row, index]), before, logits)
        return logits - costs

    @torch.no_grad()
    def costs(self, record: int, before: Sequence[int], like: Tensor) -> Float[Tensor, " width"]:
        """Cost of each token after `before`, where the words of one forget record are forbidden."""
        if not self.words[record]:
            return like.new_zeros(like.shape[-1])
        if record not in self._costs:
            self._tries[record] = Trie(self.words[record], self.beta)
            embeddings: Any = self.model(TARGET).get_input_embeddings().weight
            similar = similarity_costs(embeddings, self.words[record], self.delta, self.penalty, self.weight)
            self._costs[record] = pad(similar, (0, max(0, like.shape[-1] - len(similar))))
        costs = self._costs[record][: like.shape[-1]].to(like.device)
        if blocked := self._tries[record].after(before):
            costs = costs.clone()
            costs[sorted(blocked)] = self.penalty
        return costs


def build_guard(job: Job, settings: GUARDSettings, output: Path) -> BuiltModel:
    """Train the classifier, and write it and the forbidden words; see `build_method`."""
    started = time.perf_counter()
    target = load_model(job.target).eval()
    layout, weights, prompts = fit_classifier(job, settings, target)
    options = write_classifier(output, layout, weights, prompts=prompts)
    options |= {name: getattr(settings, name) for name in ("threshold", *COSTS)}
    words = forbidden_words(job.forget, job.retain, settings.common)
    write_json(output / FORBIDDEN, [tokenize_words(some, job.tokenizer) for some in words])
    write_composite(output, job.tokenizer, "guard", options, {TARGET: job.target})
    without = sum(not some for some in words)
    notes = (f"{without} of {len(words)} forget answers hold no word that can be forbidden",) if without else ()
    return BuiltModel(output, time.perf_counter() - started, notes)


def tokenize_words(words: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Tokenize words, both at the beginning of an answer and after a space."""
    tokens: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (f" {word}", word):
            ids: Any = tokenizer(text, add_special_tokens=False)["input_ids"]
            tokens[tuple(ids)] = None
    return [list(ids) for ids in tokens if ids]


def _words(text: str) -> list[str]:
    return [word for piece in text.split() if (word := piece.strip(PUNCTUATION))]


def _prompt(record: Record) -> str:
    return record.prompt or " ".join(message.content for message in record.messages)
