"""Reading forget, retain and holdout sets from files, folders and Hugging Face datasets.

Recognises question/answer, prompt/completion, messages and plain text. It knows nothing of tokens.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from divdec.errors import UsageError

Kind = Literal["question/answer", "prompt/completion", "messages", "text"]
ACCEPTED_FIELDS = "accepted: question + answer, prompt + completion, messages (role, content), or text"
TEXT_SUFFIXES = (".txt", ".md")
JSON_SUFFIXES = (".jsonl", ".json")
TABLE_SUFFIXES = (".csv", ".parquet", ".arrow")
SUFFIXES = (*JSON_SUFFIXES, *TEXT_SUFFIXES, *TABLE_SUFFIXES)


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


def read_records(source: str | Path, *, limit: int | None = None) -> RecordSet:
    """Read a set from a file, a folder or a Hugging Face dataset.

    Args:
        source: a .jsonl, .json, .txt or .md file; a .parquet or .csv table; a folder of such files or one that
            `datasets` saved; or a dataset id 'org/name', 'org/name:config' or 'org/name:config:split'.
        limit: read only the first so many records.

    Raises:
        UsageError: nothing is there, nothing is in it, or a line cannot be read (with its number).
    """
    path = Path(source).expanduser()
    if path.is_dir():
        name, rows = path.name, _folder_rows(path)
    elif path.is_file():
        name, rows = path.stem, _file_rows(path)
    elif _looks_like_path(str(source)):
        raise UsageError(f"data {str(source)!r} does not exist; give a file, a folder or a Hugging Face dataset id")
    else:
        name, rows = str(source), _hub_rows(str(source))
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


def checked_text(text: str, place: str) -> str:
    """The text, unless it holds half a surrogate pair (from broken JSON or bytes), which no tokenizer takes.

    Raises:
        UsageError: it does.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{place} holds a broken character at {error.start}; save it as UTF-8 again") from None
    return text


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, with or without a byte order mark.

    Raises:
        UsageError: it is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path.name} is not UTF-8 text (byte {error.start})") from None


def _file_rows(path: Path) -> Iterator[tuple[str, Any]]:
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


def json_rows(name: str, content: str) -> Iterator[tuple[str, Any]]:
    """Rows of a JSON list, or of JSON lines, which many files named .json hold."""
    if content.lstrip().startswith("["):
        try:
            values = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{name} is not readable JSON ({error})") from None
        yield from ((f"{name}, item {number}", value) for number, value in enumerate(values, start=1))
        return
    # Not splitlines(): JSON strings may hold other line separators as they are.
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{name}, line {number}"
        try:
            yield place, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{place} is not readable JSON ({error})") from None


def _folder_rows(path: Path) -> Iterator[tuple[str, Any]]:
    if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        yield from _saved_rows(path)
        return
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    if not files:
        raise UsageError(f"folder {path} holds no data files ({', '.join(SUFFIXES)})")
    for file in files:
        yield from _file_rows(file)


def _saved_rows(path: Path) -> Iterator[tuple[str, Any]]:
    import datasets

    try:
        loaded = datasets.load_from_disk(path)
    except Exception as error:
        raise UsageError(f"dataset folder {path} cannot be read ({_first_line(error)})") from None
    if isinstance(loaded, datasets.DatasetDict):
        loaded = _one_split(loaded, str(path))
    yield from _numbered(path.name, loaded)


def _csv_rows(path: Path) -> Iterator[tuple[str, Any]]:
    # Every field as text: table readers guess types, and make numbers of years and nothing of "NA".
    table = csv.DictReader(io.StringIO(read_text(path), newline=""))
    try:
        for row in table:
            place = f"{path.name}, line {table.line_num}"
            if None in row or None in row.values():
                raise UsageError(
                    f"{place}: {len(table.fieldnames or ())} columns are named, the line has another number"
                )
            yield place, row
    except csv.Error as error:
        raise UsageError(f"{path.name}, line {table.line_num} is not readable CSV ({error})") from None


def _table_rows(path: Path) -> Iterator[tuple[str, Any]]:
    import datasets
    import pyarrow.parquet

    try:
        if path.suffix.lower() == ".arrow":
            rows: Iterable[Any] = datasets.Dataset.from_file(str(path))
        else:
            rows = pyarrow.parquet.read_table(path).to_pylist()
    except Exception as error:
        raise UsageError(f"table {path.name} cannot be read ({_first_line(error)})") from None
    yield from _numbered(path.name, rows)


def _hub_rows(source: str) -> Iterator[tuple[str, Any]]:
    import datasets

    name, _, rest = source.partition(":")
    config, _, split = rest.partition(":")
    try:
        loaded = datasets.load_dataset(name, config or None)
    except Exception as error:
        raise UsageError(
            f"data {source!r} is not a local file or folder, and could not be had as a Hugging Face dataset "
            f"({type(error).__name__}: {_first_line(error)})"
        ) from None
    if split and split not in loaded:
        raise UsageError(f"dataset {name!r} has no split {split!r}; it has {sorted(loaded)}")
    chosen = loaded[split] if split else _one_split(loaded, source)
    yield from _numbered(source, chosen)


def _one_split(loaded: Mapping[Any, Any], source: str) -> Any:
    if "train" in loaded:
        return loaded["train"]
    if len(loaded) == 1:
        return next(iter(loaded.values()))
    raise UsageError(f"{source} has the splits {sorted(map(str, loaded))}; name one as 'org/name:config:split'")


def _numbered(name: str, rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{name}, row {number}", row) for number, row in enumerate(rows, start=1))


def _looks_like_path(source: str) -> bool:
    return source.startswith((".", "/", "~")) or source.lower().endswith(SUFFIXES) or source.count("/") > 1


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
