"""Score answers with teacher-forced passes: the source of every likelihood metric.

A prompt is read once for all answers to it, and many steering settings share the passes of target and auxiliaries.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm
from transformers import Cache

from divdec.data.formatting import IGNORED, Example, padded
from divdec.decoding.cache import holds_tokens
from divdec.errors import UsageError
from divdec.model.modeling import DivergenceForCausalLM
from divdec.passes import logits_of, new_cache, takes_cache
from divdec.steering import Steering

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Number of logits that are read at once: they fit a CPU's cache, and keep a GPU busy.
BLOCK = {"cpu": 1 << 18, "cuda": 1 << 27}
MIN_LOG_PROBABILITY = -200.0  # float32's exp is 0 there
MASKED = 150.0  # nats
# Positions of a pass whose logits are kept. With 152,000 tokens they take 1.2 GB in float32, of several models at once.
MAX_POSITIONS = 2048

Forward = Callable[[Tensor, Tensor, None, Any, int], Any]
"""Takes input_ids, attention_mask, no position_ids (models count them), a cache or None, and logits_to_keep."""


@dataclasses.dataclass(frozen=True)
class ItemScore:
    """Likelihood of one answer, token by token, given its prompt."""

    log_probabilities: tuple[float, ...]
    """Natural log-probability of each labelled token, including the one that ends the answer."""
    hits: tuple[bool, ...]
    """Whether each labelled token is the model's first choice."""
    vocabulary_moments: tuple[tuple[float, float], ...] = ()
    """At each labelled token, mean and variance of log p over the vocabulary, weighted by p; computed on request."""

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
        """Share of the answer's tokens that are the model's first choice."""
        return sum(self.hits) / len(self.hits)


def token_log_probabilities(scores: Iterable[ItemScore]) -> list[float]:
    """Natural log-probabilities of the labelled tokens of all items."""
    return [value for item in scores for value in item.log_probabilities]


def mean_loss(scores: Iterable[ItemScore]) -> float:
    """Mean negative log-probability of the tokens of all items, in nats."""
    return -statistics.fmean(token_log_probabilities(scores))


@dataclasses.dataclass(frozen=True)
class EvaluatedModel:
    """A model with its tokenizer, and the steering settings that it is evaluated with."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    settings: tuple[Steering | None, ...] = ()
    """Settings of a steered model; (None,) for a plain one. By default the model's own."""

    def __post_init__(self) -> None:
        steered = isinstance(self.model, DivergenceForCausalLM)
        if not self.settings:
            object.__setattr__(self, "settings", (getattr(self.model, "steering", None) if steered else None,))
        if steered != all(setting is not None for setting in self.settings):
            raise UsageError("a plain model has no steering, and a steered one is never measured without")

    def scores(
        self, examples: Sequence[Example], *, moments: bool, batch_size: int, title: str | None
    ) -> list[list[ItemScore]]:
        """Score the examples under every setting; see `score_settings`."""
        if isinstance(self.model, DivergenceForCausalLM):
            settings = [setting for setting in self.settings if setting is not None]
            return score_settings(self.model, examples, settings, moments=moments, batch_size=batch_size, title=title)
        return [score(self.model, examples, moments=moments, batch_size=batch_size, title=title)]

    def under(self, setting: Steering | None) -> PreTrainedModel:
        """Set the steering, and return the model."""
        if isinstance(self.model, DivergenceForCausalLM):
            assert setting is not None
            self.model.steering = setting
        return self.model


def score(
    model: PreTrainedModel,
    examples: Sequence[Example],
    *,
    moments: bool = False,
    batch_size: int = 32,
    title: str | None = None,
) -> list[ItemScore]:
    """Score every example with a causal language model, steered or plain; its logits are used as they are.

    Args:
        model: any causal LM.
        examples: prompts with labelled answers.
        moments: also compute `vocabulary_moments`.
        batch_size: sequences in a pass; they are grouped by length.
        title: title of the progress bar; None shows none.

    Raises:
        UsageError: an answer has probability 0 or NaN; names the item.
    """
    cache = None
    if takes_cache(model):
        # Models made of several parts make their own cache.
        cache = getattr(model, "new_cache", None) or functools.partial(new_cache, model)

    def forward(input_ids: Tensor, mask: Tensor, positions: None, cache: Any, logits_to_keep: int) -> tuple[Tensor]:
        if takes_cache(model):
            return (logits_of(model, input_ids, mask, positions, cache, logits_to_keep),)
        ids, mask = input_ids.to(model.device), mask.to(model.device)
        return (model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, -logits_to_keep:],)

    (scores,) = _score(examples, forward, lambda logits: [logits], 1, cache, moments, batch_size, title)
    return scores


def score_settings(
    model: DivergenceForCausalLM,
    examples: Sequence[Example],
    settings: Sequence[Steering],
    *,
    moments: bool = False,
    keep_fill: bool = False,
    batch_size: int = 32,
    title: str | None = None,
) -> list[list[ItemScore]]:
    """Score every example under many settings, with one pass of target and auxiliaries for all of them.

    See `score` for the arguments. The model's own setting is not used. Likelihoods must be finite, so the rank rule has
    the soft fill here whatever the setting's is, as in the paper; answers are generated with the setting's own. With
    `keep_fill` it keeps that, and the hard fill lies `MASKED` below the largest logit: only first choices count then.

    Returns:
        For each setting one score per example.

    Raises:
        UsageError: an answer has probability 0 or NaN under a setting; names the item.
    """
    if not settings:
        return []
    if not keep_fill:
        settings = [dataclasses.replace(setting, fill="soft") for setting in settings]

    def steer(target: Tensor, divergence: Tensor) -> Iterable[Tensor]:
        target, divergence = target.float(), divergence.float()
        steered = (setting.apply(target, divergence) for setting in settings)  # one at a time: logits are large
        return (x.clamp(min=x.amax(-1, keepdim=True) - MASKED) for x in steered) if keep_fill else steered

    def forward(*inputs: Any) -> Sequence[Tensor]:
        return model.components(*inputs)[1:]

    return _score(examples, forward, steer, len(settings), model.new_cache, moments, batch_size, title)


def unchanged_answers(
    model: DivergenceForCausalLM,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    settings: Sequence[Steering],
    *,
    batch_size: int = 32,
    title: str | None = None,
) -> list[list[bool]]:
    """Return for each setting which greedy answers of the target it leaves as they are, from one pass for all settings.

    An answer stays if under the setting its tokens are the first choices at the same places as without steering: at all
    of them, but for near ties that a pass over the whole answer rounds otherwise than generation did. Prompts and
    answers are token ids, answers without padding.
    """
    examples = [
        Example([*prompt, *answer], [*[IGNORED] * len(prompt), *answer])
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    unsteered = Steering("linear", alpha=0.0)
    expected, *scores = score_settings(
        model, examples, [unsteered, *settings], keep_fill=True, batch_size=batch_size, title=title
    )
    if model.takedowns is not None:  # its corrections are in the scores of every setting
        expected = score(model.target, examples, batch_size=batch_size)
    return [[item.hits == other.hits for item, other in zip(row, expected, strict=True)] for row in scores]


def _score(
    examples: Sequence[Example],
    forward: Forward,
    steer: Callable[..., Iterable[Tensor]],
    count: int,
    cache: Callable[[], Cache] | None,
    moments: bool,
    batch_size: int,
    title: str | None,
) -> list[list[ItemScore]]:
    """Score the examples under `count` settings, for which `steer` makes logits from the outputs of `forward`."""
    for index, example in enumerate(examples):
        if all(label == IGNORED for label in example.labels[1:]):
            raise UsageError(f"item {index}: it has no labelled token to score")

    scores: dict[tuple[int, int], ItemScore] = {}
    with torch.inference_mode():
        for indices, logits, labels in _passes(examples, forward, cache, batch_size, title):
            for setting, rows in enumerate(_label_rows(logits, labels, steer, moments)):
                start = 0
                for index, labelled in zip(indices, (labels != IGNORED).sum(dim=1).tolist(), strict=True):
                    scores[setting, index] = _item_score(index, rows[start : start + labelled])
                    start += labelled
    return [[scores[setting, index] for index in range(len(examples))] for setting in range(count)]


def _passes(
    examples: Sequence[Example],
    forward: Forward,
    new_cache: Callable[[], Cache] | None,
    batch_size: int,
    title: str | None,
) -> Iterator[tuple[list[int], Sequence[Tensor], Int[Tensor, "batch positions"]]]:
    """Run the models over every example.

    Without a cache, or with one from which rows cannot be selected, a prompt is read again for every answer. Yields the
    indices of the examples in a pass, the outputs of `forward` at its last positions, and the labels of the tokens that
    these predict.
    """
    shared: list[tuple[tuple[int, ...], list[int]]] = []  # prompts, and the examples that begin with them
    if new_cache is not None and all(map(holds_tokens, new_cache().layers)):
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, example in enumerate(examples):
            # A prompt's last token is left to the answer that it predicts.
            groups.setdefault(tuple(example.input_ids[: max(example.prompt_length - 1, 0)]), []).append(index)
        shared = [(prompt, indices) for prompt, indices in groups.items() if len(indices) > 1 and prompt]
    alone = set(range(len(examples))).difference(*(indices for _, indices in shared))
    with tqdm(total=len(examples), desc=title, unit="item", disable=title is None, dynamic_ncols=True) as bar:
        batches = _batches(alone, lambda index: len(examples[index].input_ids), batch_size)
        for indices in (part for batch in batches for part in _fitting(batch, examples)):
            yield indices, *_run(forward, [examples[index] for index in indices])
            bar.update(len(indices))
        # Prompts in one pass have one length. Padding on the left would not do: architectures differ in where positions
        # begin and what shifts them.
        shared.sort(key=lambda group: len(group[0]))
        batches = (
            batch
            for _, same_length in itertools.groupby(shared, key=lambda group: len(group[0]))
            for batch in _batches(same_length, lambda group: 0, batch_size)
        )
        for batch in batches:
            cache, prompts = new_cache(), torch.tensor([prompt for prompt, _ in batch])  # pyright: ignore[reportOptionalCall]
            start = prompts.shape[1]
            forward(prompts, torch.ones_like(prompts), None, cache, 1)
            row_of = {index: row for row, (_, indices) in enumerate(batch) for index in indices}
            parts = _batches(row_of, lambda index: len(examples[index].input_ids), batch_size)
            for indices in (part for batch in parts for part in _fitting(batch, examples)):
                rows = torch.tensor([row_of[index] for index in indices])
                answers = [
                    Example(examples[index].input_ids[start:], examples[index].labels[start:]) for index in indices
                ]
                yield indices, *_run(forward, answers, _select_rows(cache, rows), start)
                bar.update(len(indices))


def _run(
    forward: Forward, examples: Sequence[Example], cache: Cache | None = None, past: int = 0
) -> tuple[Sequence[Tensor], Int[Tensor, "batch positions"]]:
    """Run one right-padded pass; `past` tokens of each row are in the cache."""
    # The last token of an answer predicts nothing.
    input_ids = padded([example.input_ids[:-1] for example in examples], 0)
    mask = padded([[1] * (past + len(example.input_ids) - 1) for example in examples], 0)
    labels = padded([example.labels[1:] for example in examples], IGNORED)
    logits_to_keep = labels.shape[1] + 1 - min(max(example.prompt_length, 1) for example in examples)
    return forward(input_ids, mask, None, cache, logits_to_keep), labels[:, -logits_to_keep:]


def _batches(items: Any, length: Callable[[Any], int], size: int) -> Iterator[list[Any]]:
    order = sorted(items, key=length)
    return (order[start : start + size] for start in range(0, len(order), size))


def _fitting(indices: list[int], examples: Sequence[Example]) -> Iterator[list[int]]:
    """Halve a batch until it asks for the logits of at most `MAX_POSITIONS` positions."""
    some = [examples[index] for index in indices]
    kept = max(len(example.input_ids) for example in some) - min(example.prompt_length for example in some)
    if len(indices) == 1 or len(indices) * kept <= MAX_POSITIONS:
        yield indices
    else:
        half = len(indices) // 2
        yield from _fitting(indices[:half], examples)
        yield from _fitting(indices[half:], examples)


def _select_rows(cache: Cache, rows: Int[Tensor, " batch"]) -> Cache:
    """Make a cache of these rows of another, which does not change."""
    # Selecting makes new tensors, so the copy may share them until then.
    shared = {id(value): value for layer in cache.layers for value in vars(layer).values() if isinstance(value, Tensor)}
    selected = copy.deepcopy(cache, shared)
    selected.batch_select_indices(rows)
    return selected


def _label_rows(
    outputs: Sequence[Tensor],
    labels: Int[Tensor, "batch positions"],
    steer: Callable[..., Iterable[Tensor]],
    moments: bool,
) -> list[list[list[float]]]:
    """Compute `_label_columns` under each setting; only the positions before labelled tokens are steered."""
    device, vocab_size = outputs[0].device, outputs[0].shape[-1]
    size = max(1, BLOCK.get(device.type, BLOCK["cuda"]) // vocab_size)
    flat = [output.flatten(0, 1) for output in outputs]
    chosen = labels != IGNORED
    positions, labels = chosen.flatten().nonzero()[:, 0].to(device), labels[chosen].to(device)
    blocks = [
        [_label_columns(logits, block, moments) for logits in steer(*(output[where] for output in flat))]
        for where, block in zip(positions.split(size), labels.split(size), strict=True)
    ]
    # One transfer for the whole pass.
    return torch.stack([torch.cat(columns) for columns in zip(*blocks, strict=True)]).tolist()


def _item_score(index: int, rows: Sequence[Sequence[float]]) -> ItemScore:
    log_probabilities, hits, *moments = zip(*rows, strict=True)
    if not all(map(math.isfinite, log_probabilities)):
        raise UsageError(
            f"item {index}: its answer has a token of probability 0 or NaN; the rank rule's hard fill gives that: "
            "score with the soft one (rank:K:soft), or the model is broken"
        )
    return ItemScore(log_probabilities, tuple(map(bool, hits)), tuple(zip(*moments, strict=True)))


def _label_columns(
    logits: Float[Tensor, "labelled vocab"], labels: Int[Tensor, " labelled"], moments: bool
) -> Float[Tensor, "labelled columns"]:
    """For each label log p, whether it is the first choice, and with `moments` those of log p over the vocabulary.

    μ = Σ p·log p and σ² = Σ p·(log p)² − μ² (min-k++). The sums are those of logits less the largest, which leaves σ²
    unchanged and is more exact.
    """
    logits, labels = logits.float(), labels[:, None]
    own_logit = logits.gather(1, labels)
    # The largest of the others tells whether the label is first: much cheaper than argmax, except for ties.
    others = logits.scatter_(1, labels, -math.inf).amax(dim=-1, keepdim=True)
    logits.scatter_(1, labels, own_logit)
    first = own_logit > others
    tied = (own_logit == others)[:, 0]
    if tied.any():
        first[tied] = logits[tied].argmax(dim=-1, keepdim=True) == labels[tied]
    below = logits - torch.maximum(own_logit, others)
    weights = below.exp()
    total = weights.sum(dim=-1, keepdim=True)
    log_total = total.log()
    log_p = below.gather(1, labels) - log_total
    if not moments:
        return torch.cat([log_p, first], dim=1)
    # A token of probability 0 adds nothing, however low its logit is.
    below.clamp_(min=MIN_LOG_PROBABILITY)
    weights.mul_(below)
    mean = weights.sum(dim=-1, keepdim=True) / total
    variance = torch.linalg.vecdot(weights, below)[:, None] / total - mean.square()
    return torch.cat([log_p, first, mean - log_total, variance], dim=1)
