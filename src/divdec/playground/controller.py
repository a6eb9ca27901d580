"""Actions of the page: questions and colours.

Clients can send any values; every rule comes from `SteeringControls`, so that no answer is unsteered.
"""

from __future__ import annotations

import dataclasses
import sys
import time
import traceback
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from divdec.data.records import Message
from divdec.errors import FailedClosed, UsageError, first_line
from divdec.playground.models import SteeredModel, UnsteeredTarget
from divdec.playground.rendering import Conversation, Token, Turn
from divdec.steering import is_number

UPDATE_INTERVAL = 0.08  # seconds between two updates of a growing answer
MAX_TEMPERATURE = 2.0
MAX_EXAMPLES = 12
RETRY_HINT = "The text so far is kept; press “Answer again” to retry."


@dataclasses.dataclass(frozen=True)
class ControlValues:
    """Values of the controls, unchecked: a client can send anything."""

    rule: Any = "linear"
    alpha: Any = 1.0
    k: Any = 20
    temperature: Any = 0.0


@dataclasses.dataclass(frozen=True)
class Controller:
    """A bundle on the page; conversations are values that the page keeps."""

    name: str
    """Name of the bundle."""
    model: SteeredModel
    """The bundle."""
    target: UnsteeredTarget | None = None
    """The UNSTEERED target; None hides it."""
    examples: tuple[str, ...] = ()
    """Example questions."""

    def ask(self, question: str, conversation: Conversation, values: ControlValues) -> Iterator[Conversation]:
        """Answer a question, and yield the conversation as it grows."""
        if question.strip():
            yield from self._answer((*conversation, Turn(question.strip())), values)
        else:
            yield conversation

    def retry(self, conversation: Conversation, values: ControlValues) -> Iterator[Conversation]:
        """Generate the last answer again."""
        if conversation:
            yield from self._answer(without_last_answer(conversation), values)
        else:
            yield conversation

    def stop(self, conversation: Conversation) -> Conversation:
        """Mark a running answer as stopped."""
        if not conversation or not conversation[-1].running:
            return conversation
        return _replace_last(conversation, running=False, note=f"Stopped. {RETRY_HINT}")

    def recolor(self, conversation: Conversation, values: ControlValues) -> Conversation:
        """Colour the last answer for the rule that is set now; its text stays."""
        if not conversation or not conversation[-1].tokens or conversation[-1].running:
            return conversation
        try:
            steering = self.model.controls.steering(values.rule, values.alpha, values.k)
            prompt = self.model.encode_prompt(to_messages(without_last_answer(conversation)))
            tokens = self.model.recolor(prompt, conversation[-1].tokens, steering)
        except Exception as error:
            return _replace_last(conversation, note=explain_error(error))
        return _replace_last(conversation, tokens=tokens, color_rule=self.model.with_rule(steering).rule)

    def answer_unsteered(self, conversation: Conversation, earlier: Conversation) -> Iterator[Conversation]:
        """Yield the target's own answers so far and to the last question, UNSTEERED, where they may be shown."""
        if self.target is None or not conversation:
            yield ()
            return
        answers = (*earlier[: len(conversation) - 1], Turn(conversation[-1].question, running=True))
        yield answers
        try:
            prompt = self.model.encode_prompt(to_messages(without_last_answer(conversation)))
            for text in self.target.answer(prompt):
                answers = _replace_last(answers, tokens=(Token(text),))
                yield answers
        except Exception as error:
            answers = _replace_last(answers, note=explain_error(error))
        yield _replace_last(answers, running=False)

    def _answer(self, conversation: Conversation, values: ControlValues) -> Iterator[Conversation]:
        conversation = _replace_last(conversation, running=True)
        yield conversation
        tokens: list[Token] = []
        try:
            rule, stream = self._stream(conversation, values)
            conversation = _replace_last(conversation, rule=rule, color_rule=rule)
            updated = time.monotonic()
            for token in stream:
                tokens.append(token)
                if time.monotonic() - updated >= UPDATE_INTERVAL:
                    updated = time.monotonic()
                    yield _replace_last(conversation, tokens=tuple(tokens))
        except Exception as error:
            conversation = _replace_last(conversation, note=explain_error(error, partial=bool(tokens)))
        yield _replace_last(conversation, tokens=tuple(tokens), running=False)

    def _stream(self, conversation: Conversation, values: ControlValues) -> tuple[str, Iterator[Token]]:
        """Return the rule's name and the answer's tokens."""
        temperature, messages = values.temperature, to_messages(conversation)
        if not is_number(temperature) or not 0 <= temperature <= MAX_TEMPERATURE:
            raise UsageError(f"temperature is {temperature!r}; accepted: 0 (greedy) to {MAX_TEMPERATURE:g}")
        steering = self.model.controls.steering(values.rule, values.alpha, values.k)
        prompt = self.model.encode_prompt(messages)
        return self.model.with_rule(steering).rule, self.model.answer(prompt, steering, temperature)


def to_messages(conversation: Conversation) -> tuple[Message, ...]:
    """Convert a conversation to messages that end with the last question."""
    messages: list[Message] = []
    for turn in conversation:
        if messages and messages[-1].role == "user":  # a question without an answer is not asked again
            messages.pop()
        messages.append(Message("user", turn.question))
        if turn.answer:
            messages.append(Message("assistant", turn.answer))
    return tuple(messages[:-1] if messages and messages[-1].role == "assistant" else messages)


def without_last_answer(conversation: Conversation) -> Conversation:
    """Return the conversation up to its last question."""
    return (*conversation[:-1], Turn(conversation[-1].question)) if conversation else conversation


def explain_error(error: Exception, *, partial: bool = False) -> str:
    """Describe an error for the page, and print an unexpected one; `partial`: a part of the answer exists."""
    hint = f" {RETRY_HINT}" if partial else ""
    if isinstance(error, UsageError):
        return f"{_sentence(str(error))}{hint}"
    if isinstance(error, FailedClosed):
        return f"The model cannot be steered, so there is no further answer: {_sentence(str(error))}{hint}"
    traceback.print_exception(error, file=sys.stderr)
    return f"The answer failed: {_sentence(first_line(error))}{hint}"


def read_example_questions(bundle: str) -> tuple[str, ...]:
    """Read the first example questions, one a line, from a `questions.txt` beside a bundle's folder; () without one."""
    folder = Path(bundle).expanduser().resolve()
    try:
        lines = (folder.parent / "questions.txt").read_text(encoding="utf-8").split("\n") if folder.is_dir() else []
    except (OSError, UnicodeDecodeError):
        return ()
    return tuple(islice((line.strip() for line in lines if line.strip()), MAX_EXAMPLES))


def _replace_last(conversation: Conversation, **changes: Any) -> Conversation:
    return (*conversation[:-1], dataclasses.replace(conversation[-1], **changes))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."
