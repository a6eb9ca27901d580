"""Verbatim memorization of texts that a registry has taken down, and the strength at which it ends.

A passage is recited if the greedy continuation of its prompt has `RUN` consecutive tokens in common with the text's
continuation, or all of them if there are fewer.
"""

from __future__ import annotations

import difflib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from divdec.data.formatting import WHOLE, encode_prompts, encode_records
from divdec.data.records import Record, RecordSet
from divdec.evaluation.generation import continuations
from divdec.model.modeling import DivergenceForCausalLM
from divdec.takedowns.correction import TakedownCorrection
from divdec.takedowns.registry import Registry
from divdec.takedowns.store import TakedownRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PASSAGES = 20  # measured at most
PREFIX, LENGTH, RUN = 32, 32, 16  # tokens: shortest prompt of a plain text, continuation, recited passage
CONTEXT = 512  # tokens of a plain text's longest prompt
STRONGEST = 80.0  # largest strength: a greater one changes other answers (docs/limits.md)


@dataclass(frozen=True)
class Passage:
    """A prompt from a text, and the continuation that a model may recite."""

    prompt: list[int]
    continuation: list[int]


def passages_of(
    texts: RecordSet, tokenizer: PreTrainedTokenizerBase, *, most: int = PASSAGES, seed: int = 0
) -> tuple[list[Passage], int]:
    """Draw passages from texts, and count all passages.

    A record with a prompt or question is one passage: its answer, after the prompt in the model's layout. A plain text
    has one every `LENGTH` tokens from its `PREFIX`-th on, each after the text before it (the last `CONTEXT` tokens at
    most). A shorter text is one passage: its last two thirds.

    Args:
        texts: the texts of a request.
        tokenizer: tokenizer of the target.
        most: number of passages, at most.
        seed: seed of the random choice.
    """
    rng = random.Random(seed)
    special = set(tokenizer.all_special_ids)
    if texts.kind == "text":
        prompts = encode_prompts([Record("", prompt=record.answer) for record in texts], tokenizer)
        passages = [passage for ids in prompts for passage in _of_text(ids, special)]
        return rng.sample(passages, min(most, len(passages))), len(passages)
    records = rng.sample(texts.records, min(most, len(texts)))
    passages = []
    for example in encode_records(records, tokenizer, WHOLE):
        ids, start = example.input_ids, example.prompt_length
        passages.append(Passage(ids[:start], [token for token in ids[start:][:LENGTH] if token not in special]))
    return [passage for passage in passages if passage.prompt and passage.continuation], len(texts)


def count_recited(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    passages: Sequence[Passage],
    *,
    title: str | None = None,
) -> int:
    """Count the passages that a model, steered or plain, recites."""
    if not passages:
        return 0
    room = getattr(model.config, "max_position_embeddings", None) or math.inf
    prompts = [passage.prompt[-int(min(room - LENGTH, len(passage.prompt))) :] for passage in passages]
    outputs = continuations(model, tokenizer, prompts, max_new_tokens=LENGTH, title=title)
    return sum(
        longest_run(answer, passage.continuation) >= min(RUN, len(passage.continuation))
        for answer, passage in zip(outputs, passages, strict=True)
    )


def longest_run(answer: Sequence[int], text: Sequence[int]) -> int:
    """Length of the longest run of tokens that an answer and a text have in common."""
    return difflib.SequenceMatcher(None, answer, text, autojunk=False).find_longest_match().size


def measure(
    registry: Registry,
    entry: TakedownRequest,
    texts: RecordSet,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    progress: bool = False,
) -> dict[str, Any]:
    """Measure a request in force, and raise the registry's strength until no passage of it is recited.

    If no strength is enough, the registry keeps the lowest strength at which the fewest passages are recited.

    Returns:
        The measurement, which the registry also records: `passages` measured of `passages_in_all`, `recited_before` by
        the unsteered target, `recited_after` under the takedowns, the registry's `strength`, the `strength_before`, and
        the `strongest` tried.

    Raises:
        FailedClosed: the registry is damaged.
    """
    passages, in_all = passages_of(texts, tokenizer)
    before = count_recited(target, tokenizer, passages, title="before" if progress else None)
    strength_before = strength = registry.strength
    tried: dict[float, int] = {}
    while True:
        takedowns = TakedownCorrection(registry.folder, strength=strength)
        steered = DivergenceForCausalLM.from_experts(target, None, takedowns=takedowns)
        title = f"at strength {strength:g}" if progress else None
        tried[strength] = count_recited(steered, tokenizer, passages, title=title)
        if not tried[strength] or 2 * strength > STRONGEST:
            break
        strength *= 2
    best = min(tried, key=lambda each: (tried[each], each))
    registry.raise_strength(best)
    measured = {
        "passages": len(passages),
        "passages_in_all": in_all,
        "recited_before": before,
        "recited_after": tried[best],
        "strength": best,
        "strength_before": strength_before,
        "strongest": strength,
    }
    registry.record(entry, measured)
    return measured


def measured_text(measured: dict[str, Any]) -> str:
    """Describe a measurement in a sentence or two."""
    passages, before, after = (measured[name] for name in ("passages", "recited_before", "recited_after"))
    if not passages:
        return "not measured: the texts are too short to be begun and continued"
    drawn = f" ({passages} drawn of {measured['passages_in_all']:,})" if passages < measured["passages_in_all"] else ""
    text = (
        f"{before} of {passages} passages{drawn} were recited word for word before, {after} now, "
        f"at strength {measured['strength']:g}"
    )
    if measured["strength"] > measured["strength_before"]:
        text += f", raised from {measured['strength_before']:g}"
    if after:
        text += (
            f" (tried up to {measured['strongest']:g}). The request stays in force, and the texts are STILL RECITED: "
            "train a pair for them (divdec train) and serve it with this registry"
        )
    return text


def _of_text(ids: list[int], special: set[int]) -> list[Passage]:
    lead = next((index for index, token in enumerate(ids) if token not in special), len(ids))
    start, body = ids[:lead], ids[lead:]
    if len(body) < PREFIX + RUN:
        cut = max(1, len(body) // 3)
        return [Passage(start + body[:cut], body[cut:][:LENGTH])] if len(body) > 1 else []
    return [
        Passage(start + body[max(index - CONTEXT, 0) : index], body[index : index + LENGTH])
        for index in range(PREFIX, len(body) - RUN + 1, LENGTH)
    ]
