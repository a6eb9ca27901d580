"""The rows of files, folders and Hugging Face datasets, each with its place: 'file, line 3'.

It knows nothing of what a row means.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from divdec.errors import UsageError, first_line

TEXT_SUFFIXES = (".txt", ".md")
JSON_SUFFIXES = (".jsonl", ".json")
TABLE_SUFFIXES = (".csv", ".parquet", ".arrow")
SUFFIXES = (*JSON_SUFFIXES, *TEXT_SUFFIXES, *TABLE_SUFFIXES)


def rows_of(source: str | Path) -> tuple[str, Iterator[tuple[str, Any]]]:
    """The name of a file, a folder or a Hugging Face dataset, and its rows with their places.

    Raises:
        UsageError: nothing is there; while rows are read, that one cannot be.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path.name, _folder_rows(path)
    if path.is_file():
        return path.stem, _file_rows(path)
    if _looks_like_path(str(source)):
        raise UsageError(f"data {str(source)!r} does not exist; give a file, a folder or a Hugging Face dataset id")
    return str(source), _hub_rows(str(source))


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
        raise UsageError(f"dataset folder {path} cannot be read ({first_line(error)})") from None
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
        raise UsageError(f"table {path.name} cannot be read ({first_line(error)})") from None
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
            f"({type(error).__name__}: {first_line(error)})"
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
