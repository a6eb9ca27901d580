"""Prompts to be answered: like records, but without an answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from divdec.data.files import JSON_SUFFIXES, checked_text, json_rows, read_text
from divdec.data.records import Message, Record, messages_of
from divdec.errors import UsageError


def prompts_from_lines(lines: Iterable[str], *, chat: bool) -> list[Record]:
    """One prompt a line; blank lines are left out.

    Args:
        lines: the prompts.
        chat: make each a user's turn of a conversation.

    Raises:
        UsageError: there is none.
    """
    try:
        prompts = [
            _prompt(checked_text(line.rstrip("\n"), f"prompt {number}"), chat)
            for number, line in enumerate(lines, start=1)
            if line.strip()
        ]
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompts are not UTF-8 text (byte {error.start})") from None
    if not prompts:
        raise UsageError("there is no prompt; give --prompt, --file, or lines on standard input")
    return prompts


def read_prompts(source: str, *, chat: bool) -> list[Record]:
    """Prompts of a text file (one a line) or of JSON lines with `question`, `prompt` or `messages`.

    Raises:
        UsageError: the file does not exist, is empty, or a line cannot be read (with its number).
    """
    path = Path(source).expanduser()
    if not path.is_file():
        raise UsageError(f"prompt file {source!r} does not exist")
    content = read_text(path)
    if path.suffix.lower() not in JSON_SUFFIXES:
        return prompts_from_lines(content.splitlines(), chat=chat)
    prompts = [_from_row(row, place, chat) for place, row in json_rows(path.name, content)]
    if not prompts:
        raise UsageError(f"prompt file {source!r} is empty")
    return prompts


def _from_row(row: Any, place: str, chat: bool) -> Record:
    if isinstance(row, str) and row.strip():
        return _prompt(checked_text(row, place), chat)
    if isinstance(row, Mapping):
        if "messages" in row:
            turns = messages_of(row["messages"], place)
            # The answer that a training file holds is not part of the question.
            turns = turns[:-1] if turns and turns[-1].role == "assistant" else turns
            if not turns:
                raise UsageError(f"{place}: messages hold no turn to be answered")
            return Record("", messages=turns, place=place)
        for field in ("question", "prompt"):
            if isinstance(row.get(field), str) and row[field].strip():
                text = checked_text(row[field], f"{place}: {field}")
                return dataclasses.replace(_prompt(text, chat or field == "question"), place=place)
    raise UsageError(f"{place}: no prompt found; accepted: a string, or an object with question, prompt or messages")


def _prompt(text: str, chat: bool) -> Record:
    return Record("", messages=(Message("user", text),)) if chat else Record("", prompt=text)
