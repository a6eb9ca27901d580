"""A conversation as the target's chat template writes it, found again in its tokens and rendered for the auxiliary.

What is found counts only if rendering it again gives the same text, character for character.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from jinja2 import TemplateError

from divdec.experts.retokenize import AuxiliaryTokenizer
from divdec.experts.token_bytes import special_tokens

Messages = list[dict[str, str]]
_DATE = "zqxdatexqz"
_CONTENT = tuple(f"zqx{name}xqz" for name in ("alpha", "bravo", "carol", "delta"))


@dataclasses.dataclass(frozen=True)
class ChatLayout:
    """The literal strings that a chat template writes around the turns."""

    tokenizer: Any
    before_user: str
    """What begins a conversation without a system turn; a stand-in where the template prints a date."""
    before_system: str | None
    """What begins a conversation with one; None where the template takes none."""
    after_system: str
    user_to_assistant: str
    assistant_to_user: str
    prompt: str
    """From the last user turn to the answer."""

    @classmethod
    def of(cls, tokenizer: Any) -> ChatLayout | None:
        """Learn a tokenizer's layout by rendering probes; None without a template, or with one of another kind."""
        if not getattr(tokenizer, "chat_template", None):
            return None
        system, user, answer, question = _CONTENT
        turns = [_turn("user", user), _turn("assistant", answer), _turn("user", question)]
        told = _split(render(tokenizer, turns, _DATE), user, answer, question)
        if told is None or not told[3] or not told[1] or not told[2]:
            return None
        before_user, to_assistant, to_user, prompt = told
        with_system = _split(render(tokenizer, [_turn("system", system), turns[0]], _DATE), system, user)
        if with_system is not None and with_system[2] != prompt:
            with_system = None
        before_system, after_system, _ = with_system or (None, "", "")
        return cls(tokenizer, before_user, before_system, after_system, to_assistant, to_user, prompt)

    def recover(self, text: str) -> tuple[Messages, str] | None:
        """The conversation in a rendered text and what was generated after its last prompt.

        Returns:
            None where no part of the text, up to one of its prompts, is what the template writes.
        """
        end = len(text)
        while (start := text.rfind(self.prompt, 0, end)) >= 0:
            stop = start + len(self.prompt)
            found = self.read(text[:stop])
            if found is not None:
                return found[0], text[stop:]
            end = stop - 1
        return None

    def read(self, text: str) -> tuple[Messages, str | None] | None:
        """The conversation that renders to this text, which ends where the answer begins, and the date it was given."""
        if not text.endswith(self.prompt):
            return None
        body = text[: -len(self.prompt)]
        readings = []
        for begin, system in ((self.before_user, False), (self.before_system, True)):
            if begin is None:
                continue
            begin, date = _dated(begin, body)
            if body.startswith(begin):
                found = self._turns(body[len(begin) :], system)
                if found is not None and render(self.tokenizer, found, date) == text:
                    readings.append((found, date))
        # Where a template writes system turns like others, what has no special token within a content was meant.
        return min(readings, key=lambda reading: self._marked(reading[0]), default=None)

    def _marked(self, messages: Messages) -> int:
        marks = [content for content in special_tokens(self.tokenizer).values() if content]
        return sum(mark in message["content"] for message in messages for mark in marks)

    def _turns(self, body: str, system: bool) -> Messages | None:
        found = []
        if system:
            content, separator, body = body.partition(self.after_system) if self.after_system else ("", "", "")
            if not separator:
                return None
            found.append(_turn("system", content))
        while True:
            content, separator, rest = body.partition(self.user_to_assistant)
            answer, ended, following = rest.partition(self.assistant_to_user)
            if not separator or not ended:
                return [*found, _turn("user", body)]
            found += [_turn("user", content), _turn("assistant", answer)]
            body = following


@dataclasses.dataclass(frozen=True)
class Opening:
    """What the auxiliary reads before the answer."""

    ids: tuple[int, ...]
    text: str
    """A text that the answer goes on from, where the auxiliary has no chat template; else nothing."""


class ConversationBridge:
    """From the target's rendered conversations to the auxiliary's."""

    def __init__(self, layout: ChatLayout, auxiliary: AuxiliaryTokenizer) -> None:
        self.layout = layout
        self.auxiliary = auxiliary
        self._marker = layout.prompt.encode()
        self.turn_ends = self._turn_ends()
        self.opening = functools.lru_cache(maxsize=256)(self._opening)

    @classmethod
    def of(cls, target: Any, auxiliary: AuxiliaryTokenizer) -> ConversationBridge | None:
        """None where the target has no chat template, or one that cannot be read back."""
        layout = ChatLayout.of(target)
        return None if layout is None else cls(layout, auxiliary)

    def marker_ends(self, stream: bytearray, before: int) -> list[int]:
        """Where an answer may begin, among the ends of the prompts that the bytes from `before` on have completed."""
        found, start = [], max(before - len(self._marker) + 1, 0)
        while (place := stream.find(self._marker, start)) >= 0:
            found.append(place + len(self._marker))
            start = place + 1
        return found

    def _opening(self, stream: bytes) -> Opening | None:
        try:
            found = self.layout.read(stream.decode())
        except UnicodeDecodeError:
            return None
        if found is None:
            return None
        messages, date = found
        if not getattr(self.auxiliary.tokenizer, "chat_template", None):
            return Opening(self.auxiliary.head, _plain_prompt(messages))
        text = render(self.auxiliary.tokenizer, messages, date)
        if text is None and messages[0]["role"] == "system":
            # A template that takes no system turn: its content goes before the first question.
            first = f"{messages[0]['content']}\n\n{messages[1]['content']}"
            text = render(self.auxiliary.tokenizer, [_turn("user", first), *messages[2:]], date)
        return None if text is None else Opening(tuple(self.auxiliary.encode_rendered(text)), "")

    def _turn_ends(self) -> dict[int, int]:
        """The special token with which the target ends an answer, and the auxiliary's."""
        other = ChatLayout.of(self.auxiliary.tokenizer)
        here = _leading_special(self.layout)
        there = _leading_special(other) if other is not None else self.auxiliary.tokenizer.eos_token_id
        return {here: there} if here is not None and isinstance(there, int) else {}


def render(tokenizer: Any, messages: Messages, date: str | None = None) -> str | None:
    """A conversation as a prompt, with the date that some templates print; None where the template refuses it."""
    options = {} if date is None else {"date_string": date}
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    except TemplateError:
        return None
    return text if isinstance(text, str) else None


def _dated(begin: str, body: str) -> tuple[str, str | None]:
    """What begins a conversation, with the date that stands there."""
    before, found, after = begin.partition(_DATE)
    if not found or not body.startswith(before):
        return begin, None
    date = body[len(before) :].partition(after[:1])[0] if after else ""
    return before + date + after, date


def _leading_special(layout: ChatLayout) -> int | None:
    text = layout.assistant_to_user
    found = [(len(content), place) for place, content in special_tokens(layout.tokenizer).items()
             if content and text.startswith(content)]  # fmt: skip
    return max(found)[1] if found else None


def _plain_prompt(messages: Messages) -> str:
    # The layout of divdec.data.formatting for tokenizers without a template, which the auxiliaries were trained with.
    lines = []
    for message in messages:
        if message["role"] == "system":
            lines.append(message["content"])
        else:
            lines.append(f"{'Answer' if message['role'] == 'assistant' else 'Question'}: {message['content']}")
    return "\n".join([*lines, "Answer:"])


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _split(text: str | None, *contents: str) -> list[str] | None:
    """What stands around the contents, each of which must be there once, in order."""
    if text is None:
        return None
    found = []
    for content in contents:
        if text.count(content) != 1:
            return None
        before, _, text = text.partition(content)
        found.append(before)
    return [*found, text]
