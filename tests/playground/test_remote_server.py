import contextlib

import pytest

from divdec.data.records import Message
from divdec.endpoint import StreamInterrupted
from divdec.errors import UsageError
from divdec.playground.controller import RETRY_HINT, Controller, ControlValues
from divdec.playground.models import ChatOptions
from divdec.playground.rendering import tokens_html
from divdec.playground.server import RemoteServer
from divdec.serving import bind
from divdec.steering import Steering
from support.exactness import assert_same_text
from support.served import engine_of, serving

QUESTION = [Message("user", "Where was Jasper Ashild born?")]
OPTIONS = ChatOptions(max_new_tokens=24)
KEY = "0123456789abcdef"


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("PLAYGROUND_TEST_KEY", KEY)


@pytest.fixture(scope="module")
def url(played_bundle):
    with serving([engine_of(played_bundle)], shutdown_timeout=0.0, api_key=KEY) as address:
        yield address


def last(talks):
    *_, final = talks
    return final


def test_remote_server_output_matches_library(url, steered):
    with contextlib.closing(RemoteServer(url, OPTIONS, api_key_env="PLAYGROUND_TEST_KEY")) as server:
        assert server.name == "tiny"
        tokens = list(server.answer(QUESTION))
    prompt = steered.encode_prompt(QUESTION)
    expected = [token.id for token in steered.answer(prompt, Steering(alpha=1.5))]
    assert_same_text(steered.model, steered.tokenizer, prompt, "".join(token.text for token in tokens), expected)
    assert all(token.logprob_shift is None and token.target_probability is None for token in tokens)
    assert all(0 < token.steered_probability <= 1 for token in tokens)
    assert "also likely here" in tokens_html(tokens)


def test_the_url_may_end_in_v1(url):
    with contextlib.closing(RemoteServer(f"{url}/v1/", OPTIONS, api_key_env="PLAYGROUND_TEST_KEY")) as server:
        assert server.url == f"{url}/v1"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "requires an API key"),
        ({"api_key_env": "PLAYGROUND_TEST_KEY", "model": "other"}, "serves no model 'other'; it serves: tiny"),
    ],
)
def test_server_errors_are_reported_at_start(url, options, said):
    with pytest.raises(UsageError, match=said):
        RemoteServer(url, OPTIONS, **options)


@pytest.mark.parametrize("url", ["http://", "http://user:word@127.0.0.1:1", "https://[::1"])
def test_invalid_url_is_rejected(url):
    with pytest.raises(UsageError, match="URL"):
        RemoteServer(url, OPTIONS)


def test_unreachable_server_gives_one_line_error():
    port = bind("127.0.0.1", 0)  # taken, but without a listener
    with port, pytest.raises(UsageError, match=r"cannot be reached .*; is the server running"):
        RemoteServer(f"http://127.0.0.1:{port.getsockname()[1]}", OPTIONS)


@pytest.mark.parametrize("level", ["off", "top-1"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_server_that_gives_no_log_probabilities_is_asked_without(played_bundle, level, temperature):
    with (
        serving([engine_of(played_bundle)], shutdown_timeout=0.0, logprobs=level) as url,
        contextlib.closing(RemoteServer(url, OPTIONS)) as server,
    ):
        for _ in range(2):
            assert "".join(token.text for token in server.answer(QUESTION, temperature))


def test_model_without_chat_template_uses_plain_prompt(models, tmp_path):
    import shutil

    from divdec import write_bundle
    from divdec.checkpoint import load_tokenizer

    parts = {}
    for name in ("target", "retain", "forget"):
        parts[name] = str(shutil.copytree(models / name, tmp_path / name))
        tokenizer = load_tokenizer(tmp_path / name)
        tokenizer.chat_template = None
        (tmp_path / name / "chat_template.jinja").unlink(missing_ok=True)
        tokenizer.save_pretrained(tmp_path / name)
    bundle = write_bundle(
        tmp_path / "plain",
        target=parts["target"],
        retain_auxiliary=parts["retain"],
        forget_auxiliary=parts["forget"],
        steering="linear:1.5",
    )
    with (
        serving([engine_of(bundle, "plain")], shutdown_timeout=0.0) as url,
        contextlib.closing(RemoteServer(url, OPTIONS)) as server,
    ):
        tokens = list(server.answer(QUESTION))
    assert tokens
    assert all(0 < token.steered_probability <= 1 for token in tokens)


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("", "broke in the middle of the answer"),
        ("cut", "ended the answer before it was complete"),
        ("error", "stopped in the middle of the answer: the model could not be steered"),
        ("nonsense", "an event that is not of the OpenAI API"),
    ],
)
def test_lost_server_leaves_partial_text_and_retry_works(breaking, ending, said):
    with breaking(ending) as (url, handler), contextlib.closing(RemoteServer(url, OPTIONS)) as server:
        with pytest.raises(StreamInterrupted, match=said):
            list(server.answer(QUESTION))
        controller = Controller("broken", server=server)
        talk = last(controller.ask(QUESTION[0].content, (), ControlValues()))
        assert talk[0].answer == "Jasper was "
        assert said in talk[0].note
        assert talk[0].note.endswith(RETRY_HINT)
        handler.ending = "whole"
        (turn,) = last(controller.retry(talk, ControlValues()))
        assert (turn.answer, turn.note, turn.running) == ("Jasper was ", "", False)


def test_unreachable_server_before_first_token_is_reported(breaking):
    with breaking("whole") as (url, _):
        server = RemoteServer(url, OPTIONS)
    with contextlib.closing(server):
        (turn,) = last(Controller("gone", server=server).ask("Where?", (), ControlValues()))
    assert turn.answer == ""
    assert "cannot be reached" in turn.note
