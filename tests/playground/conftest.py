"""A small trained bundle whose forget auxiliary has seen more than its retain auxiliary, so that it pushes."""

import contextlib
import http.server
import json
import threading

import pytest

from support.served import bundle_of


@pytest.fixture(scope="session")
def played_bundle(models):
    return bundle_of(models, "played", "linear:1.5")


@pytest.fixture(scope="session")
def loaded(played_bundle):
    """Model and tokenizer, for tests that leave both as they are."""
    from divdec import DivergenceForCausalLM
    from divdec.checkpoint import load_tokenizer

    return DivergenceForCausalLM.from_pretrained(played_bundle), load_tokenizer(played_bundle)


@pytest.fixture(scope="session")
def steered(loaded):
    from divdec.playground.models import ChatOptions, SteeredModel

    return SteeredModel(*loaded, ChatOptions(max_new_tokens=24))


@pytest.fixture(scope="session")
def controller(steered):
    from divdec.playground.controller import Controller

    return Controller("tiny", steered)


@pytest.fixture
def registry(tmp_path, models, world):
    """A registry that knows a part of the world."""
    from divdec.data.records import texts_of
    from divdec.takedowns.registry import Registry

    return Registry.create(tmp_path / "takedowns", texts_of("retain", world.corpus[:200:2]), models / "target")


class _Breaking(http.server.BaseHTTPRequestHandler):
    """A real server that answers as an OpenAI server does, and breaks off as its `ending` says."""

    ending = ""
    words = ("Jasper ", "was ")

    def do_GET(self):
        body = json.dumps({"data": [{"id": "broken"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        if self.ending == "":
            self.send_header("Content-Length", "100000")  # which it never sends
        self.end_headers()
        for word in self.words:
            self._event({"choices": [{"index": 0, "delta": {"content": word}}]})
        if self.ending == "whole":
            self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            self.wfile.write(b"data: [DONE]\n\n")
        elif self.ending == "error":
            self._event({"error": {"message": "the model could not be steered; it gives no other answer"}})
        elif self.ending == "nonsense":
            self.wfile.write(b"data: {half\n\n")

    def _event(self, content):
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def _serve_breaking(ending, port=0):
    handler = type("Handler", (_Breaking,), {"ending": ending})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@pytest.fixture
def breaking():
    """Starts servers that break off: takes the ending and a port, gives the URL and the handler."""
    return _serve_breaking
