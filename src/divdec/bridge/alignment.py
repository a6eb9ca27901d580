"""Between the target's tokens and the auxiliaries': their input at each target token, and their divergence mapped back.

The input is a pure function of the tokens up to there. A sequence stores what it has computed.
"""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from divdec.bridge.auxiliary_tokenizer import AuxiliaryTokenizer, begins_with_space
from divdec.bridge.conversation import MARK_BYTE, ConversationConverter, ConversationPrefix
from divdec.bridge.token_bytes import (
    TokenBytes,
    source_tokens,
    special_tokens,
    token_bytes,
)
from divdec.data.formatting import common_prefix_length
from divdec.errors import UsageError

_MIN_COVERAGE = 0.5
_MAX_STATES = 64  # states that a sequence stores, to which it can be rolled back


@dataclasses.dataclass(frozen=True)
class AuxiliaryInput:
    """Tokens that the auxiliaries read at one of the target's tokens."""

    ids: list[int]
    target_strips_space: bool
    """The target's next token begins a text, and its leading space is not part of the text."""
    auxiliary_adds_space: bool
    """The auxiliaries' next token has a leading space that is not part of the text."""


@dataclasses.dataclass
class RetokenizerState:
    """Position of a `Retokenizer` in one sequence."""

    stable_ids: tuple[int, ...]
    """Ids before the current text."""
    tail: str = ""
    """The current text."""
    tail_ids: list[int] | None = dataclasses.field(default_factory=list)
    """Ids of `tail`; None until they are needed."""
    incomplete: bytes = b""
    """First bytes of a character that is not complete yet."""
    has_text: bool = False
    """The current text is not empty. Special tokens separate texts."""
    is_first: bool = True
    """No special token precedes the current text, except one that begins the sequence."""
    conversation: ConversationPrefix | None = None
    """The conversation up to its last prompt."""
    is_answer: bool = False
    """The current text is the answer to that prompt."""
    prompt_ends_in_text: bool = False
    """That prompt did not end in a special token, so no tokenizer puts a space before the answer."""
    has_ended: bool = False
    """The last token, ignoring padding, ended a text."""
    needs_space: bool = False
    """A space separates the text read from the text that follows."""
    stream_length: int = 0
    """Number of bytes read, special tokens included."""


class Retokenizer:
    """Converts the target's tokens into text and the text into the auxiliaries' tokens."""

    def __init__(self, target: Any, auxiliary: Any) -> None:
        self.auxiliary = AuxiliaryTokenizer(auxiliary)
        self.bytes = token_bytes(target)
        self.special = special_tokens(target)
        special = next(iter(self.special.values()), "")
        ids = {
            text: target.backend_tokenizer.encode(text, add_special_tokens=False).ids
            for text in ("a", " a", special + "a", special + " a")
        }
        self.adds_space_first = begins_with_space(self.bytes, ids["a"])
        self._adds_space_later = self.adds_space_first and begins_with_space(self.bytes, ids[special + "a"])
        drops_space = (
            self.adds_space_first and ids["a"] == ids[" a"],
            self._adds_space_later and ids[special + "a"] == ids[special + " a"],
        )
        self.conversations = ConversationConverter.from_tokenizers(target, self.auxiliary, drops_space)
        self.bos = target.bos_token_id
        self.padding = target.pad_token_id
        self.ends = {target.eos_token_id}
        self.special_ids = {}
        """The auxiliaries' special token of the same role, for each of the target's that has one."""
        for role in ("bos_token_id", "eos_token_id"):
            target_id, auxiliary_id = getattr(target, role), getattr(auxiliary, role)
            if isinstance(target_id, int) and isinstance(auxiliary_id, int):
                self.special_ids[target_id] = auxiliary_id
        if self.conversations is not None:
            self.special_ids |= self.conversations.turn_ends
            self.ends |= self.conversations.turn_ends.keys()
        # A model needs at least one token. Padding would not do: its embedding is often zero, which makes all models
        # agree.
        ends = (auxiliary.bos_token_id, auxiliary.eos_token_id)
        fallbacks = (*ends, *self.auxiliary.encode("\n"), *self.auxiliary.encode("."))
        self.empty_ids = next(([token] for token in fallbacks if isinstance(token, int)), [0])

    def initial_state(self) -> RetokenizerState:
        """Return the state before the first token."""
        return RetokenizerState(self.auxiliary.prefix_ids)

    def strips_space(self, state: RetokenizerState) -> bool:
        """Whether a leading space of the next token is not part of the text."""
        space_before_answer = (
            state.is_answer and self.conversations is not None and self.conversations.space_before_answer
        )
        return not state.has_text and (space_before_answer or self.adds_space(state))

    def adds_space(self, state: RetokenizerState) -> bool:
        """Whether the target's tokenizer puts a space before a text that begins here."""
        if state.has_text or state.prompt_ends_in_text:
            return False
        return self.adds_space_first if state.is_first else self._adds_space_later

    def tokenize_tail(self, state: RetokenizerState) -> list[int]:
        """Return the ids of the current text."""
        if state.tail_ids is None:
            state.tail_ids = self.auxiliary.encode(state.tail)
        return state.tail_ids

    def end_text(self, state: RetokenizerState) -> None:
        """End the current text; text that follows is tokenized separately."""
        if state.incomplete:
            state.tail, state.tail_ids = state.tail + state.incomplete.decode(errors="replace"), None
        state.stable_ids += tuple(self.tokenize_tail(state))
        state.tail, state.tail_ids, state.incomplete = "", [], b""
        state.has_text = state.is_first = state.needs_space = state.is_answer = state.prompt_ends_in_text = False

    def add_text(self, state: RetokenizerState, data: bytes) -> None:
        """Append bytes to the current text; an incomplete character is kept until it is complete."""
        state.has_text = True
        data = state.incomplete + data
        text, length = codecs.utf_8_decode(data, "replace", False)
        state.incomplete = data[length:]
        if text:
            if state.needs_space and not text[0].isspace():
                text = " " + text
            state.needs_space = False
            state.tail, state.tail_ids = state.tail + text, None

    def auxiliary_input(self, state: RetokenizerState) -> AuxiliaryInput:
        """Return what the auxiliaries read in this state."""
        tail = self.tokenize_tail(state) + self.auxiliary.encode_bytes(state.incomplete)
        is_empty = not state.tail and not state.incomplete
        adds_space = (state.needs_space and not state.incomplete) or (is_empty and self.auxiliary.adds_space)
        ids = [*state.stable_ids, *tail]
        strips_space = self.strips_space(state)
        return AuxiliaryInput(ids or self.empty_ids, strips_space, adds_space)


class AlignedSequence:
    """The target's tokens of one sequence, with the auxiliaries' input at each; it can be copied and rolled back."""

    def __init__(self, retokenizer: Retokenizer) -> None:
        self._retokenizer = retokenizer
        self._tokens: list[int] = []
        self._stream = bytearray()  # the text, with special tokens marked
        self._states = [(0, retokenizer.initial_state())]  # number of tokens read, state after them

    def copy(self) -> AlignedSequence:
        """Return an independent copy."""
        other = AlignedSequence.__new__(AlignedSequence)
        other._retokenizer, other._tokens = self._retokenizer, list(self._tokens)
        other._stream, other._states = bytearray(self._stream), list(self._states)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> AlignedSequence:
        return self.copy()

    def auxiliary_inputs(self, tokens: list[int], counts: Sequence[int]) -> list[AuxiliaryInput]:
        """Return what the auxiliaries read after the first n tokens, for each n of `counts`, in ascending order.

        The prefix that the whole sequence `tokens` shares with the last call's is not read again.
        """
        unchanged = min(common_prefix_length(self._tokens, tokens), counts[0] if counts else len(tokens))
        while self._states[-1][0] > unchanged:
            self._states.pop()
        start, state = self._states[-1]
        state = dataclasses.replace(state)
        del self._stream[state.stream_length :]
        self._tokens = list(tokens)
        wanted, inputs = set(counts), {}
        if start in wanted:
            inputs[start] = self._retokenizer.auxiliary_input(state)
        for count, token in enumerate(tokens[start:], start + 1):
            self._read(state, token)
            if count in wanted or count == len(tokens):
                inputs[count] = self._retokenizer.auxiliary_input(state)
                self._states.append((count, dataclasses.replace(state)))
        if len(self._states) > _MAX_STATES + 1:
            self._states[1:] = self._states[-_MAX_STATES:]
        return [inputs[count] for count in counts]

    def _read(self, state: RetokenizerState, token: int) -> None:
        special = self._retokenizer.special.get(token)
        if special is None:
            self._read_text(state, token)
        else:
            self._read_special(state, token, MARK_BYTE + special.encode())

    def _read_text(self, state: RetokenizerState, token: int) -> None:
        retokenizer = self._retokenizer
        text = (retokenizer.bytes[token] or b"") if token < len(retokenizer.bytes) else b""
        streamed = text.replace(MARK_BYTE, b"\xfe")  # also invalid in UTF-8, but not the mark
        if retokenizer.strips_space(state) and text.startswith(b" "):
            text = text[1:]
            if retokenizer.adds_space(state):
                streamed = streamed[1:]
            state.has_text = True
        state.has_ended = False
        if not self._extend_stream(state, streamed, is_special=False) and text:
            retokenizer.add_text(state, text)

    def _read_special(self, state: RetokenizerState, token: int, streamed: bytes) -> None:
        retokenizer, is_first = self._retokenizer, not self._stream
        # A finished row of a batch is padded until the others finish, possibly with its end token.
        if token == retokenizer.padding and token not in retokenizer.special_ids:
            return
        if state.has_ended and (token == retokenizer.padding or token in retokenizer.ends):
            return
        if token == retokenizer.bos and self._stream == streamed:
            return  # a BOS token written by both the template and the tokenizer counts once
        state.has_ended = not is_first and token in retokenizer.ends
        if self._extend_stream(state, streamed, is_special=True) or (token == retokenizer.bos and is_first):
            return
        retokenizer.end_text(state)
        if (auxiliary_id := retokenizer.special_ids.get(token)) is not None:
            state.stable_ids += (auxiliary_id,)

    def _extend_stream(self, state: RetokenizerState, streamed: bytes, *, is_special: bool) -> bool:
        """Add a token's bytes to the stream, and return whether they complete a prompt, so that an answer begins.

        The state then continues from the auxiliaries' prompt.
        """
        before = len(self._stream)
        self._stream += streamed
        state.stream_length = len(self._stream)
        conversations = self._retokenizer.conversations
        begins = False
        if conversations is None or not streamed:
            return begins
        for end in conversations.prompt_ends(self._stream, before):
            rest = bytes(self._stream[end:])
            prefix = None if is_special and rest else conversations.prefix_of(bytes(self._stream[:end]))
            # Any other conversation is part of an answer or of a message's content.
            if prefix is not None and (state.conversation is None or prefix.continues(state.conversation)):
                state.conversation, state.is_answer, state.has_ended = prefix, True, False
                state.prompt_ends_in_text = not is_special
                state.stable_ids = prefix.ids
                state.tail, state.tail_ids, state.incomplete = prefix.text, None, b""
                state.has_text = state.is_first = False
                state.needs_space = bool(prefix.text)
                if rest:
                    if conversations.space_before_answer and rest.startswith(b" "):
                        rest, state.has_text = rest[1:], True
                    self._retokenizer.add_text(state, rest)
                begins = True
        return begins


class DivergenceMapper:
    """Divergence over the target's vocabulary from the auxiliaries' logits over their own.

    It is log q − log p over the tokens with text. A target token without a source has its median.

    Raises:
        UsageError: less than half of the target's vocabulary has a source.
    """

    def __init__(self, target_bytes: TokenBytes, auxiliary: AuxiliaryTokenizer, width: int) -> None:
        self._bytes, self._auxiliary, self._width = target_bytes, auxiliary, width
        self._sources: dict[tuple[bool, bool], Tensor] = {}
        self._text_tokens = torch.tensor([index for index, text in enumerate(auxiliary.bytes) if text is not None])
        # A token without a source is never steered: with most of them unsteered, nothing would be unlearned.
        text = np.array([text is not None for text in target_bytes][:width])
        source = self.source().numpy()[: len(text)][text]
        covered = float((source >= 0).mean()) if len(source) else 0.0
        if covered < _MIN_COVERAGE:
            raise UsageError(
                f"the auxiliaries' tokenizer has tokens for {covered:.0%} of the target's vocabulary, at least "
                f"{_MIN_COVERAGE:.0%} are needed: the rest would not be steered"
            )

    def source(self, strip_space: bool = False, add_space: bool = False) -> Int[Tensor, " vocab"]:
        """Return `source_tokens` within a text, or at the beginning of a text; see `AuxiliaryInput`."""
        key = (strip_space, add_space)
        if key not in self._sources:
            texts = [_at_beginning(text, *key) for text in self._bytes]
            self._sources[key] = torch.from_numpy(source_tokens(texts, self._auxiliary.written_bytes, self._width))
        return self._sources[key]

    def divergence(
        self,
        retain: Float[Tensor, "inputs width"],
        forget: Float[Tensor, "inputs width"],
        inputs: Sequence[AuxiliaryInput],
    ) -> Float[Tensor, "inputs vocab"]:
        """Return log q − log p over the target's vocabulary after each input; NaN where an auxiliary is not finite."""
        retain, forget = retain.float(), forget.to(retain.device).float()
        width = min(retain.shape[-1], forget.shape[-1])
        retain, forget = retain[..., :width], forget[..., :width]
        self._text_tokens = self._text_tokens.to(retain.device)
        finite = self._is_finite(retain) & self._is_finite(forget)
        q, p = (logits[:, self._text_tokens].logsumexp(-1, keepdim=True) for logits in (retain, forget))
        divergence = retain - forget - (q - p)
        result = divergence.new_empty(len(inputs), self._width)
        keys = [
            (auxiliary_input.target_strips_space, auxiliary_input.auxiliary_adds_space) for auxiliary_input in inputs
        ]
        for key in set(keys):
            rows = [row for row, row_key in enumerate(keys) if row_key == key]
            result[rows] = self._gather(divergence[rows], key)
        # A gather may drop a value that is not finite. NaN makes the steered model raise an error.
        return result.masked_fill(~finite[:, None], torch.nan)

    def _is_finite(self, logits: Float[Tensor, "inputs width"]) -> Bool[Tensor, " inputs"]:
        """Whether all logits are finite; −inf is accepted for tokens without text, which a model may rule out."""
        ruled_out = logits.isneginf()
        ruled_out[:, self._text_tokens] = False
        return (logits.isfinite() | ruled_out).all(-1)

    def _gather(self, values: Float[Tensor, "inputs width"], key: tuple[bool, bool]) -> Float[Tensor, "inputs vocab"]:
        source = self._sources[key] = self.source(*key).to(values.device)
        median = values[:, self._text_tokens].median(dim=-1, keepdim=True).values
        return torch.where(source < 0, median, values[:, source.clamp(min=0)])


def _at_beginning(text: bytes | None, strip_space: bool, add_space: bool) -> bytes | None:
    if strip_space and text and len(text) > 1:
        text = text.removeprefix(b" ")
    return b" " + text if add_space and text and not text.startswith(b" ") else text
