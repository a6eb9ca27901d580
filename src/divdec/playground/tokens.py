"""An answer's tokens as coloured, escaped HTML. Pure text: it knows nothing of models or of Gradio.

Colour says how steering changed a token's probability; what a viewer may be told beside it is decided by whoever makes
a `Token`, since all that one holds is shown.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterable, Sequence

# Nats from which on a token's colour is that strong: 1.3, 2.7, 7.4 and 55 times in probability.
LEVELS = (0.25, 1.0, 2.0, 4.0)
MARKED = 0.1  # of probability; where another token lost that much, the place is underlined


@dataclasses.dataclass(frozen=True)
class Other:
    """A token that might have stood in a place."""

    text: str
    push: float | None = None
    """Change of its log-probability by steering, in nats; −∞ where it was masked, None where nobody tells."""
    before: float | None = None
    """Probability under the target alone: only where the target may be shown."""
    after: float | None = None
    """Probability under the steered model."""


@dataclasses.dataclass(frozen=True)
class Token(Other):
    """A token of an answer."""

    id: int | None = None
    """Its id; None where nobody tells."""
    others: tuple[Other, ...] = ()
    """What was pushed down in its place, or was likely there."""
    marked: bool = False
    """Whether another token lost much probability in its place."""


def escape(text: str) -> str:
    """Text for HTML; also signs that mean something to templates of the page."""
    found = html.escape(text)
    for sign in "${}`":
        found = found.replace(sign, f"&#{ord(sign)};")
    return found


def level(push: float | None) -> int:
    """How strongly a token is coloured: −4 (pushed down most) to 4 (pushed up most), 0 for hardly pushed."""
    if push is None or math.isnan(push):
        return 0
    return int(math.copysign(sum(abs(push) >= bound for bound in LEVELS), push))


def in_words(push: float) -> str:
    """A push as a reader understands it, with the number behind it."""
    if push == -math.inf:
        return "masked: it cannot be said here"
    if abs(push) < LEVELS[0]:
        return f"hardly pushed ({_signed(push)} nats)"
    factor = math.exp(min(abs(push), 50))
    times = f"{factor:.1f}" if factor < 10 else f"{factor:,.0f}" if factor < 10_000 else "more than 10,000"
    return f"{times} times {'likelier' if push > 0 else 'less likely'} ({_signed(push)} nats)"


def answer_html(tokens: Iterable[Token]) -> str:
    """Tokens as coloured spans, each with a box of what was pushed there, shown on hover and focus.

    Tokens that hold a part of a character only are joined with those that end it.
    """
    return "".join(_span(group) for group in _whole(tokens))


def _whole(tokens: Iterable[Token]) -> Iterable[list[Token]]:
    group: list[Token] = []
    for token in tokens:
        group.append(token)
        if token.text:
            yield group
            group = []


def _span(group: Sequence[Token]) -> str:
    text = "".join(token.text for token in group)
    pushes = [token.push for token in group if token.push is not None]
    push = sum(pushes) if pushes else None  # log-probabilities of parts add up to that of the whole
    strength = level(push)
    kinds = ["dd-token"]
    if strength:
        kinds.append(f"dd-{'up' if strength > 0 else 'down'}{abs(strength)}")
    if any(token.marked for token in group):
        kinds.append("dd-marked")
    box = _box(text, push, group)
    focus = ' tabindex="0"' if box else ""
    return f'<span class="{" ".join(kinds)}"{focus}>{escape(text)}{box}</span>'


def _box(text: str, push: float | None, group: Sequence[Token]) -> str:
    lines = []
    said = [_probabilities(token) for token in group if token.text][-1:]
    own = [in_words(push)] if push is not None else []
    if own := [*own, *filter(None, said)]:
        lines.append(f'<span class="dd-own">{_named(text)} {"; ".join(own)}</span>')
    others = [other for token in group for other in token.others]
    if others:
        title = "pushed down here" if any(other.push is not None for other in others) else "also likely here"
        rows = "".join(f"<span>{_named(other.text)} {_of(other)}</span>" for other in others)
        lines.append(f'<span class="dd-title">{title}</span>{rows}')
    return f'<span class="dd-box" role="tooltip">{"".join(lines)}</span>' if lines else ""


def _of(other: Other) -> str:
    words = [in_words(other.push)] if other.push is not None else []
    return "; ".join(filter(None, [*words, _probabilities(other)]))


def _probabilities(token: Other) -> str:
    if token.before is not None and token.after is not None:
        return f"target {token.before:.1%} → steered {token.after:.1%}"
    return f"probability {token.after:.1%}" if token.after is not None else ""


def _named(text: str) -> str:
    seen = text.replace("\n", "⏎").replace("\t", "⇥")
    seen = f"␣{seen[1:]}" if seen.startswith(" ") else seen
    return f"<b>{escape(seen)}</b>"


def _signed(number: float) -> str:
    return f"{number:+.1f}".replace("-", "−")
