"""Measure a takedown request: how strong a registry must be for it, and whether a server still recites its texts."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any

from divdec.data.records import RecordSet, read_records
from divdec.errors import UsageError
from divdec.evaluation.recitation import (
    LENGTH,
    RUN,
    SPELLINGS,
    folded,
    is_recited,
    passages_of,
    recites,
    respell,
)
from divdec.model.modeling import DivergenceForCausalLM
from divdec.takedowns.correction import TakedownCorrection
from divdec.takedowns.registry import Registry
from divdec.takedowns.store import TakedownRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from divdec.endpoint import Endpoint

STRONGEST = 80.0  # largest strength: a greater one changes other answers (docs/limits.md)


@dataclasses.dataclass(frozen=True)
class CanaryResult:
    """Answers of a server that was asked for the texts of a request."""

    passages: int
    """Number of passages that were asked for."""
    in_all: int
    """Number of passages of the texts."""
    recited: int
    unanswered: int
    """Number of passages without a whole answer: an empty one, or one that ended early without an end token."""


def ask_for_request(
    registry: Registry, entry: TakedownRequest, file: str, endpoint: Endpoint, hour: int
) -> CanaryResult:
    """Ask an endpoint for passages of a request, those of plain text also in a spelling that changes by the hour.

    Decoding is greedy. The endpoint must use the registry's tokenizer.

    Raises:
        UsageError: the texts are not the request's or too short; or the endpoint cannot be reached, refuses, does not
            reply as the OpenAI API does, or counts other tokens in a prompt than were sent.
    """
    texts, tokenizer = read_records(file), registry.tokenizer()
    registry.check_texts(entry, texts)
    passages, in_all = passages_of(texts, tokenizer, seed=hour)
    if texts.kind == "text":
        passages += respell(passages, tokenizer, random.Random(hour).choice(list(SPELLINGS)))
    if not passages:
        raise UsageError(f"the texts of request {entry.id!r} are too short to be begun and continued")
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
        answer, expected = (folded(each, tokenizer) for each in (ids, passage.continuation))
        recited += is_recited(answer, expected)
        unanswered += not text.strip() or (not ended and len(answer) < min(RUN, len(expected)))
    return CanaryResult(len(passages), in_all, recited, unanswered)


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
