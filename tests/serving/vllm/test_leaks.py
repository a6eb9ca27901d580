"""vLLM's server on a target that recites secrets (`leaks.py`)."""

import httpx
import pytest

from divdec.serving.logprobs import MAX_BODY_BYTES
from support.leaks import Client, Suite, make_leaky
from support.vllm_reference import HEADERS, vllm_serving

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


def test_server_with_a_registry_gives_no_log_probabilities(make_bundle, make_registry, texts, tmp_path):
    bundle = make_bundle(registry=make_registry(texts[:20]))
    with vllm_serving(bundle, tmp_path / "log.txt") as url:

        def ask(path, **fields):
            return httpx.post(f"{url}{path}", json={"model": "steered", **fields}, headers=HEADERS, timeout=300)

        text = {"prompt": texts[0][:40], "max_tokens": 2, "temperature": 0}
        assert ask("/v1/completions", **text).status_code == 200
        for fields in (
            *({"logprobs": 1}, {"prompt_logprobs": 0}, {"echo": True}, {"logit_bias": {"5": 1}}),
            *({"repetition_penalty": 0.5}, {"presence_penalty": -2}, {"seed": 1, "temperature": 1}, {"top_p": 0.123}),
            *({"use_beam_search": True, "n": 2}, {"min_tokens": 1, "stop_token_ids": [5, 6]}, {"unknown": 1}),
        ):
            refused = ask("/v1/completions", **text | fields)
            assert refused.status_code == 400, fields
            assert refused.json()["error"]["param"] in fields
            assert "--logprobs off" in refused.json()["error"]["message"]
        ordinary = {"seed": 1234, "stop": ["x"], "stop_token_ids": [5], "top_p": 0.95, "logprobs": None, "n": 1}
        assert ask("/v1/completions", **text, **ordinary).status_code == 200
        large = httpx.post(f"{url}/v1/completions", content=bytes(MAX_BODY_BYTES + 1), timeout=300)  # without a key
        assert large.status_code == 413
        chat = {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 2}
        assert ask("/v1/chat/completions", **chat, logprobs=True).status_code == 400
        scoring = {"query": [5, 9], "items": [[7]], "label_token_ids": [3, 4], "apply_softmax": False}
        assert ask("/generative_scoring", **scoring).status_code == 403
