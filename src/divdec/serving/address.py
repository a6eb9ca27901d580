"""Where a process listens: a port that is free, and whether only this machine reaches it."""

from __future__ import annotations

import ipaddress
import socket

from divdec.errors import UsageError


def bind(host: str, port: int) -> socket.socket:
    """Take the port, before models are loaded.

    Args:
        host: a name or address of this machine.
        port: 0 takes any that is free.

    Raises:
        UsageError: it is in use, or the host is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"host {host!r} cannot be used ({error.strerror or error})") from None
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        found.close()
        raise UsageError(f"port {port} of {host} cannot be used ({error.strerror}); give another with --port") from None
    return found


def is_local(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
