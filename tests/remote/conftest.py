"""A plain target behind the embedded server, the steered model that its answers must equal, and awkward providers."""

import contextlib
import json
import threading
import time

import httpx
import pytest

from support.served import bundle_of, engine_of, serving


@pytest.fixture(scope="session")
def bundle(served_bundle):
    return served_bundle


@pytest.fixture(scope="session")
def local(served_model):
    """The steered model in this process."""
    return served_model


@pytest.fixture(scope="session")
def url(models):
    """The plain target behind the embedded server: alpha is 0, so that nothing steers it."""
    with serving([engine_of(bundle_of(models, "plain", "linear:0"), "plain")], shutdown_timeout=0.0) as address:
        yield address


@pytest.fixture(scope="session")
def prompts(tokenizer, world):
    return [tokenizer(text).input_ids[:12] for text in world.corpus[:6]]


@pytest.fixture
def opened():
    """Takes what must be closed after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda item: stack.enter_context(contextlib.closing(item))


@pytest.fixture
def provider(url):
    """Makes a provider that differs from the embedded server in how it treats requests and replies."""
    with contextlib.ExitStack() as stack:
        yield lambda **habits: stack.enter_context(_awkward(url, **habits))


@contextlib.contextmanager
def _awkward(url, request=None, reply=None):
    """A real server before the real server.

    Args:
        url: of the one behind.
        request: changes a request's body, or gives a status and a message that refuse it.
        reply: changes a reply's body, together with the request's body.
    """
    import uvicorn
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def complete(asked):
        body = await asked.json()
        seen.append((dict(asked.headers), json.loads(json.dumps(body))))
        if request is not None and (refusal := request(body)) is not None:
            status, message = refusal
            return JSONResponse({"error": {"message": message}}, status, {"retry-after-ms": "10"})
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(f"{url}/v1/completions", json=body)
        content = answer.json()
        if reply is not None and answer.is_success:
            reply(content, body)
        return JSONResponse(content, answer.status_code)

    seen = []
    app = Starlette(routes=[Route("/v1/completions", complete, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off", ws="none"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Provider(f"http://127.0.0.1:{port}", seen, server, thread)
    finally:
        server.should_exit = True
        thread.join(30)


class Provider:
    def __init__(self, url, seen, server, thread):
        self.url, self.seen, self.server, self.thread = url, seen, server, thread

    def stop(self):
        """Stop, and return when it accepts nothing more."""
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()
