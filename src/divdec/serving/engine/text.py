"""An answer's text while it grows: whole characters only, and nothing of what may turn out to be a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class AnswerText:
    """Turns tokens into the text that may be shown so far."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._decode = tokenizer.decode
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._text = ""
        self._shown = 0
        self.stopped = False
        """Whether a stop string has come; the text ends before it."""

    def add(self, token: int) -> str:
        """What a token adds to the text that may be shown."""
        self._tokens.append(token)
        try:
            self._text += self._stream.step(self._tokenizer, token) or ""
        except Exception:  # of tokenizers, where bytes that make no character change what was shown before them
            self._stream = DecodeStream(skip_special_tokens=True)
            self._text += self._stream.step(self._tokenizer, token) or ""
        return self._show()

    def end(self) -> str:
        """What was held back: nothing more comes."""
        whole = str(self._decode(self._tokens, skip_special_tokens=True))
        if not self.stopped and whole.startswith(self._text):
            self._text = whole  # with what is left of a character that was never finished
        return self._show(last=True)

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
