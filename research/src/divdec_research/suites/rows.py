"""Rows of a benchmark's files."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from divdec.data.records import Message, Record, json_rows, read_text
from divdec.errors import UsageError

Item = TypeVar("Item")


def read_rows(file: Path, dataset: str, read: Callable[[Any, str], Item], limit: int | None = None) -> tuple[Item, ...]:
    """Read the first `limit` rows of a JSON or JSONL file; `read` makes an item from a row and its location.

    `dataset` is the Hugging Face dataset that the file comes from, for error messages.

    Raises:
        UsageError: the file is missing or empty, or a row cannot be read (with its line).
    """
    if not file.is_file():
        raise UsageError(f"{file} does not exist; such files come from the Hugging Face dataset {dataset}")
    rows = itertools.islice(json_rows(file.name, read_text(file)), limit)
    items = tuple(read(row, location) for location, row in rows)
    if not items:
        raise UsageError(f"{file} is empty")
    return items


def text_in(row: Any, column: str, location: str) -> str:
    """Return the text in a column, or raise a `UsageError` if it is missing, empty or not a text."""
    value = _columns(row, location).get(column)
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{location}: column {column} is {'empty or no text' if column in row else 'missing'}")
    return value


def texts_in(row: Any, column: str, location: str) -> tuple[str, ...]:
    """Return the list of texts in a column, or raise a `UsageError` if it is missing or not such a list."""
    value = _columns(row, location).get(column)
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text.strip() for text in value):
        raise UsageError(f"{location}: column {column} is missing, or no list of texts")
    return tuple(value)


def question_in(row: Any, location: str) -> Record:
    """Make a record from the columns question and answer."""
    question = Message("user", text_in(row, "question", location))
    return Record(text_in(row, "answer", location), messages=(question,), location=location)


def _columns(row: Any, location: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise UsageError(f"{location}: expected an object with columns, such as question and answer")
    return row
