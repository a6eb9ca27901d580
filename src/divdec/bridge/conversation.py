"""Conversations: recognized in the target's tokens and rendered with the auxiliaries' chat template.

A parsed conversation is accepted only if rendering it again gives the same text, character for character.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from divdec.bridge.token_bytes import describe_tokenizer, special_tokens
from divdec.data.formatting import TEMPLATE_ERRORS, plain_prompt

if TYPE_CHECKING:
    from divdec.bridge.auxiliary_tokenizer import AuxiliaryTokenizer

Messages = list[dict[str, str]]
Pieces = list[str]
"""Text of a template and contents of the messages in turn: template, content, template, …"""

# Precedes each special token in a decoded text, so that text with the name of a special token is not mistaken for one.
# The byte occurs in no UTF-8 text.
MARK_BYTE = b"\xff"
MARK = MARK_BYTE.decode(errors="surrogateescape")
_DATE = "zqxdatexqz"
_PLACEHOLDER = re.compile(r"zqx(\d+)xqz")
# Replaces the clock that transformers offers to templates; the line break after it is not part of the template.
_CLOCK = "strftime_now"
_FIXED_CLOCK = "{% macro strftime_now(format) %}{{ zqx_date }}{% endmacro %}\n"


@dataclasses.dataclass(frozen=True)
class ChatLayout:
    """Literal strings that a chat template writes around the turns; special tokens are marked with `MARK`."""

    tokenizer: Any
    mark_special_tokens: Callable[[Sequence[str]], str]
    """Joins rendered pieces and marks the special tokens in the template's text, not in the contents."""
    before_user: str
    """Beginning of a conversation without a system turn, with a placeholder for a date."""
    before_system: str | None
    """Beginning of a conversation with a system turn; None if the template does not support one."""
    after_system: str
    user_to_assistant: str
    assistant_to_user: str
    prompt: str
    """Text from the end of the last user turn to the answer."""

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Any, drops_space: tuple[bool, bool] = (False, False), plain: bool = False
    ) -> ChatLayout | None:
        """Learn a tokenizer's layout by rendering conversations of placeholders.

        Args:
            tokenizer: a tokenizer with a chat template.
            drops_space: whether the tokens do not show if a text begins with a space: at the very beginning, and after
                a special token.
            plain: learn the layout of `plain_prompt` instead, for a tokenizer without a chat template.

        Returns:
            None without a template (with one if `plain`), or if the template is not built of such strings.
        """
        if bool(getattr(tokenizer, "chat_template", None)) == plain:
            return None
        mark = _special_token_marker(tokenizer, drops_space)
        turns = [_turn(role, "") for role in ("user", "assistant", "user")]
        pieces = _template_pieces(tokenizer, turns, _DATE, mark)
        if pieces is None or pieces[1::2] != ["0", "1", "2"] or not all((pieces[2], pieces[4], pieces[6])):
            return None
        before_user, to_assistant, to_user, prompt = pieces[::2]
        with_system = None if plain else _template_pieces(tokenizer, [_turn("system", ""), turns[0]], _DATE, mark)
        before_system, after_system = None, ""
        if with_system is not None and with_system[1::2] == ["0", "1"] and with_system[4] == prompt:
            before_system, after_system = with_system[0], with_system[2]
        return cls(tokenizer, mark, before_user, before_system, after_system, to_assistant, to_user, prompt)

    def parse(self, text: str) -> tuple[Messages, str | None] | None:
        """Parse a marked text that ends where an answer begins.

        Returns:
            The conversation that renders to the text, and the date that the template printed; None if there is none.
        """
        if not text.endswith(self.prompt):
            return None
        body = text[: -len(self.prompt)]
        candidates = []
        for beginning, has_system in ((self.before_user, False), (self.before_system, True)):
            if beginning is None:
                continue
            beginning, date = _fill_date(beginning, body)
            if body.startswith(beginning):
                messages = self._split_turns(body[len(beginning) :], has_system)
                if messages is not None and self._renders_to(messages, date, text):
                    candidates.append((messages, date))
        # If a template writes system turns like other turns, take the reading with the fewest marks in contents.
        messages, date = min(candidates, key=lambda candidate: _count_marks(candidate[0]), default=(None, None))
        return messages and ([_turn(turn["role"], turn["content"].replace(MARK, "")) for turn in messages], date)

    def _renders_to(self, messages: Messages, date: str | None, text: str) -> bool:
        # Turns that the layout does not know (tools, two questions in a row) would be read as part of a content.
        if any(delimiter in message["content"] for message in messages for delimiter in self._delimiters):
            return False
        pieces = render_pieces(self.tokenizer, messages, date)
        return pieces is not None and self.mark_special_tokens(pieces) == text

    @functools.cached_property
    def _delimiters(self) -> set[str]:
        """Strings that no content may contain: the layout's special tokens, and strings that are not only spaces."""
        between = [self.user_to_assistant, self.assistant_to_user, self.prompt]
        names = [MARK + name for name in special_tokens(self.tokenizer).values() if name]
        literals = [*between, self.before_user, self.before_system or "", self.after_system]
        used = {name for name in names if any(name in text for text in literals)}
        return used | {text for text in between if text.strip()}

    def _split_turns(self, body: str, has_system: bool) -> Messages | None:
        messages = []
        if has_system:
            content, separator, body = body.partition(self.after_system) if self.after_system else ("", "", "")
            if not separator:
                return None
            messages.append(_turn("system", content))
        while True:
            question, separator, rest = body.partition(self.user_to_assistant)
            answer, end, following = rest.partition(self.assistant_to_user)
            if not separator or not end:
                return [*messages, _turn("user", body)]
            messages += [_turn("user", question), _turn("assistant", answer)]
            body = following


@dataclasses.dataclass(frozen=True)
class ConversationPrefix:
    """Tokens that the auxiliaries read before an answer."""

    ids: tuple[int, ...]
    text: str
    """Text that the answer continues, if the auxiliaries have no chat template; else empty."""
    turns: tuple[tuple[str, str], ...] = ()
    """Role and content of each turn."""

    def continues(self, earlier: ConversationPrefix) -> bool:
        """Whether this is the same conversation after an answer to the earlier prompt."""
        length = len(earlier.turns)
        following = [role for role, _ in self.turns[length:]]
        return self.turns[:length] == earlier.turns and following[:1] == ["assistant"]


class ConversationConverter:
    """Converts conversations rendered for the target into those of the auxiliaries.

    Attributes:
        space_before_answer: the template writes a space between prompt and answer that the answer brings itself.
        turn_ends: the target's special token that ends an answer, with the auxiliaries' as value.
        prefix_of: returns the `ConversationPrefix` of marked bytes that end where an answer begins, or None.
    """

    def __init__(self, layout: ChatLayout, auxiliary: AuxiliaryTokenizer) -> None:
        self._layout = layout
        self._auxiliary = auxiliary
        self.space_before_answer = layout.user_to_assistant == layout.prompt + " "
        self._prompt = layout.prompt.encode(errors="surrogateescape")
        self._bos = f"{MARK}{layout.tokenizer.bos_token}"
        self.turn_ends = self._turn_ends()
        self.prefix_of = functools.lru_cache(maxsize=256)(self._prefix_of)

    @classmethod
    def from_tokenizers(
        cls, target: Any, auxiliary: AuxiliaryTokenizer, drops_space: tuple[bool, bool]
    ) -> ConversationConverter | None:
        """Return None if the target's chat template cannot be parsed, or if neither tokenizer has a template.

        A target without a template is prompted in the layout of `plain_prompt`.
        """
        layout = ChatLayout.from_tokenizer(target, drops_space)
        if layout is None and getattr(auxiliary.tokenizer, "chat_template", None):
            layout = ChatLayout.from_tokenizer(target, drops_space, plain=True)
        return None if layout is None else cls(layout, auxiliary)

    def prompt_ends(self, stream: bytearray, start: int) -> list[int]:
        """Return the ends of all prompts that end after `start`: positions at which an answer may begin."""
        ends, start = [], max(start - len(self._prompt) + 1, 0)
        while (index := stream.find(self._prompt, start)) >= 0:
            ends.append(index + len(self._prompt))
            start = index + 1
        return ends

    def _prefix_of(self, stream: bytes) -> ConversationPrefix | None:
        text = stream.decode(errors="surrogateescape")
        if any("\ud800" <= character <= "\udfff" for character in text.replace(MARK, "")):
            return None
        parsed = self._layout.parse(text)
        if parsed is None and text.startswith(self._bos):  # written by the tokenizer, not by the template
            parsed = self._layout.parse(text.removeprefix(self._bos))
        if parsed is None:
            return None
        messages, date = parsed
        turns = tuple((message["role"], message["content"]) for message in messages)
        tokenizer = self._auxiliary.tokenizer
        if not getattr(tokenizer, "chat_template", None):
            return ConversationPrefix(self._auxiliary.prefix_ids, plain_prompt(turns), turns)
        if messages[0]["role"] == "system" and _render(tokenizer, messages, date) is None:
            # The template does not support a system turn: put its content before the first question.
            first = f"{messages[0]['content']}\n\n{messages[1]['content']}"
            messages = [_turn("user", first), *messages[2:]]
        pieces = render_pieces(tokenizer, messages, date)
        return None if pieces is None else ConversationPrefix(tuple(self._auxiliary.encode_pieces(pieces)), "", turns)

    def _turn_ends(self) -> dict[int, int]:
        auxiliary_layout = ChatLayout.from_tokenizer(self._auxiliary.tokenizer)
        target_end, auxiliary_end = _answer_end(self._layout), self._auxiliary.tokenizer.eos_token_id
        if auxiliary_layout is not None:
            auxiliary_end = _answer_end(auxiliary_layout)
        return {target_end: auxiliary_end} if target_end is not None and isinstance(auxiliary_end, int) else {}


def render_pieces(tokenizer: Any, messages: Messages, date: str | None = None) -> Pieces | None:
    """Render a conversation as a prompt, with template and contents apart.

    The contents are located by rendering placeholders, not by searching for them: a content may look like the template.

    Returns:
        None if the template raises an error or changes a content.
    """
    text, frame = _render(tokenizer, messages, date), _template_pieces(tokenizer, messages, date)
    if text is None or frame is None:
        return None
    result, position = [], 0
    for index, piece in enumerate(frame):
        if index % 2:
            content = messages[int(piece)]["content"]
            forms = (content, content.strip(), content.rstrip(), content.lstrip())  # templates trim contents
            piece = next((form for form in forms if text.startswith(form + frame[index + 1], position)), None)
        elif not text.startswith(piece, position):
            piece = None
        if piece is None:
            return None
        result.append(piece)
        position += len(piece)
    return result if position == len(text) else None


def _render(tokenizer: Any, messages: Messages, date: str | None = None) -> str | None:
    """Render a conversation as a prompt, with the date that some templates print; None if the template fails."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return plain_prompt((message["role"], message["content"]) for message in messages)
    options = {} if date is None else {"date_string": date}
    default = template.get("default") if isinstance(template, dict) else template
    if date is not None and isinstance(default, str) and _CLOCK in default:
        options |= {"chat_template": _FIXED_CLOCK + default, "zqx_date": date}
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    except TEMPLATE_ERRORS:
        return None
    return text if isinstance(text, str) else None


def _template_pieces(
    tokenizer: Any, messages: Messages, date: str | None, change: Callable[[Sequence[str]], str] = "".join
) -> Pieces | None:
    """Return the text that a template writes around contents, with the contents' indices in `messages` between."""
    placeholders = [_turn(message["role"], f"zqx{index}xqz") for index, message in enumerate(messages)]
    text = _render(tokenizer, placeholders, date)
    return None if text is None else _PLACEHOLDER.split(change([text]))


def _special_token_marker(tokenizer: Any, drops_space: tuple[bool, bool]) -> Callable[[Sequence[str]], str]:
    names = sorted({name for name in special_tokens(tokenizer).values() if name}, key=len, reverse=True)
    special = "|".join(map(re.escape, names)) or "(?!)"
    unmarked, followed_by_space = re.compile(special), re.compile(f"({MARK}(?:{special})) ")
    drops_first, drops_later = drops_space
    bos = re.escape(MARK + tokenizer.bos_token) if tokenizer.bos_token and not drops_later else "(?!)"
    first_space = re.compile(f"({bos}|) ")
    added = describe_tokenizer(tokenizer)["added_tokens"]
    stripping = "|".join(re.escape(token["content"]) for token in added if token["rstrip"]) or "(?!)"  # as in Phi-3
    space_after = re.compile(f"({MARK}(?:{stripping}))\\s+")

    def mark_special_tokens(pieces: Sequence[str]) -> str:
        text = "".join(
            piece if index % 2 else unmarked.sub(lambda match: MARK + match[0], piece)
            for index, piece in enumerate(pieces)
        )
        text = space_after.sub(r"\1", text)
        if drops_later:
            text = followed_by_space.sub(r"\1", text)
        if drops_first and (match := first_space.match(text)):
            text = text[: match.end() - 1] + text[match.end() :]
        return text

    return mark_special_tokens


def _fill_date(beginning: str, body: str) -> tuple[str, str | None]:
    """Return the beginning of a conversation with the date that the text has in it, and that date."""
    before, placeholder, after = beginning.partition(_DATE)
    if not placeholder or not body.startswith(before):
        return beginning, None
    date = body[len(before) :].partition(after[:1])[0] if after else ""
    return beginning.replace(_DATE, date), date


def _answer_end(layout: ChatLayout) -> int | None:
    """Return the special token that the template writes after an answer, if it writes one."""
    text = layout.assistant_to_user
    tokens = special_tokens(layout.tokenizer).items()
    matches = [(len(content), index) for index, content in tokens if content and text.startswith(MARK + content)]
    return max(matches)[1] if matches else None


def _count_marks(messages: Messages) -> int:
    return sum(message["content"].count(MARK) for message in messages)


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
