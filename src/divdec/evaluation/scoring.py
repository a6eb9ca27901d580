"""One teacher-forced pass over a set: what every likelihood metric reads from.

Many steering settings are scored on the same pass of target and auxiliaries. It knows nothing of benchmarks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from divdec.data.formatting import IGNORED, Example
from divdec.errors import UsageError
from divdec.evaluation.passes import Forward, Pass, passes
from divdec.evaluation.sharding import together
from divdec.evaluation.sweep_ordering import sweep
from divdec.experts.neural import logits_of, new_cache, takes_cache
from divdec.model.modeling import DivergenceForCausalLM
from divdec.steering import Steering

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

# How many logits are read at a time: what a processor's own memory holds, and what a GPU is kept busy by.
BLOCK = {"cpu": 1 << 18, "cuda": 1 << 27}
LEAST = -200.0  # float32's exp is 0 there


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
    def loss_without_end(self) -> float:
        """The same without the last labelled token, which ends an answer; NaN where there is no other."""
        log_probabilities = self.log_probabilities[:-1]
        return -math.fsum(log_probabilities) / len(log_probabilities) if log_probabilities else math.nan

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
    forward, cache = _running(model)

    def own() -> dict[int, ItemScore]:
        scores: dict[int, ItemScore] = {}
        with torch.inference_mode():
            for found in passes(_checked(examples), forward, cache, batch_size=batch_size, title=title):
                scores |= _read(found, (found.output,), lambda logits: [logits], moments)[0]
        return scores

    scores = together(own)
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
    if not settings:
        return []
    ranked = {setting.vocabulary: setting for setting in settings if setting.rule == "rank"}
    if len(ranked) > 1:
        raise UsageError("rank settings that are scored together must have one eligible vocabulary")
    eligible = next(iter(ranked.values())).eligible(model.vocab_size) if ranked else None
    forward, new = model.components, model.new_cache

    def own() -> dict[tuple[int, int], ItemScore]:
        scores: dict[tuple[int, int], ItemScore] = {}
        with torch.inference_mode():
            for found in passes(_checked(examples), forward, new, batch_size=batch_size, title=title):
                # Only the places that say how likely a labelled token is are steered.
                by_setting = _read(
                    found, found.output, lambda target, added: sweep(settings, target, added, eligible), moments
                )
                for number, items in enumerate(by_setting):
                    scores |= {(number, place): item for place, item in items.items()}
        return scores

    scores = together(own)
    return [[scores[number, place] for place in range(len(examples))] for number in range(len(settings))]


def _running(model: PreTrainedModel) -> tuple[Forward, Callable[[], Cache] | None]:
    """How a model is run, and what makes a cache for it; None where it takes none."""
    if takes_cache(model):
        # Models made of several parts make their own.
        new = getattr(model, "new_cache", None) or functools.partial(new_cache, model)
        return functools.partial(logits_of, model), new

    def run(input_ids: Tensor, mask: Tensor, positions: None, cache: None, kept: int) -> Tensor:
        ids, mask = input_ids.to(model.device), mask.to(model.device)
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, -kept:]

    return run, None


def _checked(examples: Sequence[Example]) -> Sequence[Example]:
    for place, example in enumerate(examples):
        if all(label == IGNORED for label in example.labels[1:]):
            raise UsageError(f"item {place}: it has no labelled token to score")
    return examples


def _read(
    found: Pass,
    parts: Sequence[Float[Tensor, "batch kept vocab"]],
    steer: Callable[..., Iterable[Float[Tensor, "some vocab"]]],
    moments: bool,
) -> list[dict[int, ItemScore]]:
    """Each item's score under each setting, for which `steer` makes logits from those of some labelled tokens."""
    device, vocab_size = parts[0].device, parts[0].shape[-1]
    rows = max(1, BLOCK.get(device.type, BLOCK["cuda"]) // vocab_size)
    flat = [part.flatten(0, 1) for part in parts]
    places, labels = found.chosen.flatten().nonzero()[:, 0].to(device), found.labels.to(device)
    blocks = [
        [_tokens(logits, some, moments) for logits in steer(*(part[where] for part in flat))]
        for where, some in zip(places.split(rows), labels.split(rows), strict=True)
    ]
    # One transfer for all of a pass.
    by_setting = torch.stack([torch.cat(tokens) for tokens in zip(*blocks, strict=True)]).tolist()
    return [_scores(found, tokens) for tokens in by_setting]


def _scores(found: Pass, tokens: Sequence[Sequence[float]]) -> dict[int, ItemScore]:
    scores, start = {}, 0
    for item, count in zip(found.items, found.chosen.sum(dim=1).tolist(), strict=True):
        log_probabilities, hits, *further = zip(*tokens[start : start + count], strict=True)
        start += count
        if not all(map(math.isfinite, log_probabilities)):
            raise UsageError(
                f"item {item}: its answer has a token of probability 0 or NaN; hard rank masking gives that: "
                "score with the soft fill (rank:K:soft)"
            )
        scores[item] = ItemScore(log_probabilities, tuple(map(bool, hits)), tuple(zip(*further, strict=True)))
    return scores


def _tokens(
    logits: Float[Tensor, "labelled vocab"], labels: Int[Tensor, " labelled"], moments: bool
) -> Float[Tensor, "labelled columns"]:
    """For each label log p, whether it is the first choice, and with `moments` those of log p over the vocabulary.

    μ = Σ p·log p and σ² = Σ p·(log p)² − μ² (min-k++). The sums are those of logits less the
    largest, which leaves σ² as it is and is more exact.
    """
    logits, labels = logits.float(), labels[:, None]
    own = logits.gather(1, labels)
    # Without its own logit the rest tells whether the label is first: much cheaper than argmax, save for ties.
    others = logits.scatter_(1, labels, -math.inf).amax(dim=-1, keepdim=True)
    logits.scatter_(1, labels, own)
    first = own > others
    tied = (own == others)[:, 0]
    if tied.any():
        first[tied] = logits[tied].argmax(dim=-1, keepdim=True) == labels[tied]
    below = logits - torch.maximum(own, others)
    weights = below.exp()
    total = weights.sum(dim=-1, keepdim=True)
    log_total = total.log()
    log_p = below.gather(1, labels) - log_total
    if not moments:
        return torch.cat([log_p, first], dim=1)
    # A token of probability 0 adds nothing, however far below it lies.
    below.clamp_(min=LEAST)
    weights.mul_(below)
    mean = weights.sum(dim=-1, keepdim=True) / total
    variance = torch.linalg.vecdot(weights, below)[:, None] / total - mean.square()
    return torch.cat([log_p, first, mean - log_total, variance], dim=1)
