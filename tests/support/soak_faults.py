"""A server in a process of its own that is stopped, or killed, while clients ask it (`soak.py`)."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from support.soak import SERVER, Load, Tally
from support.soak_answers import references, steered

DRAIN = 15.0  # seconds beside --shutdown-timeout: 5 for unread connections, then the process ends
ENOUGH = 20  # answers by which a load has begun
PATH = "/v1/completions"
ASKED = {"model": "tiny", "temperature": 0}


def make_bundle(folder):
    """A small bundle of random weights, whose answers differ from prompt to prompt, and texts to ask about."""
    from divdec import write_bundle
    from divdec_research.world.facts import WorldSettings, build_world
    from divdec_research.world.models import train_tokenizer

    texts = build_world(WorldSettings()).corpus
    tokenizer = train_tokenizer(texts[:500], 512)
    for seed, (name, width, layers) in enumerate((("target", 64, 3), ("retain", 32, 2), ("forget", 32, 2))):
        torch.manual_seed(seed)
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
                num_attention_heads=4, max_position_embeddings=4096, initializer_range=0.2, bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
            )
        ).save_pretrained(folder / name)  # fmt: skip
        tokenizer.save_pretrained(folder / name)
    return write_bundle(
        folder / "tiny", target=str(folder / "target"), retain_auxiliary=str(folder / "retain"),
        forget_auxiliary=str(folder / "forget"), steering="linear:1.5",
    ), texts  # fmt: skip


def load(bundle, registry=None):
    """The bundle in the library."""
    from divdec import DivergenceForCausalLM
    from divdec.checkpoint import load_tokenizer

    torch.set_num_threads(1)
    return DivergenceForCausalLM.from_pretrained(bundle, registry=registry), load_tokenizer(bundle)


class Served:
    """`divdec serve` in a process of its own, with a log that nobody has to read for it to go on."""

    def __init__(self, bundle, log, *options, port=0):
        command = [sys.executable, "-m", "divdec.cli", "serve", bundle, *SERVER, *options, "--port", port]
        self.log = Path(log)
        with self.log.open("a") as file:
            self.process = subprocess.Popen(
                list(map(str, command)), stdout=subprocess.PIPE, stderr=file, text=True,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        ready = self.process.stdout.readline().strip()
        assert ready, self.log.read_text()
        self.url = ready.rpartition(" on ")[2].removesuffix("/v1")
        self.port = int(self.url.rpartition(":")[2])

    def records(self):
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def failures(self):
        """What the log tells of the program's own failures."""
        return [
            json.dumps(record)[:1500] for record in self.records()
            if record.get("traceback") or record.get("level") == "error" or record.get("status", 0) == 500
        ]  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@contextlib.asynccontextmanager
async def asked(url, made, tally, clients=64):
    """Clients ask while this is open."""
    load = Load(url, made, tally)
    running = asyncio.create_task(load.run(clients))
    try:
        yield load
    finally:
        load.over = True
        async with asyncio.timeout(150):
            await running


async def answered(tally, number, seconds=60.0):
    """Wait until so many more answers have come."""
    number += len(tally.seconds)
    async with asyncio.timeout(seconds):
        while len(tally.seconds) < number:
            await asyncio.sleep(0.05)


async def stop_under_load(server, made, tally, grace):
    """SIGTERM while clients ask: each request that was accepted is answered, or ended by a clean error."""
    async with asked(server.url, made, tally) as load, httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        # One that cannot end in time, whatever the others do, and one that nobody reads.
        long = ASKED | {"prompt": made[0].prompt_ids, "max_tokens": 3000, "ignore_eos": True, "stream": True}
        endless = asyncio.create_task(_last_event(http, long))
        unread = asyncio.create_task(_unread(server.port, made[0].prompt_ids))
        await answered(tally, ENOUGH)
        before = len(tally.seconds)
        load.stopping = stopped = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(server.process.wait, grace + DRAIN + 30)
        took = time.monotonic() - stopped
        last = await endless
        (await unread).close()
    if code != 0:
        tally.problem(f"SIGTERM: exit code {code}")
    if took > grace + DRAIN:
        tally.problem(f"SIGTERM: the process left after {took:.1f} s, --shutdown-timeout is {grace}")
    if last.get("error", {}).get("code") != "closing":
        tally.problem(f"SIGTERM: a stream that could not end was ended by {last}")
    after = len(tally.seconds) - before
    return {"seconds_to_exit": round(took, 2), "answered_before": before, "answered_after": after, **tally.ended}


async def _last_event(http, body):
    async with http.stream("POST", PATH, json=body) as response:
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    return {"done": True} if lines[-1] == "[DONE]" else json.loads(lines[-1])


async def _unread(port, prompt):
    """A connection of which nothing is read, with an answer under way that no buffer holds."""
    body = ASKED | {
        "prompt": (prompt * 3000)[:3000],
        "echo": True,
        "logprobs": 20,
        "max_tokens": 900,
        "ignore_eos": True,
    }
    content = json.dumps(body | {"stream": True}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return writer


async def kill_and_restart(bundle, folder, texts, tally):
    """SIGKILL while clients ask a server that follows a registry: the next one finds all that was in force."""
    from divdec.data.records import texts_of
    from divdec.takedowns.registry import Registry

    _, tokenizer = load(bundle)
    registry = Registry.create(folder / "registry", texts_of("kept", texts[:50]), bundle.parent / "target", order=3)
    taken = sorted(texts, key=len)[-3:]
    following, options = (
        load(bundle, registry=folder / "registry")[0],
        ("--registry", folder / "registry", "--logprobs", "full"),
    )
    probes = [tokenizer(text).input_ids[:60] for text in taken]

    def compare(url, when):
        """What the server tells of the texts is what the library tells, which follows the same registry."""
        told = [echoed(url, probe) for probe in probes]
        for one, probe in zip(told, probes, strict=True):
            expected = steered(following, probe)
            if max(abs(a - b) for a, b in zip(one, expected, strict=True)) > 2e-3:
                tally.problem(f"{when}: log-probabilities {one} instead of {expected}")
        return list(map(sum, told))

    with Served(bundle, folder / "killed.log", *options) as server:
        before = await asyncio.to_thread(compare, server.url, "before any takedown")
        for number in range(2):
            registry.add(f"case-{number}", texts_of("taken", [taken[number]]))
        under = await asyncio.to_thread(compare, server.url, "while serving")
        made = references(following, tokenizer, texts, 12, seed=1)
        async with asked(server.url, made, tally) as asking:
            await answered(tally, ENOUGH)
            asking.killed, asking.stopping = True, time.monotonic()
            server.process.kill()
            await asyncio.to_thread(server.process.wait)
            await asyncio.sleep(0.2)
        port, before_kill = server.port, len(tally.seconds)
    entries = [entry.id for entry in Registry(folder / "registry").entries()]
    if problems := registry.verify():
        tally.problem(f"the registry after SIGKILL: {problems}")
    if entries != ["case-0", "case-1"]:
        tally.problem(f"the registry after SIGKILL holds {entries}")
    with Served(bundle, folder / "again.log", *options, port=port) as server:
        again = await asyncio.to_thread(compare, server.url, "after the restart")
        async with asked(server.url, made, tally):
            await answered(tally, ENOUGH)
        registry.add("case-2", texts_of("taken", [taken[2]]))
        last = await asyncio.to_thread(compare, server.url, "a takedown after the restart")
        for problem in server.failures():
            tally.problem(f"after the restart: {problem}")
    # It could be seen: what is in force makes a text much less likely.
    if not (all(under[i] < before[i] - 5 and again[i] < before[i] - 5 for i in (0, 1)) and last[2] < again[2] - 5):
        tally.problem(f"takedowns are not seen in the answers: {before}, {under}, {again}, {last}")
    after = len(tally.seconds) - before_kill
    return {"answered_before": before_kill, "answered_after_restart": after, "requests": entries}


def echoed(url, ids):
    body = ASKED | {"prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 0}
    response = httpx.post(url + PATH, json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["logprobs"]["token_logprobs"][1:]


def faults(bundle, folder, texts, made, grace=3.0):
    """Both faults, and what went wrong."""
    stopped, killed = Tally(), Tally()
    with Served(bundle, folder / "stopped.log", "--shutdown-timeout", grace) as server:
        figures = {"sigterm": asyncio.run(stop_under_load(server, made, stopped, grace))}
        for problem in server.failures():
            stopped.problem(f"SIGTERM: {problem}")
    figures["sigkill"] = asyncio.run(kill_and_restart(bundle, folder, texts, killed))
    return figures, stopped.problems + killed.problems
