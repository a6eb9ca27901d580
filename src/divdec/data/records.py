"""Read forget, retain and holdout sets, and prompts, from files, folders and Hugging Face datasets.

Records are question/answer, prompt/completion, messages or plain text. Alpaca's rows are read as question/answer,
ShareGPT's and TRL's prompt/completion of messages as messages.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from divdec.errors import UsageError, first_line
from divdec.runs import write_text

Kind = Literal["question/answer", "prompt/completion", "messages", "text"]
ACCEPTED_FIELDS = (
    "accepted: question + answer, instruction (+ input) + output, prompt + completion (texts, or lists of messages), "
    "messages (role, content), conversations (from, value), or text"
)
TEXT_SUFFIXES = (".txt", ".md")
JSON_SUFFIXES = (".jsonl", ".json")
TABLE_SUFFIXES = (".csv", ".parquet", ".arrow")
SUFFIXES = (*JSON_SUFFIXES, *TEXT_SUFFIXES, *TABLE_SUFFIXES)

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
"""Roles of the speakers that ShareGPT's rows name."""
MESSAGE_ROLES = {**ROLES, "developer": "system", "tool": "tool"}
MAX_LISTED = 10  # files in a message
PROMPT_FIELDS = ("question", "instruction", "prompt", "messages", "conversations")
MAX_CELL = 2**31 - 1  # characters; the largest limit that csv accepts on every platform

Rows = Iterator[tuple[str, Any]]
"""Pairs of a location for error messages ('file, line 3') and a row."""


@dataclasses.dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclasses.dataclass(frozen=True)
class Record:
    """One example: a prompt or conversation, and the answer that is learned, scored or forgotten."""

    answer: str
    """The answer, the completion, or the whole of a plain text."""
    messages: tuple[Message, ...] = ()
    """The turns before the answer; empty if the record is not a conversation."""
    prompt: str | None = None
    """The text before a completion; None if the record is not a completion."""
    location: str = dataclasses.field(default="", compare=False)
    """Where it was read, for error messages: 'file, line 3'."""

    def as_row(self, *, turns: bool = False) -> dict[str, Any]:
        """Convert to a row of a JSONL file that `read_records` reads; with `turns` a question becomes `messages`."""
        if self.prompt is not None:
            return {"prompt": self.prompt, "completion": self.answer}
        if not self.messages:
            return {"text": self.answer}
        if self.is_question and not turns:
            return {"question": self.messages[0].content, "answer": self.answer}
        conversation = (*self.messages, Message("assistant", self.answer))
        return {"messages": [dataclasses.asdict(turn) for turn in conversation]}

    @property
    def is_question(self) -> bool:
        """Whether the record is one question and its answer."""
        return len(self.messages) == 1 and self.messages[0].role == "user"


@dataclasses.dataclass(frozen=True)
class RecordSet:
    """A named set of records of one kind."""

    name: str
    kind: Kind
    records: tuple[Record, ...]
    blank: int = 0
    """Number of plain texts without a word, which are left out."""

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    @property
    def has_questions(self) -> bool:
        """Whether its records are conversations, so that a model can be asked for the answers."""
        return self.kind in ("question/answer", "messages")

    @property
    def sha256(self) -> str:
        """Digest of the content, the same for every file format."""
        digest = hashlib.sha256()
        for record in self.records:
            turns = [[message.role, message.content] for message in record.messages]
            digest.update(json.dumps([turns, record.prompt, record.answer], ensure_ascii=False).encode())
        return digest.hexdigest()

    @property
    def label(self) -> str:
        """Name and digest for model cards; they do not reveal the records."""
        return f"{self.name} (sha256 {self.sha256[:12]}, {len(self)} records)"


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Number of records of one set that are also in another."""

    records: int
    """Same prompt and same answer."""
    prompts: int
    """Same prompt, any answer; plain texts have none."""


def single_turn(records: Iterable[Record]) -> bool:
    """Whether every record is one question with its answer: no text, no completion, no longer conversation."""
    return all([turn.role for turn in record.messages if turn.role != "system"] == ["user"] for record in records)


def read_records(source: str | Path, *, limit: int | None = None, complete: bool = False) -> RecordSet:
    """Read a set from a file, a folder or a Hugging Face dataset.

    Args:
        source: a .jsonl, .json, .txt or .md file; a .parquet or .csv table; a folder of such files or one that
            `datasets` saved; or a dataset id 'org/name', 'org/name:config' or 'org/name:config:split'.
        limit: read only the first N records.
        complete: refuse a folder with files that are not read, such as .html, .docx or hidden ones, or a dataset with
            further splits. By default such files are listed on standard error.

    Raises:
        UsageError: it does not exist or is empty, or a line cannot be read (with its number).
    """
    path, source = Path(source).expanduser(), str(source)
    if path.is_dir():
        return record_set(path.name, _folder_rows(path, complete), limit=limit)
    if path.is_file():
        return record_set(path.stem, _file_rows(path), limit=limit)
    if (
        source.startswith((".", "/", "~"))
        or source.lower().endswith(SUFFIXES)
        or source.partition(":")[0].count("/") != 1
    ):
        raise UsageError(f"data {source!r} does not exist; give a file, a folder or a Hugging Face dataset id")
    return record_set(source, _hub_rows(source, complete), limit=limit)


def record_set(name: str, rows: Iterable[tuple[str, Any]], *, limit: int | None = None) -> RecordSet:
    """Make a set from rows: pairs of a location and a mapping with fields, or a string, which is a text.

    Raises:
        UsageError: there is no row, a row is malformed, or rows are of several kinds.
    """
    kind: Kind | None = None
    records: list[Record] = []
    blank = 0
    for location, row in rows:
        if limit is not None and len(records) >= limit:
            break
        if _is_blank_text(row):
            blank += 1
            continue
        row_kind, record = _to_record(row, location)
        if kind is not None and row_kind != kind:
            raise UsageError(f"{location}: a {row_kind} record in a set that began with {kind}; give one kind per set")
        kind = row_kind
        records.append(record)
    if kind is None:
        raise UsageError(f"data set {name!r} is empty; give records with question and answer, messages or text")
    return RecordSet(name, kind, tuple(records), blank)


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write records as JSON lines that `read_records` reads."""
    some = list(records)
    turns = any(record.messages and not record.is_question for record in some)  # a file has rows of one kind
    rows = (record.as_row(turns=turns) for record in some)
    write_text(path, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))


def texts_of(name: str, texts: Iterable[str]) -> RecordSet:
    """Make a set from plain texts."""
    return record_set(name, [(f"text {number}", text) for number, text in enumerate(texts, start=1)])


def overlap(records: RecordSet, other: RecordSet) -> Overlap:
    """Count the records of `records` that are also in `other`, ignoring case and white space."""
    prompts = {_normal(_before(record)) for record in other if _before(record)}
    whole = {_normal(_before(record), record.answer) for record in other}
    return Overlap(
        records=sum(_normal(_before(record), record.answer) in whole for record in records),
        prompts=sum(_normal(_before(record)) in prompts for record in records),
    )


def prompts_from_lines(lines: Iterable[str], *, chat: bool) -> list[Record]:
    """Read one prompt per line, with `chat` as the user's turn of a conversation; blank lines are skipped.

    Raises:
        UsageError: there is no prompt, or a line is not UTF-8.
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


def read_prompts(source: str, *, chat: bool, raw: bool = False) -> list[Record]:
    """Read prompts from a text file (one per line), or from JSON whose rows have one of `PROMPT_FIELDS`.

    With `raw` questions are plain text, too.

    Raises:
        UsageError: the file does not exist or is empty, or a line cannot be read (with its number).
    """
    path = Path(source).expanduser()
    if not path.is_file():
        raise UsageError(f"prompt file {source!r} does not exist; accepted: .txt (a prompt per line), .json and .jsonl")
    if path.suffix.lower() in TABLE_SUFFIXES:
        raise UsageError(f"prompt file {source!r} is a table; accepted: .txt (a prompt per line), .json and .jsonl")
    content = read_text(path)
    if path.suffix.lower() not in JSON_SUFFIXES:
        # Not splitlines(): a prompt may hold other line separators.
        return prompts_from_lines(content.split("\n"), chat=chat)
    prompts = [_prompt_of_row(row, location, chat, raw) for location, row in json_rows(path.name, content)]
    if not prompts:
        raise UsageError(f"prompt file {source!r} is empty")
    return prompts


def json_rows(name: str, content: str) -> Rows:
    """Read the rows of a JSON list, of {"data": [...]}, or of JSON lines, which many files named .json hold."""
    try:
        whole = json.loads(content)
    except (ValueError, RecursionError) as error:
        if content.lstrip().startswith("["):
            raise UsageError(f"{name} is not readable JSON ({error})") from None
        whole = None
    if isinstance(whole, Mapping) and isinstance(whole.get("data"), list):
        whole = whole["data"]
    if isinstance(whole, list):
        yield from ((f"{name}, item {number}", value) for number, value in enumerate(whole, start=1))
        return
    if isinstance(whole, Mapping):  # one object, which may be indented
        yield f"{name}, line 1", whole
        return
    # Not splitlines(): JSON strings may hold other line separators unescaped.
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        location = f"{name}, line {number}"
        try:
            yield location, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"{location} is not readable JSON ({error}); accepted: one object per line, a list of objects, or "
                'an object {"data": [...]}'
            ) from None


def read_text(path: Path) -> str:
    """Read a UTF-8 file, with or without a byte order mark; others are a `UsageError`."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path.name} is not UTF-8 text (byte {error.start})") from None


def checked_text(text: str, location: str) -> str:
    """Return a text; a lone surrogate (from broken JSON or bytes), which tokenizers reject, is an error."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{location} holds a broken character at {error.start}; save it as UTF-8 again") from None
    return text


def _turns(row: Mapping[Any, Any], field: str, location: str) -> tuple[Message, ...]:
    """Return the turns in a field: messages of role and content, or ShareGPT's of from and value."""
    value = row[field]
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise UsageError(f"{location}: {field} must be a list of objects with role and content, or from and value")
    system = row.get("system") if field in ("conversations", "messages") else None
    turns = [Message("system", _filled(system, "system", location))] if system else []
    for turn in value:
        for unread in ("tool_calls", "reasoning_content", "tools"):
            if (row if unread == "tools" else turn if isinstance(turn, Mapping) else {}).get(unread):
                raise UsageError(f"{location}: {unread} is not read; write it into the content")
        if isinstance(turn, Mapping) and isinstance(turn.get("role"), str):
            role = MESSAGE_ROLES.get(turn["role"].casefold())
            if role is None:  # many chat templates would leave the turn out
                accepted = ", ".join(MESSAGE_ROLES)
                raise UsageError(f"{location}: a turn has the role {turn['role']!r}; accepted: {accepted}")
            turns.append(Message(role, _filled(turn.get("content"), "content", location)))
        elif isinstance(turn, Mapping) and isinstance(turn.get("from"), str):
            if turn["from"] not in ROLES:
                raise UsageError(f"{location}: a turn is from {turn['from']!r}; accepted: {', '.join(ROLES)}")
            turns.append(Message(ROLES[turn["from"]], _filled(turn.get("value"), "value", location)))
        else:
            raise UsageError(f"{location}: each message needs a role and a content, or from and value")
    return tuple(turns)


def _conversation(turns: tuple[Message, ...], field: str, location: str) -> tuple[Kind, Record]:
    if len(turns) < 2 or turns[-1].role != "assistant":
        raise UsageError(f"{location}: {field} must end with an assistant's turn after at least one other")
    return "messages", Record(turns[-1].content, messages=turns[:-1], location=location)


def _question(row: Mapping[Any, Any], field: str, location: str) -> Message:
    """Return the question of a row; that of an Alpaca row is the instruction, and its input on a new line."""
    for unread in ("system", "history", "context"):
        if row.get(unread):
            raise UsageError(f"{location}: a row with {field} has {unread}, which is not read; give messages")
    text, given = _filled(row[field], field, location), row.get("input")
    return Message("user", f"{text}\n{_filled(given, 'input', location)}" if given else text)


def _before(record: Record) -> str:
    return record.prompt or "\n".join(message.content for message in record.messages)


def _normal(*texts: str) -> tuple[str, ...]:
    return tuple(" ".join(text.casefold().split()) for text in texts)


def _is_blank_text(row: Any) -> bool:
    is_text = isinstance(row, Mapping) and row.keys().isdisjoint(PROMPT_FIELDS)
    text = row.get("text") if is_text else row
    return isinstance(text, str) and not text.strip()


def _to_record(row: Any, location: str) -> tuple[Kind, Record]:
    if isinstance(row, str):
        row = {"text": row}
    if not isinstance(row, Mapping):
        raise UsageError(f"{location}: expected an object with fields, found {type(row).__name__}; {ACCEPTED_FIELDS}")
    for field in ("messages", "conversations"):
        if field in row:
            return _conversation(_turns(row, field, location), field, location)
    for question, answer in (("question", "answer"), ("instruction", "output")):
        if {question, answer} <= row.keys():
            asked, text = _question(row, question, location), _filled(row[answer], answer, location)
            return "question/answer", Record(text, messages=(asked,), location=location)
    if {"prompt", "completion"} <= row.keys():
        if isinstance(row["prompt"], list):
            completion = _turns(row, "completion", location)
            if len(completion) != 1:
                raise UsageError(f"{location}: completion has {len(completion)} messages; accepted: one, the answer")
            return _conversation(_turns(row, "prompt", location) + completion, "completion", location)
        prompt = _filled(row["prompt"], "prompt", location)
        answer = _filled(row["completion"], "completion", location)
        return "prompt/completion", Record(answer, prompt=prompt, location=location)
    if "text" in row:
        return "text", Record(_filled(row["text"], "text", location), location=location)
    raise UsageError(f"{location}: fields {sorted(map(str, row))} are not recognised; {ACCEPTED_FIELDS}")


def _filled(value: Any, field: str, location: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{location}: {field} is {type(value).__name__}, not text")
    if not value.strip():
        raise UsageError(f"{location}: {field} is empty")
    return checked_text(value, f"{location}: {field}")


def _prompt_of_row(row: Any, location: str, chat: bool, raw: bool) -> Record:
    if isinstance(row, str) and row.strip():
        return _prompt(checked_text(row, location), chat)
    if isinstance(row, Mapping):
        field = next((name for name in PROMPT_FIELDS if isinstance(row.get(name), list)), None)
        if field is not None:
            turns = _turns(row, field, location)
            # The answer in a training file is not part of the question.
            turns = turns[:-1] if turns and turns[-1].role == "assistant" else turns
            if not turns:
                raise UsageError(f"{location}: {field} holds no turn to be answered")
            if raw:
                raise UsageError(f"{location}: {field} are turns of a conversation; leave out --raw, or give prompt")
            return Record("", messages=turns, location=location)
        if isinstance(row.get("instruction"), str):
            text = _question(row, "instruction", location).content
            return dataclasses.replace(_prompt(text, not raw), location=location)
        for field in ("question", "prompt"):
            if isinstance(row.get(field), str) and row[field].strip():
                text = checked_text(row[field], f"{location}: {field}")
                return dataclasses.replace(_prompt(text, chat or (field == "question" and not raw)), location=location)
    raise UsageError(f"{location}: no prompt found; accepted: a string, or an object with {', '.join(PROMPT_FIELDS)}")


def _prompt(text: str, chat: bool) -> Record:
    return Record("", messages=(Message("user", text),)) if chat else Record("", prompt=text)


def _file_rows(path: Path) -> Rows:
    suffix = path.suffix.lower()
    if suffix in TEXT_SUFFIXES:
        yield path.name, read_text(path)
    elif suffix in JSON_SUFFIXES:
        yield from json_rows(path.name, read_text(path))
    elif suffix == ".csv":
        yield from _csv_rows(path)
    elif suffix in TABLE_SUFFIXES:
        yield from _table_rows(path)
    else:
        raise UsageError(f"{path.name}: files of this kind are not read; accepted: {', '.join(SUFFIXES)}")


def _folder_rows(path: Path, complete: bool) -> Rows:
    if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        yield from _saved_rows(path, complete)
        return
    files, unread = _list_files(path)
    if unread:
        names = ", ".join(str(file.relative_to(path)) for file in unread[:MAX_LISTED])
        more = f" and {len(unread) - MAX_LISTED} more" if len(unread) > MAX_LISTED else ""
        said = f"{len(unread)} of {len(files) + len(unread)} files in folder {path} are not read: {names}{more}"
        accepted = f"accepted: {', '.join(SUFFIXES)} that are not hidden"
        if complete:
            raise UsageError(f"{said}; {accepted}: convert these files, or move them elsewhere")
        print(f"warning: {said} ({accepted})", file=sys.stderr)
    if not files:
        raise UsageError(f"folder {path} holds no data files ({', '.join(SUFFIXES)})")
    for file in files:
        yield from _file_rows(file)


def _list_files(path: Path) -> tuple[list[Path], list[Path]]:
    """List the data files of a folder and its subfolders, and the documents that are not read.

    Hidden files of other kinds, such as .DS_Store, are no documents; hidden data files may be copies that an editor
    or a notebook left behind.
    """
    files, unread = [], []
    for folder, subfolders, names in os.walk(path, onerror=_refuse_unreadable):
        # Links to folders are not followed: they may lead back.
        links = [name for name in subfolders if (Path(folder) / name).is_symlink()]
        for file in (Path(folder) / name for name in (*names, *links)):
            is_data = file.suffix.lower() in SUFFIXES and file.is_file()
            is_hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if is_data and not is_hidden:
                files.append(file)
            elif is_data or not is_hidden:
                unread.append(file)
    return sorted(files), sorted(unread)


def _refuse_unreadable(error: OSError) -> None:
    raise UsageError(f"folder {error.filename} cannot be read ({error.strerror})")


def _saved_rows(path: Path, complete: bool) -> Rows:
    import datasets

    try:
        loaded = datasets.load_from_disk(path)
    except Exception as error:
        raise UsageError(f"dataset folder {path} cannot be read ({first_line(error)})") from None
    rows = _one_split(loaded, str(path), complete, "folder/split") if isinstance(loaded, dict) else loaded
    yield from _numbered(path.name, rows)


def _csv_rows(path: Path) -> Rows:
    # csv keeps every field as text; pandas would convert years to numbers and "NA" to missing values.
    csv.field_size_limit(MAX_CELL)  # a cell may hold a whole document
    table = csv.DictReader(io.StringIO(read_text(path), newline=""), strict=True)  # a lone quote would take all rows in
    try:
        for row in table:
            location = f"{path.name}, line {table.line_num}"
            if None in row or None in row.values():
                columns = len(table.fieldnames or ())
                raise UsageError(f"{location}: {columns} columns are named, the line has another number")
            yield location, row
    except csv.Error as error:
        raise UsageError(f"{path.name}, line {table.line_num} is not readable CSV ({error})") from None


def _table_rows(path: Path) -> Rows:
    import datasets
    import pyarrow.parquet

    try:
        if path.suffix.lower() == ".arrow":
            rows: Iterable[Any] = datasets.Dataset.from_file(str(path))
        else:
            rows = pyarrow.parquet.read_table(path).to_pylist()
    except Exception as error:
        raise UsageError(f"table {path.name} cannot be read ({first_line(error)})") from None
    yield from _numbered(path.name, rows)


def _hub_rows(source: str, complete: bool) -> Rows:
    import datasets

    name, _, rest = source.partition(":")
    config, _, split = rest.partition(":")
    try:
        loaded = datasets.load_dataset(name, config or None)
    except Exception as error:
        raise UsageError(
            f"data {source!r} is not a local file or folder, and cannot be loaded as a Hugging Face dataset "
            f"({type(error).__name__}: {first_line(error)})"
        ) from None
    if split and split not in loaded:
        raise UsageError(f"dataset {name!r} has no split {split!r}; it has {sorted(loaded)}")
    yield from _numbered(source, loaded[split] if split else _one_split(loaded, source, complete))


def _one_split(
    loaded: Mapping[Any, Any], source: str, complete: bool, form: str = "org/name:config:split"
) -> Iterable[Any]:
    if "train" in loaded and not (complete and len(loaded) > 1):
        if others := sorted(map(str, loaded.keys() - {"train"})):
            print(f"warning: {source}: the split train is read, not {', '.join(others)}", file=sys.stderr)
        return loaded["train"]
    if len(loaded) == 1:
        return next(iter(loaded.values()))
    raise UsageError(f"{source} has the splits {sorted(map(str, loaded))}; name one as {form!r}")


def _numbered(name: str, rows: Iterable[Any]) -> Rows:
    return ((f"{name}, row {number}", row) for number, row in enumerate(rows, start=1))
