"""A plain target behind the embedded server, the steered model that its answers must equal, and awkward providers."""

import contextlib
import json
import threading
import time

import httpx
import pytest

from served import engine_of, serving, trained


@pytest.fixture(scope="session")
def models(tmp_path_factory, tokenizer, world):
    """A folder with `target`, `retain` and `forget`; the retain auxiliary has read one half of the world."""
    folder = tmp_path_factory.mktemp("remote")
    halves = {"target": world.corpus, "retain": world.corpus[::2], "forget": world.corpus}
    for seed, (name, texts) in enumerate(halves.items()):
        size = (48, 3) if name == "target" else (32, 2)
        trained(tokenizer, texts, seed, *size).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def bundle_of(models, name, steering):
    from divdec import write_bundle

    parts = {"target": "target", "retain_auxiliary": "retain", "forget_auxiliary": "forget"}
    given = {part: str(models / place) for part, place in parts.items()}
    return write_bundle(models / name, **given, steering=steering)


@pytest.fixture(scope="session")
def bundle(models):
    return bundle_of(models, "steered", "linear:1.5")


@pytest.fixture(scope="session")
def local(bundle):
    """The steered model in this process."""
    from divdec import DivergenceForCausalLM

    return DivergenceForCausalLM.from_pretrained(bundle)


@pytest.fixture(scope="session")
def url(models):
    """The plain target behind the embedded server: alpha is 0, so that nothing steers it."""
    with serving([engine_of(bundle_of(models, "plain", "linear:0"), "plain")], grace=0.0) as found:
        yield found


@pytest.fixture(scope="session")
def prompts(tokenizer, world):
    return [tokenizer(text).input_ids[:12] for text in world.corpus[:6]]


@pytest.fixture
def opened():
    """Takes what must be closed after the test."""
    with contextlib.ExitStack() as stack:
        yield stack.enter_context


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
        request: changes a request's body in place, or gives a status and a message that refuse it.
        reply: changes a reply's body in place, given the request's.
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
            return JSONResponse({"error": {"message": message}}, status)
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
        """Returns when it accepts nothing more, whatever the machine is busy with."""
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()
