"""The Gradio page: components, their events, the theme, and its web server."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from importlib import resources
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from divdec.playground import rendering
from divdec.playground.controller import MAX_TEMPERATURE, Controller, ControlValues
from divdec.playground.rendering import Conversation, escape
from divdec.report.palette import palette_css

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # Gradio reads it when it is imported

import gradio as gr

LOCAL_NAMES = ["127.0.0.1", "localhost"]
CONTENT_SECURITY_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; form-action 'self'"
)
LEGEND = """<p class="dd-legend"><span><span class="dd-token dd-down3">suppressed</span></span>
<span><span class="dd-token dd-up3">promoted</span></span>
<span><span class="dd-token dd-marked">another token suppressed here</span></span>
<span>hover over a token, or tap it, for details</span></p>"""
# One model and one answer at a time.
MODEL: dict[str, Any] = {"concurrency_id": "model", "concurrency_limit": 1, "api_visibility": "private"}
STREAM: dict[str, Any] = {**MODEL, "show_progress": "hidden"}
INSTANT: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}


def build_page(controller: Controller) -> gr.Blocks:
    """Build the page without serving it."""
    about = f"the bundle's rule is {escape(controller.model.model.rule)}; everything runs locally"
    header = f'<div class="dd-head"><h1>{escape(controller.name)}</h1><p>divdec playground: {about}</p>{LEGEND}</div>'
    with gr.Blocks(title=f"{controller.name} · divdec playground", analytics_enabled=False) as page:
        gr.HTML(header, elem_id="dd-header")
        controls = _create_controls(controller)
        with gr.Row():
            with gr.Column(scale=5, min_width=320):
                _add_chat(controller, controls)
            with gr.Column(scale=2, min_width=260):
                for control in controls:
                    control.render()
    return page


def _create_controls(controller: Controller) -> list[Any]:
    """Create rule, strength, k and temperature."""
    offered = controller.model.controls
    (low, high), (smallest, largest) = offered.alpha_range, offered.k_range
    default = offered.default
    name = default.rule if offered.experts else "takedowns"
    rule = gr.Radio(
        list(offered.rules), value=name, label="Rule", interactive=True, elem_id="dd-rule",
        visible=len(offered.rules) > 1, render=False,
    )  # fmt: skip
    alpha = gr.Slider(
        low, high, value=min(max(default.alpha, low), high), step=0.05, label="Strength α",
        info="weight of the divergence; 0 is not offered", interactive=True, visible=name == "linear",
        elem_id="dd-alpha", render=False,
    )  # fmt: skip
    k = gr.Slider(
        smallest, largest, value=min(max(default.k, smallest), largest), step=1, label="k",
        info="number of masked tokens at every position", interactive=True, visible=name == "rank",
        elem_id="dd-k", render=False,
    )  # fmt: skip
    temperature = gr.Slider(
        0, MAX_TEMPERATURE, value=0, step=0.1, label="Temperature", info="0 is greedy", render=False
    )
    rule.change(
        lambda name: (gr.update(visible=name == "linear"), gr.update(visible=name == "rank")), rule, [alpha, k],
        **INSTANT,
    )  # fmt: skip
    return [rule, alpha, k, temperature]


def _add_chat(controller: Controller, controls: list[Any]) -> None:
    """Add the conversation."""
    compares = controller.target is not None

    def steered_html(conversation: Conversation) -> str:
        html = rendering.conversation_html(conversation, empty=rendering.WELCOME)
        return f'<div class="dd-panel"><h4>Steered</h4>{html}</div>' if compares else html

    conversation, unsteered = gr.State(()), gr.State(())
    target: Any = None
    with gr.Row(equal_height=False):
        with gr.Column(min_width=280):
            shown = gr.HTML(steered_html(()), elem_id="dd-conversation", max_height=620, autoscroll=True)
        if compares:
            with gr.Column(min_width=280):
                target = gr.HTML(_unsteered_html(()), elem_id="dd-target", max_height=620, autoscroll=True)
    question = gr.Textbox(
        placeholder="Ask something", show_label=False, container=False, elem_id="dd-question", autofocus=True
    )
    with gr.Row():
        send = gr.Button("Send", variant="primary", elem_id="dd-send", min_width=80)
        stop = gr.Button("Stop", elem_id="dd-stop", min_width=80, interactive=False)
        again = gr.Button("Answer again", elem_id="dd-again", min_width=140)
        new = gr.Button("New conversation", elem_id="dd-new", min_width=140)
    starts: list[Any] = [question.submit, send.click]
    if controller.examples:
        samples = [[example] for example in controller.examples]
        examples = gr.Dataset(
            label="Example questions", components=[question], samples=samples, samples_per_page=4, elem_id="dd-examples"
        )
        starts.append(examples.click(lambda sample: sample[0], examples, question, **INSTANT).then)
    inputs, outputs = [conversation, *controls], [shown, conversation, stop]

    def update(value: Conversation, *, busy: bool = False) -> tuple[Any, ...]:
        running = busy or bool(value and value[-1].running)
        return steered_html(value), value, gr.update(interactive=running)

    def ask(text: str, value: Conversation, *values: Any) -> Iterator[tuple[Any, ...]]:
        box: Any = ""
        for growing in controller.ask(text, value, ControlValues(*values)):
            yield *update(growing, busy=compares), box
            box = gr.skip()

    def retry(value: Conversation, *values: Any) -> Iterator[tuple[Any, ...]]:
        for growing in controller.retry(value, ControlValues(*values)):
            yield update(growing, busy=compares)

    def compare(value: Conversation, earlier: Conversation) -> Iterator[tuple[Any, ...]]:
        for growing in controller.answer_unsteered(value, earlier):
            yield _unsteered_html(growing), growing, gr.update(interactive=bool(growing and growing[-1].running))

    def recolor(value: Conversation, *values: Any) -> tuple[Any, ...]:
        return update(controller.recolor(value, ControlValues(*values)))[:2]

    running: list[Any] = [start(ask, [question, *inputs], [*outputs, question], **STREAM) for start in starts]
    running.append(again.click(retry, inputs, outputs, **STREAM))
    reset, cleared = [*outputs], ()
    if compares:
        comparison, cleared = [target, unsteered], (_unsteered_html(()), ())
        running += [event.then(compare, [conversation, unsteered], [*comparison, stop], **STREAM) for event in running]
        reset += comparison
    stop.click(lambda value: update(controller.stop(value)), conversation, outputs, cancels=running, **INSTANT)
    new.click(lambda: (*update(()), *cleared), None, reset, cancels=running, **INSTANT)
    for control in controls[:3]:
        control.change(recolor, inputs, outputs[:2], trigger_mode="always_last", **STREAM)


def _unsteered_html(conversation: Conversation) -> str:
    html = rendering.conversation_html(conversation, empty='<p class="dd-hint">Answers without steering.</p>')
    return f'<div class="dd-panel dd-unsteered"><h4>⚠ UNSTEERED: the target alone</h4>{html}</div>'


class SecurityMiddleware:
    """Sets the security headers, and refuses requests of other origins.

    Without the check of the origin, another site's page in the browser could change the strength and ask questions.
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


def build_app(controller: Controller) -> Any:
    """Build the ASGI application.

    Only requests for this machine's names are accepted, so that another site's name cannot be pointed at the page.
    """
    from fastapi import FastAPI
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    folder = resources.files("divdec.playground")
    style, script = ((folder / f"playground.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    light, dark = palette_css()
    head = f"<style>:root {{ {light}; }}\n.dark {{ {dark}; }}\n{style}</style>\n<script>{script}</script>"
    theme = gr.themes.Base(
        font=("system-ui", "sans-serif"), font_mono=("ui-monospace", "monospace"), radius_size="md", text_size="md"
    )

    async def build() -> Any:
        app = FastAPI(openapi_url=None)
        app.add_middleware(SecurityMiddleware)
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOCAL_NAMES, www_redirect=False)
        page = build_page(controller)
        page.queue(api_open=False, max_size=64)
        return gr.mount_gradio_app(
            app, page, path="/", theme=theme, head=head, footer_links=[], run_history=False, ssr_mode=False,
            mcp_server=False, pwa=False, enable_monitoring=False, show_error=False,
            max_file_size=1,  # byte: the page accepts no files
        )  # fmt: skip

    return asyncio.run(build())  # outside of a running event loop Gradio creates loops that it never closes


def serve(controller: Controller, listener: socket.socket) -> None:
    """Serve the page until the process is stopped."""
    import uvicorn

    config = uvicorn.Config(build_app(controller), log_level="warning", timeout_graceful_shutdown=2)
    port = listener.getsockname()[1]
    print(f"playground of {controller.name} on http://127.0.0.1:{port} (Ctrl-C ends it)", flush=True)
    uvicorn.Server(config).run(sockets=[listener])
