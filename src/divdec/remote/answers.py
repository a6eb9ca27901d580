"""Answers that were paid for are kept while a run goes on, so that a stopped one does not ask again."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from divdec.errors import UsageError
from divdec.runs import write_text


class Kept:
    """Rows by place, in `OUTPUT.partial` as they come; in memory alone where there is no output file."""

    def __init__(self, output: Path | None, fingerprint: str) -> None:
        """Read what a stopped run with the same settings has left; a line that it had not ended is cut off.

        Args:
            output: the file that is wanted in the end.
            fingerprint: of what decides the answers.

        Raises:
            UsageError: what is there is of other settings, or cannot be read.
        """
        self._output = output
        self._partial = None if output is None else output.with_name(f"{output.name}.partial")
        self._rows: dict[int, dict[str, Any]] = {}
        self._lock = threading.Lock()
        if self._partial is None:
            return
        if self._partial.exists():
            self._read(fingerprint)
        else:
            try:
                write_text(self._partial, json.dumps({"settings": fingerprint}) + "\n")
            except (PermissionError, FileNotFoundError) as error:
                raise UsageError(f"output {output} cannot be written: {error.strerror}") from None

    def of(self, place: int, prompt: Any) -> dict[str, Any] | None:
        """The row of a prompt, if it has been answered."""
        row = self._rows.get(place)
        return row if row is not None and row["prompt"] == prompt else None

    def add(self, place: int, row: dict[str, Any]) -> None:
        """Keep a row. Threads may call it at the same time."""
        with self._lock:
            self._rows[place] = row
            if self._partial is not None:
                with self._partial.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"place": place, "row": row}, ensure_ascii=False) + "\n")

    def finish(self, number: int, *, as_json: bool) -> None:
        """Write the first `number` rows in order, and remove what was kept on the way."""
        if self._output is None or self._partial is None:
            return
        rows = [self._rows[place] for place in range(number)]  # a run of more prompts may have left others
        lines = [json.dumps(row, ensure_ascii=False) if as_json else row["text"] for row in rows]
        write_text(self._output, "".join(f"{line}\n" for line in lines))
        self._partial.unlink()

    def _read(self, fingerprint: str) -> None:
        assert self._partial is not None
        try:
            # Bytes, and their own line ends alone: an answer may hold U+2028, and a stopped run half a character.
            first, *lines, rest = self._partial.read_bytes().split(b"\n")
            known = json.loads(first)["settings"]
            self._rows = {entry["place"]: entry["row"] for entry in map(json.loads, lines)}
        except (ValueError, KeyError, TypeError, OSError):
            known, first, lines, rest = None, b"", [], b""
        if known != fingerprint:
            raise UsageError(
                f"{self._partial} holds answers of a run with other settings; repeat those to go on with it, or "
                "remove the file"
            )
        if rest:  # it was being written when the run was stopped; what is added must not follow it on its line
            write_text(self._partial, b"\n".join([first, *lines, b""]).decode())
