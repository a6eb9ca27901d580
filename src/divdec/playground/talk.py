"""A conversation as it stands on the page: turns, and their HTML. It knows nothing of models or of Gradio."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from divdec.data.records import Message
from divdec.playground.tokens import Token, answer_html, escape

EMPTY = '<p class="dd-hint">Ask something. Each word of the answer is coloured by what the experts did to it.</p>'
EMPTY_REMOTE = '<p class="dd-hint">Ask something.</p>'


@dataclasses.dataclass(frozen=True)
class Turn:
    """A question and what was answered."""

    question: str
    tokens: tuple[Token, ...] = ()
    rule: str = ""
    """The rule that the answer was made with."""
    seen_by: str = ""
    """The rule that its colours belong to."""
    running: bool = False
    """Whether more is to come."""
    note: str = ""
    """What went wrong, or why the answer ends."""

    @property
    def answer(self) -> str:
        """The answer's text."""
        return "".join(token.text for token in self.tokens)


Talk = tuple[Turn, ...]


def messages(talk: Iterable[Turn]) -> tuple[Message, ...]:
    """The conversation as a model reads it, up to the last question."""
    found: list[Message] = []
    for turn in talk:
        # A question that got no answer would stand before the next one as if both had been asked at once.
        if found and found[-1].role == "user":
            found.pop()
        found.append(Message("user", turn.question))
        if turn.answer:
            found.append(Message("assistant", turn.answer))
    return tuple(found[:-1] if found and found[-1].role == "assistant" else found)


def again(talk: Talk) -> Talk:
    """The conversation with its last answer to be made anew."""
    return (*talk[:-1], Turn(talk[-1].question)) if talk else talk


def talk_html(talk: Talk, *, empty: str = EMPTY) -> str:
    """The conversation, oldest turn first."""
    return f'<div class="dd-talk">{"".join(map(_turn, talk)) or empty}</div>'


def _turn(turn: Turn) -> str:
    waits = '<span class="dd-wait" aria-label="more is to come">▍</span>' if turn.running else ""
    answer = f'<p class="dd-answer">{answer_html(turn.tokens)}{waits}</p>' if turn.tokens or turn.running else ""
    rule = turn.rule
    if turn.seen_by and turn.seen_by != turn.rule:
        rule = f"answered with {turn.rule}, coloured for {turn.seen_by}"
    about = f'<p class="dd-rule">{escape(rule)}</p>' if turn.tokens and rule else ""
    note = f'<p class="dd-note" role="alert">{escape(turn.note)}</p>' if turn.note else ""
    return f'<div class="dd-turn"><p class="dd-question">{escape(turn.question)}</p>{answer}{about}{note}</div>'
