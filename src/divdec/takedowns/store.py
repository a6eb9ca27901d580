"""The SQLite database of a registry and its keys: a hash chain of events, and the encrypted counts of the requests.

Every change is one transaction. The authentication code of an event covers the code of the event before it, and the
head says which event is the last, so that changed, removed, reordered and added rows are detected.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import json
import os
import secrets
import sqlite3
import stat
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from divdec.checkpoint import load_tokenizer
from divdec.errors import FailedClosed, UsageError
from divdec.experts.ngram_counts import DESCRIPTION as COUNTS
from divdec.runs import file_sha256
from divdec.takedowns.counts import PackedCounts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DATABASE, FORMAT = "registry.db", "divdec registry 7"
RETAIN, TOKENIZER = "retain", "tokenizer"  # folders beside the database
KEY_FILE, ENVIRONMENT = "secret.key", "DIVDEC_REGISTRY_KEY"
KEY_BYTES, NONCE_BYTES = 32, 12  # of AES-256-GCM
MAX_STRENGTH = 1000.0  # beyond it logits overflow
TIMEOUT = 60.0  # seconds to wait for another writer
ADVICE = {  # nothing is damaged, and a backup would lose the newest requests
    sqlite3.SQLITE_BUSY: "another process is changing it; try again",
    sqlite3.SQLITE_FULL: "make room on the disk and try again",
    sqlite3.SQLITE_READONLY: "give this user write access to the folder",
    sqlite3.SQLITE_CANTOPEN: "give this user read and write access to the folder",
}
SCHEMA = """
    CREATE TABLE description (content TEXT NOT NULL, code TEXT NOT NULL);
    CREATE TABLE events (sequence INTEGER PRIMARY KEY, content TEXT NOT NULL, code BLOB NOT NULL);
    CREATE TABLE head (sequence INTEGER NOT NULL, code BLOB NOT NULL);
    CREATE TABLE counts (id TEXT PRIMARY KEY, own BLOB NOT NULL, held BLOB);
"""


@dataclasses.dataclass(frozen=True)
class TakedownRequest:
    """A request that is in force."""

    id: str
    time: str
    """When it was added, in UTC."""
    reference: str
    """Name that the requester gave."""
    text_hash: str
    """Keyed hash of its texts."""
    documents: int
    tokens: int
    ngrams: int
    """Distinct n-grams of all lengths, in both readings."""
    counts_id: str
    """Key of its row in the table of counts; no two requests ever have the same."""
    has_retained_passages: bool = False
    """Whether the retain set holds passages of its texts, which q leaves out."""
    max_retained_copies: int = 0
    """How often the retain set holds the most frequent of these passages."""
    shared_spans: int = 0
    """Number of shorter spans that the retain set shares with its texts, as almost equal texts do."""
    divergence: float = 0.0
    """Mean S_q − S_p at the texts' own next tokens: −1 where only this request knows what comes next."""
    measured: dict[str, Any] | None = None
    """Passages that the target recited before and under the request; None if not measured."""


@dataclasses.dataclass(frozen=True)
class State:
    """Immutable state of a registry, replayed from its events."""

    sequence: int = 0
    """Number of events."""
    code: bytes = b""
    """Authentication code of the last event."""
    entries: dict[str, TakedownRequest] = dataclasses.field(default_factory=dict)
    """The requests in force by `counts_id`, oldest first."""
    strength: float = 0.0
    """Factor of S_q − S_p before it is added to the target's logits; a registry's first event sets it."""

    def find(self, request_id: str) -> TakedownRequest | None:
        """Return the request in force that has this id, in any Unicode normalisation."""
        return next((entry for entry in self.entries.values() if entry.id == normal_id(request_id)), None)


def normal_id(request_id: str) -> str:
    """Return the spelling under which a request is stored: ids that look the same are the same request."""
    return unicodedata.normalize("NFC", request_id)


class RegistryKeys:
    """The keys of one registry, derived with HKDF: for encryption, events, texts, the key check, and signed reports.

    Keys of different purposes or registries are independent, so that no value can stand for another one.
    """

    def __init__(self, key: bytes, registry: str) -> None:
        encryption, self._events, self._texts, self._check, signature = (
            HKDFExpand(SHA256(), KEY_BYTES, f"divdec registry {registry} {purpose}".encode()).derive(key)
            for purpose in ("encryption", "events", "texts", "check", "signature")
        )
        self._cipher = AESGCM(encryption)
        self._signature = Ed25519PrivateKey.from_private_bytes(signature)

    def __reduce__(self) -> Any:
        raise UsageError("a registry's key is not written into pickles; load the bundle in each process instead")

    def __deepcopy__(self, memo: Any) -> RegistryKeys:
        return self

    @property
    def check(self) -> str:
        """A value that tells whether a key is the registry's; nothing else can be computed from it."""
        return self._check.hex()

    def text_hash(self, digest: str) -> str:
        """Return a keyed hash of a text's digest, as hexadecimal digits: without the key no guess can be tested."""
        return hmac.digest(self._texts, digest.encode(), "sha256")[:16].hex()

    def authenticate(self, purpose: str, previous: bytes, content: str) -> bytes:
        """Return the authentication code of a row, which depends on the row before it."""
        fields = (purpose.encode(), previous.hex().encode(), content.encode())
        return hmac.digest(self._events, b"\0".join(fields), "sha256")

    def authenticate_description(self, description: dict[str, Any]) -> str:
        """Return the authentication code of a registry's description, as hexadecimal digits."""
        content = json.dumps(description, sort_keys=True, ensure_ascii=False)
        return self.authenticate("description", b"", content).hex()

    @property
    def public(self) -> str:
        """The public key of the registry's signatures (Ed25519), as hexadecimal digits."""
        return self._signature.public_key().public_bytes_raw().hex()

    def sign(self, content: bytes) -> str:
        """Return the signature (Ed25519) of a content, as hexadecimal digits."""
        return self._signature.sign(content).hex()

    def encrypt(self, content: bytes, name: str) -> bytes:
        """Encrypt with AES-256-GCM, authenticated together with the name of the row."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, content, name.encode())

    def decrypt(self, sealed: bytes, name: str) -> bytes:
        """Decrypt what `encrypt` returned.

        Raises:
            ValueError: it was changed, or belongs to another row.
        """
        try:
            return self._cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], name.encode())
        except InvalidTag:
            raise ValueError("its authentication fails") from None


class Store:
    """The database of one registry and the keys to it.

    Every method raises `FailedClosed` if the database cannot be used, or if a row was changed, removed, added or moved.
    """

    def __init__(self, folder: Path) -> None:
        """Open the database of a registry.

        Raises:
            UsageError: the folder is no registry, or its key is missing or another one's.
        """
        self.folder, self.path = folder, folder / DATABASE
        if not self.path.is_file():
            if (folder / RETAIN).is_dir() and (folder / TOKENIZER).is_dir():
                raise FailedClosed(f"{self.path} is gone: nothing can tell what is to be forgotten; restore it")
            raise UsageError(f"{folder} is no registry: it has no {DATABASE}; `divdec takedown init` makes one")
        with self.read() as connection:
            content, code = self._description(connection)
        try:
            self.description: dict[str, Any] = json.loads(content)
            written_by, registry_id, key_check = (str(self.description[name]) for name in ("format", "id", "key_check"))
        except (ValueError, KeyError, TypeError) as error:
            raise FailedClosed(f"{self.path} does not describe a registry ({error}); restore it") from None
        if written_by != FORMAT:
            raise UsageError(
                f"{folder} has the format {written_by!r}; this divdec reads {FORMAT!r}: create another one (divdec "
                "takedown init NEW_FOLDER --target … --retain …) and add the requests to it again"
            )
        key, source = read_key(folder)
        self.keys = RegistryKeys(key, registry_id)
        if not hmac.compare_digest(self.keys.check.encode(), key_check.encode()):
            raise UsageError(f"{source} holds the key of another registry than {folder}")
        if not hmac.compare_digest(self.keys.authenticate_description(self.description).encode(), code.encode()):
            raise FailedClosed(f"{folder}: the registry's description has been changed; restore it from a backup")

    @classmethod
    def create(cls, folder: Path, description: dict[str, Any], keys: RegistryKeys, event: dict[str, Any]) -> None:
        """Create a database with its first event."""
        with contextlib.closing(sqlite3.connect(folder / DATABASE, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.executescript(SCHEMA)
            content = json.dumps(description, ensure_ascii=False)
            code = keys.authenticate_description(description)
            connection.execute("INSERT INTO description VALUES (?, ?)", (content, code))
            connection.execute("INSERT INTO head VALUES (0, ?)", (keys.authenticate("head", b"", "0"),))
        store = cls(folder)
        with store.write() as connection:
            store.append(connection, State(), event)

    def connect(self) -> sqlite3.Connection:
        """Open a connection, which any thread may use."""
        uri = f"{self.path.absolute().as_uri()}?mode=rw"
        connection = sqlite3.connect(uri, uri=True, timeout=TIMEOUT, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA secure_delete=ON")
        return connection

    @contextlib.contextmanager
    def read(self, connection: sqlite3.Connection | None = None) -> Iterator[sqlite3.Connection]:
        """Read one state of the database, whatever writers do meanwhile; None opens a connection."""
        with self.failing_closed(), contextlib.ExitStack() as stack:
            connection = connection or stack.enter_context(contextlib.closing(self.connect()))
            connection.execute("BEGIN")
            yield connection
            connection.execute("ROLLBACK")

    @contextlib.contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """Change the database in one transaction; other writers wait. An exception undoes the changes."""
        with self.failing_closed(), contextlib.closing(self.connect()) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")
            # The change is durable in the write-ahead log. Copied into the main file, it survives if the log is lost.
            with contextlib.suppress(sqlite3.Error):
                connection.execute("PRAGMA busy_timeout=500")
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def read_events(self, connection: sqlite3.Connection) -> tuple[list[dict[str, Any]], bytes]:
        """Check all events; return them, oldest first, with their sequence numbers, and the last one's code."""
        events, previous = [], b""
        rows = connection.execute("SELECT sequence, content, code FROM events ORDER BY sequence")
        for number, (sequence, content, code) in enumerate(rows, start=1):
            expected = self.keys.authenticate(f"event {number}", previous, str(content))
            if sequence != number or not isinstance(code, bytes) or not hmac.compare_digest(code, expected):
                raise FailedClosed(
                    f"{self.path}: event {number} has been changed, or an event before it removed; restore the "
                    "registry from a backup"
                )
            events.append({"sequence": number, **json.loads(content)})
            previous = code
        heads = connection.execute("SELECT sequence, code FROM head").fetchall()
        if heads != [(len(events), self.keys.authenticate("head", previous, str(len(events))))]:
            raise FailedClosed(
                f"{self.path} does not end as its head says: events have been removed; restore it from a backup"
            )
        return events, previous

    def read_state(self, connection: sqlite3.Connection) -> State:
        """Check all events and return what they amount to."""
        entries: dict[str, TakedownRequest] = {}
        strength, events, code = 0.0, *self.read_events(connection)
        for event in events:
            try:
                strength = _apply(event, entries) or strength
            except (KeyError, TypeError, ValueError) as error:
                raise FailedClosed(f"{self.path}: event {event['sequence']} cannot be applied ({error})") from None
        if not strength:
            raise FailedClosed(f"{self.path} has no strength: takedowns would do nothing; restore it from a backup")
        return State(len(events), code, entries, strength)

    def append(self, connection: sqlite3.Connection, state: State, event: dict[str, Any]) -> None:
        """Add an event to a state that was read in the same transaction."""
        sequence, content = state.sequence + 1, json.dumps(event, ensure_ascii=False)
        code = self.keys.authenticate(f"event {sequence}", state.code, content)
        connection.execute("INSERT INTO events VALUES (?, ?, ?)", (sequence, content, code))
        head = self.keys.authenticate("head", code, str(sequence))
        connection.execute("UPDATE head SET sequence = ?, code = ?", (sequence, head))

    def insert_counts(
        self, connection: sqlite3.Connection, counts_id: str, counts: PackedCounts, passage_counts: PackedCounts | None
    ) -> None:
        """Encrypt and store the counts of a request."""
        sealed = self.keys.encrypt(counts.to_bytes(), f"own {counts_id}")
        passages = None if passage_counts is None else self.keys.encrypt(passage_counts.to_bytes(), f"held {counts_id}")
        connection.execute("INSERT INTO counts VALUES (?, ?, ?)", (counts_id, sealed, passages))

    def read_counts(
        self, connection: sqlite3.Connection, state: State
    ) -> Iterator[tuple[TakedownRequest, PackedCounts, PackedCounts | None]]:
        """Decrypt the counts of every request in force, and of its passages that the retain set holds."""
        missing = set(state.entries)
        for counts_id, sealed_counts, sealed_passages in connection.execute("SELECT id, own, held FROM counts"):
            entry = state.entries.get(counts_id)
            if entry is None:
                raise FailedClosed(f"{self.path} holds counts of no request in force; restore it from a backup")
            missing.discard(counts_id)
            try:
                decrypted = PackedCounts.from_bytes(self.keys.decrypt(sealed_counts, f"own {counts_id}"))
                passages = None
                if entry.has_retained_passages:
                    passages = PackedCounts.from_bytes(self.keys.decrypt(sealed_passages, f"held {counts_id}"))
            except (ValueError, TypeError) as error:
                raise FailedClosed(
                    f"{self.path}: the counts of request {entry.id!r} are damaged ({error}); restore it from a backup"
                ) from None
            yield entry, decrypted, passages
        if missing:
            names = ", ".join(repr(state.entries[counts_id].id) for counts_id in missing)
            raise FailedClosed(f"{self.path}: the counts of request {names} are missing; restore it from a backup")

    def check_unchanged(self, connection: sqlite3.Connection, known: State) -> None:
        """Refuse a database that is another registry's, or an older copy of the one that was read before."""
        content, _ = self._description(connection)
        row = connection.execute("SELECT code FROM events WHERE sequence = ?", (known.sequence,)).fetchone()
        if content != json.dumps(self.description, ensure_ascii=False) or (
            known.sequence and (row is None or row[0] != known.code)
        ):
            raise FailedClosed(f"{self.path} was replaced by another or an older registry; restore the newest one")

    def check_retain(self) -> None:
        """Refuse counts of another retain set than the registry was created with."""
        counts = self.folder / RETAIN / COUNTS
        if not counts.is_file() or file_sha256(counts) != self.description["retain"]:
            raise FailedClosed(f"{counts.parent} is missing or holds other counts than the registry's; restore it")

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer that requests are encoded with."""
        if changed := self.changed_tokenizer_files():
            folder = self.folder / TOKENIZER
            raise UsageError(f"{folder} holds another tokenizer than the registry's ({changed[0].name}); restore it")
        return load_tokenizer(self.folder / TOKENIZER)

    def changed_tokenizer_files(self) -> list[Path]:
        """Return the tokenizer's files that are missing, new or other than those that the registry was created with."""
        folder, known = self.folder / TOKENIZER, self.description["tokenizer_files"]
        files = dict.fromkeys(tokenizer_files(folder), "") | {folder / name: sha for name, sha in known.items()}
        return [file for file, sha in files.items() if not file.is_file() or file_sha256(file) != sha]

    def _description(self, connection: sqlite3.Connection) -> tuple[str, str]:
        row = connection.execute("SELECT content, code FROM description").fetchone()
        if row is None or not all(isinstance(value, str) for value in row):
            raise FailedClosed(f"{self.path} has no description; restore it from a backup")
        return row

    @contextlib.contextmanager
    def failing_closed(self) -> Iterator[None]:
        """Turn errors of SQLite into `FailedClosed`; the text of an error may hold bytes of a damaged file."""
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:
            advice = ADVICE.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, "restore it from a backup")
            raise FailedClosed(f"{self.path} cannot be used ({error}); {advice}") from None


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a tokenizer; those whose names begin with a dot belong to other programs."""
    files = sorted(file for file in folder.rglob("*.*") if file.is_file())
    return [file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts)]


def check_strength(value: Any) -> float:
    """Return a strength that takes something down."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_STRENGTH:
        raise UsageError(f"strength is {value!r}; accepted: above 0, at most {MAX_STRENGTH:g}")
    return float(value)


def _apply(event: dict[str, Any], entries: dict[str, TakedownRequest]) -> float | None:
    """Apply an event to the requests in force; return the strength that it sets."""
    if event["action"] == "strength":
        return check_strength(event["strength"])
    if event["action"] == "add":
        entry = TakedownRequest(**{field.name: event[field.name] for field in dataclasses.fields(TakedownRequest)})
        entries[entry.counts_id] = entry
    elif event["action"] == "remove":
        del entries[event["counts_id"]]
    elif event["action"] == "measure" and event["counts_id"] in entries:  # it may have been withdrawn meanwhile
        counts_id = event["counts_id"]
        entries[counts_id] = dataclasses.replace(entries[counts_id], measured=event["measured"])
    return None


def create_keys(folder: Path, registry: str) -> RegistryKeys:
    """Take the key from the environment, or write a new one into a file that only its owner can read.

    Raises:
        UsageError: the environment variable does not hold 32 bytes.
    """
    if text := os.environ.get(ENVIRONMENT):
        return RegistryKeys(_parse_key(text, f"${ENVIRONMENT}"), registry)
    key = secrets.token_bytes(KEY_BYTES)
    handle = os.open(folder / KEY_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(key.hex() + "\n")
        file.flush()
        os.fsync(file.fileno())
    return RegistryKeys(key, registry)


def read_key(folder: Path) -> tuple[bytes, str]:
    """Read a registry's key from the environment or its file; return it and where it was.

    Raises:
        UsageError: there is no key, or others may read its file.
    """
    if text := os.environ.get(ENVIRONMENT):
        return _parse_key(text, f"${ENVIRONMENT}"), f"${ENVIRONMENT}"
    path = folder / KEY_FILE
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        raise UsageError(
            f"{folder}: the registry's key is neither in {path} nor in ${ENVIRONMENT}; restore it: without it "
            "nothing can be steered"
        ) from None
    if os.name == "posix" and stat.S_IMODE(mode) & 0o077:
        raise UsageError(f"{path} can be read by others (mode {stat.S_IMODE(mode):04o}); chmod 600 {path}")
    return _parse_key(text, str(path)), str(path)


def _parse_key(text: str, source: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise UsageError(f"{source} holds no registry key; accepted: {2 * KEY_BYTES} hexadecimal digits")
    return key
