"""A conversation as the target's chat template writes it, found again in its tokens and rendered for the auxiliary.

What is found counts only if rendering it again gives the same text, character for character.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from jinja2 import TemplateError

from divdec.bridge.plain_layout import plain_prompt
from divdec.bridge.retokenize import AuxiliaryTokenizer
from divdec.bridge.token_bytes import special_tokens

Messages = list[dict[str, str]]
Pieces = list[str]
"""What a template writes, and between that the contents: template, content, template, …"""

# Stands before each special token in a text made of tokens, so that what only looks like one is none. As a byte it
# occurs in no text.
MARK_BYTE = b"\xff"
MARK = MARK_BYTE.decode(errors="surrogateescape")
_DATE = "zqxdatexqz"
_PLACE = re.compile(r"zqx(\d+)xqz")
# Hides the clock that transformers lets templates read; the line break after it is not part of the template.
_CLOCK = "strftime_now"
_STOPPED_CLOCK = "{% macro strftime_now(format) %}{{ zqx_date }}{% endmacro %}\n"
# What templates raise that were not written for such messages: they are run, not checked.
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


@dataclasses.dataclass(frozen=True)
class ChatLayout:
    """The literal strings that a chat template writes around the turns, their special tokens marked."""

    tokenizer: Any
    as_tokens: Callable[[Sequence[str]], str]
    """What a target's tokens say where the template has written these pieces."""
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
    def of(cls, tokenizer: Any, loose: tuple[bool, bool] = (False, False), plain: bool = False) -> ChatLayout | None:
        """Learn a tokenizer's layout by rendering probes; None without a template, or with one of another kind.

        Args:
            tokenizer: whose template it is.
            loose: at the beginning, and after other special tokens: the tokens do not say whether a text begins with
                a space.
            plain: the layout of a tokenizer without a template is asked for, and None given for one with a template.
        """
        if bool(getattr(tokenizer, "chat_template", None)) == plain:
            return None
        as_tokens = _token_text(tokenizer, loose)
        turns = [_turn(role, "") for role in ("user", "assistant", "user")]
        told = _frame(tokenizer, turns, _DATE, as_tokens)
        if told is None or told[1::2] != ["0", "1", "2"] or not told[6] or not told[2] or not told[4]:
            return None
        before_user, to_assistant, to_user, prompt = told[::2]
        with_system = None if plain else _frame(tokenizer, [_turn("system", ""), turns[0]], _DATE, as_tokens)
        before_system, after_system = None, ""
        if with_system is not None and with_system[1::2] == ["0", "1"] and with_system[4] == prompt:
            before_system, after_system = with_system[0], with_system[2]
        return cls(tokenizer, as_tokens, before_user, before_system, after_system, to_assistant, to_user, prompt)

    def recover(self, text: str) -> tuple[Messages, str] | None:
        """The conversation in a rendered text and what was generated after its last prompt.

        Returns:
            None where no part of the text, up to one of its prompts, is what the template writes.
        """
        text = self.as_tokens([text])
        end = len(text)
        while (start := text.rfind(self.prompt, 0, end)) >= 0:
            stop = start + len(self.prompt)
            found = self.read_tokens(text[:stop])
            if found is not None:
                return found[0], text[stop:].replace(MARK, "")
            end = stop - 1
        return None

    def read(self, text: str) -> tuple[Messages, str | None] | None:
        """The conversation that renders to this text, which ends where the answer begins, and the date it was given."""
        return self.read_tokens(self.as_tokens([text]))

    def read_tokens(self, text: str) -> tuple[Messages, str | None] | None:
        """The same of a text whose special tokens are marked; what looks like one without being marked is text."""
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
                if found is not None and self._writes(found, date, text):
                    readings.append((found, date))
        # Where a template writes system turns like others, what has no special token within a content was meant.
        found, date = min(readings, key=lambda reading: _marks(reading[0]), default=(None, None))
        return found and ([_turn(turn["role"], turn["content"].replace(MARK, "")) for turn in found], date)

    def _writes(self, messages: Messages, date: str | None, text: str) -> bool:
        # Turns of a kind that the layout does not know (tools, two questions in a row) would pass as one's content.
        if any(marker in message["content"] for message in messages for marker in self._markers):
            return False
        pieces = written(self.tokenizer, messages, date)
        return pieces is not None and self.as_tokens(pieces) == text

    @functools.cached_property
    def _markers(self) -> set[str]:
        """What no content may hold: the special tokens of the layout, and its other strings but for mere space."""
        between = [self.user_to_assistant, self.assistant_to_user, self.prompt]
        found = {text for text in between if text.strip()}
        names = [MARK + name for name in special_tokens(self.tokenizer).values() if name]
        literals = [*between, self.before_user, self.before_system or "", self.after_system]
        return found | {name for name in names if any(name in text for text in literals)}

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
    turns: tuple[tuple[str, str], ...] = ()
    """The conversation: roles and contents."""

    def follows(self, earlier: Opening) -> bool:
        """Whether this is the same conversation, gone on with the answer to its earlier prompt."""
        length = len(earlier.turns)
        following = [role for role, _ in self.turns[length:]]
        return self.turns[:length] == earlier.turns and following[:1] == ["assistant"]


class ConversationBridge:
    """From the target's rendered conversations to the auxiliary's."""

    def __init__(self, layout: ChatLayout, auxiliary: AuxiliaryTokenizer) -> None:
        self.layout = layout
        self.auxiliary = auxiliary
        # The template writes a space before an answer that comes after its prompt: the answer's own first one.
        self.gap = layout.user_to_assistant == layout.prompt + " "
        self._marker = _encoded(layout.prompt)
        self._begin = f"{MARK}{layout.tokenizer.bos_token}"
        self.turn_ends = self._turn_ends()
        self.opening = functools.lru_cache(maxsize=256)(self._opening)

    @classmethod
    def of(cls, target: Any, auxiliary: AuxiliaryTokenizer, loose: tuple[bool, bool]) -> ConversationBridge | None:
        """None where the target has a chat template that cannot be read back, or neither of them has one.

        A target without one is asked questions in the layout of divdec.data.formatting.
        """
        layout = ChatLayout.of(target, loose)
        if layout is None and getattr(auxiliary.tokenizer, "chat_template", None):
            layout = ChatLayout.of(target, loose, plain=True)
        return None if layout is None else cls(layout, auxiliary)

    def marker_ends(self, stream: bytearray, before: int) -> list[int]:
        """Where an answer may begin, among the ends of the prompts that the bytes from `before` on have completed."""
        found, start = [], max(before - len(self._marker) + 1, 0)
        while (place := stream.find(self._marker, start)) >= 0:
            found.append(place + len(self._marker))
            start = place + 1
        return found

    def _opening(self, stream: bytes) -> Opening | None:
        text = stream.decode(errors="surrogateescape")
        if any("\ud800" <= character <= "\udfff" for character in text.replace(MARK, "")):
            return None
        found = self.layout.read_tokens(text)
        if found is None and text.startswith(self._begin):  # put there by the tokenizer, not by the template
            found = self.layout.read_tokens(text.removeprefix(self._begin))
        if found is None:
            return None
        messages, date = found
        turns = tuple((message["role"], message["content"]) for message in messages)
        tokenizer = self.auxiliary.tokenizer
        if not getattr(tokenizer, "chat_template", None):
            return Opening(self.auxiliary.head, plain_prompt(_turns_of(messages)), turns)
        if messages[0]["role"] == "system" and render(tokenizer, messages, date) is None:
            # A template that takes no system turn: its content goes before the first question.
            first = f"{messages[0]['content']}\n\n{messages[1]['content']}"
            messages = [_turn("user", first), *messages[2:]]
        pieces = written(tokenizer, messages, date)
        return None if pieces is None else Opening(tuple(self.auxiliary.encode_rendered(pieces)), "", turns)

    def _turn_ends(self) -> dict[int, int]:
        """The special token with which the target ends an answer, and the auxiliary's."""
        other = ChatLayout.of(self.auxiliary.tokenizer)
        here = _leading_special(self.layout)
        there = _leading_special(other) if other is not None else self.auxiliary.tokenizer.eos_token_id
        return {here: there} if here is not None and isinstance(there, int) else {}


def render(tokenizer: Any, messages: Messages, date: str | None = None) -> str | None:
    """A conversation as a prompt, with the date that some templates print; None where the template refuses it."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return plain_prompt(_turns_of(messages))
    options = {} if date is None else {"date_string": date}
    default = template.get("default") if isinstance(template, dict) else template
    if date is not None and isinstance(default, str) and _CLOCK in default:
        options |= {"chat_template": _STOPPED_CLOCK + default, "zqx_date": date}
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    except _REFUSALS:
        return None
    return text if isinstance(text, str) else None


def written(tokenizer: Any, messages: Messages, date: str | None = None) -> Pieces | None:
    """A conversation as a prompt, the contents apart; None where the template refuses it or changes a content.

    Where the contents stand is told by rendering others, not by looking for them: one may look like the template's.
    """
    text, frame = render(tokenizer, messages, date), _frame(tokenizer, messages, date)
    if text is None or frame is None:
        return None
    found, at = [], 0
    for place, piece in enumerate(frame):
        if place % 2:
            content = messages[int(piece)]["content"]
            forms = (content, content.strip(), content.rstrip(), content.lstrip())  # templates trim
            piece = next((form for form in forms if text.startswith(form + frame[place + 1], at)), None)
        elif not text.startswith(piece, at):
            piece = None
        if piece is None:
            return None
        found.append(piece)
        at += len(piece)
    return found if at == len(text) else None


def _frame(
    tokenizer: Any, messages: Messages, date: str | None, change: Callable[[Sequence[str]], str] = "".join
) -> Pieces | None:
    """What a template writes around contents, with their places in `messages` between."""
    stand_ins = [_turn(message["role"], f"zqx{place}xqz") for place, message in enumerate(messages)]
    text = render(tokenizer, stand_ins, date)
    return None if text is None else _PLACE.split(change([text]))


def _token_text(tokenizer: Any, loose: tuple[bool, bool]) -> Callable[[Sequence[str]], str]:
    names = sorted({name for name in special_tokens(tokenizer).values() if name}, key=len, reverse=True)
    special = "|".join(map(re.escape, names)) or "(?!)"
    marked, spaced = re.compile(special), re.compile(f"({MARK}(?:{special})) ")
    first, later = loose
    begin = re.escape(MARK + tokenizer.bos_token) if tokenizer.bos_token and not later else "(?!)"
    start = re.compile(f"({begin}|) ")

    def as_tokens(pieces: Sequence[str]) -> str:
        text = "".join(
            piece if place % 2 else marked.sub(lambda found: MARK + found[0], piece)
            for place, piece in enumerate(pieces)
        )
        text = spaced.sub(r"\1", text) if later else text
        return text[: found.end() - 1] + text[found.end() :] if first and (found := start.match(text)) else text

    return as_tokens


def _dated(begin: str, body: str) -> tuple[str, str | None]:
    """What begins a conversation, with the date that stands there."""
    before, found, after = begin.partition(_DATE)
    if not found or not body.startswith(before):
        return begin, None
    date = body[len(before) :].partition(after[:1])[0] if after else ""
    return begin.replace(_DATE, date), date


def _leading_special(layout: ChatLayout) -> int | None:
    text = layout.assistant_to_user
    found = [(len(content), place) for place, content in special_tokens(layout.tokenizer).items()
             if content and text.startswith(MARK + content)]  # fmt: skip
    return max(found)[1] if found else None


def _turns_of(messages: Messages) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _marks(messages: Messages) -> int:
    return sum(message["content"].count(MARK) for message in messages)


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogateescape")
