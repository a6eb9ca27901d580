"""The correction that a registry's requests add to the target's logits, followed while the registry changes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import sqlite3
import threading
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache

from divdec.errors import FailedClosed, UsageError
from divdec.experts.ngram import StupidBackoff
from divdec.experts.ngram_counts import CountDifference, NgramCounts, SummedCounts
from divdec.experts.protocol import own_cache
from divdec.experts.token_cache import TokenCache, TokenLayer
from divdec.takedowns.canonical import READINGS, WINDOW, Readings
from divdec.takedowns.counts import extended
from divdec.takedowns.store import RETAIN, State, Store


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The state of a registry at one moment; it never changes."""

    state: State
    taken: SummedCounts | None
    """Counts of all requests in force; None where there is none."""
    held: SummedCounts | None
    """Counts of their passages that the retain set holds; None where there are none."""
    pair: tuple[StupidBackoff, StupidBackoff] | None
    """q and p; None where no request is in force."""

    def __deepcopy__(self, memo: Any) -> Snapshot:
        return self


class SnapshotCache(TokenCache):
    """The tokens of an answer, and the snapshot of the registry that the answer began with."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self.snapshot = snapshot


class TakedownCorrection:
    """The correction P' − P = s·(S_q − S_p) of a registry of takedown requests.

    q counts the n-grams of the registry's retain set without the texts to forget, p those of the retain set and of all
    texts to forget, and s is the registry's strength. Where no request knows the context, the correction is almost 0.
    The rule and the experts of a bundle then steer the corrected logits; their strength does not change s.
    """

    window = WINDOW
    """Number of tokens that a context is read from at least."""

    def __init__(self, folder: str | os.PathLike[str], *, strength: float | None = None) -> None:
        """Open a registry.

        Args:
            folder: the registry's folder.
            strength: used instead of the registry's, to measure its effect.

        Raises:
            UsageError: the folder is no registry, or its key is missing or another one's.
            FailedClosed: the registry is damaged.
        """
        self.folder = Path(folder).expanduser()
        self._strength = strength
        self._store = Store(self.folder)
        description = self._store.description
        self.id: str = description["id"]
        self.tokenizer_sha256: str = description["tokenizer"]
        self.vocab_size: int = description["vocab_size"]
        self.order: int = description["order"]
        self._store.check_retain()
        retain = NgramCounts.load(self.folder / RETAIN)
        self.readings = Readings(self._store.load_tokenizer(), self.vocab_size)
        """Reads contexts in canonical form."""
        if (retain.vocab_size, retain.order) != (self.readings.table_size, self.order):
            raise UsageError(f"{self.folder}: {RETAIN} holds other counts than the registry's; restore it")
        self.retain = StupidBackoff(retain, READINGS)
        """The n-gram model of the retain set, which no request changes."""
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._signature: tuple[int, ...] = ()
        self._snapshot = Snapshot(State(), None, None, None)
        self.snapshot()

    def __del__(self) -> None:
        if (connection := getattr(self, "_connection", None)) is not None:
            connection.close()

    def __deepcopy__(self, memo: Any) -> TakedownCorrection:
        other = copy.copy(self)
        other._lock, other._connection, other._signature = threading.Lock(), None, ()
        return other

    def snapshot(self) -> Snapshot:
        """Return the newest state of the registry; it is read again if it has changed since the last call.

        Raises:
            FailedClosed: the registry is damaged; no answer is given until it is restored.
        """
        with self._lock:
            if self._changed():
                self._refresh()
            return self._snapshot

    def state_digest(self) -> str:
        """Return a digest of the newest state: the authentication code of the last event, which covers all."""
        return f"{self.id} {self.snapshot().state.code.hex()}"

    def begin(self, cache: Cache) -> None:
        """Let an answer that continues from a cache follow the newest state of the registry."""
        if (snapshot_cache := own_cache(cache, SnapshotCache)) is not None:
            snapshot_cache.snapshot = self.snapshot()

    def new_cache(self) -> SnapshotCache:
        """Return an empty cache of tokens, bound to the newest state of the registry."""
        return SnapshotCache(self.snapshot())

    def correction(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch past_and_tokens"] | None = None,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
    ) -> Float[Tensor, "batch kept vocab"]:
        """Return s·(S_q − S_p), which is 0 while no request is in force; see `Experts.divergence` for the arguments."""
        snapshot_cache = own_cache(cache, SnapshotCache)
        if snapshot_cache is not None and not snapshot_cache.get_seq_length():
            self.begin(snapshot_cache)
        snapshot = self.snapshot() if snapshot_cache is None else snapshot_cache.snapshot
        layer = TokenLayer() if snapshot_cache is None else snapshot_cache.token_layer
        tokens = layer.extend(input_ids, attention_mask)
        positions = min(logits_to_keep or input_ids.shape[1], input_ids.shape[1])
        return self._correct(snapshot, tokens, positions).to(input_ids.device)

    def correction_after(self, windows: Int[Tensor, "rows window"]) -> Float[Tensor, "rows vocab"]:
        """Return s·(S_q − S_p) after the last `self.window` tokens of sequences, for caches that hold no more.

        `windows` has −1 in front of a sequence's first token.
        """
        return self._correct(self.snapshot(), windows.cpu().long(), 1, windows=True)[:, 0].to(windows.device)

    def _correct(self, snapshot: Snapshot, tokens: Tensor, positions: int, *, windows: bool = False) -> Tensor:
        if snapshot.pair is None:
            return torch.zeros(len(tokens), positions, self.vocab_size)
        q, p = snapshot.pair
        correction = self.readings.scores(
            tokens.numpy(), positions, self.order - 1,
            lambda contexts, i: q.scores(contexts, i).sub_(p.scores(contexts, i)), windows=windows,
        )  # fmt: skip
        strength = snapshot.state.strength if self._strength is None else self._strength
        return correction.mul_(strength).view(len(tokens), positions, self.vocab_size)

    def _changed(self) -> bool:
        """Whether a writer committed a change, or the file was changed or replaced in any other way."""
        if self._connection is None or self._file_signature() != self._signature[:-1]:
            return True
        try:
            return _data_version(self._connection) != self._signature[-1]
        except (sqlite3.Error, UnicodeDecodeError):  # the text of an error may hold bytes of a damaged file
            return True

    def _file_signature(self) -> tuple[int, ...]:
        try:
            status = self._store.path.stat()
        except OSError:
            raise FailedClosed(f"{self._store.path} is gone: nothing can tell what is to be forgotten") from None
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def _refresh(self) -> None:
        """Read and check the whole registry with a new connection, which has no pages in its cache."""
        file_signature = self._file_signature()
        with self._store.failing_closed(), contextlib.ExitStack() as stack:
            connection = stack.enter_context(contextlib.closing(self._store.connect()))
            signature = (*file_signature, _data_version(connection))
            with self._store.read(connection):
                self._store.check_unchanged(connection, self._snapshot.state)
                self._snapshot = self._read(connection)
            stack.pop_all()
        if self._connection is not None:
            self._connection.close()
        self._connection, self._signature = connection, signature

    def _read(self, connection: sqlite3.Connection) -> Snapshot:
        known, state = self._snapshot, self._store.read_state(connection)
        only_added = known.state.entries.keys() <= state.entries.keys()
        request_counts, passage_counts = (known.taken, known.held) if only_added else (None, None)
        new, texts = [], {entry.text_hash for entry in known.state.entries.values() if only_added}
        for entry, counts, passages in self._store.read_counts(connection, state):
            if not only_added or entry.counts_id not in known.state.entries:
                # The retain set holds the passages of a text once, however many requests name it.
                new.append((counts, None if entry.text_hash in texts else passages))
                texts.add(entry.text_hash)
        if only_added and not new:
            return dataclasses.replace(known, state=state)
        request_counts = extended(request_counts, [counts for counts, _ in new], self.readings.table_size)
        passage_counts = extended(
            passage_counts, [passages for _, passages in new if passages], self.readings.table_size
        )
        if request_counts is None:
            return Snapshot(state, None, None, None)
        retain = self.retain.counts
        rest = None if passage_counts is None else CountDifference(retain, passage_counts)
        q = self.retain if rest is None else StupidBackoff(rest, READINGS)
        p = StupidBackoff(SummedCounts((retain, request_counts)), READINGS)
        return Snapshot(state, request_counts, passage_counts, (q, p))


def _data_version(connection: sqlite3.Connection) -> int:
    """Return a number that differs from the last call's if another connection has changed the database since."""
    return connection.execute("PRAGMA data_version").fetchone()[0]
