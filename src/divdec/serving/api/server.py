"""The process: a port, TLS, readiness, and a shutdown that lets running answers end."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import socket
import ssl
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from divdec.errors import UsageError, first_line
from divdec.serving.api.app import create_app
from divdec.serving.api.generation import Limits
from divdec.serving.api.record import Log
from divdec.serving.api.sending import ABORT
from divdec.serving.engine.engine import Engine

DRAIN = 5  # seconds in which connections take the last of their answers
KEEP_ALIVE = 30  # seconds
SHORTEST_KEY = 16  # characters


@dataclasses.dataclass(frozen=True)
class Options:
    """How the process serves."""

    api_key: str | None = None
    """What clients must send; None lets everybody in."""
    limits: Limits = dataclasses.field(default_factory=Limits)
    """What one request may take."""
    grace: float = 30.0
    """Seconds that running answers have to end when the server is stopped."""
    log_prompts: bool = False
    """Write prompts into the log."""
    ssl_certfile: str | None = None
    """Certificate (PEM), its chain included."""
    ssl_keyfile: str | None = None
    """Its private key; None where it is in the same file."""

    def __post_init__(self) -> None:
        key = self.api_key
        if key is not None and (len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key):
            raise UsageError(
                f"the API key has {len(key)} characters; accepted: at least {SHORTEST_KEY} printable ASCII characters "
                "without spaces (such as `openssl rand -hex 24` prints)"
            )
        if self.ssl_keyfile and not self.ssl_certfile:
            raise UsageError("--ssl-keyfile needs --ssl-certfile")

    def check_tls(self) -> None:
        """Look at certificate and key before anything takes time.

        Raises:
            UsageError: they cannot be used.
        """
        if self.ssl_certfile is None:
            return
        for name in (self.ssl_certfile, self.ssl_keyfile):
            if name is not None and not Path(name).is_file():
                raise UsageError(f"TLS: {name} does not exist")
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            # An empty password, for a key that wants one would ask on the terminal.
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password="")
        except (ssl.SSLError, OSError, ValueError) as error:
            raise UsageError(
                f"TLS: certificate {self.ssl_certfile} and key {self.ssl_keyfile or self.ssl_certfile} cannot be used "
                f"together ({first_line(error)}); accepted: PEM, the key without a password"
            ) from None


def serve(engines: Mapping[str, Engine], port: socket.socket, options: Options = Options()) -> None:
    """Answer requests until SIGTERM or SIGINT (Ctrl-C), then let running ones end.

    Args:
        engines: by the name that clients give; not started yet.
        port: see `divdec.serving.address.bind`.
        options: how.

    Raises:
        UsageError: another process has begun to listen on the port in the meantime.
    """
    log = Log(prompts=options.log_prompts)
    _log_as_json(log)
    server = HttpServer(engines, port, options, log)
    names = ", ".join(f"{name} ({engine.steering})" for name, engine in engines.items())
    server.ready = lambda: print(f"serving {names} on {server.url}/v1", flush=True)
    server.run()


class Connection(H11Protocol):
    """A connection that its requests can end at once, where its client does not take what is sent."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Let requests find how."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, ABORT: transport.abort}


class HttpServer(uvicorn.Server):
    """Ends with the answers that it has begun, and with exit code 0."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        port: socket.socket,
        options: Options = Options(),
        log: Log | None = None,
    ) -> None:
        """Prepare; `run` starts the engines and serves until it is told to stop.

        Args:
            engines: by the name that clients give.
            port: see `divdec.serving.address.bind`.
            options: how.
            log: where requests are written down; standard error by default.
        """
        self._engines, self._port, self._grace = engines, port, options.grace
        self._stopping = threading.Event()
        self.ready: Callable[[], None] = lambda: None
        """Called when requests are accepted."""
        host, number = port.getsockname()[:2]
        scheme = "https" if options.ssl_certfile else "http"
        self.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{number}"
        """Where it serves."""
        log = log or Log(prompts=options.log_prompts)
        app = create_app(
            engines, api_key=options.api_key, limits=options.limits, log=log, closing=self._stopping.is_set
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=DRAIN,
                ssl_certfile=options.ssl_certfile,
                ssl_keyfile=options.ssl_keyfile,
            )
        )

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `stop`, SIGTERM or SIGINT.

        Raises:
            UsageError: another process has begun to listen on the port.
        """
        for engine in self._engines.values():
            engine.start()
        try:
            super().run(sockets=[self._port])
        except OSError as error:
            raise UsageError(f"the port cannot be used ({error.strerror}); give another with --port") from None

    def stop(self) -> None:
        """Let `run` end, from any thread."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; at once where it is the second time."""
        # Not recorded as uvicorn does, which would raise the signal again and end the process by it.
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self.ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse what comes, let answers end, end the rest, and close the connections."""
        self._stopping.set()
        closings = [asyncio.ensure_future(engine.close(self._grace)) for engine in self._engines.values()]
        while not all(closing.done() for closing in closings):
            if self.force_exit and self._grace:
                self._grace = 0
                closings += [asyncio.ensure_future(engine.close(0)) for engine in self._engines.values()]
            await asyncio.wait(closings, timeout=0.1)
        await super().shutdown(sockets)


def _log_as_json(log: Log) -> None:
    """Write what libraries warn of in the same form as requests."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            content: dict[str, Any] = {"level": record.levelname.lower(), "message": record.getMessage()}
            if record.exc_info and record.exc_info[1]:
                content["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
            log.event(record.name, **content)

    logging.getLogger().handlers = [Handler(level=logging.WARNING)]
