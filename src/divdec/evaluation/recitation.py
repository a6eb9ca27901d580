"""Recitation: whether a model continues a text word for word.

A passage of a text is recited if the greedy continuation of its prompt has `RUN` consecutive tokens in common with the
text's continuation, or all of them if there are fewer.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from divdec.data.formatting import WHOLE, Example, encode_prompts, encode_records
from divdec.data.records import Record, RecordSet
from divdec.evaluation.generation import continuations
from divdec.evaluation.phrases import ENCLOSING, find_words
from divdec.takedowns.canonical import canonical_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PASSAGES = 20  # measured at most
PREFIX, LENGTH, RUN = 32, 32, 16  # tokens: shortest prompt of a plain text, continuation, recited passage
CONTEXT = 512  # tokens of a plain text's longest prompt


@dataclasses.dataclass(frozen=True)
class Passage:
    """A prompt from a text, and the continuation that a model may recite."""

    prompt: list[int]
    continuation: list[int]


def passages_of(
    texts: RecordSet, tokenizer: PreTrainedTokenizerBase, *, most: int = PASSAGES, seed: int = 0
) -> tuple[list[Passage], int]:
    """Draw at most `most` passages from texts, and count all passages.

    The answer to a prompt or question has one every `LENGTH` tokens, each after the prompt, in the model's layout, and
    the answer before it. A plain text has one every `LENGTH` tokens from its `PREFIX`-th on, each after the text before
    it (the last `CONTEXT` tokens at most). A shorter text is one passage: its last two thirds.
    """
    rng = random.Random(seed)
    special = set(tokenizer.all_special_ids)
    if texts.kind == "text":
        prompts = encode_prompts([Record("", prompt=record.answer) for record in texts], tokenizer)
        passages = [passage for ids in prompts for passage in _of_text(ids, special)]
    else:
        examples = encode_records(texts.records, tokenizer, WHOLE)
        passages = [passage for example in examples for passage in _of_answer(example, special)]
    return rng.sample(passages, min(most, len(passages))), len(passages)


def recites(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    passages: Sequence[Passage],
    *,
    title: str | None = None,
    **options: Any,
) -> list[bool]:
    """Tell of each passage whether a model, steered or plain, recites it; `options` are those of `generate`."""
    if not passages:
        return []
    room = getattr(model.config, "max_position_embeddings", None) or math.inf
    prompts = [passage.prompt[-int(min(room - LENGTH, len(passage.prompt))) :] for passage in passages]
    outputs = continuations(model, tokenizer, prompts, max_new_tokens=LENGTH, title=title, **options)
    return [
        is_recited(*(folded(ids, tokenizer) for ids in (answer, passage.continuation)))
        for answer, passage in zip(outputs, passages, strict=True)
    ]


def respell(passages: Sequence[Passage], tokenizer: PreTrainedTokenizerBase, spelling: str) -> list[Passage]:
    """Return the passages whose prompts another spelling, one of `SPELLINGS`, changes; with their new prompts."""
    special = set(tokenizer.all_special_ids)
    result = []
    for passage in passages:
        lead = next((index for index, token in enumerate(passage.prompt) if token not in special), 0)
        text = str(tokenizer.decode(passage.prompt[lead:]))
        if (changed := SPELLINGS[spelling](text)) != text:
            prompt = tokenizer(changed, add_special_tokens=False)["input_ids"]
            result.append(Passage([*passage.prompt[:lead], *prompt], passage.continuation))
    return result


def _split_last_word(text: str, before: str, inside: str) -> str:
    """Insert text before the last word, and in the middle of it."""
    last: Any = next(reversed(find_words(text)), None)
    start, end = (last.start, last.end) if last else (0, len(text))
    middle = (start + end + 1) // 2
    return text[:start] + before + text[start:middle] + inside + text[middle:]


SPELLINGS: dict[str, Callable[[str], str]] = {
    "lower case": str.lower,
    "capitals": str.upper,
    "an extra space before the last word": lambda text: _split_last_word(text, " ", ""),
    "every space doubled": lambda text: text.replace(" ", "  "),
    "a zero-width space in the last word": lambda text: _split_last_word(text, "", "\u200b"),
}
"""Other spellings of a prompt: the same text with other tokens."""


def folded(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenize the canonical text of tokens in lower case, so that an answer in another spelling is compared, too."""
    text = canonical_text(str(tokenizer.decode(list(ids), skip_special_tokens=True))).casefold()
    return tokenizer(text.strip(ENCLOSING) or text.strip(), add_special_tokens=False)["input_ids"]


def is_recited(answer: Sequence[int], continuation: Sequence[int]) -> bool:
    """Tell whether an answer has `RUN` consecutive tokens in common with a continuation, or all if there are fewer."""
    return longest_run(answer, continuation) >= max(1, min(RUN, len(continuation)))


def longest_run(answer: Sequence[int], text: Sequence[int]) -> int:
    """Length of the longest run of tokens that an answer and a text have in common."""
    return difflib.SequenceMatcher(None, answer, text, autojunk=False).find_longest_match().size


def _of_answer(example: Example, special: set[int]) -> list[Passage]:
    ids, start = example.input_ids, example.prompt_length
    while ids and ids[-1] in special:
        ids = ids[:-1]
    places = range(start, max(len(ids) - RUN, start) + 1, LENGTH)
    passages = [
        Passage(ids[:place], [token for token in ids[place:][:LENGTH] if token not in special]) for place in places
    ]
    return [passage for passage in passages if passage.prompt and passage.continuation]


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
