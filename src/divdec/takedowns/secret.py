"""A registry's secret, and everything that is derived from it: hashes of contexts, key streams, the log's seals."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any

import numpy as np

from divdec.errors import FailedClosed, UsageError

KEY_FILE = "secret.key"
ENVIRONMENT = "DIVDEC_REGISTRY_KEY"
KEY_BYTES = 32
HASH_BYTES, SEED_BYTES = 8, 16


class Secret:
    """What only the holder of a registry's key can compute.

    The sub-keys for contexts, log and texts are apart, and those of two registries under one key too, so that no value
    of one kind or place is one of another.
    """

    def __init__(self, key: bytes, registry: str) -> None:
        self._contexts, self._log, self._texts, self._check = (
            hashlib.blake2b(registry.encode(), key=key, person=name, digest_size=KEY_BYTES).digest()
            for name in (b"divdec.contexts", b"divdec.log", b"divdec.texts", b"divdec.check")
        )

    def __reduce__(self) -> Any:
        raise UsageError("a registry's key is not written into pickles; load the bundle in each process instead")

    def __deepcopy__(self, memo: Any) -> Secret:
        return self

    @property
    def check(self) -> str:
        """A value that tells whether a key is the registry's, and nothing else."""
        return self._check.hex()

    def description(self, about: dict[str, Any]) -> str:
        """The seal of what the folder says of itself."""
        return self.seal("description", json.dumps(about, sort_keys=True, ensure_ascii=False))

    def context(self, tokens: bytes) -> tuple[int, bytes]:
        """Hash and seed of a context (paper's w_{i−k+1}…w_{i−1}), given as its 32-bit token ids one after the other."""
        digest = hashlib.blake2b(tokens, key=self._contexts, digest_size=HASH_BYTES + SEED_BYTES).digest()
        return int.from_bytes(digest[:HASH_BYTES], "little"), digest[HASH_BYTES:]

    def text(self, digest: str) -> str:
        """A keyed hash of a text's digest, as hexadecimal digits: without the key no guess can be tried."""
        return hashlib.blake2b(digest.encode(), key=self._texts, digest_size=16).hexdigest()

    def seal(self, previous: str, line: str) -> str:
        """The seal of a line of the log, which depends on all lines before it."""
        return hashlib.blake2b(f"{previous}\n{line}".encode(), key=self._log, digest_size=16).hexdigest()


def key_stream(seed: bytes, nonce: bytes, words: int) -> bytes:
    """So many 32-bit words that cover one context's counts in one file."""
    return hashlib.shake_128(seed + nonce).digest(4 * words)


def context_bytes(context: np.ndarray) -> bytes:
    """A context as `Secret.context` takes it."""
    return np.ascontiguousarray(context, dtype="<i4").tobytes()


def new_key(folder: Path, registry: str) -> Secret:
    """The key from the environment, or a fresh one in a file that only its owner can read.

    Raises:
        UsageError: the environment holds no key of 32 bytes.
    """
    if given := os.environ.get(ENVIRONMENT):
        return Secret(_parsed(given, f"${ENVIRONMENT}"), registry)
    key = secrets.token_bytes(KEY_BYTES)
    handle = os.open(folder / KEY_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(key.hex() + "\n")
        file.flush()
        os.fsync(file.fileno())
    return Secret(key, registry)


def read_key(folder: Path, about: dict[str, Any]) -> Secret:
    """The registry's key, from the environment or its file.

    Args:
        folder: the registry.
        about: what it says of itself, with `Secret.check` and its seal.

    Raises:
        UsageError: there is none, others may read its file, or it is another registry's.
        FailedClosed: what the registry says of itself has been changed.
    """
    if given := os.environ.get(ENVIRONMENT):
        place, key = f"${ENVIRONMENT}", _parsed(given, f"${ENVIRONMENT}")
    else:
        path = folder / KEY_FILE
        place = str(path)
        try:
            mode = path.stat().st_mode
            text = path.read_text(encoding="ascii")
        except (OSError, ValueError):
            raise UsageError(
                f"{folder}: the registry's key is neither in {path} nor in ${ENVIRONMENT}; put it back, "
                "for without it nothing can be steered"
            ) from None
        if os.name == "posix" and stat.S_IMODE(mode) & 0o077:
            raise UsageError(f"{path} can be read by others (mode {stat.S_IMODE(mode):04o}); chmod 600 {path}")
        key = _parsed(text.strip(), place)
    secret = Secret(key, about["id"])
    if not hmac.compare_digest(secret.check, about["key_check"]):
        raise UsageError(f"{place} holds the key of another registry than {folder}")
    sealed = {name: value for name, value in about.items() if name != "seal"}
    if not hmac.compare_digest(secret.description(sealed), about["seal"]):
        raise FailedClosed(f"{folder}: what the registry says of itself has been changed; restore it from a backup")
    return secret


def _parsed(text: str, place: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise UsageError(f"{place} holds no registry key; accepted: {2 * KEY_BYTES} hexadecimal digits")
    return key
