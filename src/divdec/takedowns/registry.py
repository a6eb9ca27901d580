"""A registry of takedown requests: a folder to which texts are added that a model shall not repeat.

A request takes effect in seconds: nothing is trained and nothing restarted, a running model reads the change before
its next answer (`divdec.takedowns.correction`). The folder holds n-gram counts of the requests, encrypted, and neither
their texts nor readable n-grams. Every change is one transaction: if a writer is killed, the change has happened or
it has not.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divdec.checkpoint import (
    CheckpointReference,
    load_config,
    load_tokenizer,
    vocabulary_sha256,
    vocabulary_width,
)
from divdec.data.records import RecordSet
from divdec.errors import FailedClosed, UsageError
from divdec.experts.ngram_counts import DESCRIPTION as COUNTS
from divdec.experts.ngram_counts import CountDifference, NgramCounts, SummedCounts, mean_difference
from divdec.experts.ngram_fit import check_order, count, fit
from divdec.runs import file_sha256, output_folder, write_text
from divdec.takedowns.canonical import Readings
from divdec.takedowns.counts import PackedCounts, find_retained_passages
from divdec.takedowns.store import (
    DATABASE,
    FORMAT,
    KEY_FILE,
    RETAIN,
    TOKENIZER,
    State,
    Store,
    TakedownRequest,
    check_strength,
    create_keys,
    normal_id,
    tokenizer_files,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_ID_LENGTH, MAX_REFERENCE_LENGTH = 200, 10_000
ORDER = 5  # longer n-grams change fewer unrelated answers (docs/benchmarks.md)
STRENGTH = 10.0  # nats that a token loses which only a taken-down text continues with
NO_EFFECT = -0.1  # mean difference of scores above which a request would do next to nothing


class Registry:
    """A registry of takedown requests, to add, remove, list and verify them.

    Every method raises `FailedClosed` if the registry is damaged.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Open a registry.

        Raises:
            UsageError: the folder is no registry, or its key is missing or another one's.
        """
        self.folder = Path(folder).expanduser()
        self._store = Store(self.folder)
        self.description = self._store.description
        """Properties that the registry was created with: id, time, tokenizer, retain set, target, order."""
        self.vocab_size: int = self.description["vocab_size"]
        self.order: int = self.description["order"]

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str],
        retain: RecordSet,
        checkpoint: str | os.PathLike[str],
        *,
        order: int = ORDER,
        strength: float = STRENGTH,
        progress: Callable[[int], object] | None = None,
    ) -> Registry:
        """Create a registry without requests.

        Args:
            folder: it must be empty or absent.
            retain: texts that the model may know; their n-grams are stored unencrypted, as those of any n-gram model.
            checkpoint: folder or hub id of the model to be steered, for its tokenizer and the width of its logits;
                requests are measured on it.
            order: length of the longest n-grams, 2 to 5.
            strength: what S_q − S_p is multiplied by before it is added to the target's logits, in nats.
            progress: called with the number of tokens read since its last call.

        Raises:
            UsageError: the folder is in use, the checkpoint has no tokenizer, or there is nothing to count.
        """
        check_order(order)
        event = _strength_event(strength)
        folder = Path(folder).expanduser()
        reference = CheckpointReference.parse(str(checkpoint))
        checkpoint = reference.resolve(Path(), weights=False)
        tokenizer, vocab_size = load_tokenizer(checkpoint), vocabulary_width(load_config(checkpoint))
        if reference.folder is not None:  # relative, so that both can be moved together, unless given as absolute
            absolute = Path(reference.folder).is_absolute()
            path = str(checkpoint) if absolute else os.path.relpath(checkpoint, folder.resolve())
            reference = CheckpointReference(folder=path)
        else:
            reference = CheckpointReference(hub_id=reference.hub_id, revision=checkpoint.name)  # the snapshot's commit
        if (folder / DATABASE).exists():
            raise UsageError(
                f"{folder} is a registry already; add requests to it (divdec takedown add), or give another name"
            )
        if folder.is_dir() and any(folder.iterdir()):
            raise UsageError(f"folder {folder} is not empty; give the name of an empty or absent one")
        with output_folder(folder) as temporary:
            registry_id = secrets.token_hex(16)
            keys = create_keys(temporary, registry_id)
            sha256 = vocabulary_sha256(tokenizer)
            (temporary / RETAIN).mkdir()
            readings = Readings(tokenizer, vocab_size)
            fit(
                itertools.chain(*readings.documents(retain)), readings.table_size, temporary / RETAIN,
                order=order, progress=progress, tokenizer=sha256,
            )  # fmt: skip
            tokenizer.save_pretrained(temporary / TOKENIZER)
            write_text(temporary / ".gitignore", f"/{KEY_FILE}\n/{DATABASE}-*\n")
            description = {
                "format": FORMAT,
                "id": registry_id,
                "created": _now(),
                "vocab_size": vocab_size,
                "order": order,
                "tokenizer": sha256,
                "tokenizer_files": {
                    file.relative_to(temporary / TOKENIZER).as_posix(): file_sha256(file)
                    for file in tokenizer_files(temporary / TOKENIZER)
                },
                "retain": file_sha256(temporary / RETAIN / COUNTS),
                "retain_set": retain.label,
                "retain_kind": retain.kind,
                "key_check": keys.check,
                "target": reference.to_dict(),
            }
            Store.create(temporary, description, keys, event)
        return cls(folder)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer that requests are encoded with; see `Store.load_tokenizer`."""
        return self._store.load_tokenizer()

    def target(self, path_or_id: str | None = None) -> Path:
        """Return the folder of the model that requests are measured on; `path_or_id` replaces its recorded place.

        Raises:
            UsageError: it does not exist.
        """
        if path_or_id is not None:
            return CheckpointReference.parse(path_or_id).resolve(Path(), weights=True)
        reference = CheckpointReference.from_dict(self.description["target"], "target")
        return reference.resolve(self.folder, weights=True)

    @property
    def strength(self) -> float:
        """Factor of S_q − S_p before it is added to the target's logits, in nats."""
        with self._store.read() as connection:
            return self._store.read_state(connection).strength

    def raise_strength(self, strength: float) -> None:
        """Raise the strength, in running models too. A registry that is as strong or stronger stays as it is.

        Raises:
            UsageError: the strength is out of range.
        """
        event = _strength_event(strength)
        with self._store.write() as connection:
            state = self._store.read_state(connection)
            if state.strength < strength:
                self._store.append(connection, state, event)

    def add(self, request_id: str, texts: RecordSet, reference: str = "") -> TakedownRequest:
        """Add a request. When this returns, it is in force, also in running models.

        Args:
            request_id: the request's id. Ids that differ in their Unicode normalisation only are the same.
            texts: what shall not be repeated.
            reference: what the requester calls it.

        Raises:
            UsageError: the id is in use, the texts hold no token, or the retain set knows them so well that the
                request would have no effect.
        """
        request_id = normal_id(request_id)
        _check_labels(request_id, reference)
        readings = Readings(self.tokenizer(), self.vocab_size)
        documents = [list(each) for each in readings.documents(texts)]
        counts = count(itertools.chain(*documents), readings.table_size, self.order)
        retain = NgramCounts.load(self.folder / RETAIN, verify=False)
        cased, lower = (find_retained_passages(retain, each) for each in documents)
        passages = cased.passages + lower.passages
        passage_counts = count(passages, readings.table_size, self.order) if passages else None
        q = retain if passage_counts is None else CountDifference(retain, passage_counts)
        divergence = mean_difference(q, SummedCounts((retain, counts)), counts)
        if divergence > NO_EFFECT:
            raise UsageError(
                f"request {request_id!r} would have no effect: the retain set of {self.folder} continues as these "
                f"texts do (divergence {divergence:.2f}, accepted: below {NO_EFFECT:g}); create a registry whose "
                "retain set does not hold them, or train a pair"
            )
        entry = TakedownRequest(
            id=request_id,
            time=_now(),
            reference=reference,
            text_hash=self._store.keys.text_hash(texts.sha256),
            documents=len(texts),
            tokens=sum(map(len, documents[0])),
            ngrams=counts.distinct,
            counts_id=secrets.token_hex(16),
            has_retained_passages=passage_counts is not None,
            max_retained_copies=max(cased.max_copies, lower.max_copies),
            shared_spans=min(cased.shared_spans, lower.shared_spans),
            divergence=round(divergence, 4),
        )
        packed = PackedCounts.from_counts(counts)
        packed_passages = None if passage_counts is None else PackedCounts.from_counts(passage_counts)
        with self._store.write() as connection:
            state = self._store.read_state(connection)
            if state.find(request_id) is not None:
                raise UsageError(
                    f"request {request_id!r} is in {self.folder} already; give another id, or remove it first"
                )
            self._store.insert_counts(connection, entry.counts_id, packed, packed_passages)
            self._store.append(connection, state, {"action": "add", **vars(entry)})
        return entry

    def record(self, entry: TakedownRequest, measured: dict[str, Any]) -> None:
        """Record what was measured of a request."""
        event = {"action": "measure", "id": entry.id, "counts_id": entry.counts_id, "time": _now()}
        with self._store.write() as connection:
            state = self._store.read_state(connection)
            self._store.append(connection, state, event | {"measured": measured})

    def remove(self, request_id: str) -> TakedownRequest:
        """Withdraw a request and delete its counts. Models may repeat its texts again.

        Raises:
            UsageError: there is no such request.
        """
        with self._store.write() as connection:
            state = self._store.read_state(connection)
            entry = self._find(state, request_id)
            event = {"action": "remove", "id": entry.id, "counts_id": entry.counts_id, "time": _now()}
            connection.execute("DELETE FROM counts WHERE id = ?", (entry.counts_id,))
            self._store.append(connection, state, event)
        return entry

    def entries(self) -> list[TakedownRequest]:
        """Return the requests in force, oldest first."""
        with self._store.read() as connection:
            return list(self._store.read_state(connection).entries.values())

    def history(self) -> list[dict[str, Any]]:
        """Return every event of the audit trail with its sequence number and time, oldest first."""
        with self._store.read() as connection:
            return self._store.read_events(connection)[0]

    def find(self, request_id: str) -> TakedownRequest:
        """Return a request in force.

        Raises:
            UsageError: there is no such request.
        """
        with self._store.read() as connection:
            return self._find(self._store.read_state(connection), request_id)

    def check_texts(self, entry: TakedownRequest, texts: RecordSet) -> None:
        """Check that texts are those of a request.

        Raises:
            UsageError: they are not.
        """
        if not secrets.compare_digest(self._store.keys.text_hash(texts.sha256), entry.text_hash):
            raise UsageError(
                f"these are not the texts of request {entry.id!r} (their keyed hash differs); give the file that it "
                "was added with"
            )

    @property
    def public_key(self) -> str:
        """The public key that reports on this registry are verified with (Ed25519), as hexadecimal digits."""
        return self._store.keys.public

    def sign(self, content: bytes) -> str:
        """Return the registry's signature (Ed25519) of a content, as hexadecimal digits."""
        return self._store.keys.sign(content)

    def verify(self) -> list[str]:
        """Check that the registry is intact; return one line for each problem."""
        problems = []
        try:
            self._store.check_retain()
            NgramCounts.load(self.folder / RETAIN)
        except (UsageError, FailedClosed) as error:
            problems.append(str(error))
        for file in self._store.changed_tokenizer_files():
            problems.append(f"{file} is missing, new or has changed; restore the folder from a backup")
        try:
            with self._store.read() as connection:
                for _ in self._store.read_counts(connection, self._store.read_state(connection)):
                    pass
        except FailedClosed as error:
            problems.append(str(error))
        return problems

    def _find(self, state: State, request_id: str) -> TakedownRequest:
        entry = state.find(request_id)
        if entry is None:
            known = ", ".join([other.id for other in state.entries.values()][:5]) or "none"
            raise UsageError(f"there is no request {request_id!r} in {self.folder}; in force: {known}")
        return entry


def _check_labels(request_id: str, reference: str) -> None:
    visible = reference.translate(dict.fromkeys(map(ord, "\n\u200c\u200d")))  # Persian and Indic words have joiners
    if not visible.isprintable() or len(reference) > MAX_REFERENCE_LENGTH:
        raise UsageError(f"reference {reference[:40]!r} cannot be used; accepted: printable text")
    if not 0 < len(request_id) <= MAX_ID_LENGTH or not request_id.isprintable() or request_id != request_id.strip():
        raise UsageError(
            f"request id {request_id!r} cannot be used; accepted: 1 to {MAX_ID_LENGTH} printable characters, without a "
            "space at either end"
        )


def _strength_event(strength: float) -> dict[str, Any]:
    return {"action": "strength", "strength": check_strength(strength), "time": _now()}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
