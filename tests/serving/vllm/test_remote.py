"""A plain target behind vLLM's own server, steered from outside: greedy answers are the local steered model's."""

import contextlib
import os
import socket
import subprocess
import sys
import time

import httpx
import pytest

from divdec.endpoint import Endpoint
from divdec.model.loading import Bundle
from divdec.remote.experts import LoadedExperts
from divdec.remote.settings import RemoteSettings
from divdec.remote.target import RemoteTarget
from divdec.steering import Steering
from support.exactness import assert_same_answer
from support.vllm_reference import KEY, Reference, environment

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def bundle(make_bundle):
    return make_bundle()


@pytest.fixture(scope="module")
def url(models, tmp_path_factory):
    """vLLM's own server on the target's checkpoint, without anything of ours."""
    log = tmp_path_factory.mktemp("plain") / "log.txt"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(models / "target"),
        "--served-model-name", "plain", "--port", str(port), "--host", "127.0.0.1", "--api-key", KEY,
        "--dtype", "float32", "--max-model-len", "256", "--enforce-eager", "--gpu-memory-utilization", "0.3",
    ]  # fmt: skip
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment())
        try:
            for _ in range(600):
                assert process.poll() is None, log.read_text()[-4000:]
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                        break
                time.sleep(1)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            process.wait(60)


@pytest.mark.parametrize(("steering", "block"), [("rank:20", 1), ("rank:20", 8), ("linear:1.5", 1), ("linear:1.5", 8)])
def test_greedy_output_matches_local_model(url, bundle, prompts, monkeypatch, steering, block):
    monkeypatch.setitem(os.environ, "DIVDEC_TEST_KEY", KEY)
    reference = Reference(bundle)
    reference.model.steering = steering
    experts = LoadedExperts.load(Bundle.open(bundle, target=False))
    endpoint = Endpoint(url, "plain", "DIVDEC_TEST_KEY")
    with RemoteTarget(endpoint, experts, Steering.parse(steering), RemoteSettings(block=block, tries=60)) as target:
        for ids in prompts[:4]:
            answer = target.generate(ids, 16)
            tokens = [choice.token for choice in answer.choices]
            assert_same_answer(reference.model, ids, tokens, reference.greedy(ids))
            assert answer.exact_tokens == len(answer.choices)
        assert target.capabilities.prompt_ids
        assert target.capabilities.answer_ids
        assert target.capabilities.top_logprobs == 20
        assert target.capabilities.raw_logprobs
