"""The playground's process: the page on a port of this machine, and what browsers are told about it.

The page may load nothing from elsewhere; its policy forbids it, whatever Gradio would do.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from divdec.playground import look
from divdec.playground.page import build
from divdec.playground.play import Playground
from divdec.serving import is_local

LOCAL_NAMES = ["127.0.0.1", "localhost", "[::1]", "::1"]
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; form-action 'self'"
)
LARGEST_FILE = 1  # bytes: the page takes none


class Policy:
    """Tells browsers to load nothing from elsewhere and to let no other page hold this one; refuses other pages' posts.

    A page of another site that is open in the same browser could otherwise add and withdraw takedown requests here.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and add the headers to its answer."""
        headers = Headers(scope=scope) if scope["type"] == "http" else {}
        origin = headers.get("origin")
        if scope["type"] == "http" and origin is not None and origin.partition("://")[2] != headers.get("host"):
            await PlainTextResponse("this page answers to itself alone", status_code=403)(scope, receive, send)
            return

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = POLICY
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "no-referrer"
            await send(message)

        await self._app(scope, receive, told)


def application(playground: Playground, host: str) -> Any:
    """The ASGI application.

    Args:
        playground: what it shows.
        host: where it listens; on this machine alone, only this machine's names are answered, so that no other site's
            page can reach it under a name of its own.
    """
    # Outside of a running loop Gradio makes loops of its own and never closes them.
    return asyncio.run(_application(playground, host))


async def _application(playground: Playground, host: str) -> Any:
    import gradio
    from fastapi import FastAPI
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    app = FastAPI(openapi_url=None)
    app.add_middleware(Policy)
    if is_local(host):
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*LOCAL_NAMES, host], www_redirect=False)
    page = build(playground)
    page.queue(api_open=False, max_size=64)
    return gradio.mount_gradio_app(
        app, page, path="/", theme=look.theme(), head=look.head(), footer_links=[], run_history=False, ssr_mode=False,
        mcp_server=False, pwa=False, enable_monitoring=False, show_error=False, max_file_size=LARGEST_FILE,
    )  # fmt: skip


def serve(playground: Playground, host: str, port: socket.socket) -> None:
    """Serve until the process is told to stop."""
    import uvicorn

    config = uvicorn.Config(application(playground, host), log_level="warning", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    number = port.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    print(f"playground of {playground.name} on http://{shown}:{number} (Ctrl-C ends it)", flush=True)
    server.run(sockets=[port])
