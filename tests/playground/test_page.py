"""The page as Gradio describes it, and its server on a real socket; what a browser makes of it is in test_browser."""

import asyncio
import contextlib
import copy
import dataclasses
import importlib.util
import json
import threading

import httpx
import pytest

from divdec.playground.controller import Controller
from divdec.playground.models import UnsteeredTarget
from divdec.serving import bind
from support.served import eventually

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("gradio") is None, reason="gradio is not installed: divdec[ui]"),
    # Gradio's own calls, of itself and of what it is built on.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def page_of(controller):
    from divdec.playground.page import build_page

    async def made():
        return build_page(controller).get_config_file()

    return asyncio.run(made())  # outside of a loop Gradio makes some that it never closes


def texts(config):
    return json.dumps(config, ensure_ascii=False, default=str)


def slider(config, name):
    return next(component["props"] for component in config["components"] if component["props"].get("elem_id") == name)


@contextlib.contextmanager
def served(controller):
    import uvicorn

    from divdec.playground.page import build_app

    port = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(build_app(controller), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [port]}, daemon=True)
    thread.start()
    eventually(lambda: server.started, 60)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port.getsockname()[1]}", timeout=60) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(30)
        port.close()


def called(client, fn_index, data):
    """What one of the page's functions gives last, as a page or any other client calls it."""
    session = "a-session"
    body = {"data": data, "fn_index": fn_index, "session_hash": session}
    client.post("/gradio_api/queue/join", json=body).raise_for_status()
    with client.stream("GET", "/gradio_api/queue/data", params={"session_hash": session}) as response:
        for line in response.iter_lines():
            if line.startswith("data:"):
                event = json.loads(line.removeprefix("data:"))
                if event["msg"] == "process_completed":
                    return event["output"]
    raise AssertionError("no answer")


def test_takedown_requests_alone_have_no_strength_on_the_page(controller):
    model = copy.copy(controller.model)
    model.controls = dataclasses.replace(model.controls, experts=False)
    config = page_of(dataclasses.replace(controller, model=model))
    assert not any(slider(config, name)["visible"] for name in ("dd-rule", "dd-alpha", "dd-k"))


def test_page_shows_target_only_with_show_target(controller, steered):
    assert "UNSTEERED" not in texts(page_of(controller))
    with_target = Controller("tiny", steered, target=UnsteeredTarget(steered))
    assert "UNSTEERED: the target alone" in texts(page_of(with_target))


def test_strength_slider_starts_above_zero(controller):
    alpha = slider(page_of(controller), "dd-alpha")
    assert alpha["minimum"] == 0.1
    assert alpha["value"] == 1.5


def test_zero_strength_request_is_rejected(controller):
    calls = page_of(controller)["dependencies"]
    ask = next(call["id"] for call in calls if len(call["inputs"]) == 6 and len(call["outputs"]) == 4)
    question = "Where was Jasper Ashild born?"
    with served(controller) as client:
        refused = called(client, ask, [question, None, "linear", 0, 20, 0])
    assert refused["error"] == "Value 0 is less than minimum value 0.1."  # Gradio's own check comes before ours
    assert "data" not in refused


def test_page_loads_no_external_resources_and_rejects_other_hosts(controller):
    with served(controller) as client:
        page = client.get("/")
        assert page.status_code == 200
        assert "default-src 'self'" in page.headers["content-security-policy"]
        assert "fonts.googleapis" not in page.text
        assert "--vermillion" in page.text
        assert client.get("/", headers={"host": "evil.example"}).status_code == 400
        assert client.post("/gradio_api/queue/join", headers={"host": "evil.example"}, json={}).status_code == 400
        for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "http://[none"):
            assert client.post("/gradio_api/queue/join", headers={"origin": origin}, json={}).status_code == 403


def test_markup_in_model_name_is_escaped(steered, controller):
    nasty = "</title></script><script>alert(1)</script>"
    with served(Controller(nasty, steered)) as client:
        assert "<script>alert(1)" not in client.get("/").text
        assert client.get("/config").headers["content-type"] == "application/json"


def test_gradio_analytics_are_disabled():
    import os

    import gradio

    import divdec.playground.page  # noqa: F401

    assert os.environ["GRADIO_ANALYTICS_ENABLED"] == "False"
    assert not gradio.analytics.analytics_enabled()
