"""Library and embedded server on a target that recites secrets (`leaks.py`; vLLM's part is in tests/serving/vllm)."""

import pytest

from divdec import Speculation
from support.leaks import Client, Suite, check_library, make_leaky
from support.served import engine_of, serving

RULES = ("linear:1.5", "rank:40")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("leaky")


@pytest.fixture(scope="module")
def make(folder, tokenizer, world):
    return lambda steering: make_leaky(tokenizer, world.corpus, folder, steering)


@pytest.mark.parametrize("steering", RULES)
def test_library_exposes_only_steered_output(steering, make, folder):
    assert check_library(folder, steering, make(steering)) > 1000


@pytest.mark.parametrize(
    ("steering", "speculates"),
    [
        ("rank:40", True),
        pytest.param("linear:1.5", False, marks=pytest.mark.slow),
        pytest.param("linear:1.5", True, marks=pytest.mark.slow),
        pytest.param("rank:40", False, marks=pytest.mark.slow),
    ],
)
def test_server_exposes_only_steered_output(steering, speculates, make, folder):
    bundle, suite = make(steering), Suite(folder, steering, seed=int(speculates))
    engine = engine_of(bundle, speculation=Speculation() if speculates else None)
    with serving([engine], shutdown_timeout=0.0) as url, Client(url, "tiny", suite.tokenizer) as client:
        assert suite.run(client) > 15
