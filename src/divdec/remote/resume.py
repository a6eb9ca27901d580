"""Rows that are kept while a run continues, so that a stopped run does not pay for them again."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from divdec.errors import UsageError
from divdec.runs import write_text


class ResumableOutput:
    """Rows by index, appended to `OUTPUT.partial`; in memory alone without an output file."""

    def __init__(self, output: Path | None, fingerprint: str) -> None:
        """Read the rows of a stopped run with the same settings; an incomplete last line is cut off.

        Args:
            output: the output file.
            fingerprint: hash of the settings that decide the rows.

        Raises:
            UsageError: the partial file is of other settings, or cannot be read or written.
        """
        self._output = output
        self._partial = None if output is None else output.with_name(f"{output.name}.partial")
        self._rows: dict[int, dict[str, Any]] = {}
        self._lock = threading.Lock()
        if self._partial is None:
            return
        if self._partial.exists():
            self._read(self._partial, fingerprint)
            return
        try:
            write_text(self._partial, json.dumps({"settings": fingerprint}) + "\n")
        except (PermissionError, FileNotFoundError) as error:
            raise UsageError(f"output {output} cannot be written: {error.strerror}") from None

    def get(self, index: int, prompt: Any) -> dict[str, Any] | None:
        """Return the row of a prompt, if there is one."""
        row = self._rows.get(index)
        return row if row is not None and row["prompt"] == prompt else None

    def add(self, index: int, row: dict[str, Any]) -> None:
        """Keep a row. Threads may call it at the same time."""
        with self._lock:
            self._rows[index] = row
            if self._partial is not None:
                with self._partial.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"index": index, "row": row}, ensure_ascii=False) + "\n")

    def finish(self, number: int, *, as_json: bool) -> None:
        """Write the first `number` rows in order, and remove the partial file."""
        if self._output is None or self._partial is None:
            return
        rows = [self._rows[index] for index in range(number)]  # a run with more prompts may have left others
        lines = [json.dumps(row, ensure_ascii=False) if as_json else row["text"] for row in rows]
        write_text(self._output, "".join(f"{line}\n" for line in lines))
        self._partial.unlink()

    def _read(self, path: Path, fingerprint: str) -> None:
        try:
            # Bytes are split at "\n" alone: an answer may hold U+2028, and a stopped run leaves half a character.
            first, *lines, rest = path.read_bytes().split(b"\n")
            settings = json.loads(first)["settings"]
            self._rows = {entry["index"]: entry["row"] for entry in map(json.loads, lines)}
        except (ValueError, KeyError, TypeError, OSError):
            settings, first, lines, rest = None, b"", [], b""
        if settings != fingerprint:
            raise UsageError(
                f"{path} holds answers of a run with other settings; repeat those to go on with it, or remove the file"
            )
        if rest:  # later rows must not follow the incomplete line
            write_text(path, b"\n".join([first, *lines, b""]).decode())
