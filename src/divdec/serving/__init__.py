"""Serving a steered model: the embedded OpenAI-compatible server and the vLLM plugin; the server's options."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
import socket
from typing import Annotated, Literal

from cyclopts import Parameter

from divdec.errors import UsageError
from divdec.options import RARE, Flag, check_at_least, read_template_kwargs
from divdec.serving.logprobs import MAX_BODY_BYTES, LogprobPolicy

MIN_KEY_LENGTH = 16  # characters


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Options of `divdec serve`."""

    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0 accepts connections from other machines."""
    port: int = 8000
    """Port to listen on. 0 selects a free port."""
    api_key: str | None = None
    """API key (bearer token), at least 16 characters. Prefer the environment variable DIVDEC_API_KEY, which other users
    of the machine cannot see."""
    name: str | None = None
    """Model name of the bundle in the API; its folder's name by default."""
    extra_bundle: tuple[str, ...] = ()
    """Further bundles, as name=path; clients choose by name."""
    registry: str | None = None
    """Folder of a takedown registry (`divdec takedown`), by default that of the environment variable DIVDEC_REGISTRY.
    Every bundle follows it, including later changes."""
    logprobs: str | None = None
    """Probabilities that replies tell: off, top-1, or full. All but full also refuse logit_bias, log-probabilities of
    the prompt and seeds of samples, and accept sampling numbers in steps of 0.05.
    Default: off with a registry, full without. vLLM: off or full."""
    on_suppressed: Literal["answer", "refuse", "note"] = "answer"
    """Action for a reply from which steering took much of the target's probability, where the model would invent
    something: answer, refuse (send --refusal instead), or note (mark the reply in the response; with --logprobs full,
    add the share)."""
    suppressed_share: Annotated[float, RARE] = 0.2
    """Mark a reply if steering took at least this share of the probability at one of its tokens."""
    refusal: Annotated[str, RARE] = "I cannot answer that."
    """Text that replaces a refused reply."""
    chat_template_kwargs: Annotated[str | None, RARE] = None
    """Variables of the chat template as a JSON object, such as '{"enable_thinking": false}'. Requests can replace
    them."""
    engine: Literal["embedded", "vllm"] = "embedded"
    """Inference engine: embedded (this process), or vllm."""
    vllm_options: str = ""
    """Options for vLLM's server in one string, such as --vllm-options='--tensor-parallel-size 2'."""
    cors_origin: Annotated[tuple[str, ...], RARE] = ()
    """Origin of web pages whose scripts may use the server (CORS), such as http://localhost:3000; * means every page.
    None by default."""
    max_num_seqs: Annotated[int, RARE] = 32
    """Maximum number of sequences decoded at the same time."""
    max_queue: Annotated[int, RARE] = 128
    """Maximum number of queued sequences. Further requests get status 429."""
    max_tokens: Annotated[int, RARE] = 4096
    """Longest answer that a client may ask for, in tokens."""
    max_seconds: Annotated[float, RARE] = 300.0
    """Maximum time per request in seconds, including time in the queue."""
    max_body_bytes: Annotated[int, RARE] = MAX_BODY_BYTES
    """Largest body of a request."""
    shutdown_timeout: Annotated[float, RARE] = 30.0
    """Seconds that running requests may take to finish when the server is stopped."""
    log_prompts: Flag = False
    """Include prompts in the access log."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise UsageError(f"--port is {self.port}; accepted: 0 to {2**16 - 1}")
        for name in ("max_num_seqs", "max_queue", "max_tokens", "max_body_bytes"):
            check_at_least(name, getattr(self, name), 1)
        if not 0 < self.max_seconds < 1e6 or not 0 <= self.shutdown_timeout < 1e6:
            raise UsageError(
                "--max-seconds must be above 0, --shutdown-timeout at least 0 seconds, both below a million"
            )
        if not 0 < self.suppressed_share <= 1:
            raise UsageError(f"--suppressed-share is {self.suppressed_share:g}; accepted: above 0, at most 1")
        if not self.refusal.strip():
            raise UsageError("--refusal is empty; accepted: the text that replaces a reply")
        read_template_kwargs(self.chat_template_kwargs)
        if wrong := [
            origin for origin in self.cors_origin if not re.fullmatch(r"\*|null|[a-z][^:/]*://[^/\s]+", origin)
        ]:
            raise UsageError(f"--cors-origin is {wrong[0]!r}; accepted: scheme://host[:port] without a path, or *")
        if self.engine == "embedded" and self.vllm_options:
            raise UsageError("--vllm-options are for --engine vllm")
        if self.logprobs is not None:
            LogprobPolicy(self.logprobs)
        key = self.api_key
        if key is not None and (len(key) < MIN_KEY_LENGTH or not key.isascii() or not key.isprintable() or " " in key):
            raise UsageError(
                f"the API key has {len(key)} characters; accepted: at least {MIN_KEY_LENGTH} printable ASCII "
                "characters without spaces (such as `openssl rand -hex 24` prints)"
            )

    def took_much(self, share: float | None) -> bool:
        """Whether steering took much of a reply with this share; without one nobody knows, and it counts as much."""
        return share is None or not share < self.suppressed_share


def bind(host: str, port: int) -> socket.socket:
    """Reserve a port of this machine, before models are loaded; 0 selects a free one.

    Raises:
        UsageError: the port is in use, or the host is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"--host {host!r} cannot be used ({error.strerror or error}); give a local address") from None
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
