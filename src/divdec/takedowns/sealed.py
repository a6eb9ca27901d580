"""A request's counts as they lie on disk: contexts as keyed hashes, what follows them under a key stream.

Of a file alone one can tell how many contexts there are and how many tokens follow each, not which.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from divdec.errors import FailedClosed, first_line
from divdec.experts.ngram_counts import NgramCounts, ranges
from divdec.runs import file_sha256
from divdec.takedowns.secret import Secret, context_bytes, key_stream

NONCE_BYTES = 8


@dataclasses.dataclass(frozen=True)
class Sealed:
    """The counts of one or more requests.

    A block is what one request says of one context, in 32-bit words under a key stream: how often the context occurs,
    the tokens that follow it, and how often each does.
    """

    hashes: np.ndarray
    """Keyed hash of each block's context, uint64 [blocks], ascending."""
    owners: np.ndarray
    """Which of the requests each block belongs to, uint32 [blocks]."""
    starts: np.ndarray
    """Where each block begins in `words`, and where the last one ends, uint64 [blocks + 1]."""
    words: np.ndarray
    """uint32 [words]."""
    nonces: np.ndarray
    """Of each request, uint8 [requests, 8]."""

    def open(self, block: int, seed: bytes) -> tuple[int, np.ndarray, np.ndarray]:
        """Total, tokens and counts of a block, given the seed of its context."""
        covered = self.words[int(self.starts[block]) : int(self.starts[block + 1])]
        nonce = self.nonces[self.owners[block]].tobytes()
        words = covered ^ np.frombuffer(key_stream(seed, nonce, len(covered)), dtype="<u4")
        half = (len(words) - 1) // 2
        return int(words[0]), words[1 : half + 1].astype(np.int64), words[half + 1 :].astype(np.int64)

    def to_bytes(self) -> bytes:
        """The content of its file; the same counts under the same nonces give the same bytes."""
        buffer = io.BytesIO()
        np.savez(buffer, **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
        return buffer.getvalue()

    @classmethod
    def load(cls, path: Path, sha256: str) -> Sealed:
        """Read a file whole.

        Raises:
            FileNotFoundError: it is not there.
            FailedClosed: it is not what was written.
        """
        if not path.is_file():
            raise FileNotFoundError(path)
        try:
            if file_sha256(path) != sha256:
                raise FailedClosed(f"{path} is damaged: it is not what was written; restore it from a backup")
            with np.load(path, allow_pickle=False) as arrays:
                return cls(**{field.name: arrays[field.name] for field in dataclasses.fields(cls)})
        except FileNotFoundError:
            raise
        except (OSError, KeyError, ValueError) as error:
            raise FailedClosed(f"{path} cannot be read ({first_line(error)})") from None


def seal(counts: NgramCounts, secret: Secret, nonce: bytes) -> Sealed:
    """Seal the counts of one request."""
    hashes: list[int] = []
    lengths: list[np.ndarray] = []
    plain: list[np.ndarray] = []
    streams: list[bytes] = []
    for level in _levels(counts):
        sizes = 1 + 2 * level.followers
        begins = np.cumsum(sizes) - sizes
        places = ranges(begins + 1, level.followers)
        words = np.empty(int(sizes.sum()), dtype=np.uint32)
        words[begins] = level.totals
        words[places] = level.tokens
        words[places + np.repeat(level.followers, level.followers)] = level.counts
        plain.append(words)
        lengths.append(sizes)
        content, step = context_bytes(level.contexts), 4 * level.contexts.shape[1]
        for place, size in enumerate(sizes.tolist()):
            number, seed = secret.context(content[place * step : (place + 1) * step])
            hashes.append(number)
            streams.append(key_stream(seed, nonce, size))
    words = np.concatenate(plain) ^ np.frombuffer(b"".join(streams), dtype="<u4")
    sealed = Sealed(
        np.array(hashes, dtype=np.uint64),
        np.zeros(len(hashes), dtype=np.uint32),
        np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.uint64),
        words.astype(np.uint32),
        np.frombuffer(nonce, dtype=np.uint8)[None],
    )
    return _ordered(sealed)


def joined(parts: Sequence[tuple[Sealed, set[bytes]]]) -> Sealed:
    """Several files as one.

    Args:
        parts: each with the nonces of the requests that shall be kept of it.
    """
    hashes, owners, lengths, words, nonces = [], [], [], [], []
    for sealed, kept in parts:
        renumbered = np.full(len(sealed.nonces), -1, dtype=np.int64)
        for place, nonce in enumerate(sealed.nonces):
            if nonce.tobytes() in kept:
                renumbered[place] = len(nonces)
                nonces.append(nonce)
        owner = renumbered[sealed.owners]
        chosen = np.flatnonzero(owner >= 0)
        sizes = np.diff(sealed.starts.astype(np.int64))
        hashes.append(sealed.hashes[chosen])
        owners.append(owner[chosen])
        lengths.append(sizes[chosen])
        words.append(sealed.words[np.repeat(owner >= 0, sizes)])
    starts = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.uint64)
    return _ordered(
        Sealed(
            np.concatenate(hashes),
            np.concatenate(owners).astype(np.uint32),
            starts,
            np.concatenate(words),
            np.stack(nonces),
        )
    )


@dataclasses.dataclass(frozen=True)
class _Level:
    """All contexts of one length, and what follows them."""

    contexts: np.ndarray
    """Token ids, [contexts, length]."""
    totals: np.ndarray
    followers: np.ndarray
    """How many tokens follow each."""
    tokens: np.ndarray
    """What follows, context by context."""
    counts: np.ndarray


def _levels(counts: NgramCounts) -> Iterator[_Level]:
    """The contexts shorter than the order, the empty one first."""
    ids = np.flatnonzero(counts.unigrams)
    totals = counts.unigrams[ids]
    yield _Level(np.zeros((1, 0), np.int64), np.array([counts.tokens]), np.array([len(ids)]), ids, totals)
    contexts = ids[:, None]
    for length in range(1, counts.order):
        keys, numbers, rows = (arrays[length - 1] for arrays in (counts.keys, counts.counts, counts.rows))
        tokens, shorter = keys % counts.vocab_size, keys // counts.vocab_size
        followers = rows[ids + 1].astype(np.int64) - rows[ids].astype(np.int64)
        yield _Level(contexts, np.asarray(totals), followers, tokens, np.asarray(numbers))
        parents = shorter[:, None] if length == 1 else contexts[shorter]
        contexts = np.concatenate([parents, tokens[:, None]], axis=1)
        totals, ids = numbers, np.arange(len(keys))


def _ordered(sealed: Sealed) -> Sealed:
    """The same blocks by hash, so that their order says nothing of the texts."""
    order = np.argsort(sealed.hashes, kind="stable")
    sizes = np.diff(sealed.starts.astype(np.int64))[order]
    begins = sealed.starts[:-1].astype(np.int64)[order]
    return dataclasses.replace(
        sealed,
        hashes=sealed.hashes[order],
        owners=sealed.owners[order],
        starts=np.concatenate([[0], np.cumsum(sizes)]).astype(np.uint64),
        words=sealed.words[ranges(begins, sizes)],
    )
