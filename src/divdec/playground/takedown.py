"""Taking a text down from the running model, and seeing what that changes. It knows nothing of pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from divdec.data.formatting import encode_prompt
from divdec.data.records import Record, checked_text, texts_of
from divdec.errors import UsageError
from divdec.evaluation.verbatim import longest_run, measure, measured_text
from divdec.playground.steered import Steered
from divdec.playground.tokens import Token, answer_html, escape
from divdec.steering import Steering
from divdec.takedowns.registry import Registry

SHORTEST = 12  # tokens: a text that can be begun and gone on with
LONGEST = 96  # tokens of the text that the model is asked to go on with


@dataclasses.dataclass(frozen=True)
class Recital:
    """What the model says after a text's beginning."""

    tokens: tuple[Token, ...]
    run: int
    """Longest passage of the text in it, in tokens."""


@dataclasses.dataclass(frozen=True)
class Effect:
    """What a request has changed."""

    id: str
    beginning: str
    """The part of the text that the model was given."""
    length: int
    """How many tokens it was to go on with."""
    before: Recital
    after: Recital
    measured: str
    """What of the text the target recites now, in words."""


def take_down(steered: Steered, registry: Registry, name: str, text: str, reference: str, steering: Steering) -> Effect:
    """Add a request, and let the steered model go on from the text's beginning before and after.

    Args:
        steered: a model that follows the registry.
        registry: to which the text is added.
        name: the request's id.
        text: what shall not be repeated.
        reference: what the requester calls it.
        steering: the rule.

    Raises:
        UsageError: the text is too short, the id is taken or cannot be used.
        FailedClosed: the registry is damaged.
    """
    ids = encode_prompt(Record("", prompt=checked_text(text.strip(), "the text")), steered.tokenizer)
    if len(ids) < SHORTEST:
        raise UsageError(f"the text has {len(ids)} tokens; paste at least {SHORTEST}, so that it can be gone on with")
    if not name.strip():
        raise UsageError("the request has no id; give one, such as case-17")
    cut = len(ids) // 3
    prompt, rest = steered.checked(ids[:cut]), ids[cut : cut + LONGEST]
    before = _recital(steered, prompt, rest, steering)
    texts = texts_of(name.strip(), [text.strip()])
    entry = registry.add(name.strip(), texts, reference.strip())
    measured = measured_text(measure(registry, entry, texts, steered.model.target, steered.tokenizer))
    after = _recital(steered, prompt, rest, steering)
    beginning = str(steered.tokenizer.decode(prompt, skip_special_tokens=True))
    return Effect(name.strip(), beginning, len(rest), before, after, measured)


def effect_html(effect: Effect) -> str:
    """Both answers side by side."""
    panels = "".join(
        f'<div class="dd-side"><h4>{when}</h4><p class="dd-answer">{answer_html(recital.tokens)}</p>'
        f'<p class="dd-rule">longest passage word for word: {recital.run} of {effect.length} tokens</p></div>'
        for when, recital in (("before", effect.before), (f"after “{escape(effect.id)}”", effect.after))
    )
    return (
        f'<p class="dd-rule">The steered model goes on from: “{escape(effect.beginning)}”</p>'
        f'<div class="dd-sides">{panels}</div><p class="dd-rule">Measured on the target: {escape(effect.measured)}.</p>'
    )


def requests_html(registry: Registry) -> str:
    """The requests in force as a table."""
    rows = ""
    for entry in registry.entries():
        cells = (entry.id, entry.time[:16].replace("T", " "), entry.reference, f"{entry.tokens:,}")
        rows += f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
    if not rows:
        return '<p class="dd-hint">No request is in force.</p>'
    head = "<tr><th>request</th><th>since (UTC)</th><th>reference</th><th>tokens</th></tr>"
    return f'<div class="dd-scroll"><table class="dd-table"><thead>{head}</thead><tbody>{rows}</tbody></table></div>'


def _recital(steered: Steered, prompt: list[int], rest: Sequence[int], steering: Steering) -> Recital:
    tokens = []
    for token in steered.answer(prompt, steering):
        tokens.append(token)
        if len(tokens) == len(rest):
            break
    return Recital(tuple(tokens), longest_run([token.id for token in tokens if token.id is not None], rest))
