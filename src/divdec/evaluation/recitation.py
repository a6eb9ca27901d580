"""Recitation: whether a model continues a text word for word, and how strong a registry must be to prevent it.

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
from divdec.data.records import Record, RecordSet, read_records
from divdec.errors import UsageError
from divdec.evaluation.generation import continuations
from divdec.evaluation.phrases import find_words
from divdec.model.modeling import DivergenceForCausalLM
from divdec.takedowns.canonical import canonical_text
from divdec.takedowns.correction import TakedownCorrection
from divdec.takedowns.registry import Registry
from divdec.takedowns.store import TakedownRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from divdec.endpoint import Endpoint

PASSAGES = 20  # measured at most
PREFIX, LENGTH, RUN = 32, 32, 16  # tokens: shortest prompt of a plain text, continuation, recited passage
CONTEXT = 512  # tokens of a plain text's longest prompt
STRONGEST = 80.0  # largest strength: a greater one changes other answers (docs/limits.md)


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
    """Tell of each passage whether a model, steered or plain, recites it.

    Args:
        model: any causal language model.
        tokenizer: its tokenizer.
        passages: the passages.
        title: title of the progress bar; None shows none.
        **options: options of `generate`, such as `do_sample=True`; by default decoding is greedy.
    """
    if not passages:
        return []
    room = getattr(model.config, "max_position_embeddings", None) or math.inf
    prompts = [passage.prompt[-int(min(room - LENGTH, len(passage.prompt))) :] for passage in passages]
    outputs = continuations(model, tokenizer, prompts, max_new_tokens=LENGTH, title=title, **options)
    return [
        is_recited(*(_folded(ids, tokenizer) for ids in (answer, passage.continuation)))
        for answer, passage in zip(outputs, passages, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class CanaryResult:
    """Answers of a server that was asked for the texts of a request."""

    passages: int
    """Number of passages that were asked for."""
    in_all: int
    """Number of passages of the texts."""
    recited: int
    unanswered: int


def ask_for_request(
    registry: Registry, entry: TakedownRequest, file: str, endpoint: Endpoint, hour: int
) -> CanaryResult:
    """Ask an endpoint for passages of a request, those of plain text also in a spelling that changes by the hour.

    Raises:
        UsageError: the texts are not the request's or too short, or see `ask_endpoint`.
    """
    texts, tokenizer = read_records(file), registry.tokenizer()
    registry.check_texts(entry, texts)
    passages, in_all = passages_of(texts, tokenizer, seed=hour)
    if texts.kind == "text":
        passages += respell(passages, tokenizer, list(SPELLINGS)[hour % len(SPELLINGS)])
    if not passages:
        raise UsageError(f"the texts of request {entry.id!r} are too short to be begun and continued")
    return CanaryResult(len(passages), in_all, *ask_endpoint(endpoint, tokenizer, passages))


def ask_endpoint(
    endpoint: Endpoint, tokenizer: PreTrainedTokenizerBase, passages: Sequence[Passage]
) -> tuple[int, int]:
    """Ask an endpoint for passages, greedily.

    Args:
        endpoint: a running server; its model must use this tokenizer.
        tokenizer: the tokenizer.
        passages: the passages.

    Returns:
        The number of recited passages, and the number of passages without a whole answer: an empty one, or one that
        ended early without an end token.

    Raises:
        UsageError: the endpoint cannot be reached, refuses, does not reply as the OpenAI API does, or counts other
            tokens in a prompt than were sent.
    """
    recited = unanswered = 0
    for passage in passages:
        # vLLM's own command would apply the checkpoint's repetition penalty.
        content, _ = endpoint.create_completion(
            passage.prompt, max_tokens=LENGTH, temperature=0.0, repetition_penalty=1.0
        )
        try:
            choice, read = content["choices"][0], content["usage"]["prompt_tokens"]
            # A refusal (--on-suppressed) is a whole answer, too.
            text, ended = choice["text"], choice.get("finish_reason") in ("stop", "content_filter")
        except (KeyError, IndexError, TypeError, AttributeError):
            text, ended, read = None, False, None
        if not isinstance(text, str):
            raise UsageError(f"endpoint {endpoint.base_url} replied without text or usage: not OpenAI-compatible")
        if read != len(passage.prompt):
            raise UsageError(
                f"endpoint {endpoint.base_url} counts {read} tokens in a prompt of {len(passage.prompt)}: it does not "
                "take token ids as they are; accepted: vLLM, divdec serve and others that do"
            )
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        answer, expected = (_folded(each, tokenizer) for each in (ids, passage.continuation))
        recited += is_recited(answer, expected)
        unanswered += not text.strip() or (not ended and len(answer) < min(RUN, len(expected)))
    return recited, unanswered


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
    "an extra space before the last word": lambda text: _split_last_word(text, " ", ""),
    "every space doubled": lambda text: text.replace(" ", "  "),
    "a zero-width space in the last word": lambda text: _split_last_word(text, "", "\u200b"),
}
"""Other spellings of a prompt, which a reader sees as the same text but which have other tokens."""


def _folded(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenize the canonical text of tokens, so that an answer in another spelling is compared, too."""
    text = canonical_text(str(tokenizer.decode(list(ids), skip_special_tokens=True))).strip()
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def is_recited(answer: Sequence[int], continuation: Sequence[int]) -> bool:
    """Tell whether an answer has `RUN` consecutive tokens in common with a continuation, or all if there are fewer."""
    return longest_run(answer, continuation) >= max(1, min(RUN, len(continuation)))


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
    before = sum(recites(target, tokenizer, passages, title="before" if progress else None))
    strength_before = strength = registry.strength
    tried: dict[float, int] = {}
    while True:
        takedowns = TakedownCorrection(registry.folder, strength=strength)
        steered = DivergenceForCausalLM.from_experts(target, None, takedowns=takedowns)
        title = f"at strength {strength:g}" if progress else None
        tried[strength] = sum(recites(steered, tokenizer, passages, title=title))
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


def measured_text(measured: dict[str, Any], entry: TakedownRequest) -> str:
    """Describe a measurement in a sentence or two."""
    passages, before, after = (measured[name] for name in ("passages", "recited_before", "recited_after"))
    if not passages:
        return (
            "not measured: the texts are too short to be begun and continued, so nothing shows that the request helps"
        )
    drawn = f" ({passages} drawn of {measured['passages_in_all']:,})" if passages < measured["passages_in_all"] else ""
    text = (
        f"{before} of {passages} passages{drawn} were recited word for word before, {after} now, "
        f"at strength {measured['strength']:g}"
    )
    if measured["strength"] > measured["strength_before"]:
        text += f", raised from {measured['strength_before']:g}"
    if not before and not after:
        text += (
            ". The request is in force, but NOTHING SHOWS THAT IT HELPS: the target does not repeat these texts. Check "
            "whether it repeats another spelling or edition of them, and whether it is the model that is served; "
            "--no-measure adds a request without this measurement"
        )
    if after:
        advice = "train a pair for them (divdec train) and serve it with this registry"
        # q knows these passages too, so that no strength lowers them.
        if entry.has_retained_passages or entry.shared_spans:
            advice = "the retain set shares passages with them; remove these from the texts or from the retain set"
        text += (
            f" (tried up to {measured['strongest']:g}). The request stays in force, and the texts are STILL RECITED: "
            f"{advice}"
        )
    return text


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
