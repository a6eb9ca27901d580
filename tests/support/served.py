"""A small trained model, servers on real sockets in this process, and servers in processes of their own."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import httpx
import torch

from divdec.serving.middleware import write_log

CONTEXT = 4096
STEPS = 40


def trained(tokenizer, texts, seed, width, layers, steps=STEPS, length=32):
    """A small model that has read some texts for a second."""
    from divdec_research.world.models import Shape, new_model

    model = new_model(Shape(width, layers, 4, 2 * width), tokenizer, seed, CONTEXT).train()
    ids = torch.tensor([token for text in texts for token in [*tokenizer(text).input_ids, tokenizer.eos_token_id]])
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    length = min(length, len(ids) - 1)
    for _ in range(steps):
        starts = torch.randint(0, len(ids) - length, (8,), generator=generator).tolist()
        batch = torch.stack([ids[start : start + length] for start in starts])
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def bundle_of(models, name, steering, target="target"):
    """A bundle of the fixture `models`, in its folder."""
    from divdec import write_bundle

    parts = {"target": target, "retain_auxiliary": "retain", "forget_auxiliary": "forget"}
    inputs = {piece: str(models / index) for piece, index in parts.items()}
    return write_bundle(models / name, **inputs, steering=steering)


@contextlib.contextmanager
def serving(engines, log=False, tracer=None, **options):
    """A server of started engines; gives its URL. It writes an access log only where a test reads it."""
    from divdec.serving import ServeSettings, bind, middleware
    from divdec.serving.server import HttpServer

    engines = {engine.name: engine for engine in engines}
    server = HttpServer(engines, bind("127.0.0.1", 0), ServeSettings(**options), tracer)
    ready = threading.Event()
    server.on_ready = ready.set
    thread = threading.Thread(target=server.run, daemon=True)
    with mock.patch.object(middleware, "write_log", write_log if log else lambda **fields: None):
        thread.start()
        assert ready.wait(30)
        try:
            yield server.url
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


def engine_of(bundle, name="tiny", **options):
    from divdec import DivergenceForCausalLM
    from divdec.checkpoint import load_tokenizer
    from divdec.serving.engine import Engine

    return Engine(DivergenceForCausalLM.from_pretrained(bundle), load_tokenizer(bundle), name, **options)


def figure(url, name, **options):
    """One of the server's figures; the sum over its labels."""
    page = httpx.get(f"{url}/metrics", **options).text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(f"{name}{{"))


def eventually(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


class Process:
    """`divdec serve` in a process of its own."""

    def __init__(self, *arguments, **environment):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "divdec.cli", "serve", *map(str, arguments), "--port", "0"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parent,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment},
        )  # fmt: skip
        self.ready = self.process.stdout.readline().strip()
        assert self.ready, self.process.communicate()[1]
        self.url = self.ready.rpartition(" on ")[2].removesuffix("/v1")

    def end(self, sig):
        """Exit code and standard error after a signal."""
        self.process.send_signal(sig)
        _, log = self.process.communicate(timeout=60)
        return self.process.returncode, log


@contextlib.contextmanager
def process(*arguments, **environment):
    result = Process(*arguments, **environment)
    try:
        yield result
    finally:
        if result.process.poll() is None:
            result.process.kill()
        result.process.communicate()
