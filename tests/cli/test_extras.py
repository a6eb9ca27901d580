"""Without an extra's libraries its verbs say in one line what to install, and all others work."""

import sys

import pytest

from divdec.cli import main
from divdec.extras import EXTRAS, require

EVERY = sorted({library for libraries in EXTRAS.values() for library in libraries})


@pytest.fixture
def no_extras(monkeypatch):
    for library in EVERY:
        monkeypatch.setitem(sys.modules, library, None)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("playground", "bundle", "--port", "0"), "the playground needs gradio: pip install 'divdec[ui]'"),
        (
            ("serve", "bundle"),
            "the server needs fastapi and uvicorn and prometheus_client and sse_starlette and llguidance: pip install "
            "'divdec[serve]'",
        ),
        (("serve", "bundle", "--engine", "vllm"), "pip install 'divdec[vllm]'"),
    ],
)
def test_missing_extra_error_names_install_command(arguments, says, no_extras, capsys):
    assert main(list(arguments)) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_doctor_requires_no_extra(no_extras, capsys):
    assert main(["doctor"]) == 0
    section = capsys.readouterr().out.partition("\nextras\n")[2]
    assert section.split() == [word for extra in EXTRAS for word in (extra, "no")]


def test_installed_extras_are_accepted():
    require("serve", "this")
