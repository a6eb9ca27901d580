"""The log of a registry: every change a line, each sealed together with all lines before it.

The log is the registry's state: what it says has happened, and nothing else. A line without its end is one whose
writer died; it has not happened.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from divdec.errors import FailedClosed, UsageError, first_line
from divdec.runs import read_json, write_durably
from divdec.takedowns.secret import Secret

LOG_FILE, HEAD_FILE = "log.jsonl", "head.json"
STRONGEST = 1000.0  # beyond it logits overflow
START = "0" * 32  # stands for the seal before the first line


@dataclasses.dataclass(frozen=True)
class Entry:
    """A request that is in force."""

    id: str
    time: str
    """When it was added, in UTC."""
    reference: str
    """What the requester calls it."""
    text_hash: str
    """Keyed hash of its texts."""
    documents: int
    tokens: int
    ngrams: int
    """Distinct n-grams of all lengths."""
    file: str
    """Which file holds its counts."""
    nonce: str
    """Names it within the file, and makes its key streams its own."""
    held: str | None = None
    """The same for passages of its texts that the retain set holds, which q leaves out; None where there are none."""
    copies: int = 0
    """How often the retain set holds the most frequent of these passages."""
    spans: int = 0
    """How many shorter spans the retain set shares with its texts, as texts do that are almost the same."""
    divergence: float = 0.0
    """Mean S_q − S_p at the texts' own next tokens: −1 where only this request knows what comes next."""
    measured: dict[str, Any] | None = None
    """What the target recited before and under the request (`divdec.evaluation.verbatim`); None if not measured."""

    @property
    def nonces(self) -> tuple[str, ...]:
        """All that its file must hold."""
        return (self.nonce, self.held) if self.held else (self.nonce,)


@dataclasses.dataclass(frozen=True)
class Head:
    """Where a log ends."""

    sequence: int = 0
    """How many lines there are."""
    seal: str = START
    """That of the last line."""
    offset: int = 0
    """Bytes up to its end."""


@dataclasses.dataclass(frozen=True)
class State:
    """What a log says up to some line; it is never changed."""

    head: Head = Head()
    entries: dict[str, Entry] = dataclasses.field(default_factory=dict)
    """In force, by nonce, in the order in which they came."""
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    """SHA-256 by name of each file that holds counts of these."""
    strength: float = 0.0
    """What S_q − S_p is multiplied by before it is added to the target's logits; a log's first line sets it."""


def read_log(folder: Path, secret: Secret, known: State = State()) -> State:
    """Read what has been added to a log since `known`, and check its seals.

    Raises:
        FailedClosed: a line has been changed, removed or is not readable; the registry cannot be trusted.
    """
    entries, files, head, strength = dict(known.entries), dict(known.files), known.head, known.strength
    # Before the log, since its writer writes it after: a head ahead of the log means that lines are gone.
    stated = read_head(folder, secret)
    for event, head in _events(folder, secret, known.head):
        try:
            _apply(event, entries, files)
            strength = checked_strength(event["strength"]) if event["action"] == "strength" else strength
        except (KeyError, TypeError, ValueError) as error:
            raise FailedClosed(f"{folder / LOG_FILE}, line {head.sequence}: it cannot be followed ({error})") from None
        if head.sequence == stated.sequence and head != stated:
            break
    if stated.sequence > head.sequence or (stated.sequence == head.sequence and stated != head):
        raise FailedClosed(
            f"{folder / LOG_FILE} does not end as {HEAD_FILE} says (line {stated.sequence}): lines have been "
            "removed or changed; restore both from a backup"
        )
    if not strength:
        raise FailedClosed(
            f"{folder / LOG_FILE} names no strength: takedowns would do nothing; restore it from a backup"
        )
    used = {entry.file for entry in entries.values()}
    return State(head, entries, {name: digest for name, digest in files.items() if name in used}, strength)


def checked_strength(value: Any) -> float:
    """A strength that takes something down.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= STRONGEST:
        raise ValueError(f"strength is {value!r}; accepted: above 0, at most {STRONGEST:g}")
    return float(value)


def events(folder: Path, secret: Secret) -> list[dict[str, Any]]:
    """What has happened, oldest first, each with its number and time.

    Raises:
        FailedClosed: see `read_log`.
    """
    return [event for event, _ in _events(folder, secret, Head())]


def append(folder: Path, secret: Secret, event: dict[str, Any]) -> None:
    """Add a line; it has happened when the line is on disk. The caller holds the registry's lock.

    Raises:
        FailedClosed: the end of the log has been changed.
    """
    head = read_head(folder, secret)
    for _, later in list(_events(folder, secret, head)):  # lines whose writer died before it wrote the head
        head = later
    text = json.dumps({"sequence": head.sequence + 1, **event}, ensure_ascii=False)
    seal = secret.seal(head.seal, text)
    line = (json.dumps({"event": text, "seal": seal}, ensure_ascii=False) + "\n").encode()
    with (folder / LOG_FILE).open("r+b") as file:
        file.truncate(head.offset)  # a line without its end, whose writer died
        file.seek(head.offset)
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
    # It has happened; where the disk is full now, the next writer says how long the log is.
    with contextlib.suppress(OSError):
        write_head(folder, secret, Head(head.sequence + 1, seal, head.offset + len(line)))


def write_head(folder: Path, secret: Secret, head: Head) -> None:
    """Say beside the log how long it is, so that removed lines are missed."""
    fields = dataclasses.asdict(head)
    sealed = {"head": fields, "seal": secret.seal("head", json.dumps(fields))}
    write_durably(folder / HEAD_FILE, json.dumps(sealed).encode())


def read_head(folder: Path, secret: Secret) -> Head:
    """Where the log ends, or ended before its last lines were written.

    Raises:
        FailedClosed: the file that says so is missing, unreadable or changed.
    """
    try:
        found = read_json(folder / HEAD_FILE)
        if not hmac.compare_digest(secret.seal("head", json.dumps(found["head"])), found["seal"]):
            raise ValueError("its seal is wrong")
        return Head(**found["head"])
    except (OSError, UsageError, KeyError, TypeError, ValueError) as error:
        raise FailedClosed(f"{folder / HEAD_FILE} cannot be trusted ({first_line(error)}); restore it") from None


def _events(folder: Path, secret: Secret, head: Head) -> Iterator[tuple[dict[str, Any], Head]]:
    """The lines after `head` with the head after each."""
    path = folder / LOG_FILE
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(head.offset)
            lines = file.read().splitlines(keepends=True)
    except OSError:
        raise FailedClosed(f"{path} cannot be read: nothing can tell what is to be forgotten") from None
    if size < head.offset:
        raise FailedClosed(f"{path} has become shorter: lines have been removed; restore it from a backup")
    for line in lines:
        if not line.endswith(b"\n"):
            return  # its writer died, or is writing
        number = head.sequence + 1
        try:
            found = json.loads(line)
            text, seal = found["event"], found["seal"]
            if not hmac.compare_digest(secret.seal(head.seal, text), seal):
                raise ValueError("its seal is wrong")
            event = json.loads(text)
            if event["sequence"] != number:
                raise ValueError("its number is wrong")
        except (ValueError, KeyError, TypeError) as error:
            raise FailedClosed(
                f"{path}, line {number}: it has been changed, or a line before it removed ({error}); "
                "restore the registry from a backup"
            ) from None
        head = Head(number, seal, head.offset + len(line))
        yield event, head


def _apply(event: dict[str, Any], entries: dict[str, Entry], files: dict[str, str]) -> None:
    """Let a change that the log tells happen."""
    if event["action"] == "add":
        entry = Entry(**{field.name: event[field.name] for field in dataclasses.fields(Entry)})
        entries[entry.nonce] = entry
        files[entry.file] = event["sha256"]
    elif event["action"] == "remove":
        for nonce in [nonce for nonce, entry in entries.items() if entry.id == event["id"]]:
            del entries[nonce]
    elif event["action"] == "measure":
        if event["nonce"] in entries:  # it may have been withdrawn meanwhile
            entries[event["nonce"]] = dataclasses.replace(entries[event["nonce"]], measured=event["measured"])
    elif event["action"] == "compact":
        for nonce, entry in entries.items():
            entries[nonce] = dataclasses.replace(entry, file=event["file"])
        files[event["file"]] = event["sha256"]
