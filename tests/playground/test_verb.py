import contextlib
import importlib.util

import pytest

from divdec.cli import main
from divdec.serving import bind

needs_gradio = pytest.mark.skipif(
    importlib.util.find_spec("gradio") is None, reason="gradio is not installed: divdec[ui]"
)


def error_of(capsys, *arguments):
    assert main(["playground", *map(str, arguments)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_playground_has_no_option_for_another_host(played_bundle, capsys):
    assert "--host" in error_of(capsys, played_bundle, "--host", "0.0.0.0")


@needs_gradio
def test_playground_rejects_steering_without_effect(played_bundle, capsys):
    assert main(["playground", str(played_bundle), "--steering", "linear:0", "--port", "0"]) == 2
    assert "steered answers only" in capsys.readouterr().err


def test_a_server_is_not_a_bundle(capsys):
    assert "http://127.0.0.1:8000 is a server" in error_of(capsys, "http://127.0.0.1:8000")


@pytest.mark.parametrize("options", ["--max-new-tokens 0", "--port 70000", "--seed=-1"])
def test_out_of_range_numbers_are_rejected(capsys, options):
    assert "accepted" in error_of(capsys, "bundle", *options.split())


@needs_gradio
def test_port_in_use_is_rejected(played_bundle, capsys):
    listener = bind("127.0.0.1", 0)
    listener.listen()
    with contextlib.closing(listener):
        assert "cannot be used" in error_of(capsys, played_bundle, "--port", listener.getsockname()[1])
