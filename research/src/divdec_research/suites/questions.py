"""Questions of a benchmark with their answers, as OpenUnlearning's published figures score them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from divdec.data.formatting import Example, encode_records, label_answer
from divdec.data.records import Record
from divdec.errors import UsageError
from divdec.evaluation.questions import QuestionFormat, decoded


@dataclasses.dataclass(frozen=True)
class BenchmarkFormat(QuestionFormat):
    """Layout of questions and answers for one tokenizer."""

    shots: tuple[Record, ...] = ()
    """Examples before every question (plain layout)."""

    def encode(self, records: Sequence[Record]) -> list[Example]:
        """Tokenize prompts and answers; the answers and their end tokens are labelled.

        Raises:
            UsageError: no token of an answer is left.
        """
        new = [record for record in dict.fromkeys(records) if record not in self._examples]
        if self.template == "chat":
            examples = encode_records(new, self.tokenizer, self.chat_format)
        else:
            examples = [self._plain_example(record) for record in new]
        self._examples.update(zip(new, examples, strict=True))
        return [self._examples[record] for record in records]

    def truth(self, record: Record) -> str:
        """Decode the answer's tokens after truncation; raise a `UsageError` if truncation removed the whole answer."""
        ids = self.encode([record])[0].input_ids if self.template == "chat" else self._plain_whole(record)
        text = decoded(self.tokenizer, ids).replace(decoded(self.tokenizer, self.prompt(record)), "").strip()
        if not text:
            raise UsageError(f"{record.location}: nothing is left of the answer within {self.max_length} tokens")
        return text

    def plain_text(self, record: Record) -> str:
        """Return question and answer in the plain layout, after the examples."""
        plain_text = super().plain_text
        return "".join(f"{plain_text(shot)}\n\n" for shot in self.shots) + plain_text(record)

    @functools.cached_property
    def _examples(self) -> dict[Record, Example]:
        return {}  # an answer is scored, attacked and compared

    def _plain_example(self, record: Record) -> Example:
        # OpenUnlearning counts the prompt's tokens, and leaves the first token of many answers unlabelled.
        example = label_answer(self.prompt(record), self._plain_whole(record))
        if set(example.input_ids[example.prompt_length :]) <= set(self.tokenizer.all_special_ids):
            raise UsageError(
                f"{record.location}: no token of the answer is left within {self.max_length} tokens "
                f"(the prompt alone has {len(self.plain_ids(dataclasses.replace(record, answer='')))}); "
                "give a greater --max-length"
            )
        return example

    def _plain_whole(self, record: Record) -> list[int]:
        whole, end = self.plain_ids(record)[: self.max_length], self.tokenizer.eos_token_id
        return whole if whole[-1:] == [end] or not isinstance(end, int) else [*whole, end]
