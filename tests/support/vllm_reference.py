"""What vLLM's processes run with, and the steered model in transformers that their answers are compared with."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import torch

from support.exactness import assert_same_answer

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # a core that vLLM chose may be busy
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # each process would import vLLM anew
    "OMP_NUM_THREADS": "1",
}
ALONE = {"distributed_executor_backend": "uni"}
EAGER = {"enforce_eager": True}
TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}

# Of float32 logits of about 30: other kernels add in another order. Measured: at most 1e-4.
TOLERANCE = 1e-3

KEY = "a-key-of-the-tests"
HEADERS = {"Authorization": f"Bearer {KEY}"}
EXTRA = ["--dtype", "float32", "--max-model-len", "256", "--enforce-eager", "--gpu-memory-utilization", "0.3"]


def environment(**changes):
    return os.environ | ENVIRONMENT | changes


@contextlib.contextmanager
def vllm_serving(bundle, log, changes=None, **options):
    """vLLM's server on a bundle, called steered, in a process of its own; gives its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).parents[1] / "serving" / "vllm" / "run_server.py"
    job = {"bundle": str(bundle), "name": "steered", "port": port, "extra": EXTRA, **options}
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, str(script), json.dumps(job)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(**changes or {}),
        )
        try:
            for _ in range(600):
                assert process.poll() is None, log.read_text()[-4000:]
                try:
                    if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(1)
            yield f"http://127.0.0.1:{port}"
            assert process.poll() is None, log.read_text()[-4000:]
        finally:
            process.terminate()
            process.wait(60)


class Reference:
    """The steered model in transformers, in float32."""

    def __init__(self, bundle):
        from divdec import DivergenceForCausalLM

        self.model = DivergenceForCausalLM.from_pretrained(bundle, dtype=torch.float32)

    def greedy(self, ids, tokens=16):
        answer = self.model.generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False)
        return answer[0, len(ids) :].tolist()

    @torch.no_grad()
    def logprobs(self, ids):
        """After each token, [tokens, vocab]."""
        return self.model(torch.tensor([ids])).logits[0].log_softmax(-1)

    @torch.no_grad()
    def own_logprobs(self, ids):
        """The target's own, which nobody may be shown."""
        return self.model.target(torch.tensor([ids])).logits[0].float().log_softmax(-1)


def requests(prompts, **sampling):
    return [{"ids": ids, "sampling": {"temperature": 0, "max_tokens": 16, **sampling}} for ids in prompts]


def same_answers(model, prompts, answers):
    for place, ids in enumerate(prompts):
        assert_same_answer(model.model, ids, answers[place]["tokens"], model.greedy(ids))


def furthest(model, prompts, answers):
    """How far log-probabilities of answers and prompts are from the steered ones, and from the target's own."""
    from_steered = from_target = 0.0
    for ids, answer in zip(prompts, answers, strict=True):
        steered, target = (find(ids + answer["tokens"]) for find in (model.logprobs, model.own_logprobs))
        tables = [(place - 1, found) for place, found in enumerate(answer["prompt_logprobs"]) if found is not None]
        tables += [(len(ids) - 1 + place, found) for place, found in enumerate(answer["logprobs"])]
        assert len(tables) >= len(answer["tokens"])
        for place, found in tables:
            for token, value in found.items():
                expected = steered[place, int(token)].item()
                if value != expected:  # both may be minus infinity
                    from_steered = max(from_steered, abs(value - expected))
                from_target = max(from_target, abs(value - target[place, int(token)].item()))
    return from_steered, from_target


def is_steered(model, prompts, answers, apart=1.0):
    from_steered, from_target = furthest(model, prompts, answers)
    print(f"log-probabilities are at most {from_steered:.1e} from the steered ones")  # -s shows it
    assert from_steered < TOLERANCE
    assert from_target > apart
