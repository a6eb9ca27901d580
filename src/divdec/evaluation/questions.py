"""Layout of a benchmark's questions, as OpenUnlearning's published figures have it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

from divdec.data.formatting import IGNORED, WHOLE, Example, Format, encode_prompts
from divdec.data.records import Record
from divdec.errors import UsageError
from divdec.options import read_template_kwargs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from divdec.evaluation.settings import QuestionSettings

TEXT_TOKENS = 2048


@dataclasses.dataclass(frozen=True)
class QuestionFormat:
    """Layout of questions for one tokenizer: its chat template, or OpenUnlearning's plain layout.

    The plain layout differs from `divdec.data.formatting` in white space, which the published figures depend on.
    """

    tokenizer: PreTrainedTokenizerBase
    template: Literal["chat", "plain"] = "chat"
    system_prompt: str | None = "You are a helpful assistant."
    date: str | None = "10 Apr 2025"
    max_length: int = 512
    """Longest sequence of the plain layout, in tokens; a chat is never cut."""
    chat_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Variables of the chat template."""

    @classmethod
    def from_settings(
        cls, tokenizer: PreTrainedTokenizerBase, settings: QuestionSettings, max_length: int = 512
    ) -> Self:
        """Create the layout that the options of `divdec eval` describe."""
        return cls(
            tokenizer,
            settings.template,
            settings.system_prompt,
            settings.date,
            max_length=max_length,
            chat_template_kwargs=read_template_kwargs(settings.chat_template_kwargs),
        )

    def __post_init__(self) -> None:
        if self.template == "chat" and not self.tokenizer.chat_template:
            raise UsageError("the tokenizer has no chat template; give --template plain")

    def prompts(self, records: Sequence[Record]) -> list[list[int]]:
        """Tokenize the prompts, which do not depend on the answers."""
        questions = [dataclasses.replace(record, answer="") for record in records]
        if self.template == "chat":
            return encode_prompts(questions, self.tokenizer, self.chat_format)
        return [self.plain_ids(record)[: self.max_length] for record in questions]

    def prompt(self, record: Record) -> list[int]:
        """Tokenize the prompt of one record."""
        return self.prompts([record])[0]

    @functools.cached_property
    def chat_format(self) -> Format:
        """Layout of the chat template, without truncation."""
        kwargs = self.chat_template_kwargs
        return dataclasses.replace(WHOLE, system_prompt=self.system_prompt, date=self.date, chat_template_kwargs=kwargs)

    def plain_ids(self, record: Record) -> list[int]:
        """Tokenize question and answer in the plain layout."""
        return token_ids(self.tokenizer, self.plain_text(record))

    def plain_text(self, record: Record) -> str:
        """Return question and answer in the plain layout."""
        return f"Question: {question_of(record)}\nAnswer: {record.answer}"


def question_of(record: Record) -> str:
    """Return the last turn before a record's answer, or its prompt; a plain text is a `UsageError`."""
    if record.messages:
        return record.messages[-1].content
    if record.prompt is None:
        raise UsageError(f"{record.location or 'a record'}: a plain text asks nothing; give questions with answers")
    return record.prompt


def decoded(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Decode without special tokens, and without spaces before punctuation, as OpenUnlearning does."""
    return tokenizer.clean_up_tokenization(str(tokenizer.decode(ids, skip_special_tokens=True)))


def continuation(record: Record, tokenizer: PreTrainedTokenizerBase, longest: int = TEXT_TOKENS) -> Example:
    """Tokenize a prompt, and `longest` tokens of its labelled continuation at most (OpenUnlearning's completions).

    A text without a prompt is labelled from its second token on. There is no end token.

    Raises:
        UsageError: fewer than two tokens follow the prompt.
    """
    prompt = record.prompt or ""
    before = token_ids(tokenizer, prompt) if prompt else []
    whole = token_ids(tokenizer, f"{prompt} {record.answer}" if prompt else record.answer)
    whole = whole[: len(before) + longest]
    masked = max(len(before), 1)
    if len(whole) - masked < 2:
        raise UsageError(f"{record.location}: there is nothing to predict")
    return Example(whole, [IGNORED] * masked + whole[masked:])


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokenize a text, with the special tokens that the tokenizer adds."""
    return list(tokenizer(text)["input_ids"])  # pyright: ignore[reportArgumentType]
