"""An answer's text while it grows: whole characters only, and nothing of what may turn out to be a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CONTEXT = 8  # tokens of a prompt by which its answer's first token is read
_UNFINISHED = "\ufffd"  # how a tokenizer writes bytes that make no character, or not yet


class AnswerText:
    """Turns tokens into the text that may be shown so far.

    An answer continues its prompt: SentencePiece's "▁the" is "the" at the beginning of a text and " the" elsewhere.
    Each token is therefore decoded together with those before it, back to the prompt's last special token.

    Attributes:
        start: where the last token begins in the answer, in characters; for a part of a character, where that begins.
        stopped: whether a stop string has come; the text ends before it.
    """

    def __init__(
        self, tokenizer: Any, stop: Sequence[str] = (), prompt: Sequence[int] = (), *, skip_special: bool = True
    ) -> None:
        self.start = 0
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._skip_special = skip_special
        self._before = self._context(prompt)
        self._pending: list[int] = []  # tokens whose text is not in `_text` yet
        self._held = ""  # their text so far
        self._text = ""
        self._shown = 0

    def add(self, token: int) -> str:
        """What a token adds to the text that may be shown."""
        self.start = len(self._text) + len(self._held.rstrip(_UNFINISHED))
        self._pending.append(token)
        self._held = self._text_of(self._pending)
        if self._held and not self._held.endswith(_UNFINISHED):
            self._settle(len(self._pending))
        elif len(self._pending) > CONTEXT:  # at most the last three can be parts of a character that is not finished
            self._settle(len(self._pending) - 3)
        return self._show()

    def end(self) -> str:
        """What was held back: nothing more comes."""
        if not self.stopped:
            self._settle(len(self._pending))
        return self._show(last=True)

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """The prompt's last tokens, without those up to its last special one."""
        found: list[int] = []
        for token in reversed(prompt[-CONTEXT:]):
            special = not self._decode([token]) and _decode(self._tokenizer, [token], skip_special=False)
            if special and token != self._tokenizer.unk_token_id:
                break
            found.insert(0, token)
        return found

    def _decode(self, ids: list[int]) -> str:
        return _decode(self._tokenizer, ids, self._skip_special)

    def _text_of(self, ids: list[int]) -> str:
        """What tokens add to the text before them."""
        before, whole = self._decode(self._before), self._decode(self._before + ids)
        # Bytes that make no character can change how the bytes before them are read.
        return whole[len(before) :] if whole.startswith(before) else self._decode(ids)

    def _settle(self, count: int) -> None:
        """Add the text of the first pending tokens."""
        done, self._pending = self._pending[:count], self._pending[count:]
        if added := self._text_of(done):  # special tokens add none: what follows them continues the text before
            self._text += added
            self._before = done
        self._held = self._text_of(self._pending) if self._pending else ""

    def _show(self, last: bool = False) -> str:
        if not self.stopped:
            # A stop string may begin in what was shown only if it had been held back, so nothing shown is taken back.
            found = [place for stop in self._stop if (place := self._text.find(stop, self._shown)) >= 0]
            if found:
                self._text, self.stopped = self._text[: min(found)], True
        end = len(self._text) if last or self.stopped else len(self._text) - self._begun()
        shown, self._shown = self._text[self._shown : end], max(end, self._shown)
        return shown

    def _begun(self) -> int:
        """How many characters at the end could begin a stop string."""
        longest = max(map(len, self._stop), default=0)
        for length in range(min(longest - 1, len(self._text) - self._shown), 0, -1):
            end = self._text[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0


def answer_text(tokenizer: Any, prompt: Sequence[int], answer: Sequence[int]) -> str:
    """The text of a whole answer to a prompt, as a stream of it adds up."""
    text = AnswerText(tokenizer, (), prompt)
    return "".join(map(text.add, answer)) + text.end()


def token_text(tokenizer: Any, before: Sequence[int], token: int) -> str:
    """What a token adds to the text of those before it; special tokens as they are written."""
    head = list(before[-CONTEXT:])
    known, whole = (_decode(tokenizer, ids, skip_special=False) for ids in (head, [*head, token]))
    return whole[len(known) :] if whole.startswith(known) else _decode(tokenizer, [token], skip_special=False)


def _decode(tokenizer: Any, ids: list[int], skip_special: bool) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False))
