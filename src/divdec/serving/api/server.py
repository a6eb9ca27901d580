"""The server process: port, TLS, readiness, and a shutdown that lets running requests finish."""

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

from divdec.errors import UsageError, first_line
from divdec.serving.api.app import create_app
from divdec.serving.api.generation import Limits
from divdec.serving.api.middleware import AccessLog
from divdec.serving.engine.engine import Engine

DRAIN = 5  # seconds in which connections receive the last of their replies
KEEP_ALIVE = 30  # seconds
SHORTEST_KEY = 16  # characters


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the server process."""

    api_key: str | None = None
    """Key that clients must send; None admits everyone."""
    limits: Limits = dataclasses.field(default_factory=Limits)
    """Limits of one request."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests have to finish at shutdown."""
    log_prompts: bool = False
    """Log prompts."""
    ssl_certfile: str | None = None
    """Certificate (PEM) with its chain."""
    ssl_keyfile: str | None = None
    """Private key; None if it is in the same file."""

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
        """Check certificate and key before models are loaded.

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
            # Without a password, an encrypted key would ask for one on the terminal.
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password="")
        except (ssl.SSLError, OSError, ValueError) as error:
            raise UsageError(
                f"TLS: certificate {self.ssl_certfile} and key {self.ssl_keyfile or self.ssl_certfile} cannot be used "
                f"together ({first_line(error)}); accepted: PEM, the key without a password"
            ) from None


def serve(engines: Mapping[str, Engine], port: socket.socket, options: Options = Options()) -> None:
    """Answer requests until SIGTERM or SIGINT (Ctrl-C), then let running ones finish.

    Args:
        engines: engines by model name, not started yet.
        port: see `divdec.serving.bind`.
        options: options of the process.

    Raises:
        UsageError: another process listens on the port.
    """
    log = AccessLog(prompts=options.log_prompts)
    logging.getLogger().handlers = [_JsonHandler(log)]
    server = HttpServer(engines, port, options, log)
    names = ", ".join(f"{name} ({engine.steering})" for name, engine in engines.items())
    server.on_ready = lambda: print(f"serving {names} on {server.url}/v1", flush=True)
    server.run()


class HttpServer(uvicorn.Server):
    """uvicorn, which at shutdown waits for the engines and exits with code 0."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        port: socket.socket,
        options: Options = Options(),
        log: AccessLog | None = None,
    ) -> None:
        """Prepare; `run` starts the engines. See `serve` for the arguments."""
        self._engines, self._port, self._timeout = engines, port, options.shutdown_timeout
        self._stopping = threading.Event()
        self.on_ready: Callable[[], None] = lambda: None
        """Called when requests are accepted."""
        host, number = port.getsockname()[:2]
        scheme = "https" if options.ssl_certfile else "http"
        self.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{number}"
        """URL of the server."""
        log = log or AccessLog(prompts=options.log_prompts)
        app = create_app(
            engines, api_key=options.api_key, limits=options.limits, log=log, closing=self._stopping.is_set
        )
        super().__init__(
            uvicorn.Config(
                app, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
                timeout_keep_alive=KEEP_ALIVE, timeout_graceful_shutdown=DRAIN, ssl_certfile=options.ssl_certfile,
                ssl_keyfile=options.ssl_keyfile,
            )
        )  # fmt: skip

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `stop`, SIGTERM or SIGINT.

        Raises:
            UsageError: another process listens on the port.
        """
        for engine in self._engines.values():
            engine.start()
        try:
            super().run(sockets=[self._port])
        except OSError as error:
            raise UsageError(f"the port cannot be used ({error.strerror}); give another with --port") from None

    def stop(self) -> None:
        """End `run`, from any thread."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop on a signal; at once on the second."""
        # uvicorn's own handler would raise the signal again after the shutdown, and end the process by it.
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and call `on_ready`."""
        await super().startup(sockets)
        self.on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, wait for running ones, abort the rest, and close the connections."""
        self._stopping.set()
        closings = [asyncio.ensure_future(engine.close(self._timeout)) for engine in self._engines.values()]
        while not all(closing.done() for closing in closings):
            if self.force_exit and self._timeout:
                self._timeout = 0
                closings += [asyncio.ensure_future(engine.close(0)) for engine in self._engines.values()]
            await asyncio.wait(closings, timeout=0.1)
        await super().shutdown(sockets)


class _JsonHandler(logging.Handler):
    """Writes warnings of libraries into the access log."""

    def __init__(self, log: AccessLog) -> None:
        super().__init__(logging.WARNING)
        self.log = log

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = {"level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info and record.exc_info[1]:
            fields["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
        self.log.write(event=record.name, **fields)
