"""Share of the target's probability that steering took from a reply, and its threshold: `divdec serve --on-suppressed`.

Where the target's answer is forgotten, a steered model invents another one. The share that steering took is the total
variation distance between the target's and the steered distribution of the next token, at the token of the reply where
it is largest: 0 where steering changed nothing, near 1 where it took a token that the target was sure of.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from divdec.data.formatting import Format, encode_prompts
from divdec.data.records import RecordSet
from divdec.errors import FailedClosed
from divdec.evaluation.generation import continuations, without_padding
from divdec.evaluation.recitation import passages_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from divdec.model.modeling import DivergenceForCausalLM

REPLIES = 16  # of a set, at most
LENGTH = 32  # tokens of a reply, at most
MIN_DIFFERENCE = 0.5
"""Least difference of the shares of marked replies, forget set less others, at which a threshold is recommended."""


class SuppressionPass:
    """A pass over prompt and reply that measures what steering took, by chunks, so that other requests do not wait.

    Attributes:
        chunk: tokens in one step.
    """

    def __init__(self, model: DivergenceForCausalLM, tokens: Sequence[int], prompt_length: int, chunk: int) -> None:
        """Prepare.

        Args:
            model: the steered model.
            tokens: prompt and reply.
            prompt_length: tokens of the prompt, at least 1.
            chunk: tokens in one step.
        """
        self.chunk = chunk
        self._model, self._prompt_length = model, prompt_length
        self._cache, self._eligible = model.new_cache(), model.steering.eligible(model.vocab_size)
        self._ids = torch.tensor([list(tokens[:-1])], device=model.device)
        self._largest = torch.zeros((), device=model.device)
        self._read = 0

    @torch.inference_mode()
    def step(self) -> float | None:
        """Read the next chunk. After the last one, return the largest share that steering took at one token.

        Raises:
            FailedClosed: a logit is not finite.
        """
        model, start = self._model, self._read
        self._read = end = min(start + self.chunk, self._ids.shape[1])
        if start < end:
            keep = min(end - start, end - self._prompt_length + 1)  # after the prompt's last token, the reply's first
            model.follow_registry(self._cache)
            chunk = self._ids[:, start:end]
            target, corrected, divergence = model.unsteered_components(
                chunk, past_key_values=self._cache, logits_to_keep=max(keep, 1)
            )
            if keep > 0:
                eligible = None if self._eligible is None else self._eligible.to(corrected.device)
                steered = model.steering.apply(corrected, divergence, eligible)
                removed_probability = (target.float().softmax(-1) - steered.float().softmax(-1)).clamp(min=0).sum(-1)
                # NaN stays NaN, which is refused.
                self._largest = torch.maximum(self._largest, removed_probability.max().to(self._largest.device))
        return float(self._largest) if end == self._ids.shape[1] else None


def suppressed_share(model: DivergenceForCausalLM, tokens: Sequence[int], prompt_length: int, chunk: int) -> float:
    """Return the largest share of probability that steering took at one token of a reply; see `SuppressionPass`."""
    measurement = SuppressionPass(model, tokens, prompt_length, chunk)
    while (share := measurement.step()) is None:
        pass
    return share


@dataclasses.dataclass(frozen=True)
class SuppressionThreshold:
    """Value of `divdec serve --suppressed-share` that best tells replies about the forget set from others."""

    share: float | None
    """None if no value tells them apart."""
    marked: dict[str, int] = dataclasses.field(default_factory=dict)
    """By set, the number of replies from which steering took at least `share`."""
    replies: dict[str, int] = dataclasses.field(default_factory=dict)
    """By set, the number of replies."""

    @classmethod
    def between(cls, shares: Mapping[str, Sequence[float]]) -> SuppressionThreshold:
        """Choose the threshold with the largest difference in marked replies, forget set less others.

        Args:
            shares: by set, the share of probability that steering took from each reply, 0 to 1. All sets but 'forget'
                count as others, each with the same weight.
        """
        shares = {name: set_shares for name, set_shares in shares.items() if set_shares}
        if "forget" not in shares or len(shares) == 1:
            return cls(None)

        def difference(share: float) -> float:
            marked = {
                name: statistics.fmean(value >= share for value in set_shares) for name, set_shares in shares.items()
            }
            return marked.pop("forget") - statistics.fmean(marked.values())

        values = sorted({0.0, 1.0, *(value for set_shares in shares.values() for value in set_shares)})
        best = max((_middle(low, high) for low, high in itertools.pairwise(values)), key=difference)
        if difference(best) < MIN_DIFFERENCE:
            return cls(None)
        marked = {name: sum(value >= best for value in set_shares) for name, set_shares in shares.items()}
        return cls(best, marked, {name: len(set_shares) for name, set_shares in shares.items()})

    def __str__(self) -> str:
        if self.share is None:
            return "no --suppressed-share tells replies about the forget set from others (divdec serve --on-suppressed)"
        sets = ", ".join(f"{name} {self.marked[name]} of {count}" for name, count in self.replies.items())
        return f"--suppressed-share {self.share:g} (divdec serve --on-suppressed) marks these short replies: {sets}"


def _middle(low: float, high: float) -> float:
    """Return a short number between two others."""
    middle = (low + high) / 2
    return rounded if low < (rounded := round(middle, 3)) < high else middle


def measure_suppression(
    model: DivergenceForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    sets: Mapping[str, RecordSet],
    *,
    form: Format = Format(),  # noqa: B008
    batch_size: int = 32,
) -> SuppressionThreshold:
    """Choose the threshold by greedy replies of the steered model, of at most `LENGTH` tokens.

    Args:
        model: the steered model.
        tokenizer: its tokenizer.
        sets: 'forget', and others whose replies should not be marked. At most `REPLIES` records of each are drawn, or
            passages if they are plain text.
        form: layout of conversations.
        batch_size: sequences in a pass.

    Raises:
        FailedClosed: a logit is not finite.
    """
    room = (getattr(model.config, "max_position_embeddings", None) or math.inf) - LENGTH
    shares = {}
    for name, records in sets.items():
        if records.kind == "text":
            prompts = [passage.prompt for passage in passages_of(records, tokenizer, most=REPLIES)[0]]
        else:
            drawn = random.Random(0).sample(records.records, min(REPLIES, len(records)))
            prompts = encode_prompts(drawn, tokenizer, form)
        prompts = [prompt for prompt in prompts if len(prompt) <= room]
        shares[name] = shares_of_replies(model, tokenizer, prompts, batch_size=batch_size)
    return SuppressionThreshold.between(shares)


def shares_of_replies(
    model: DivergenceForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    batch_size: int = 32,
) -> list[float]:
    """Return for each prompt the share of probability that steering took from the greedy reply, 0 to 1.

    Args:
        model: the steered model.
        tokenizer: its tokenizer.
        prompts: token ids of each prompt. A reply has at most `LENGTH` tokens.
        batch_size: sequences in a pass.

    Raises:
        FailedClosed: a logit is not finite.
    """
    shares = []
    replies = continuations(model, tokenizer, prompts, max_new_tokens=LENGTH, batch_size=batch_size)
    for prompt, ids in zip(prompts, replies, strict=True):
        tokens = [*prompt, *without_padding(model, ids)]
        shares.append(suppressed_share(model, tokens, len(prompt), len(tokens)))
    if not all(map(math.isfinite, shares)):
        raise FailedClosed("a logit is not finite: no threshold is chosen; check the bundle with divdec doctor")
    return shares
