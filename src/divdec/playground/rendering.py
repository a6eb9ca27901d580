"""HTML of the page: tokens and conversations. All text is escaped."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterable, Sequence

LEVELS = (0.25, 1.0, 2.0, 4.0)
"""Smallest |log-probability shift| of each shade, in nats: factors of 1.3, 2.7, 7.4 and 55."""
WELCOME = '<p class="dd-hint">Ask a question. Colours show the effect of steering on each token of the answer.</p>'


@dataclasses.dataclass(frozen=True)
class TokenShift:
    """Effect of steering on one token at one position. The page shows every field that is set."""

    text: str
    logprob_shift: float | None = None
    """log P_steered − log P_target in nats: −inf for a masked token, None if unknown."""
    target_probability: float | None = None
    """Probability under the target alone; set only where the target may be shown."""
    steered_probability: float | None = None


@dataclasses.dataclass(frozen=True)
class Token(TokenShift):
    """A token of an answer."""

    id: int | None = None
    """None in an unsteered answer."""
    alternatives: tuple[TokenShift, ...] = ()
    """Other tokens that lost probability at this position."""
    marked: bool = False
    """Whether another token lost much probability at this position."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """A question and its answer."""

    question: str
    tokens: tuple[Token, ...] = ()
    rule: str = ""
    """The rule that chose the tokens."""
    color_rule: str = ""
    """The rule that the colours show."""
    running: bool = False
    """Whether the answer is still being generated."""
    note: str = ""
    """An error, or the reason why the answer ended early."""

    @property
    def answer(self) -> str:
        """Text of the answer."""
        return "".join(token.text for token in self.tokens)


Conversation = tuple[Turn, ...]


def escape(text: str) -> str:
    """Escape text for HTML and for the template syntax of Gradio's HTML component."""
    escaped = html.escape(text)
    for character in "${}`":
        escaped = escaped.replace(character, f"&#{ord(character)};")
    return escaped


def color_level(shift: float | None) -> int:
    """Return the shade of a log-probability shift: −4 (strongly suppressed) to 4 (strongly promoted), 0 for none."""
    if shift is None or math.isnan(shift):
        return 0
    return int(math.copysign(sum(abs(shift) >= bound for bound in LEVELS), shift))


def describe_shift(shift: float) -> str:
    """Describe a log-probability shift in words, with the number."""
    if shift == -math.inf:
        return "masked"
    nats = f"{shift:+.1f}".replace("-", "−")
    if abs(shift) < LEVELS[0]:
        return f"almost unchanged ({nats} nats)"
    factor = math.exp(min(abs(shift), 50))
    times = f"{factor:.1f}" if factor < 10 else f"{factor:,.0f}" if factor < 10_000 else "more than 10,000"
    return f"{times} times {'more' if shift > 0 else 'less'} likely ({nats} nats)"


def tokens_html(tokens: Iterable[Token]) -> str:
    """Render tokens as coloured spans; hovering or focusing one shows a box with the details.

    A token that ends within a character is joined with the tokens that complete it.
    """
    spans: list[str] = []
    group: list[Token] = []
    for token in tokens:
        group.append(token)
        if token.text:
            spans.append(_span(group))
            group = []
    return "".join(spans)


def conversation_html(conversation: Conversation, *, empty: str = WELCOME) -> str:
    """Render a conversation, oldest turn first."""
    return f'<div class="dd-conversation">{"".join(map(_turn_html, conversation)) or empty}</div>'


def _turn_html(turn: Turn) -> str:
    cursor = '<span class="dd-wait" aria-label="generating">▍</span>' if turn.running else ""
    answer = f'<p class="dd-answer">{tokens_html(turn.tokens)}{cursor}</p>' if turn.tokens or turn.running else ""
    rule = turn.rule
    if turn.color_rule and turn.color_rule != turn.rule:
        rule = f"answered with {turn.rule}, coloured for {turn.color_rule}"
    caption = f'<p class="dd-rule">{escape(rule)}</p>' if turn.tokens and rule else ""
    note = f'<p class="dd-note" role="alert">{escape(turn.note)}</p>' if turn.note else ""
    return f'<div class="dd-turn"><p class="dd-question">{escape(turn.question)}</p>{answer}{caption}{note}</div>'


def _span(group: Sequence[Token]) -> str:
    text = "".join(token.text for token in group)
    shifts = [token.logprob_shift for token in group if token.logprob_shift is not None]
    shift = sum(shifts) if shifts else None  # log-probabilities of parts add up to that of the whole
    level = color_level(shift)
    classes = "dd-token"
    if level:
        classes += f" dd-{'up' if level > 0 else 'down'}{abs(level)}"
    if any(token.marked for token in group):
        classes += " dd-marked"
    whole = dataclasses.replace(group[-1], text=text, logprob_shift=shift)
    box = _box(whole, [other for token in group for other in token.alternatives])
    focus = ' tabindex="0"' if box else ""
    return f'<span class="{classes}"{focus}>{escape(text)}{box}</span>'


def _box(token: TokenShift, alternatives: Sequence[TokenShift]) -> str:
    lines = ""
    if details := _details(token):
        lines = f'<span class="dd-own">{_visible(token.text)} {details}</span>'
    if alternatives:
        known = any(other.logprob_shift is not None for other in alternatives)
        lines += f'<span class="dd-title">{"suppressed" if known else "also likely"} here</span>'
        lines += "".join(f"<span>{_visible(other.text)} {_details(other)}</span>" for other in alternatives)
    return f'<span class="dd-box" role="tooltip">{lines}</span>' if lines else ""


def _details(token: TokenShift) -> str:
    details = [] if token.logprob_shift is None else [describe_shift(token.logprob_shift)]
    if token.target_probability is not None and token.steered_probability is not None:
        details.append(f"target {token.target_probability:.1%} → steered {token.steered_probability:.1%}")
    elif token.steered_probability is not None:
        details.append(f"probability {token.steered_probability:.1%}")
    return "; ".join(details)


def _visible(text: str) -> str:
    """Show white space as symbols."""
    visible = text.replace("\n", "⏎").replace("\t", "⇥")
    visible = f"␣{visible[1:]}" if visible.startswith(" ") else visible
    return f"<b>{escape(visible)}</b>"
