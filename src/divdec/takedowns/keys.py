"""The key of a registry, and the keys derived from it for encryption and authentication."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from divdec.errors import FailedClosed, UsageError

KEY_FILE = "secret.key"
ENVIRONMENT = "DIVDEC_REGISTRY_KEY"
KEY_BYTES = 32
NONCE_BYTES = 12  # of AES-GCM


class RegistryKeys:
    """The keys of one registry, derived with HKDF: one each for encryption, events, texts and the key check.

    Keys of different purposes or registries are independent, so that no value can stand for another one.
    """

    def __init__(self, key: bytes, registry: str) -> None:
        encryption, self._events, self._texts, self._check = (
            HKDFExpand(SHA256(), KEY_BYTES, f"divdec registry {registry} {purpose}".encode()).derive(key)
            for purpose in ("encryption", "events", "texts", "check")
        )
        self._cipher = AESGCM(encryption)

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
        return hmac.digest(self._events, b"\0".join((purpose.encode(), previous.hex().encode(), content.encode())),
                           "sha256")  # fmt: skip

    def authenticate_description(self, description: dict[str, Any]) -> str:
        """Return the authentication code of a registry's description, as hexadecimal digits."""
        content = json.dumps(description, sort_keys=True, ensure_ascii=False)
        return self.authenticate("description", b"", content).hex()

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


def read_keys(folder: Path, description: dict[str, Any], code: str) -> RegistryKeys:
    """Read a registry's key from the environment or its file.

    Args:
        folder: the registry.
        description: its description, which holds `RegistryKeys.check`.
        code: the description's authentication code.

    Raises:
        UsageError: there is no key, others may read its file, or it is the key of another registry.
        FailedClosed: the description was changed.
    """
    if text := os.environ.get(ENVIRONMENT):
        source = f"${ENVIRONMENT}"
    else:
        path = folder / KEY_FILE
        source = str(path)
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
    keys = RegistryKeys(_parse_key(text, source), description["id"])
    if not hmac.compare_digest(keys.check, description["key_check"]):
        raise UsageError(f"{source} holds the key of another registry than {folder}")
    if not hmac.compare_digest(keys.authenticate_description(description), code):
        raise FailedClosed(f"{folder}: the registry's description has been changed; restore it from a backup")
    return keys


def _parse_key(text: str, source: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise UsageError(f"{source} holds no registry key; accepted: {2 * KEY_BYTES} hexadecimal digits")
    return key
