"""One teacher-forced pass over a set: what every likelihood metric reads from.

Many steering settings are scored on the same pass of target and auxiliaries. It knows nothing of benchmarks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from divdec.data.formatting import IGNORED, Example
from divdec.errors import UsageError
from divdec.steering import Steering

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from divdec.model.modeling import DivergenceForCausalLM


@dataclasses.dataclass(frozen=True)
class ItemScore:
    """How a model takes one answer, given its prompt and the answer's earlier tokens."""

    log_probabilities: tuple[float, ...]
    """Natural logarithm of each labelled token's probability, the one that ends the answer included."""
    hits: tuple[bool, ...]
    """Whether each labelled token is the model's first choice."""
    vocabulary_moments: tuple[tuple[float, float], ...] = ()
    """At each labelled token, mean and variance of log p over the vocabulary, weighted by p; empty unless asked for."""

    @property
    def loss(self) -> float:
        """Mean negative log-probability, in nats per token."""
        return -math.fsum(self.log_probabilities) / len(self.log_probabilities)

    @property
    def probability(self) -> float:
        """Length-normalised probability of the answer, exp(−loss) (TOFU)."""
        return math.exp(-self.loss)

    @property
    def token_accuracy(self) -> float:
        """Share of the answer's tokens that are the model's first choice (exact memorization)."""
        return sum(self.hits) / len(self.hits)


def score(
    model: PreTrainedModel,
    examples: Sequence[Example],
    *,
    moments: bool = False,
    batch_size: int = 32,
    title: str | None = None,
) -> list[ItemScore]:
    """Score every example with a causal language model, steered or plain.

    Args:
        model: any causal LM; its logits are taken as they leave it.
        examples: prompt and labelled answer each.
        moments: compute `vocabulary_moments` too.
        batch_size: sequences in a pass; they are grouped by length.
        title: what the progress bar is called; None shows none.

    Returns:
        One score an example, in their order.

    Raises:
        UsageError: an answer has probability 0 or NaN; names the item.
    """
    scores: dict[int, ItemScore] = {}
    with torch.inference_mode():
        for places, batch in _batches(examples, batch_size, title):
            logits = model(
                input_ids=batch["input_ids"].to(model.device),
                attention_mask=batch["attention_mask"].to(model.device),
                use_cache=False,
            ).logits
            _read(logits, batch["labels"], places, scores, moments)
    return [scores[place] for place in range(len(examples))]


def score_settings(
    model: DivergenceForCausalLM,
    examples: Sequence[Example],
    settings: Sequence[Steering],
    *,
    moments: bool = False,
    batch_size: int = 32,
    title: str | None = None,
) -> list[list[ItemScore]]:
    """Score every example under many settings, with one pass of target and auxiliaries for all of them.

    Args:
        model: the steered model; its own setting plays no part.
        examples: prompt and labelled answer each.
        settings: what to steer with.
        moments: compute `vocabulary_moments` too.
        batch_size: sequences in a pass.
        title: what the progress bar is called; None shows none.

    Returns:
        For each setting the scores, in the order of the examples.

    Raises:
        UsageError: an answer has probability 0 under a setting, as hard rank masking may give.
    """
    scores: list[dict[int, ItemScore]] = [{} for _ in settings]
    eligible = [steering.eligible(model.vocab_size) for steering in settings]
    with torch.inference_mode():
        for places, batch in _batches(examples, batch_size, title):
            target_logits, divergence = model.components(batch["input_ids"], batch["attention_mask"])
            # Only the places that say how likely a labelled token is are steered.
            labels, chosen = _labelled(batch["labels"], target_logits.device)
            target_logits, divergence = target_logits[:, :-1][chosen], divergence[:, :-1][chosen]
            for steering, mask, found in zip(settings, eligible, scores, strict=True):
                mask = mask.to(target_logits.device) if mask is not None else None
                logits = steering.apply(target_logits, divergence, mask)
                _read_labelled(logits, labels, chosen.sum(dim=1).tolist(), places, found, moments)
    return [[found[place] for place in range(len(examples))] for found in scores]


def _batches(
    examples: Sequence[Example], batch_size: int, title: str | None
) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Right-padded batches of similar length, with the places of their items."""
    order = sorted(range(len(examples)), key=lambda place: len(examples[place].input_ids))
    with tqdm(total=len(examples), desc=title, unit="item", disable=title is None, dynamic_ncols=True) as bar:
        for start in range(0, len(order), batch_size):
            places = order[start : start + batch_size]
            chosen = [examples[place] for place in places]
            width = max(len(example.input_ids) for example in chosen)
            yield (
                places,
                {
                    "input_ids": _padded([example.input_ids for example in chosen], width, 0),
                    "attention_mask": _padded([[1] * len(example.input_ids) for example in chosen], width, 0),
                    "labels": _padded([example.labels for example in chosen], width, IGNORED),
                },
            )
            bar.update(len(places))


def _padded(rows: Sequence[Sequence[int]], width: int, filling: int) -> Int[Tensor, "batch width"]:
    return torch.tensor([[*row, *[filling] * (width - len(row))] for row in rows])


def _labelled(
    labels: Int[Tensor, "batch width"], device: torch.device
) -> tuple[Int[Tensor, " labelled"], Bool[Tensor, "batch places"]]:
    """The labelled tokens of a batch, and the places whose logits say how likely they are: each one before."""
    chosen = (labels[:, 1:] != IGNORED).to(device)
    return labels[:, 1:].to(device)[chosen], chosen


def _read(
    logits: Float[Tensor, "batch width vocab"],
    labels: Int[Tensor, "batch width"],
    places: Sequence[int],
    scores: dict[int, ItemScore],
    moments: bool,
) -> None:
    targets, chosen = _labelled(labels, logits.device)
    _read_labelled(logits[:, :-1][chosen], targets, chosen.sum(dim=1).tolist(), places, scores, moments)


def _read_labelled(
    logits: Float[Tensor, "labelled vocab"],
    targets: Int[Tensor, " labelled"],
    counts: Sequence[int],
    places: Sequence[int],
    scores: dict[int, ItemScore],
    moments: bool,
) -> None:
    """Collect each item's score; `counts` says how many of the labelled tokens each item has."""
    log_p = logits.float().log_softmax(dim=-1)
    log_probabilities = log_p.gather(1, targets[:, None])[:, 0].tolist()
    hits = (logits.argmax(dim=-1) == targets).tolist()
    found = _moments(log_p) if moments else []
    start = 0
    for place, count in zip(places, counts, strict=True):
        item = slice(start, start + count)
        start += count
        if count == 0:
            raise UsageError(f"item {place}: it has no labelled token to score")
        if not all(map(math.isfinite, log_probabilities[item])):
            raise UsageError(
                f"item {place}: its answer has a token of probability 0 or NaN; hard rank masking gives that: "
                "score with the soft fill (rank:K:soft)"
            )
        scores[place] = ItemScore(tuple(log_probabilities[item]), tuple(hits[item]), tuple(found[item]))


def _moments(log_p: Float[Tensor, "labelled vocab"]) -> list[tuple[float, float]]:
    """μ = Σ p·log p and σ² = Σ p·(log p)² − μ² (min-k++); a token of probability 0 adds nothing to either."""
    p = log_p.exp()
    finite = log_p.masked_fill(p == 0, 0.0)
    mean = (p * finite).sum(dim=-1)
    variance = (p * finite.square()).sum(dim=-1) - mean.square()
    return list(zip(mean.tolist(), variance.tolist(), strict=True))
