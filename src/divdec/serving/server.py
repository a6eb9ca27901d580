"""The server process: routes, port, readiness, and a shutdown that lets running requests finish."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import threading
import traceback
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from divdec import __version__
from divdec.errors import UsageError
from divdec.serving import ServeSettings
from divdec.serving.completions import ChatCompletion, Server, TextCompletion
from divdec.serving.engine import Engine
from divdec.serving.logprobs import LogprobPolicy, default_level
from divdec.serving.middleware import Metrics, RequestMiddleware, write_log
from divdec.serving.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    ErrorBody,
    server_closing,
)
from divdec.serving.tracing import trace_request, tracer_from_environment

DRAIN = 5  # seconds in which connections receive the last of their replies
KEEP_ALIVE = 30  # seconds
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request cannot be used, or the queue is full (429)."},
    "5XX": {"model": ErrorBody, "description": "Not steered (500), shutting down (503), or too slow (504)."},
}
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


def serve(engines: Mapping[str, Engine], port: socket.socket, options: ServeSettings) -> None:
    """Start the engines and answer requests until SIGTERM or SIGINT (Ctrl-C), then let running ones finish.

    Raises:
        UsageError: another process listens on the port.
    """
    server = HttpServer(engines, port, options, tracer_from_environment())
    logging.getLogger().handlers = [_JsonHandler(logging.WARNING)]
    names = ", ".join(f"{name} ({engine.steering}, {engine.fingerprint})" for name, engine in engines.items())
    server.on_ready = lambda: print(f"serving {names} on {server.url}/v1", flush=True)
    server.run()


class HttpServer(uvicorn.Server):
    """uvicorn, which at shutdown waits for the engines and exits with code 0.

    Attributes:
        on_ready: called when requests are accepted.
        url: URL of the server.
    """

    def __init__(
        self, engines: Mapping[str, Engine], port: socket.socket, options: ServeSettings, tracer: Any = None
    ) -> None:
        """Prepare; `run` starts the engines."""
        self._engines, self._port, self._timeout = engines, port, options.shutdown_timeout
        self._stopping = threading.Event()
        self.on_ready: Callable[[], None] = lambda: None
        host, number = port.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{number}"
        super().__init__(
            uvicorn.Config(
                create_app(engines, options, self._stopping.is_set, tracer), http="h11", ws="none", lifespan="off",
                log_config=None, access_log=False, server_header=False, timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=DRAIN,
            )
        )  # fmt: skip

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `should_exit` is set, SIGTERM or SIGINT."""
        for engine in self._engines.values():
            engine.start()
        try:
            super().run(sockets=[self._port])
        except OSError as error:
            raise UsageError(f"the port cannot be used ({error.strerror}); give another with --port") from None

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

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith(("Unsupported upgrade", "No supported WebSocket")):
            return  # Java's client offers HTTP/2 with each request
        fields: dict[str, Any] = {"level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info and record.exc_info[1]:
            fields["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
        write_log(event=record.name, **fields)


def create_app(
    engines: Mapping[str, Engine], options: ServeSettings, closing: Callable[[], bool], tracer: Any = None
) -> FastAPI:
    """Create the application for started engines; while `closing()` is true it refuses requests."""
    follows = any(engine.count_takedowns() is not None for engine in engines.values())
    policy = LogprobPolicy(options.logprobs or default_level(follows))
    server = Server(engines, options, policy, Metrics(engines, counts_changes=policy.level == "full"))
    app = FastAPI(
        title="divdec", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False, responses=ERRORS
    )
    trace = None if tracer is None else functools.partial(trace_request, tracer)
    app.add_middleware(RequestMiddleware, metrics=server.metrics, options=options, closing=closing, trace=trace)
    if options.cors_origin:  # outside of the other, because a preflight request has no key and errors need the headers
        app.add_middleware(
            CORSMiddleware, allow_origins=options.cors_origin, allow_methods=["GET", "POST"], allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )  # fmt: skip
    for kind in (HTTPException, RequestValidationError):  # the middleware answers all other exceptions
        app.add_exception_handler(kind, _handle_error)

    @app.post("/v1/completions", responses=STREAMED)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue prompts."""
        return await TextCompletion(body, server, request).respond()

    @app.post("/v1/chat/completions", responses=STREAMED)
    async def chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await ChatCompletion(body, server, request).respond()

    def card(engine: Engine) -> dict[str, Any]:
        return {
            "id": engine.name, "object": "model", "created": engine.created, "owned_by": "divdec",
            "max_model_len": engine.max_model_len, "logprobs": policy.level,
            "system_fingerprint": engine.fingerprint,
        }  # fmt: skip

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the served models."""
        return {"object": "list", "data": [card(engine) for engine in engines.values()]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        """Describe a served model."""
        return card(server.find_model(model))

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Say whether requests are accepted."""
        if closing() or not all(engine.is_open for engine in engines.values()):
            raise server_closing()
        for engine in engines.values():
            await asyncio.to_thread(engine.count_takedowns)  # fails if the registry is damaged, as every request does
        return {"status": "ok"}

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Metrics in the format of Prometheus."""
        page = await asyncio.to_thread(generate_latest, server.metrics.registry)  # may read the registry's folder
        return Response(page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    return app


async def _handle_error(request: Request, error: Exception) -> Response:
    return request.state.record.set_error(error).response()
