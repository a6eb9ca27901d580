"""From text to token ids and back, for one engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from jinja2.exceptions import TemplateError

from divdec.bridge.token_bytes import special_tokens, token_bytes
from divdec.data.formatting import encode_prompt
from divdec.data.records import Message, Record
from divdec.decoding.text import AnswerText
from divdec.errors import UsageError, first_line
from divdec.serving.api.errors import invalid
from divdec.serving.api.schemas import Turn

Result = TypeVar("Result")


class Vocabulary:
    """An engine's tokenizer as the endpoints use it."""

    def __init__(self, tokenizer: Any, size: int) -> None:
        """Read what each token stands for.

        Args:
            tokenizer: the bundle's.
            size: width of the logits; ids beyond the tokenizer's own are possible, if unlikely.
        """
        self.tokenizer = tokenizer
        self.size = size
        try:
            self._bytes, self._special = token_bytes(tokenizer), special_tokens(tokenizer)
        except UsageError:
            # Not of the `tokenizers` library: each token as it decodes alone.
            self._bytes = [str(tokenizer.decode([token])).encode() for token in range(len(tokenizer))]
            self._special = {token: str(tokenizer.convert_ids_to_tokens(token)) for token in tokenizer.all_special_ids}
        self._lock = threading.Lock()

    async def of_text(self, text: str, param: str = "prompt") -> list[int]:
        """The tokens of a plain prompt, as `divdec generate` makes them.

        Raises:
            ApiError: there is none.
        """
        ids = await self._apart(lambda: encode_prompt(Record("", prompt=text), self.tokenizer))
        if not ids:
            raise invalid(f"{param} holds no token: there is nothing to continue", param)
        return ids

    async def of_turns(self, turns: Sequence[Turn], *, open_end: bool = True) -> list[int]:
        """The tokens of a conversation up to where the answer begins, laid out by the tokenizer's chat template.

        Args:
            turns: the messages.
            open_end: False leaves out what begins the answer.

        Raises:
            ApiError: the tokenizer has no template, or its template refuses these messages.
        """
        if not self.tokenizer.chat_template:
            raise invalid("this model's tokenizer has no chat template: use /v1/completions", "messages")
        # What OpenAI calls developer, templates know as system.
        named = [("system" if turn.role == "developer" else turn.role, turn.content) for turn in turns]
        try:
            if open_end:
                record = Record("", messages=tuple(Message(*turn) for turn in named))
                ids = await self._apart(lambda: encode_prompt(record, self.tokenizer))
            else:
                ids = await self._apart(lambda: self._closed(named))
        except TemplateError as error:
            raise invalid(f"the chat template refuses these messages: {first_line(error)}", "messages") from None
        if not ids:
            raise invalid("messages hold no token: there is nothing to answer", "messages")
        return ids

    async def raw(self, text: str, *, special: bool) -> list[int]:
        """The tokens of a text, with or without those that the tokenizer adds."""
        return await self._apart(lambda: self.tokenizer(text, add_special_tokens=special)["input_ids"])

    def check(self, ids: Iterable[int], param: str) -> None:
        """Refuse ids that the model has no logits for.

        Raises:
            ApiError: there is one.
        """
        for token in ids:
            if token >= self.size:
                raise invalid(f"{param}: token id {token} is outside the vocabulary of {self.size} tokens", param)

    def bytes(self, token: int) -> bytes:
        """What a token stands for; a special one, what it is written as."""
        if (special := self._special.get(token)) is not None:
            return special.encode()
        return (self._bytes[token] or b"") if token < len(self._bytes) else b""

    def name(self, token: int, *, by_id: bool = False) -> str:
        """A token as text; where it holds a part of a character, its bytes are spelt as OpenAI does."""
        if by_id or not (held := self.bytes(token)):
            return f"token_id:{token}"
        try:
            return held.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in held)

    def _closed(self, turns: list[tuple[str, str]]) -> list[int]:
        messages = [{"role": role, "content": content} for role, content in turns]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    async def starts(self, text: str, count: int) -> list[int]:
        """Where each of the first tokens of a plain prompt begins in its text, in characters."""
        encoding = await self._apart(lambda: self.tokenizer(text, return_offsets_mapping=True))
        found, end = [], 0
        for start, stop in encoding["offset_mapping"][:count]:
            if start == stop or text[end:start].isspace():  # added by the tokenizer, or said with the space before it
                start = end
            found.append(start)
            end = max(end, stop)
        return found

    async def written(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """The text of tokens, special ones included, and where each begins in it."""

        def write() -> tuple[str, list[int]]:
            text = AnswerText(self.tokenizer, skip_special=False)
            pieces, starts = [], []
            for token in ids:
                pieces.append(text.add(token))
                starts.append(text.start)
            return "".join([*pieces, text.end()]), starts

        return await self._apart(write)

    async def _apart(self, work: Callable[[], Result]) -> Result:
        """Do it on another thread: a long text takes a while, and streams must go on."""

        def locked() -> Result:
            with self._lock:
                return work()

        return await asyncio.to_thread(locked)
