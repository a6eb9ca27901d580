"""How a benchmark lays questions out: with the tokenizer's chat template, or plainly as OpenUnlearning does.

It differs from `divdec.data.formatting` in the plain layout alone, whose white space the published figures depend on.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from divdec.bridge.alignment import common_prefix_length
from divdec.data.formatting import IGNORED, Example, Format, encode_prompts, encode_records
from divdec.data.records import Record
from divdec.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Template = Literal["chat", "plain"]
UNLIMITED = 1 << 40  # a chat is never cut


@dataclasses.dataclass(frozen=True)
class Layout:
    """A way to lay records out, bound to a tokenizer."""

    tokenizer: PreTrainedTokenizerBase
    template: Template = "chat"
    system_prompt: str | None = None
    date: str | None = None
    """Date for templates that print one (Llama 3)."""
    shots: tuple[Record, ...] = ()
    """Examples put before every question (plain layout)."""
    max_length: int = 512
    """Longest sequence of the plain layout, in tokens; a chat is never cut."""

    def __post_init__(self) -> None:
        if self.template == "chat" and not self.tokenizer.chat_template:
            raise UsageError("the tokenizer has no chat template; give --template plain")

    def encode(self, record: Record) -> Example:
        """Prompt and answer as tokens, the answer and its end labelled; see `encode_all`."""
        return self.encode_all([record])[0]

    def encode_all(self, records: Sequence[Record]) -> list[Example]:
        """Prompts and answers as tokens, the answers and their ends labelled.

        Raises:
            UsageError: no token of an answer is left.
        """
        new = [record for record in dict.fromkeys(records) if record not in self._examples]
        if self.template == "chat":
            found = encode_records(new, self.tokenizer, self._form)
        else:
            found = [self._plain_example(record) for record in new]
        self._examples.update(zip(new, found, strict=True))
        return [self._examples[record] for record in records]

    def prompt(self, record: Record) -> list[int]:
        """The tokens before the answer; see `prompts`."""
        return self.prompts([record])[0]

    def prompts(self, records: Sequence[Record]) -> list[list[int]]:
        """The tokens before each answer, which they do not depend on."""
        asked = [dataclasses.replace(record, answer="") for record in records]
        new = [record for record in dict.fromkeys(asked) if record not in self._prompts]
        if self.template == "chat":
            found = encode_prompts(new, self.tokenizer, self._form)
        else:
            found = [self._plain(record, "") for record in new]
        self._prompts.update(zip(new, found, strict=True))
        return [self._prompts[record] for record in asked]

    @functools.cached_property
    def _prompts(self) -> dict[Record, list[int]]:
        return {}

    @functools.cached_property
    def _examples(self) -> dict[Record, Example]:
        """What has been laid out already: an answer is scored, attacked and compared."""
        return {}

    def _plain_example(self, record: Record) -> Example:
        prompt, whole = self.prompt(record), self._plain_whole(record)
        # The space before an answer may be part of its first token: the prompt ends where both agree no more.
        # OpenUnlearning counts tokens instead, and so leaves the first token of many answers unlabelled.
        start = common_prefix_length(prompt, whole)
        if set(whole[start:]) <= set(self.tokenizer.all_special_ids):
            raise UsageError(
                f"{record.place}: no token of the answer is left within {self.max_length} tokens "
                f"(the prompt alone has {len(self._untruncated(record, ''))}); give a greater --max-length"
            )
        return Example(whole, [IGNORED] * start + whole[start:])

    def truth(self, record: Record) -> str:
        """The answer as it comes back from its tokens, cut where they are cut.

        Raises:
            UsageError: nothing is left of it.
        """
        ids = self.encode(record).input_ids if self.template == "chat" else self._plain_whole(record)
        text = decoded(self.tokenizer, ids).replace(decoded(self.tokenizer, self.prompt(record)), "").strip()
        if not text:
            raise UsageError(f"{record.place}: nothing is left of the answer within {self.max_length} tokens")
        return text

    @property
    def _form(self) -> Format:
        return Format(system_prompt=self.system_prompt, date=self.date, max_length=UNLIMITED)

    def _plain(self, record: Record, answer: str) -> list[int]:
        return self._untruncated(record, answer)[: self.max_length]

    def _plain_whole(self, record: Record) -> list[int]:
        whole, end = self._plain(record, record.answer), self.tokenizer.eos_token_id
        return whole if whole[-1:] == [end] or not isinstance(end, int) else [*whole, end]

    def _untruncated(self, record: Record, answer: str) -> list[int]:
        shots = "".join(f"Question: {question(shot)}\nAnswer: {shot.answer}\n\n" for shot in self.shots)
        text = f"{shots}Question: {question(record)}\nAnswer: {answer}"
        return list(self.tokenizer(text)["input_ids"])  # pyright: ignore[reportArgumentType]


def question(record: Record) -> str:
    """What is asked, without any answer."""
    return record.messages[-1].content if record.messages else record.prompt or ""


def decoded(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """The text of token ids, without special tokens, spaces before punctuation removed as OpenUnlearning does."""
    return tokenizer.clean_up_tokenization(str(tokenizer.decode(ids, skip_special_tokens=True)))
