import contextlib
import importlib.util

import pytest

from conftest import loads_torch
from divdec.cli import main
from divdec.cli.playground import Settings
from divdec.errors import UsageError
from divdec.serving import bind

needs_gradio = pytest.mark.skipif(
    importlib.util.find_spec("gradio") is None, reason="gradio is not installed: divdec[ui]"
)


def test_help_is_instant():
    assert not loads_torch(["playground", "--help"])


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.0.7", "::"])
@pytest.mark.parametrize("more", [[], ["--show-target"]])
def test_a_bundle_is_shown_on_this_machine_only(played_bundle, capsys, host, more):
    assert main(["playground", str(played_bundle), "--host", host, *more]) == 2
    said = capsys.readouterr().err
    assert "is open to other machines" in said
    assert ("unsteered answers" in said) == bool(more)
    assert said.count("\n") == 1


@needs_gradio
def test_a_rule_that_steers_nothing_is_refused(played_bundle, capsys):
    assert main(["playground", str(played_bundle), "--steering", "linear:0", "--port", "0"]) == 2
    assert "steered answers only" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        {"steering": "linear:2"},
        {"registry": "takedowns"},
        {"show_target": True},
        {"device": "cpu"},
        {"no_verify": True},
    ],
)
def test_a_servers_client_chooses_nothing_that_is_the_servers(options):
    with pytest.raises(UsageError, match="is for a bundle"):
        Settings("http://127.0.0.1:8000", **options)


def test_a_bundle_has_no_other_models():
    with pytest.raises(UsageError, match="--model"):
        Settings("bundle", model="other")


@pytest.mark.parametrize("options", [{"max_new_tokens": 0}, {"port": 70000}, {"seed": -1}])
def test_numbers_out_of_range_are_refused(options):
    with pytest.raises(UsageError, match="accepted"):
        Settings("bundle", **options)


@needs_gradio
def test_a_port_in_use_is_one_line(played_bundle, capsys):
    taken = bind("127.0.0.1", 0)
    taken.listen()
    with contextlib.closing(taken):
        assert main(["playground", str(played_bundle), "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot be used" in capsys.readouterr().err
