"""Text from tokens: incremental decoding of an answer behind its prompt, with stop strings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

CONTEXT = 8  # prompt tokens that the answer's first tokens are decoded with
_UNFINISHED = "\ufffd"  # a tokenizer's text for bytes that are no complete character


class AnswerText:
    """Incremental detokenizer that returns whole characters and nothing that may belong to a stop string.

    SentencePiece decodes "▁the" as "the" at the beginning of a text and as " the" elsewhere, so tokens are decoded
    together with those before them, back to the prompt's last special token. Stop strings are compared with the text in
    which special tokens are written out, as transformers' `stop_strings` are.

    Attributes:
        start: offset of the last token in the answer, in characters; for part of a character, that character's.
        stopped: whether a stop string was found; the text ends before it.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        prompt: Sequence[int] = (),
        *,
        skip_special: bool = True,
        shown: Sequence[str] = (),
    ) -> None:
        """Prepare; `shown` are names of special tokens that the text has even where others are skipped."""
        self.start = 0
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._skip_special, self._names_shown = skip_special, frozenset(shown)
        self._before = self._context(prompt)
        self._pending: list[int] = []  # tokens whose text is not in `_text` yet
        self._pending_text = ""
        self._text = ""  # with special tokens
        self._visible = bytearray()  # for each character of `_text`, 0 if it belongs to the name of a special token
        self._shown = 0

    def add(self, token: int) -> str:
        """Add a token, and return the text that can be shown since the last call."""
        self.start = self._visible.count(1) + len(self._pending_text.rstrip(_UNFINISHED))
        if name := self._special_name(token):  # adds no text and is no context for the next tokens
            self._append(name, visible=name in self._names_shown)
            return self._show()
        self._pending.append(token)
        self._pending_text = self._text_of(self._pending)
        if self._pending_text and not self._pending_text.endswith(_UNFINISHED):
            self._settle(len(self._pending))
        elif len(self._pending) > CONTEXT:  # an unfinished character has at most three bytes
            self._settle(len(self._pending) - 3)
        return self._show()

    def end(self) -> str:
        """Return the remaining text at the end of the answer."""
        if not self.stopped:
            self._settle(len(self._pending))
        return self._show(last=True)

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """Return the prompt's last tokens after its last special one."""
        context: list[int] = []
        for token in reversed(prompt[-CONTEXT:]):
            if self._special_name(token) and token != self._tokenizer.unk_token_id:
                break
            context.insert(0, token)
        while context and self._decode(context).startswith(_UNFINISHED):  # within a character, the rest is unreadable
            context.pop(0)
        return context

    def _special_name(self, token: int) -> str:
        """Return the name of a special token that the answer's text leaves out; empty for other tokens."""
        return "" if self._decode([token]) else _decode(self._tokenizer, [token], skip_special=False)

    def _decode(self, ids: list[int]) -> str:
        return _decode(self._tokenizer, ids, self._skip_special)

    def _text_of(self, ids: list[int]) -> str:
        before, whole = self._decode(self._before), self._decode(self._before + ids)
        # Incomplete bytes can change how the bytes before them are decoded.
        return whole[len(before) :] if whole.startswith(before) else self._decode(ids)

    def _settle(self, count: int) -> None:
        """Move the first pending tokens to the text."""
        settled, self._pending = self._pending[:count], self._pending[count:]
        if added := self._text_of(settled):
            self._append(added)
            self._before = settled
        self._pending_text = self._text_of(self._pending) if self._pending else ""

    def _append(self, text: str, *, visible: bool = True) -> None:
        self._text += text
        self._visible += bytes([visible]) * len(text)

    def _show(self, last: bool = False) -> str:
        if not self.stopped:
            matches = [index for stop in self._stop if (index := self._text.find(stop, self._shown)) >= 0]
            if matches:
                self._text, self.stopped = self._text[: min(matches)], True
                del self._visible[min(matches) :]
        end = len(self._text) if last or self.stopped else len(self._text) - self._stop_prefix_length()
        shown = itertools.compress(self._text[self._shown : end], self._visible[self._shown : end])
        self._shown = max(end, self._shown)
        return "".join(shown)

    def _stop_prefix_length(self) -> int:
        """Return the number of characters at the end that may begin a stop string."""
        longest = max(map(len, self._stop), default=0)
        for length in range(min(longest - 1, len(self._text) - self._shown), 0, -1):
            end = self._text[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0


def answer_text(tokenizer: Any, prompt: Sequence[int], answer: Sequence[int], stop: Sequence[str] = ()) -> str:
    """Decode a whole answer, up to a stop string; equal to the text of `AnswerText`."""
    text, pieces = AnswerText(tokenizer, stop, prompt), []
    for token in answer:
        pieces.append(text.add(token))
        if text.stopped:
            break
    return "".join(pieces) + text.end()


def token_text(tokenizer: Any, before: Sequence[int], token: int) -> str:
    """Return the text that a token adds to those before it, with special tokens written out."""
    head = list(before[-CONTEXT:])
    known, whole = (_decode(tokenizer, ids, skip_special=False) for ids in (head, [*head, token]))
    return whole[len(known) :] if whole.startswith(known) else _decode(tokenizer, [token], skip_special=False)


def _decode(tokenizer: Any, ids: list[int], skip_special: bool) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False))
