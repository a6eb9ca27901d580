"""What the auxiliaries read at each of the target's tokens: a pure function of the tokens up to there.

A context remembers what it has computed, so that the next token costs the same however long the text is.
"""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from divdec.bridge.common_prefix import common_length
from divdec.bridge.retokenize import AuxiliaryTokenizer, adds_space
from divdec.bridge.token_bytes import special_tokens, token_bytes

if TYPE_CHECKING:
    from divdec.bridge.conversation import ConversationBridge, Opening

_KEPT = 64  # states that a context may be rolled back to without reading it again


@dataclasses.dataclass(frozen=True)
class View:
    """What the auxiliaries read at one of the target's tokens."""

    ids: list[int]
    strips: bool
    """The target's next token begins a text, and a space in front of it is not part of the text."""
    adds: bool
    """The auxiliary's next token will have a space in front that is not part of the text."""
    open: bool
    """The last id belongs to a text that goes on, so that it could become a longer one."""


@dataclasses.dataclass
class _State:
    stable: list[int]
    """Ids that no later text changes; shared between states, of which each reads its first `stable_length`."""
    stable_length: int
    tail: str = ""
    tail_ids: list[int] | None = dataclasses.field(default_factory=list)
    """The ids of `tail`; None until they are asked for."""
    unfinished: bytes = b""
    started: bool = False
    """Something of the present text has been read."""
    first: bool = True
    """The present text is the first: no special token was before it, but for one that begins everything."""
    opened: Opening | None = None
    """The conversation up to its last prompt."""
    answer: bool = False
    """The present text is the answer to that prompt."""
    mid: bool = False
    """That prompt ended in text, so that no tokenizer puts a space between it and the answer."""
    ended: bool = False
    """The last token, but for padding, ended a text."""
    glue: bool = False
    """A space belongs between what was read and what comes."""
    stream_length: int = 0

    def append(self, ids: Sequence[int]) -> None:
        if len(self.stable) != self.stable_length:  # another state has gone on from here
            self.stable = self.stable[: self.stable_length]
        self.stable.extend(ids)
        self.stable_length = len(self.stable)


class ContextReader:
    """How the target's tokens are turned into text, and the text into the auxiliary's tokens."""

    def __init__(self, target: Any, auxiliary: Any) -> None:
        from divdec.bridge.conversation import MARK_BYTE, ConversationBridge

        self.auxiliary = AuxiliaryTokenizer(auxiliary)
        self.bytes = token_bytes(target)
        self.special = special_tokens(target)
        self.mark = MARK_BYTE
        marker = next(iter(self.special.values()), "")
        ids = {
            text: target.backend_tokenizer.encode(text, add_special_tokens=False).ids
            for text in ("a", " a", marker + "a", marker + " a")
        }
        self.strips_first = adds_space(self.bytes, ids["a"])
        self.strips_later = self.strips_first and adds_space(self.bytes, ids[marker + "a"])
        loose = (
            self.strips_first and ids["a"] == ids[" a"],
            self.strips_later and ids[marker + "a"] == ids[marker + " a"],
        )
        self.conversations: ConversationBridge | None = ConversationBridge.of(target, self.auxiliary, loose)
        self.begin = target.bos_token_id
        self.padding = target.pad_token_id
        self.special_ids = _roles(target, auxiliary)
        self.ends = {target.eos_token_id}
        if self.conversations is not None:
            self.special_ids |= self.conversations.turn_ends
            self.ends |= self.conversations.turn_ends.keys()
        # Where nothing at all has been read, a model still needs one token to say what it expects first.
        # Not the padding: its embedding is often all zeros, and then no two models differ.
        ends = (
            auxiliary.bos_token_id,
            auxiliary.eos_token_id,
            *self.auxiliary.encode("\n"),
            *self.auxiliary.encode("."),
        )
        self.stand_in = next(([token] for token in ends if isinstance(token, int)), [0])

    def start(self) -> _State:
        """What is known before the first token."""
        return _State(list(self.auxiliary.head), len(self.auxiliary.head))

    def strips(self, state: _State) -> bool:
        """Whether a space in front of the next token is none of the text's."""
        gap = state.answer and self.conversations is not None and self.conversations.gap
        return not state.started and (gap or self.adds(state))

    def adds(self, state: _State) -> bool:
        """Whether the target's tokenizer puts a space before a text that begins here."""
        return not state.started and not state.mid and (self.strips_first if state.first else self.strips_later)

    def settle(self, state: _State) -> list[int]:
        """Tokenise what is open, after moving what no longer changes into the stable part."""
        if state.tail_ids is None:
            if place := self.auxiliary.settled(state.tail):
                state.append(self.auxiliary.encode(state.tail[:place]))
                state.tail = state.tail[place:]
            state.tail_ids = self.auxiliary.encode(state.tail)
        return state.tail_ids

    def end_text(self, state: _State) -> None:
        """Whatever comes next is tokenised by itself."""
        if state.unfinished:
            state.tail, state.tail_ids = state.tail + state.unfinished.decode(errors="replace"), None
        state.append(self.settle(state))
        state.tail, state.tail_ids, state.unfinished = "", [], b""
        state.started = state.first = state.glue = state.answer = state.mid = False

    def add_text(self, state: _State, piece: bytes) -> None:
        """Go on with the present text; what is no whole character yet waits."""
        state.started = True
        data = state.unfinished + piece
        text, length = codecs.utf_8_decode(data, "replace", False)
        state.unfinished = data[length:]
        if text:
            if state.glue and not text[0].isspace():
                text = " " + text
            state.glue = False
            state.tail, state.tail_ids = state.tail + text, None

    def view(self, state: _State) -> View:
        """What the auxiliaries read at this point."""
        tail = self.settle(state) + self.auxiliary.pending(state.unfinished)
        nothing = not state.tail and not state.unfinished
        adds = (state.glue and not state.unfinished) or (nothing and self.auxiliary.adds_space)
        if self.auxiliary.word_piece and not state.unfinished:  # it writes no spaces, but begins words with them
            adds = adds or not state.tail[-1:].isalnum()
        ids = state.stable[: state.stable_length] + tail
        strips = self.strips(state)
        return View(ids or self.stand_in, strips, adds, bool(tail) and not strips and not adds)


class Context:
    """The target's tokens of one sequence and what was computed of them; it can be copied and rolled back."""

    def __init__(self, reader: ContextReader) -> None:
        self.reader = reader
        self.tokens: list[int] = []
        self._stream = bytearray()
        self._states = [(0, reader.start())]

    def copy(self) -> Context:
        """A context that goes its own way from here."""
        other = Context.__new__(Context)
        other.reader, other.tokens = self.reader, list(self.tokens)
        other._stream, other._states = bytearray(self._stream), list(self._states)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Context:
        return self.copy()

    def views(self, tokens: list[int], counts: Sequence[int]) -> list[View]:
        """What is read after the first n tokens, for each n of `counts` (in ascending order).

        Args:
            tokens: the whole sequence; what it has in common with the last call's is not read again.
            counts: numbers of tokens.
        """
        known = min(common_length(self.tokens, tokens), counts[0] if counts else len(tokens))
        while self._states[-1][0] > known:
            self._states.pop()
        start, state = self._states[-1]
        state = dataclasses.replace(state)
        del self._stream[state.stream_length :]
        self.tokens = list(tokens)
        wanted, found = set(counts), {}
        if start in wanted:
            found[start] = self.reader.view(state)
        for count, token in enumerate(tokens[start:], start + 1):
            self._read(state, token)
            if count in wanted or count == len(tokens):
                found[count] = self.reader.view(state)
                self._states.append((count, dataclasses.replace(state)))
        if len(self._states) > _KEPT + 1:
            self._states[1:] = self._states[-_KEPT:]
        return [found[count] for count in counts]

    def _read(self, state: _State, token: int) -> None:
        reader = self.reader
        special = reader.special.get(token)
        # A batch goes on when a row has ended: the row is filled up, perhaps with the token that ended it.
        if special is not None and token == reader.padding and (state.ended or token not in reader.special_ids):
            return
        before = len(self._stream)
        if special is not None:
            written = piece = reader.mark + special.encode()
        else:
            piece = self._text_of(token)
            written = piece.replace(reader.mark, b"\xfe")  # no text either, and no mark
        if token == reader.begin and self._stream == piece:
            return  # written by the template and by the tokenizer: twice is once
        if special is None and reader.strips(state) and piece.startswith(b" "):
            piece = piece[1:]
            if reader.adds(state):
                written = written[1:]
            state.started = True
        state.ended = special is not None and bool(before) and token in reader.ends
        self._stream += written
        state.stream_length = len(self._stream)
        if reader.conversations is not None and written and self._opened(state, before, special is not None):
            return
        if special is None:
            if piece:
                reader.add_text(state, piece)
        elif token != reader.begin or before:
            reader.end_text(state)
            if (mapped := reader.special_ids.get(token)) is not None:
                state.append([mapped])

    def _text_of(self, token: int) -> bytes:
        texts = self.reader.bytes
        return (texts[token] or b"") if token < len(texts) else b""

    def _opened(self, state: _State, before: int, special: bool) -> bool:
        """Whether the last token ended a prompt of the target's chat template; the state then begins with it."""
        conversations = self.reader.conversations
        assert conversations is not None
        opened = False
        for end in conversations.marker_ends(self._stream, before):
            rest = bytes(self._stream[end:])
            opening = None if special and rest else conversations.opening(bytes(self._stream[:end]))
            # What looks like another conversation is one that the answer has written, or that a content holds.
            if opening is not None and (state.opened is None or opening.follows(state.opened)):
                state.opened, state.answer, state.mid, state.ended = opening, True, not special, False
                state.stable, state.stable_length = list(opening.ids), len(opening.ids)
                state.tail, state.tail_ids = opening.text, None
                state.unfinished, state.started, state.first = b"", False, False
                state.glue = bool(opening.text)
                if rest:
                    if conversations.gap and rest.startswith(b" "):
                        rest, state.started = rest[1:], True
                    self.reader.add_text(state, rest)
                opened = True
        return opened


def _roles(target: Any, auxiliary: Any) -> dict[int, int]:
    """The auxiliary's special token for each of the target's that has the same role."""
    found: dict[int, int] = {}
    for role in ("bos_token_id", "eos_token_id"):
        here, there = getattr(target, role), getattr(auxiliary, role)
        if isinstance(here, int) and isinstance(there, int):
            found[here] = there
    return found
