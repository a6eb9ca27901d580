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
from torch.nn.functional import pad
from transformers import Cache

from divdec.data.records import Record, RecordSet
from divdec.experts.token_cache import TokenCache
from divdec.passes import logits_of, new_cache
from divdec.runs import read_json, write_json
from divdec_research.baselines.composite import DECODINGS, TARGET, CompositeDecoding, Step, write_composite
from divdec_research.baselines.embedder import SentenceEmbedder
from divdec_research.baselines.job import BuiltModel, Job
from divdec_research.baselines.prompts import fit_classifier, read_classifier, write_classifier
from divdec_research.baselines.settings import GUARDSettings

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
    tokens: Float[Tensor, "vocab features"], words: Float[Tensor, "words features"], delta: float, penalty: float,
    weight: float,
) -> Float[Tensor, " vocab"]:  # fmt: skip
    """Cost of each token for its similarity to forbidden words (the paper's soft matching).

    The similarity is the largest cosine with a word. From δ on the cost is the penalty, below it the cosine times
    `weight`, at least 0.

    Args:
        tokens: normalized embedding of each token's text.
        words: normalized embeddings of the words.
        delta: δ.
        penalty: cost in nats from δ on.
        weight: nats per unit of cosine below δ.
    """
    cosines = (tokens.to(words) @ words.T).amax(dim=-1)
    return torch.where(cosines >= delta, torch.full_like(cosines, penalty), weight * cosines.clamp(min=0))


@DECODINGS.register("guard")
class Guard(CompositeDecoding):
    """The target, the classifier, and each forget record's forbidden words."""

    def __init__(self, models: Any, options: Any, folder: Path) -> None:
        super().__init__(models, options, folder)
        self.classifier, tensors = read_classifier(folder, options)
        for name in ("prompts", "tokens"):
            self.register_buffer(name, tensors[name], persistent=False)
        self.words: list[list[str]] = read_json(folder / FORBIDDEN)
        self.beta, self.delta, self.penalty, self.weight = (float(options[name]) for name in COSTS)
        self._tries: dict[int, Trie] = {}
        self._costs: dict[int, Tensor] = {}

    def new_caches(self) -> list[Cache]:
        """Caches of the target and of the tokens."""
        return [new_cache(self.model(TARGET)), TokenCache()]

    def logits(self, step: Step, caches: Sequence[Cache | None]) -> Float[Tensor, "batch kept width"]:
        """See `CompositeDecoding.logits`."""
        inputs = (step.input_ids, step.attention_mask, step.position_ids)
        logits = logits_of(self.model(TARGET), *inputs, caches[0], step.logits_to_keep).float()
        positions = logits.shape[1]
        reading = self.classifier.read(step, caches[1], positions)
        guarded = reading.forget.nonzero().tolist()
        if not guarded:
            return logits
        costs, tokens = torch.zeros_like(logits), reading.tokens.tolist()
        nearest = (reading.embeddings @ self.get_buffer("prompts").to(reading.embeddings).T).argmax(dim=-1)
        for row, index in guarded:
            before = tokens[row][: len(tokens[row]) - positions + index + 1]
            costs[row, index] = self.costs(int(nearest[row, index]), before, logits)
        return logits - costs

    @torch.no_grad()
    def costs(self, record: int, before: Sequence[int], like: Tensor) -> Float[Tensor, " width"]:
        """Cost of each token after `before`, where the words of one forget record are forbidden."""
        words = self.words[record]
        if not words:
            return like.new_zeros(like.shape[-1])
        if record not in self._costs:
            self._tries[record] = Trie(tokenize_words(words, self.classifier.tokenizer), self.beta)
            forbidden = self.classifier.embedder.embed(words)
            similar = similarity_costs(self.get_buffer("tokens"), forbidden, self.delta, self.penalty, self.weight)
            self._costs[record] = pad(similar, (0, max(0, like.shape[-1] - len(similar))))
        costs = self._costs[record][: like.shape[-1]].to(like.device)
        if blocked := self._tries[record].after(before):
            costs = costs.clone()
            costs[sorted(blocked)] = self.penalty
        return costs


def build_guard(job: Job, settings: GUARDSettings, output: Path) -> BuiltModel:
    """Train the classifier, and write it and the forbidden words; see `build_method`.

    Raises:
        UsageError: there is no sentence embedder.
    """
    started = time.perf_counter()
    classifier, prompts = fit_classifier(job, settings)
    tokens = embed_tokens(classifier.embedder, job.tokenizer)
    options = write_classifier(output, classifier, settings, prompts=prompts, tokens=tokens)
    options |= {name: getattr(settings, name) for name in COSTS}
    words = forbidden_words(job.forget, job.retain, settings.common)
    write_json(output / FORBIDDEN, words)
    write_composite(output, job.tokenizer, "guard", options, {TARGET: job.target})
    without = sum(not some for some in words)
    notes = (f"{without} of {len(words)} forget answers hold no word that can be forbidden",) if without else ()
    return BuiltModel(output, time.perf_counter() - started, notes)


def embed_tokens(embedder: SentenceEmbedder, tokenizer: PreTrainedTokenizerBase) -> Float[Tensor, "vocab features"]:
    """Embed the text of each token in half precision; 0 for tokens without text, such as special ones."""
    texts = [str(tokenizer.decode([token], skip_special_tokens=True)).strip() for token in range(len(tokenizer))]
    unique = {text: index for index, text in enumerate(dict.fromkeys(filter(None, texts)))}
    embeddings = embedder.embed(list(unique)).half()
    embeddings = torch.cat([embeddings, torch.zeros_like(embeddings[:1])])
    return embeddings[[unique.get(text, -1) for text in texts]].contiguous()


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
