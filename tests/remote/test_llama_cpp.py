"""A plain target behind llama.cpp's own server: texts in and out, a repetition penalty and cuts by default."""

import contextlib
import socket
import subprocess
import sys
import time
from importlib.util import find_spec

import httpx
import pytest

from divdec.endpoint import Endpoint
from divdec.model.loading import Bundle
from divdec.remote.experts import LoadedExperts
from divdec.remote.settings import RemoteSettings
from divdec.remote.target import RemoteTarget
from divdec.steering import Steering
from support.exactness import assert_same_answer
from support.gguf_file import write_gguf

NEEDED = ("llama_cpp", "gguf", "starlette_context")
MISSING = [module for module in NEEDED if find_spec(module) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} not installed; `make test-slow` builds llama.cpp"),
]
TOKENS = 12


@pytest.fixture(scope="module", params=[True, False], ids=["logprobs", "no logprobs"])
def there(request, models, tmp_path_factory):
    """llama.cpp's server on the target, and whether it tells log-probabilities."""
    folder = tmp_path_factory.mktemp("llama")
    write_gguf(models / "target", folder / "target.gguf")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "llama_cpp.server", "--model", str(folder / "target.gguf"), "--model_alias", "plain",
        "--host", "127.0.0.1", "--port", str(port), "--n_ctx", "256", "--n_threads", "1", "--type_k", "0",
        "--type_v", "0", "--logits_all", str(request.param),
    ]  # fmt: skip
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            for _ in range(300):
                assert process.poll() is None, (folder / "log.txt").read_text()[-3000:]
                with contextlib.suppress(httpx.TransportError):
                    httpx.get(f"http://127.0.0.1:{port}/v1/models").raise_for_status()
                    break
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}/v1", request.param
        finally:
            process.terminate()
            process.wait(30)


def remote(url, bundle, steering, **settings):
    experts = LoadedExperts.load(Bundle.open(bundle, target=False))
    return RemoteTarget(Endpoint(url, "plain"), experts, Steering.parse(steering), RemoteSettings(**settings))


@pytest.mark.parametrize("steering", ["rank:20", "linear:0.5", "linear:1.5"])
def test_greedy_output_matches_local_model(there, bundle, local, prompts, steering):
    import torch

    url, tells = there
    local.steering = steering
    with remote(url, bundle, steering, tries=60) as target:
        for prompt in prompts[:4]:
            answer = target.generate(prompt, TOKENS)
            expected = local.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)
            tokens = [choice.token for choice in answer.choices]
            assert_same_answer(local, prompt, tokens, expected[0, len(prompt) :].tolist())
            assert answer.exact_tokens == len(answer.choices)
        assert not target.capabilities.prompt_ids
        assert target.capabilities.top_logprobs == (20 if tells else 0)
        assert target.capabilities.neutral["repeat_penalty"] == 1


def test_multi_token_blocks_match_local_model(there, bundle, local, prompts):
    import torch

    url, _ = there
    local.steering = "linear:0.5"
    with remote(url, bundle, "linear:0.5", tries=60, block=8) as target:
        answer = target.generate(prompts[0], TOKENS)
        expected = local.generate(torch.tensor([prompts[0]]), max_new_tokens=TOKENS, do_sample=False)
        tokens = [choice.token for choice in answer.choices]
        assert_same_answer(local, prompts[0], tokens, expected[0, len(prompts[0]) :].tolist())
