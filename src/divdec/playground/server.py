"""The playground's web server: the page with its security headers."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from divdec.playground.controller import Controller
from divdec.playground.page import build_page, page_head, page_theme
from divdec.serving import is_local

LOCAL_NAMES = ["127.0.0.1", "localhost", "[::1]", "::1"]
CONTENT_SECURITY_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; form-action 'self'"
)


class SecurityMiddleware:
    """Sets the security headers, and refuses requests of other origins.

    Without the check of the origin, another site's page in the same browser could add and withdraw takedown requests.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        headers = Headers(scope=scope) if scope["type"] == "http" else {}
        origin = headers.get("origin")
        if scope["type"] == "http" and origin is not None and origin.partition("://")[2] != headers.get("host"):
            await PlainTextResponse("cross-origin requests are refused", status_code=403)(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = CONTENT_SECURITY_POLICY
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "no-referrer"
            await send(message)

        await self._app(scope, receive, send_with_headers)


def build_app(controller: Controller, host: str) -> Any:
    """Build the ASGI application.

    Args:
        controller: the bundle or server on the page.
        host: the listening address; on a loopback address only requests for this machine's names are accepted, so
            that another site's name cannot be pointed at the page.
    """
    # Outside of a running event loop Gradio creates loops that it never closes.
    return asyncio.run(_build_app(controller, host))


async def _build_app(controller: Controller, host: str) -> Any:
    import gradio
    from fastapi import FastAPI
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    app = FastAPI(openapi_url=None)
    app.add_middleware(SecurityMiddleware)
    if is_local(host):
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*LOCAL_NAMES, host], www_redirect=False)
    page = build_page(controller)
    page.queue(api_open=False, max_size=64)
    return gradio.mount_gradio_app(
        app, page, path="/", theme=page_theme(), head=page_head(), footer_links=[], run_history=False, ssr_mode=False,
        mcp_server=False, pwa=False, enable_monitoring=False, show_error=False,
        max_file_size=1,  # byte: the page accepts no files
    )  # fmt: skip


def serve(controller: Controller, host: str, listener: socket.socket) -> None:
    """Serve the page until the process is stopped."""
    import uvicorn

    config = uvicorn.Config(build_app(controller, host), log_level="warning", timeout_graceful_shutdown=2)
    port = listener.getsockname()[1]
    name = f"[{host}]" if ":" in host else host
    print(f"playground of {controller.name} on http://{name}:{port} (Ctrl-C ends it)", flush=True)
    uvicorn.Server(config).run(sockets=[listener])
