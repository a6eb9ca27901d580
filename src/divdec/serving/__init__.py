"""Serving a steered model: the embedded OpenAI-compatible server and the vLLM plugin; the server's options."""

from __future__ import annotations

import dataclasses
import ipaddress
import socket
import ssl
from typing import Literal
from urllib.parse import urlsplit

from divdec.errors import UsageError, first_line
from divdec.serving.logprobs import MAX_BODY_BYTES, LogprobPolicy

SHORTEST_KEY = 16  # characters


@dataclasses.dataclass(frozen=True)
class SuppressionPolicy:
    """Action for replies from which steering took much."""

    action: Literal["answer", "refuse", "note"] = "answer"
    """'refuse' replaces the reply, 'note' marks it, with the share where log-probabilities are given in full."""
    share: float = 0.2
    """Least share that counts as much, above 0 and at most 1."""
    refusal: str = "I cannot answer that."
    """Text in place of the reply."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UsageError(f"--suppressed-share is {self.share:g}; accepted: above 0, at most 1")
        if not self.refusal.strip():
            raise UsageError("--refusal is empty; accepted: the text that replaces a reply")

    def refuses(self, share: float | None) -> bool:
        """Whether a finished reply with this share is replaced."""
        # Without a share nobody knows what steering took.
        return self.action == "refuse" and (share is None or not share < self.share)


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """Options of the embedded server."""

    api_key: str | None = None
    """Key that clients must send; None admits everyone."""
    max_tokens: int = 4096
    """Longest reply."""
    max_seconds: float = 300.0
    """Longest time to a complete reply, the time in the queue included."""
    max_body_bytes: int = MAX_BODY_BYTES
    """Largest request body."""
    max_sequences: int = 160
    """Most replies to one request: prompts times n (or best_of)."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests have to finish at shutdown."""
    log_prompts: bool = False
    """Log prompts."""
    logprobs: LogprobPolicy = LogprobPolicy()  # noqa: RUF009  frozen
    """Which log-probabilities replies may contain."""
    suppression: SuppressionPolicy = SuppressionPolicy()
    """Action for replies from which steering took much."""
    ssl_certfile: str | None = None
    """Certificate (PEM) with its chain."""
    ssl_keyfile: str | None = None
    """Private key; None if it is in the same file."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may read replies (CORS); '*' means every page."""

    def __post_init__(self) -> None:
        for origin in self.cors_origins:
            check_origin(origin)
        key = self.api_key
        if key is not None and (len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key):
            raise UsageError(
                f"the API key has {len(key)} characters; accepted: at least {SHORTEST_KEY} printable ASCII characters "
                "without spaces (such as `openssl rand -hex 24` prints)"
            )
        if self.ssl_keyfile and not self.ssl_certfile:
            raise UsageError("--ssl-keyfile needs --ssl-certfile")

    def check_tls(self) -> None:
        """Check certificate and key before models are loaded.

        Raises:
            UsageError: they cannot be used.
        """
        if self.ssl_certfile is None:
            return
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            # Without a password, an encrypted key would ask for one on the terminal.
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password="")
        except (OSError, ValueError) as error:
            raise UsageError(
                f"TLS: certificate {self.ssl_certfile} and key {self.ssl_keyfile or self.ssl_certfile} cannot be used "
                f"together ({first_line(error)}); accepted: PEM, the key without a password"
            ) from None


def check_origin(origin: str) -> None:
    """Refuse what no browser sends as the origin of a page.

    Raises:
        UsageError: it is neither '*' nor a scheme with a host and possibly a port.
    """
    try:
        parts = urlsplit(origin)
        port = "" if parts.port is None else f":{parts.port}"
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        valid = bool(host) and parts.scheme in ("http", "https") and origin == f"{parts.scheme}://{host}{port}"
    except ValueError:
        valid = False
    if origin != "*" and not valid:
        raise UsageError(
            f"--cors-origin is {origin!r}; accepted: an origin such as https://chat.example.org or "
            "http://localhost:3000, in lower case and without a path, or * for every page"
        )


def bind(host: str, port: int) -> socket.socket:
    """Reserve a port, before models are loaded.

    Args:
        host: a name or address of this machine.
        port: the port; 0 selects a free port.

    Raises:
        UsageError: the port is in use, or the host is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"host {host!r} cannot be used ({error.strerror or error})") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise UsageError(f"port {port} of {host} cannot be used ({error.strerror}); give another with --port") from None
    return listener


def is_local(host: str) -> bool:
    """Whether an address is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
