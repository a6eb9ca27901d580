"""Reading forget, retain and holdout sets from files, folders and Hugging Face datasets.

Recognises question/answer, prompt/completion, messages and plain text. It knows nothing of tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from divdec.data.files import checked_text, rows_of
from divdec.errors import UsageError
from divdec.runs import write_text

Kind = Literal["question/answer", "prompt/completion", "messages", "text"]
ACCEPTED_FIELDS = "accepted: question + answer, prompt + completion, messages (role, content), or text"


@dataclasses.dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclasses.dataclass(frozen=True)
class Record:
    """One example: what comes before, and what is learned, scored or forgotten."""

    answer: str
    """The answer, the completion, or the whole of a plain text."""
    messages: tuple[Message, ...] = ()
    """The turns before the answer; empty where the record is no conversation."""
    prompt: str | None = None
    """What stands before a completion, word for word; None where the record is no completion."""
    place: str = dataclasses.field(default="", compare=False)
    """Where it was read, for messages: 'file, line 3'."""

    def as_row(self) -> dict[str, Any]:
        """The record as a line of a JSONL file, which `read_records` reads back."""
        if self.prompt is not None:
            return {"prompt": self.prompt, "completion": self.answer}
        if not self.messages:
            return {"text": self.answer}
        if len(self.messages) == 1 and self.messages[0].role == "user":
            return {"question": self.messages[0].content, "answer": self.answer}
        turns = (*self.messages, Message("assistant", self.answer))
        return {"messages": [dataclasses.asdict(turn) for turn in turns]}


@dataclasses.dataclass(frozen=True)
class RecordSet:
    """A named set of records of one kind."""

    name: str
    kind: Kind
    records: tuple[Record, ...]
    blank: int = 0
    """Plain texts without a word that were left out; real collections hold some."""

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    @property
    def sha256(self) -> str:
        """Digest of the content; the same whatever file format it came from."""
        digest = hashlib.sha256()
        for record in self.records:
            turns = [[message.role, message.content] for message in record.messages]
            digest.update(json.dumps([turns, record.prompt, record.answer], ensure_ascii=False).encode())
        return digest.hexdigest()

    @property
    def label(self) -> str:
        """Name and hash: all that a model card may say of a forget set."""
        return f"{self.name} (sha256 {self.sha256[:12]}, {len(self)} records)"


@dataclasses.dataclass(frozen=True)
class Overlap:
    """How many records of one set stand in another too."""

    records: int
    """Same prompt and same answer."""
    prompts: int
    """Same prompt, whatever the answer; plain texts have none."""


def single_turn(records: Iterable[Record]) -> bool:
    """Whether every record is one question with its answer: none is a text, a completion or a longer conversation."""
    return all([turn.role for turn in record.messages if turn.role != "system"] == ["user"] for record in records)


def read_records(source: str | Path, *, limit: int | None = None) -> RecordSet:
    """Read a set from a file, a folder or a Hugging Face dataset.

    Args:
        source: a .jsonl, .json, .txt or .md file; a .parquet or .csv table; a folder of such files or one that
            `datasets` saved; or a dataset id 'org/name', 'org/name:config' or 'org/name:config:split'.
        limit: read only the first so many records.

    Raises:
        UsageError: nothing is there, nothing is in it, or a line cannot be read (with its number).
    """
    name, rows = rows_of(source)
    return record_set(name, rows, limit=limit)


def record_set(name: str, rows: Iterable[tuple[str, Any]], *, limit: int | None = None) -> RecordSet:
    """Make a set of rows as `datasets` or a JSON file gives them.

    Args:
        name: the set's name.
        rows: pairs of a place for messages and a row: a mapping with fields, or a string, which is a text.
        limit: take only the first so many.

    Raises:
        UsageError: there is no row, one is malformed, or they are of several kinds.
    """
    kind: Kind | None = None
    records: list[Record] = []
    blank = 0
    for place, row in rows:
        if limit is not None and len(records) >= limit:
            break
        if _is_blank_text(row):
            blank += 1
            continue
        row_kind, record = _to_record(row, place)
        if kind is not None and row_kind != kind:
            raise UsageError(f"{place}: a {row_kind} record in a set that began with {kind}; give one kind per set")
        kind = row_kind
        records.append(record)
    if kind is None:
        raise UsageError(f"data set {name!r} is empty")
    return RecordSet(name, kind, tuple(records), blank)


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write records as JSON lines that `read_records` reads back, whole or not at all."""
    write_text(path, "".join(f"{json.dumps(record.as_row(), ensure_ascii=False)}\n" for record in records))


def texts_of(name: str, texts: Iterable[str]) -> RecordSet:
    """Plain texts that are in memory as a set."""
    return record_set(name, [(f"text {number}", text) for number, text in enumerate(texts, start=1)])


def overlap(one: RecordSet, other: RecordSet) -> Overlap:
    """Count the records of `one` that stand in `other` too; case and white space make no difference."""
    whole = {_normal(_before(record), record.answer) for record in other}
    prompts = {_normal(before) for record in other if (before := _before(record))}
    return Overlap(
        records=sum(_normal(_before(record), record.answer) in whole for record in one),
        prompts=sum(_normal(before) in prompts for record in one if (before := _before(record))),
    )


def _before(record: Record) -> str:
    return record.prompt or "\n".join(message.content for message in record.messages)


def _normal(*parts: str) -> tuple[str, ...]:
    return tuple(" ".join(part.casefold().split()) for part in parts)


def _is_blank_text(row: Any) -> bool:
    is_text = isinstance(row, Mapping) and row.keys().isdisjoint(("question", "prompt", "messages"))
    text = row.get("text") if is_text else row
    return isinstance(text, str) and not text.strip()


def _to_record(row: Any, place: str) -> tuple[Kind, Record]:
    if isinstance(row, str):
        row = {"text": row}
    if not isinstance(row, Mapping):
        raise UsageError(f"{place}: expected an object with fields, found {type(row).__name__}; {ACCEPTED_FIELDS}")
    if "messages" in row:
        turns = messages_of(row["messages"], place)
        if len(turns) < 2 or turns[-1].role != "assistant":
            raise UsageError(f"{place}: messages must end with an assistant's turn after at least one other")
        return "messages", Record(_filled(turns[-1].content, "answer", place), messages=turns[:-1], place=place)
    if {"question", "answer"} <= row.keys():
        question = Message("user", _filled(row["question"], "question", place))
        return "question/answer", Record(_filled(row["answer"], "answer", place), messages=(question,), place=place)
    if {"prompt", "completion"} <= row.keys():
        prompt = _filled(row["prompt"], "prompt", place)
        return "prompt/completion", Record(_filled(row["completion"], "completion", place), prompt=prompt, place=place)
    if "text" in row:
        return "text", Record(_filled(row["text"], "text", place), place=place)
    raise UsageError(f"{place}: fields {sorted(map(str, row))} are not recognised; {ACCEPTED_FIELDS}")


def messages_of(value: Any, place: str) -> tuple[Message, ...]:
    """The turns of a `messages` field; a malformed one is a UsageError that names the place."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise UsageError(f"{place}: messages must be a list of objects with role and content")
    turns = []
    for turn in value:
        if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
            raise UsageError(f"{place}: each message needs a role and a content")
        turns.append(Message(turn["role"], _filled(turn.get("content"), "content", place)))
    return tuple(turns)


def _filled(value: Any, field: str, place: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{place}: {field} is {type(value).__name__}, not text")
    if not value.strip():
        raise UsageError(f"{place}: {field} is empty")
    return checked_text(value, f"{place}: {field}")
