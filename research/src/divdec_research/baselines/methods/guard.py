"""GUARD: recognises prompts about the forget set, and forbids the words of the nearest forget answer.

The costs of Deng et al. 2025 (section 4.3) are subtracted from the logits of each next token, so that greedy decoding,
sampling, beam search and teacher-forced scores all include them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from divdec.data.records import Record, RecordSet
from divdec.runs import read_json, write_json
from divdec_research.baselines.annotations import Cache, Float, Job, Tensor
from divdec_research.baselines.decoding import CompositeDecoding, Step, Trie, tokenize_words
from divdec_research.baselines.method import METHODS, BuiltModel, Method
from divdec_research.baselines.settings import ClassifierSettings
from divdec_research.ranges import NonNegative, Share, in_range

FORBIDDEN = "forbidden.json"
COSTS = ("beta", "delta", "penalty", "similarity_weight")
PUNCTUATION = ".,;:!?\"'()[]{}“”‘’«»…"


@dataclasses.dataclass(frozen=True)
class GUARDSettings(ClassifierSettings):
    """GUARD: classifies prompts, and forbids the words of the nearest forget answer."""

    beta: Annotated[float, in_range(1e-6, 1.0)] = 1.0
    """β: block the token that completes this fraction of a forbidden word's tokens."""
    delta: Annotated[float, in_range(-1.0)] = 0.5
    """δ: also block a token if the cosine similarity of its text's embedding with that of a forbidden word is at least
    this value."""
    penalty: NonNegative = 30.0
    """Penalty of blocked tokens in nats. The paper uses an infinite penalty, but likelihood metrics need a finite
    one."""
    similarity_weight: NonNegative = 1.0
    """Penalty of tokens below δ, in nats per unit of cosine."""
    common: Share = 0.02
    """Forbid a word only if at most this fraction of the retain answers contains it."""


class Guard(CompositeDecoding):
    """The target, the classifier, and each forget record's forbidden words."""

    def load(self, options: Mapping[str, Any], folder: Path) -> None:
        """See `CompositeDecoding.load`."""
        from divdec_research.baselines.prompts import read_classifier

        self.classifier, tensors = read_classifier(folder, options)
        self.prompts, self.token_embeddings = tensors["prompts"], tensors["tokens"]
        self.words: list[list[str]] = read_json(folder / FORBIDDEN)
        self.beta, self.delta, self.penalty, self.weight = (float(options[name]) for name in COSTS)
        self._tries: dict[int, Trie] = {}
        self._costs: dict[int, Tensor] = {}

    def logits(self, step: Step, caches: Sequence[Cache | None]) -> Float[Tensor, "batch kept width"]:
        """See `CompositeDecoding.logits`."""
        logits = self.model_logits(step, caches[0])
        positions = logits.shape[1]
        reading = self.classifier.read(step, caches[1], positions)
        guarded = reading.forget.nonzero().tolist()
        if not guarded:
            return logits
        costs, tokens = logits.new_zeros(logits.shape), reading.tokens.tolist()
        nearest = (reading.embeddings @ self.prompts.to(reading.embeddings).T).argmax(dim=-1)
        for row, index in guarded:
            before = tokens[row][: len(tokens[row]) - positions + index + 1]
            costs[row, index] = self.costs(int(nearest[row, index]), before, logits)
        return logits - costs

    def costs(self, record: int, before: Sequence[int], like: Tensor) -> Float[Tensor, " width"]:
        """Cost of each token after `before`, where the words of one forget record are forbidden."""
        from torch.nn.functional import pad

        words = self.words[record]
        if not words:
            return like.new_zeros(like.shape[-1])
        if record not in self._costs:
            self._tries[record] = Trie(tokenize_words(words, self.classifier.tokenizer), self.beta)
            forbidden = self.classifier.embedder.embed(words)
            similar = similarity_costs(self.token_embeddings, forbidden, self.delta, self.penalty, self.weight)
            self._costs[record] = pad(similar, (0, max(0, like.shape[-1] - len(similar))))
        costs = self._costs[record][: like.shape[-1]].to(like.device)
        if blocked := self._tries[record].after(before):
            costs = costs.clone()
            costs[sorted(blocked)] = self.penalty
        return costs


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
    return (weight * cosines.clamp(min=0)).masked_fill(cosines >= delta, penalty)


def build(job: Job, settings: GUARDSettings, output: Path) -> BuiltModel:
    """Train the classifier, and write it and the forbidden words; see `build_method`.

    Raises:
        UsageError: there is no sentence embedder.
    """
    from divdec_research.baselines.composite import write_composite
    from divdec_research.baselines.prompts import fit_classifier, write_classifier

    classifier, prompts = fit_classifier(job, settings)
    tokens = classifier.embedder.embed_tokens(job.tokenizer)
    options = write_classifier(output, classifier, settings, prompts=prompts, tokens=tokens)
    options |= {name: getattr(settings, name) for name in COSTS}
    words = forbidden_words(job.forget, job.retain, settings.common)
    write_json(output / FORBIDDEN, words)
    write_composite(job, output, "guard", options)
    without = sum(not some for some in words)
    notes = (f"{without} of {len(words)} forget answers hold no word that can be forbidden",) if without else ()
    return BuiltModel(output, notes=notes)


def _words(text: str) -> list[str]:
    return [word for piece in text.split() if (word := piece.strip(PUNCTUATION))]


def _prompt(record: Record) -> str:
    return record.prompt or " ".join(message.content for message in record.messages)


METHODS["guard"] = Method(
    "GUARD", GUARDSettings, build=build, decoding=Guard,
    source="Deng et al. 2025, GUARD: Generation-time LLM Unlearning via Adaptive Restriction and Detection",
    summary="recognise prompts about the forget set and forbid the words of the answer",
)  # fmt: skip
