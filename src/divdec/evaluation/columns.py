"""The columns of a benchmark's files: JSON or JSONL, each row an object. It knows nothing of any one benchmark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from divdec.data.records import Message, Record, json_rows, read_text
from divdec.errors import UsageError

Item = TypeVar("Item")


def read_rows(file: Path, source: str, read: Callable[[Any, str], Item], limit: int | None = None) -> tuple[Item, ...]:
    """Read a file row by row.

    Args:
        file: JSON or JSONL.
        source: the Hugging Face dataset that the file comes from, for messages.
        read: makes an item of a row and its place.
        limit: take only the first so many rows.

    Raises:
        UsageError: the file is missing or empty, or a row cannot be read (with its line).
    """
    if not file.is_file():
        raise UsageError(f"{file} does not exist; such files come from the Hugging Face dataset {source}")
    found = []
    for place, row in json_rows(file.name, read_text(file)):
        if limit is not None and len(found) >= limit:
            break
        found.append(read(row, place))
    if not found:
        raise UsageError(f"{file} is empty")
    return tuple(found)


def text_in(row: Any, column: str, place: str) -> str:
    """The text of a column.

    Raises:
        UsageError: it is missing or empty, or no text.
    """
    value = _row(row, place).get(column)
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{place}: column {column} is {'empty or no text' if column in row else 'missing'}")
    return value


def texts_in(row: Any, column: str, place: str) -> tuple[str, ...]:
    """The texts of a column that holds a list of them.

    Raises:
        UsageError: it is missing, or no list of texts.
    """
    value = _row(row, place).get(column)
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text.strip() for text in value):
        raise UsageError(f"{place}: column {column} is missing, or no list of texts")
    return tuple(value)


def _row(row: Any, place: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise UsageError(f"{place}: expected an object with columns, such as question and answer")
    return row


def question_in(row: Any, place: str) -> Record:
    """The columns question and answer as a record."""
    asked = Message("user", text_in(row, "question", place))
    return Record(text_in(row, "answer", place), messages=(asked,), place=place)
