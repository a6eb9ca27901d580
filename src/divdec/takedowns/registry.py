"""A registry of takedown requests: a folder to which texts are added that a model shall not repeat.

A request takes effect in seconds: nothing is trained and nothing restarted, a running model reads what has changed
before it begins its next answer (`divdec.takedowns.live`). The folder holds counts of n-grams, contexts as
keyed hashes and what follows them under a key stream; neither texts nor readable n-grams.

Every change is one line of a sealed log, written when all it names lies on disk: a writer that dies leaves the
registry as it was, or changed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock

from divdec.data.formatting import documents
from divdec.data.records import RecordSet
from divdec.errors import FailedClosed, UsageError
from divdec.experts.ngram_counts import DESCRIPTION as COUNTS
from divdec.experts.ngram_counts import LessCounts, NgramCounts, SummedCounts, mean_difference
from divdec.experts.ngram_fit import check_order, count, fit
from divdec.model.checkpoint import CheckpointReference, load_tokenizer, vocabulary_sha256, vocabulary_width
from divdec.runs import file_sha256, output_folder, write_durably, write_json, write_text
from divdec.serving.overlap import overlap
from divdec.serving.plain_tokenizer import is_plain, load_plain
from divdec.takedowns.folder import (
    DESCRIPTION,
    FILES,
    FORMAT,
    IDS,
    LOCK,
    RETAIN,
    TOKENIZER,
    check_retain,
    read_description,
)
from divdec.takedowns.log import (
    HEAD_FILE,
    LOG_FILE,
    Entry,
    Head,
    State,
    append,
    checked_strength,
    events,
    read_log,
    write_head,
)
from divdec.takedowns.sealed import NONCE_BYTES, Sealed, joined, seal
from divdec.takedowns.secret import KEY_FILE, new_key, read_key

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST_ID, LONGEST_REFERENCE = 200, 10_000
ATTEMPTS = 5  # to look at a registry that is being written
ORDER = 5  # the longer the n-grams, the less else a request touches (docs/benchmarks.md)
STRENGTH = 10.0  # nats that a token loses which only a taken-down text goes on with
NO_EFFECT = -0.1  # mean difference of scores above which a request would do next to nothing


class Registry:
    """Adds, removes and lists the requests of a registry's folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Open a registry.

        Raises:
            UsageError: the folder is no registry, or its key is missing or another one's.
        """
        self.folder = Path(folder).expanduser()
        about = read_description(self.folder)
        self.vocab_size: int = about["vocab_size"]
        self.order: int = about["order"]
        self._tokenizer_sha256: str = about["tokenizer"]
        self._plain: bool = about.get("plain_tokenizer") is True
        self._tokenizer_files: dict[str, str] = about["tokenizer_files"]
        self._secret = read_key(self.folder, about)
        self._retain: str = about["retain"]
        self._target = CheckpointReference.from_dict(about["target"], "target")

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str],
        retain: RecordSet,
        checkpoint: str | os.PathLike[str],
        *,
        order: int = ORDER,
        strength: float = STRENGTH,
        progress: Any = None,
    ) -> Registry:
        """Make a registry without requests.

        Args:
            folder: it must be empty or absent.
            retain: what the model may know; its n-grams are kept readable, as those of any model would be.
            checkpoint: folder or hub id of the model that is to be steered, for its tokenizer and the width of its
                logits; requests are measured on it.
            order: length of the longest n-grams, 2 to 5.
            strength: what the registry's divergence is multiplied by before it is added to the target's logits.
            progress: told how many tokens have been read since it was told last.

        Raises:
            UsageError: the folder is in use, the checkpoint has no tokenizer, or there is nothing to count.
        """
        from divdec.model.checkpoint import load_config

        check_order(order)
        reference = CheckpointReference.parse(str(checkpoint))
        checkpoint = reference.resolve(Path(), weights=False)
        tokenizer = load_tokenizer(checkpoint)
        vocab_size = vocabulary_width(load_config(checkpoint))
        folder = Path(folder).expanduser()
        if reference.folder is not None and Path(reference.folder).is_absolute():
            reference = CheckpointReference(folder=str(checkpoint))
        elif reference.folder is not None:  # so that both can be moved together
            reference = CheckpointReference(folder=os.path.relpath(checkpoint, folder.resolve()))
        if (folder / HEAD_FILE).exists():
            raise UsageError(
                f"{folder} is a registry already; add requests to it (divdec takedown add), or give another name"
            )
        if folder.is_dir() and any(folder.iterdir()):
            raise UsageError(f"folder {folder} is not empty; give the name of an empty or absent one")
        with output_folder(folder) as temporary:
            registry = secrets.token_hex(16)
            secret = new_key(temporary, registry)
            for name in (RETAIN, FILES, IDS):
                (temporary / name).mkdir()
            sha256 = vocabulary_sha256(tokenizer)
            tokens = documents(retain, tokenizer)
            fit(tokens, vocab_size, temporary / RETAIN, order=order, progress=progress, tokenizer=sha256)
            tokenizer.save_pretrained(temporary / TOKENIZER)
            plain = is_plain(tokenizer, temporary / TOKENIZER)
            (temporary / LOG_FILE).touch()
            write_head(temporary, secret, Head())
            append(temporary, secret, _strength_event(strength))
            write_text(temporary / ".gitignore", f"/{KEY_FILE}\n")
            files = {path.name: file_sha256(path) for path in sorted((temporary / TOKENIZER).iterdir())}
            about = {
                "format": FORMAT,
                "id": registry,
                "created": _now(),
                "vocab_size": vocab_size,
                "order": order,
                "tokenizer": sha256,
                "tokenizer_files": files,
                "plain_tokenizer": plain,
                "retain": file_sha256(temporary / RETAIN / COUNTS),
                "retain_set": retain.label,
                "key_check": secret.check,
                "target": reference.to_dict(),
            }
            write_json(temporary / DESCRIPTION, about | {"seal": secret.description(about)})
        return cls(folder)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that requests are read with.

        Raises:
            UsageError: it is not the one that the registry was made with.
        """
        folder = self.folder / TOKENIZER
        tokenizer = load_plain(folder) if self._plain else load_tokenizer(folder)
        if vocabulary_sha256(tokenizer) != self._tokenizer_sha256:
            raise UsageError(f"{self.folder / TOKENIZER} holds another tokenizer than the registry's; restore it")
        return tokenizer

    @property
    def strength(self) -> float:
        """What S_q − S_p is multiplied by before it is added to the target's logits.

        Raises:
            FailedClosed: the log is damaged.
        """
        return self._state().strength

    def raise_strength(self, strength: float) -> None:
        """Take texts down more strongly, in running models too. A registry that is as strong or stronger stays so.

        Raises:
            UsageError: it is no strength.
            FailedClosed: the log is damaged.
        """
        event = _strength_event(strength)
        with self._locked():
            if self._state().strength < strength:
                append(self.folder, self._secret, event)

    def target(self) -> Path:
        """The folder of the model that requests are measured on.

        Raises:
            UsageError: it is not there any longer.
        """
        return self._target.resolve(self.folder, weights=True)

    def add(self, name: str, texts: RecordSet, reference: str = "") -> Entry:
        """Take texts down; in force, also for models that are running, when this returns.

        Args:
            name: the request's id.
            texts: what shall not be repeated.
            reference: what the requester calls it.

        Raises:
            UsageError: there is such a request already, the texts hold no token, or the retain set knows them so well
                that the request would have no effect.
            FailedClosed: the registry is damaged.
        """
        _check_words(name, reference)
        tokens = [np.asarray(ids) for ids in documents(texts, self.tokenizer())]
        counts = count(tokens, self.vocab_size, self.order)
        retain = NgramCounts.load(self.folder / RETAIN, verify=False)
        shared = overlap(retain, tokens)
        held = count(shared.held, self.vocab_size, self.order) if shared.held else None
        q = retain if held is None else LessCounts(retain, held)
        divergence = mean_difference(q, SummedCounts(retain, counts), counts)
        if divergence > NO_EFFECT:
            raise UsageError(
                f"request {name!r} would have no effect: the retain set of {self.folder} goes on as these texts do "
                f"(divergence {divergence:.2f}, accepted: below {NO_EFFECT:g}); make a registry whose retain set does "
                "not hold them, or train a pair"
            )
        nonces = [secrets.token_bytes(NONCE_BYTES) for _ in range(1 if held is None else 2)]
        sealed = seal(counts, self._secret, nonces[0])
        if held is not None:
            passage = seal(held, self._secret, nonces[1])
            sealed = joined([(sealed, set(nonces)), (passage, set(nonces))])
        with self._locked():
            if self._marker(name).exists() and self._in_force(self._state(), name):
                raise UsageError(f"request {name!r} is in {self.folder} already; give another id, or remove it first")
            write_durably(self._marker(name), b"")
            file = f"{nonces[0].hex()}.npz"
            digest = self._store(file, sealed)
            entry = Entry(
                id=name,
                time=_now(),
                reference=reference,
                text_hash=self._secret.text(texts.sha256),
                documents=len(texts),
                tokens=counts.tokens,
                ngrams=counts.distinct,
                file=file,
                nonce=nonces[0].hex(),
                held=nonces[1].hex() if held else None,
                copies=shared.copies,
                spans=shared.spans,
                divergence=round(divergence, 4),
            )
            append(self.folder, self._secret, {"action": "add", **vars(entry), "sha256": digest})
        return entry

    def record(self, entry: Entry, measured: dict[str, Any]) -> None:
        """Write into the log what was measured of a request."""
        with self._locked():
            event = {"action": "measure", "id": entry.id, "nonce": entry.nonce, "time": _now(), "measured": measured}
            append(self.folder, self._secret, event)

    def remove(self, name: str) -> Entry:
        """Withdraw a request; what it took down may be repeated again.

        Raises:
            UsageError: there is no such request.
            FailedClosed: the registry is damaged.
        """
        with self._locked():
            state = self._state()
            found = self._in_force(state, name)
            if not found:
                known = ", ".join([entry.id for entry in state.entries.values()][:5]) or "none"
                raise UsageError(f"there is no request {name!r} in {self.folder}; in force: {known}")
            entry = found[0]
            append(self.folder, self._secret, {"action": "remove", "id": name, "time": _now()})
            self._marker(name).unlink(missing_ok=True)
            needed = {other.file for other in state.entries.values() if other.id != name}
            for withdrawn in found:
                if withdrawn.file not in needed:
                    (self.folder / FILES / withdrawn.file).unlink(missing_ok=True)
        return entry

    def holds(self, entry: Entry) -> bool:
        """Whether the counts of a withdrawn request still lie in a file that other requests need."""
        return (self.folder / FILES / entry.file).exists()

    def entries(self) -> list[Entry]:
        """The requests in force, oldest first.

        Raises:
            FailedClosed: the log is damaged.
        """
        return list(self._state().entries.values())

    def history(self) -> list[dict[str, Any]]:
        """Who was added or removed and when, oldest first.

        Raises:
            FailedClosed: the log is damaged.
        """
        return events(self.folder, self._secret)

    def compact(self) -> int:
        """Put the counts of all requests into one file, and delete what withdrawn ones and dead writers left.

        Returns:
            How many files were deleted.

        Raises:
            FailedClosed: the registry is damaged; nothing has been changed.
        """
        with self._locked():
            state = self._state()
            needed = set(map(bytes.fromhex, _nonces(state)))
            parts = [(self._load(name, digest), needed) for name, digest in state.files.items()]
            held = {nonce.tobytes() for sealed, _ in parts for nonce in sealed.nonces}
            if len(parts) > 1 or held != needed:  # several files, or counts of a withdrawn request among others
                file = f"{secrets.token_hex(NONCE_BYTES)}.npz"
                digest = self._store(file, joined(parts))
                append(self.folder, self._secret, {"action": "compact", "time": _now(), "file": file, "sha256": digest})
                state = self._state()
            markers = {self._marker(entry.id) for entry in state.entries.values()}
            for marker in markers:
                if not marker.exists():
                    write_durably(marker, b"")
            leftovers = [path for path in (self.folder / FILES).iterdir() if path.name not in state.files]
            leftovers += [path for path in (self.folder / IDS).iterdir() if path not in markers]
            leftovers = [path for path in leftovers if path.is_file()]
            for path in leftovers:
                path.unlink()
        return len(leftovers)

    def verify(self) -> list[str]:
        """What is wrong with the registry or a request in force, a line each; nothing where all is well."""
        for _ in range(ATTEMPTS):
            before, problems = self._size(), self._problems()
            if not problems:
                return self._without_effect()
            if before == self._size():
                break
            # It was changed while it was looked at.
        return self._problems()

    def differences(self) -> dict[str, float]:
        """Mean S_q − S_p at the n-grams of each request's texts, as all requests in force make it; by request id.

        It needs no texts: with the key the counts tell which n-grams they are of.

        Raises:
            FailedClosed: the registry is damaged.
        """
        from divdec.takedowns.live import Takedowns

        takedowns = Takedowns(self.folder)
        return {entry.id: takedowns.mean_difference(entry) for entry in takedowns.snapshot().state.entries.values()}

    def _without_effect(self) -> list[str]:
        problems = [
            f"request {name!r} has next to no effect any longer: mean divergence {difference:.2f} at its own n-grams"
            for name, difference in self.differences().items()
            if difference > NO_EFFECT
        ]
        return problems + [
            f"request {entry.id!r}: {entry.measured['recited_after']} of {entry.measured['passages']} passages were "
            f"still recited when it was measured, at strength {entry.measured['strength']:g}"
            for entry in self.entries()
            if entry.measured is not None and entry.measured["recited_after"]
        ]

    def _size(self) -> int:
        try:
            return (self.folder / LOG_FILE).stat().st_size
        except OSError:
            return -1

    def _problems(self) -> list[str]:
        problems = []
        try:
            check_retain(self.folder, self._retain)
            NgramCounts.load(self.folder / RETAIN)
        except (UsageError, FailedClosed) as error:
            problems.append(str(error))
        for name, digest in self._tokenizer_files.items():
            path = self.folder / TOKENIZER / name
            if not path.is_file() or file_sha256(path) != digest:
                problems.append(f"{path} is missing or has changed; restore it from a backup")
        try:
            state = self._state()
        except FailedClosed as error:
            return [*problems, str(error)]
        for name, digest in state.files.items():
            try:
                sealed = self._load(name, digest)
            except FailedClosed as error:
                problems.append(str(error))
                continue
            held = {nonce.tobytes().hex() for nonce in sealed.nonces}
            for entry in state.entries.values():
                if entry.file == name and not held.issuperset(entry.nonces):
                    problems.append(f"{self.folder / FILES / name} does not hold the counts of request {entry.id!r}")
        return problems

    @staticmethod
    def _in_force(state: State, name: str) -> list[Entry]:
        return [entry for entry in state.entries.values() if entry.id == name]

    def _state(self) -> State:
        return read_log(self.folder, self._secret)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # The system gives the lock back when its holder dies.
        with FileLock(self.folder / LOCK):
            yield

    def _marker(self, name: str) -> Path:
        # While there is none, no request of this id is in force, which saves reading the whole log to add one.
        return self.folder / IDS / self._secret.text(f"id {name}")

    def _store(self, file: str, sealed: Sealed) -> str:
        write_durably(self.folder / FILES / file, sealed.to_bytes())
        return file_sha256(self.folder / FILES / file)

    def _load(self, name: str, digest: str) -> Sealed:
        try:
            return Sealed.load(self.folder / FILES / name, digest)
        except FileNotFoundError as error:
            raise FailedClosed(f"{error} is missing, though a request in force needs it; restore it") from None


def _nonces(state: State) -> set[str]:
    """Of all that the requests in force need."""
    return {nonce for entry in state.entries.values() for nonce in entry.nonces}


def _check_words(name: str, reference: str) -> None:
    if not reference.replace("\n", "").isprintable() or len(reference) > LONGEST_REFERENCE:
        raise UsageError(f"reference {reference[:40]!r} cannot be used; accepted: printable text")
    if not name or len(name) > LONGEST_ID or not name.isprintable() or name != name.strip():
        raise UsageError(f"request id {name!r} cannot be used; accepted: 1 to {LONGEST_ID} printable characters")


def _strength_event(strength: float) -> dict[str, Any]:
    try:
        return {"action": "strength", "strength": checked_strength(strength), "time": _now()}
    except ValueError as error:
        raise UsageError(str(error)) from None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
