"""vLLM's server on a target that recites secrets (`leaks.py`)."""

import pytest

from leaks import Client, Suite, make_leaky
from vllm_reference import HEADERS, vllm_serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("leaky")


@pytest.mark.parametrize(
    ("steering", "options", "without"),
    [
        # With drafts on a CPU vLLM 0.32 stops at some requests with top_k, draws beyond top_p, and samples greedy
        # requests that run beside sampled ones: its own faults, seen with a plain model, too.
        ("linear:1.5", {"speculative": 2}, ("top_k", "top_p")),
        ("rank:40", {}, ()),
    ],
)
def test_vllm_exposes_only_steered_output(steering, options, without, folder, tokenizer, world, tmp_path):
    bundle = make_leaky(tokenizer, world.corpus, folder, steering)
    suite = Suite(folder, steering, without=without, hottest=2, alike=bool(without))
    with (
        vllm_serving(bundle, tmp_path / "log.txt", **options) as url,
        Client(url, "steered", suite.tokenizer, HEADERS, refuses=True) as client,
    ):
        suite.run(client)
        assert client.refused < 25  # vLLM has no biases and penalties of some kinds with drafts
