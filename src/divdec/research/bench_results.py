"""A benchmark's folder: a line of JSON for each combination, written as it is measured; a stopped run goes on.

It knows nothing of what is measured.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from divdec.errors import UsageError
from divdec.runs import RECORD, read_record, record, write_json, write_text

ROWS = "results.jsonl"
LOCK = ".lock"


class Results:
    """The rows of a folder, by their key."""

    def __init__(self, folder: Path, verb: str) -> None:
        self.folder, self.verb = folder, verb
        self.rows: dict[str, dict[str, Any]] = {}

    def add(self, row: dict[str, Any]) -> None:
        """Append a row, and make sure that it outlives a crash.

        Args:
            row: has a `key`.
        """
        with (self.folder / ROWS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.rows[row["key"]] = row

    def write_record(self, settings: Any, **content: Any) -> None:
        """Write run.json."""
        write_json(self.folder / RECORD, record(self.verb, settings, **content))

    def _read(self) -> None:
        path = self.folder / ROWS
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        for place, line in enumerate(lines):
            try:
                row = json.loads(line)
                self.rows[row["key"]] = row
            except (ValueError, KeyError, TypeError):
                if place < len(lines) - 1:
                    raise UsageError(
                        f"{path}, line {place + 1} is no row of a benchmark; remove the line or choose another folder"
                    ) from None
                # A run was killed while it wrote its last line.
                write_text(path, "".join(f"{kept}\n" for kept in lines[:-1]))
                return
        if lines and not path.read_bytes().endswith(b"\n"):
            write_text(path, "".join(f"{kept}\n" for kept in lines))


@contextlib.contextmanager
def results_in(folder: str | Path, verb: str) -> Iterator[Results]:
    """A benchmark's folder, made where it is missing, with what it holds already.

    Args:
        folder: its name.
        verb: as run.json calls it, such as 'bench compute'.

    Raises:
        UsageError: it holds something else, cannot be made, or another process is measuring into it.
    """
    folder = Path(folder).expanduser()
    for place in (folder, *folder.absolute().parents):
        if place.exists() and not place.is_dir():
            raise UsageError(f"output {folder} cannot be made: {place} is a file; give the name of a folder")
    if folder.is_dir() and any(entry.name != LOCK for entry in folder.iterdir()):
        found = (read_record(folder) or {}).get("verb")
        if found != verb:
            raise UsageError(
                f"output folder {folder} holds {f'a result of `divdec {found}`' if found else 'other files'}; give the "
                f"name of a new folder, or of one that `divdec {verb}` has written"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = FileLock(folder / LOCK).acquire(timeout=0)
    except Timeout:
        raise UsageError(f"another benchmark is running in {folder}; wait for it, or give another name") from None
    except PermissionError as error:
        raise UsageError(f"output {folder} cannot be written: {error}") from None
    with held:
        results = Results(folder, verb)
        results._read()
        yield results
