"""Serving a steered model: the embedded OpenAI-compatible server and the vLLM plugin; listening addresses."""

from __future__ import annotations

import ipaddress
import socket

from divdec.errors import UsageError


def bind(host: str, port: int) -> socket.socket:
    """Reserve a port, before models are loaded.

    Args:
        host: a name or address of this machine.
        port: 0 takes a free one.

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
