"""What the requests in force say together, looked up by keyed hash, and the experts that follow a registry.

A state of the registry is never changed: a running answer keeps the one it began with, the next takes the newest.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache

from divdec.errors import FailedClosed, UsageError
from divdec.experts.ngram import NgramPair, StupidBackoff
from divdec.experts.ngram_counts import Followers, LessCounts, NgramCounts, SummedCounts, mean_difference
from divdec.experts.protocol import own_cache
from divdec.experts.token_cache import TokenCache
from divdec.takedowns.folder import DESCRIPTION, FILES, RETAIN, check_retain, read_description
from divdec.takedowns.log import LOG_FILE, Entry, State, read_log
from divdec.takedowns.sealed import Sealed
from divdec.takedowns.secret import Secret, context_bytes, read_key

OPENED = 1 << 15  # contexts whose counts are kept open in memory
ATTEMPTS = 5  # to read a registry that is being written


@dataclasses.dataclass(frozen=True)
class Run:
    """Where the blocks of some files stand, by hash of their context."""

    hashes: np.ndarray
    """Ascending, uint64 [blocks]."""
    files: np.ndarray
    """Number of each block's file, [blocks]."""
    blocks: np.ndarray
    """Its place in the file, [blocks]."""

    @classmethod
    def of(cls, number: int, sealed: Sealed, nonces: frozenset[bytes]) -> Run:
        """The blocks of those requests of a file that are in force."""
        alive = np.array([nonce.tobytes() in nonces for nonce in sealed.nonces])
        blocks = np.flatnonzero(alive[sealed.owners])
        return cls(sealed.hashes[blocks], np.full(len(blocks), number, dtype=np.int32), blocks)

    def merged(self, other: Run) -> Run:
        """Both as one."""
        hashes = np.concatenate([self.hashes, other.hashes])
        order = np.argsort(hashes, kind="stable")
        files, blocks = np.concatenate([self.files, other.files]), np.concatenate([self.blocks, other.blocks])
        return Run(hashes[order], files[order], blocks[order])


class SealedCounts:
    """The counts of all requests in force (a `Counts`), opened context by context when they are asked for."""

    def __init__(
        self, secret: Secret, vocab_size: int, order: int, files: tuple[Sealed, ...], runs: tuple[Run, ...]
    ) -> None:
        self.vocab_size, self.order = vocab_size, order
        self._secret = secret
        self._files = files
        self._runs = runs
        self._opened: collections.OrderedDict[bytes, tuple[int, np.ndarray, np.ndarray]] = collections.OrderedDict()
        self._lock = threading.Lock()

    @property
    def unigrams(self) -> np.ndarray:
        """Occurrences by token id, [vocab]."""
        _, tokens, counts = self._look_up(b"")
        found = np.zeros(self.vocab_size, dtype=np.int64)
        found[tokens] = counts
        return found

    def __deepcopy__(self, memo: Any) -> SealedCounts:
        return self

    def followers(self, contexts: np.ndarray) -> Followers:
        """What follows each context."""
        found = [self._look_up(context_bytes(context)) for context in contexts]
        return Followers(
            np.array([total for total, _, _ in found], dtype=np.int64),
            np.repeat(np.arange(len(found)), [len(tokens) for _, tokens, _ in found]),
            np.concatenate([tokens for _, tokens, _ in found]),
            np.concatenate([counts for _, _, counts in found]),
        )

    def _look_up(self, context: bytes) -> tuple[int, np.ndarray, np.ndarray]:
        with self._lock:
            if context in self._opened:
                self._opened.move_to_end(context)
                return self._opened[context]
        number, seed = self._secret.context(context)
        parts = []
        for run in self._runs:
            start = int(np.searchsorted(run.hashes, np.uint64(number), side="left"))
            while start < len(run.hashes) and int(run.hashes[start]) == number:
                parts.append(self._files[run.files[start]].open(int(run.blocks[start]), seed))
                start += 1
        tokens, counts = (np.concatenate([np.zeros(0, np.int64), *(part[k] for part in parts)]) for k in (1, 2))
        if len(tokens) and not (tokens < self.vocab_size).all():
            raise FailedClosed("a request's counts hold impossible tokens; `divdec takedown verify` tells more")
        if len(parts) != 1:
            tokens, places = np.unique(tokens, return_inverse=True)
            counts = np.bincount(places, weights=counts, minlength=len(tokens)).astype(np.int64)
        found = sum(part[0] for part in parts), tokens, counts
        with self._lock:
            self._opened[context] = found
            if len(self._opened) > OPENED:
                self._opened.popitem(last=False)
        return found


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A registry at some moment."""

    state: State
    files: dict[str, tuple[int, Sealed]]
    """Number and content by name of each file that has been read."""
    runs: tuple[Run, ...]
    pair: NgramPair | None
    """None where no request is in force."""

    def __deepcopy__(self, memo: Any) -> Snapshot:
        return self  # it is never changed, and copies of caches share it


class SnapshotCache(TokenCache):
    """The tokens of an answer, and the state of the registry that it began with."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self.snapshot = snapshot


class Takedowns:
    """What a registry of takedown requests adds to a target's logits, followed while it changes.

    It is the registry's strength times S_q − S_p of two n-gram models: q counts the registry's retain set without what
    of it is to be forgotten, p that set and all texts in force. It is almost 0 wherever no request has anything to say.
    A rule and its experts steer what then remains: their strength has no part in a takedown.
    """

    def __init__(self, folder: str | os.PathLike[str], *, strength: float | None = None) -> None:
        """Open a registry.

        Args:
            folder: the registry's.
            strength: instead of the registry's, to measure what another one would do.

        Raises:
            UsageError: the folder is no registry, or its key is missing or another one's.
            FailedClosed: it is damaged.
        """
        self.folder = Path(folder)
        self._own_strength = strength
        about = read_description(self.folder)
        self.vocab_size, self.order = about["vocab_size"], about["order"]
        self.id = about["id"]
        self._secret = read_key(self.folder, about)
        check_retain(self.folder, about["retain"])
        retain = NgramCounts.load(self.folder / RETAIN)
        self._retain = StupidBackoff(retain)
        if (retain.vocab_size, retain.order) != (self.vocab_size, self.order):
            raise UsageError(f"{self.folder}: {RETAIN} holds other counts than {DESCRIPTION} says; restore both")
        self._lock = threading.Lock()
        self._signature: tuple[int, ...] | None = None
        self._snapshot = Snapshot(State(), {}, (), None)
        self.snapshot()

    @property
    def retain(self) -> StupidBackoff:
        """The retain set's n-grams, which no request changes."""
        return self._retain

    def snapshot(self) -> Snapshot:
        """The registry as it is now; what has changed since the last call is read.

        Raises:
            FailedClosed: log or counts are damaged; nothing is answered before they are whole again.
        """
        with self._lock:
            signature = self._current_signature()
            if signature != self._signature:
                self._snapshot = self._newest()
                self._signature = signature
            return self._snapshot

    def __deepcopy__(self, memo: Any) -> Takedowns:
        other = copy.copy(self)  # all but the lock is never changed
        other._lock = threading.Lock()
        return other

    def begin(self, cache: Cache) -> None:
        """Let an answer that goes on from a kept cache follow the registry as it is now."""
        if (held := own_cache(cache, SnapshotCache)) is not None:
            held.snapshot = self.snapshot()

    def new_cache(self) -> SnapshotCache:
        """An empty cache of tokens, bound to the registry as it is now."""
        return SnapshotCache(self.snapshot())

    def correction(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch past_and_tokens"] | None = None,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
    ) -> Float[Tensor, "batch kept vocab"]:
        """What is added to the target's logits: strength·(S_q − S_p), 0 while no request is in force.

        Args:
            input_ids: see `divdec.experts.protocol.Experts.divergence`, as for the next three.
            attention_mask: as there.
            cache: what `new_cache` made.
            logits_to_keep: as there.
        """
        held = own_cache(cache, SnapshotCache)
        if held is not None and not held.get_seq_length():
            self.begin(held)
        snapshot = self.snapshot() if held is None else held.snapshot
        if snapshot.pair is not None:
            strength = snapshot.state.strength if self._own_strength is None else self._own_strength
            return strength * snapshot.pair.divergence(input_ids, attention_mask, None, held, logits_to_keep)
        if held is not None:
            held.token_layer.extend(input_ids, attention_mask)
        kept = min(logits_to_keep or input_ids.shape[1], input_ids.shape[1])
        return torch.zeros(input_ids.shape[0], kept, self.vocab_size, device=input_ids.device)

    def mean_difference(self, entry: Entry) -> float:
        """Mean S_q − S_p at the n-grams of one request's texts, under all requests in force; see `Entry.divergence`."""
        snapshot = self.snapshot()
        assert snapshot.pair is not None
        _, sealed = snapshot.files[entry.file]
        run = Run.of(0, sealed, frozenset([bytes.fromhex(entry.nonce)]))
        own = SealedCounts(self._secret, self.vocab_size, self.order, (sealed,), (run,))
        return mean_difference(snapshot.pair.retain.counts, snapshot.pair.forget.counts, own)

    def _current_signature(self) -> tuple[int, ...]:
        try:
            found = (self.folder / LOG_FILE).stat()
        except OSError:
            raise FailedClosed(f"{self.folder / LOG_FILE} is gone: nothing can tell what is to be forgotten") from None
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _newest(self) -> Snapshot:
        known = self._snapshot
        for attempt in range(ATTEMPTS):
            state = read_log(self.folder, self._secret, known.state)
            try:
                return self._read(known, state)
            except FileNotFoundError as error:
                # Its request may have been removed, or the registry compacted, since the log was read.
                if attempt == ATTEMPTS - 1:
                    raise FailedClosed(
                        f"{error} is missing, though a request in force needs it; restore it from a backup"
                    ) from None
        raise AssertionError

    def _read(self, known: Snapshot, state: State) -> Snapshot:
        """The snapshot of a state; files that are known already are not read again."""
        files = {name: known.files[name] for name in state.files if name in known.files}
        nonces = frozenset(map(bytes.fromhex, state.entries))
        only_more = len(files) == len(known.files) and known.state.entries.keys() <= state.entries.keys()
        runs, contents = (list(known.runs), self._contents(known)) if only_more else ([], [])
        if not only_more:  # numbers are places in a list: count anew
            files = {name: (number, sealed) for number, (name, (_, sealed)) in enumerate(files.items())}
            contents = [sealed for _, sealed in files.values()]
            for number, sealed in files.values():
                _add(runs, Run.of(number, sealed, nonces))
        for name, digest in state.files.items():
            if name in files:
                continue
            sealed = Sealed.load(self.folder / FILES / name, digest)
            files[name] = (len(contents), sealed)
            _add(runs, Run.of(len(contents), sealed, nonces))
            contents.append(sealed)
        pair = None
        if state.entries:
            counts = SealedCounts(self._secret, self.vocab_size, self.order, tuple(contents), tuple(runs))
            p = SummedCounts(self._retain.counts, counts)
            pair = NgramPair(self._without(state, contents), p)
        return Snapshot(state, files, tuple(runs), pair)

    def _without(self, state: State, contents: list[Sealed]) -> StupidBackoff:
        """q: the retain set, less the passages of texts in force that it holds."""
        held = frozenset(bytes.fromhex(entry.held) for entry in state.entries.values() if entry.held)
        if not held:
            return self._retain
        runs: list[Run] = []
        for number, sealed in enumerate(contents):
            _add(runs, Run.of(number, sealed, held))
        counts = SealedCounts(self._secret, self.vocab_size, self.order, tuple(contents), tuple(runs))
        return StupidBackoff(LessCounts(self._retain.counts, counts))

    @staticmethod
    def _contents(known: Snapshot) -> list[Sealed]:
        return [sealed for _, sealed in sorted(known.files.values(), key=lambda file: file[0])]


def _add(runs: list[Run], run: Run) -> None:
    """Keep few runs: a shorter one is merged into the next, so that each block is moved a logarithm of times."""
    while runs and len(runs[-1].hashes) <= 2 * len(run.hashes):
        run = runs.pop().merged(run)
    runs.append(run)
