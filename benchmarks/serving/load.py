"""Cost of steering for a server's clients: tokens per second and latencies for 1, 8 and 32 clients.

    python -m benchmarks.serving.load --toy                                          # random models, a minute
    python -m benchmarks.serving.load --bundle demo/bundle --clients 1 8 --ways steered
    python -m benchmarks.serving.load [--bundle runs/bench-models/bundle] [--json]   # make bench-models
    python -m benchmarks.serving.load --engine vllm --vllm-python .venv-vllm/bin/python --eager

Every request is a question of the bundle's forget or retain set, answered greedily with exactly --tokens tokens (ends
are ignored); an answer of another length stops the benchmark. At each number of clients --requests questions are shared
out, at least one a client; one client asks them one after another. All servers run from the beginning to the end and
take turns within a round, and ratios are taken within a round, so that noise of the machine hits all alike. A first
round is not counted. Clients are a process of their own, but not a machine of their own.

"embedded" is `divdec serve` with its own engine. Its ways: "target" is the target's `generate` in a process, one
question after another; "steered"; "speculative" is `--speculative auto`, which speculates for one client alone. "vllm"
is vLLM's server: "target" is the plain checkpoint without divdec, "steered" the bundle, "speculative" the bundle with
--speculative drafts of q; all with the same options, and prefixes are not cached, since the same questions come again.

Columns: "first" is from the request to the first piece of the answer, "gap" from a piece to the next. A piece is a
token, or the tokens that came together ("tok/piece"): drafts that vLLM accepts, or tokens without text, which the
embedded server does not send. "a token" is the time of an answer after its first piece over its tokens. "as alone"
counts answers that are those that one client got in the uncounted round, from "steered" in the case of "speculative".
With --json one JSON object comes last.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import torch
import transformers

import divdec
from benchmarks.decoding.steering import Clock, machine, paths_of, questions_beside, sizes, spread, toy_bundle
from divdec.checkpoint import load_config, load_model, load_tokenizer
from divdec.data.formatting import encode_prompts
from divdec.errors import UsageError
from divdec.runs import read_json
from divdec.steering import Steering

PATIENCE = 600  # seconds


class WrongAnswerError(Exception):
    """A server returned an error or an unexpected reply."""


@dataclasses.dataclass
class Measured:
    """Measurements of the clients; times in seconds."""

    seconds: float = 0.0
    tokens: int = 0
    first: list[float] = dataclasses.field(default_factory=list)
    """From a request to the first piece of its answer."""
    gaps: list[float] = dataclasses.field(default_factory=list)
    """Between a piece and the next."""
    per_token: list[float] = dataclasses.field(default_factory=list)
    """Of each answer, after its first piece."""
    texts: list[str] = dataclasses.field(default_factory=list)

    def add(self, begun, times, tokens, text):
        self.tokens += tokens
        self.first.append(times[0] - begun)
        self.gaps += [after - before for before, after in itertools.pairwise(times)]
        self.per_token.append((times[-1] - times[0]) / (tokens - 1))
        self.texts.append(text)


def asked(server, clients, prompts, tokens):
    """N clients share the prompts; each sends the next prompt when its answer is complete."""
    command = server.command
    bodies = [_body(command, ids, tokens) for ids in prompts]
    try:
        answers = asyncio.run(_all(f"{server.url}/v1/completions", bodies, clients))
    except* (WrongAnswerError, httpx.HTTPError) as group:
        raise WrongAnswerError(str(group.exceptions[0]) or type(group.exceptions[0]).__name__) from None
    result = Measured(seconds=max(times[-1] for _, times, _ in answers) - min(begun for begun, _, _ in answers))
    for ids, (begun, times, lines) in zip(prompts, answers):
        expected = {"completion_tokens": tokens, "prompt_tokens": len(ids)}
        came, text = _read(times, lines, expected)
        result.add(begun, came, tokens, text)
    return result


def _body(command, ids, tokens):
    return {"model": command.model, "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip


async def _all(url, bodies, clients):
    waiting, answers = list(enumerate(bodies)), [None] * len(bodies)
    waiting.reverse()

    async def one(client):
        while waiting:
            place, body = waiting.pop()
            answers[place] = await _ask(client, url, body)

    limits = httpx.Limits(max_connections=clients)
    connections = httpx.AsyncClient(timeout=PATIENCE, limits=limits, trust_env=False)
    async with connections as client, asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(one(client))
    return answers


async def _ask(client, url, body):
    begun, times, lines = time.perf_counter(), [], []
    async with client.stream("POST", url, json=body) as response:
        if response.status_code != 200:
            raise WrongAnswerError(f"status {response.status_code}: {(await response.aread())[:300]!r}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
                lines.append(line)
    if not times:
        raise WrongAnswerError("a stream was empty")
    return begun, times, lines


def _read(times, lines, expected):
    """Arrival times of the pieces of an answer, and its text; a piece is one token or several."""
    came, texts, usage, reason = [], [], {}, None
    for when, line in zip(times, lines):
        event = json.loads(line.removeprefix("data: "))
        if "choices" not in event:
            raise WrongAnswerError(f"a stream ended with {line[:300]}")
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            reason = choice.get("finish_reason") or reason
            if choice["text"] or not event.get("usage"):
                came.append(when)
                texts.append(choice["text"])
    counts = {name: usage.get(name) for name in expected}
    if counts != expected or reason != "length":
        raise WrongAnswerError(f"asked for {expected}, got {counts}, ended by {reason!r}")
    return came, "".join(texts)


class InProcess:
    """The target's own `generate`, without a server."""

    def __init__(self, model, tokenizer):
        self.model, self.tokenizer = model, tokenizer
        model.generation_config.eos_token_id = None  # every answer has all its tokens

    def asked(self, prompts, tokens):
        """One prompt after another."""
        result, started = Measured(), time.perf_counter()
        for ids in prompts:
            given, clock, begun = torch.tensor([ids], device=self.model.device), Clock(1), time.perf_counter()
            answer = self.model.generate(
                given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=tokens,
                pad_token_id=self.tokenizer.pad_token_id, streamer=clock,
            )[0, len(ids) :]  # fmt: skip
            if len(answer) != tokens or len(clock.times) != tokens:
                raise WrongAnswerError(f"asked generate for {tokens} tokens, got {len(answer)}")
            result.add(begun, clock.times, tokens, self.tokenizer.decode(answer, skip_special_tokens=True))
        result.seconds = time.perf_counter() - started
        return result


def percentile(values, share):
    """The given quantile of the values; 0 if there are none, as the gaps of answers that came as one piece."""
    return 0.0 if not values else sorted(values)[math.ceil(share * len(values)) - 1]


def summary(rounds, alone):
    """One table row over several rounds, with a comparison to the answers for a single client."""
    rates = [result.tokens / result.seconds for result in rounds]
    every = {name: [1e3 * value for result in rounds for value in getattr(result, name)]
             for name in ("first", "gaps", "per_token")}  # fmt: skip
    tokens = sum(result.tokens for result in rounds)
    answers = [(text, known) for result in rounds for text, known in zip(result.texts, alone)]
    return {
        "tokens_per_s": statistics.median(rates), "least": min(rates), "most": max(rates), "rates": rates,
        "first_ms": statistics.median(every["first"]), "first_p99_ms": percentile(every["first"], 0.99),
        "gap_ms": percentile(every["gaps"], 0.5), "gap_p99_ms": percentile(every["gaps"], 0.99),
        "ms_per_token": statistics.median(every["per_token"]), "tokens": tokens,
        "tokens_per_piece": tokens / (len(every["gaps"]) + len(every["first"])),
        "as_alone": sum(text == known for text, known in answers), "compared": len(answers),
    }  # fmt: skip


START, STOP = 420, 60  # seconds
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM 0.32's attention on a CPU
TAIL = 12  # lines of the log of a server that did not start


@dataclasses.dataclass(frozen=True)
class Command:
    """Command line of a server, and the format of its requests."""

    arguments: list[str]
    model: str
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ServerProcess:
    """A server that answers requests."""

    url: str
    command: Command
    seconds: float

    def get(self, path):
        return httpx.get(f"{self.url}{path}", timeout=30)


def embedded(bundle, given, speculative=None):
    options = ["--name", "steered", "--dtype", given.dtype, "--device", given.device, "--shutdown-timeout", "1"]
    options += ["--speculative", speculative] if speculative else []
    return Command([sys.executable, "-m", "divdec.cli", "serve", str(bundle), *options], "steered")


def vllm(bundle, target, given, speculative=None):
    """vLLM on the bundle, or on the target alone where there is one; the same options for all."""
    options = ["--max-model-len", str(given.max_model_len), "--no-enable-prefix-caching"]
    options += ["--gpu-memory-utilization", "0.25", "--disable-uvicorn-access-log"]
    options += ["--enforce-eager"] if given.eager else []
    options += shlex.split(given.vllm_options)
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    python = str(given.vllm_python)
    if target is not None:
        start = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target), "--dtype", given.dtype]
        start += ["--served-model-name", "target", *options]
        return Command(start, "target", environment | {"VLLM_PLUGINS": ""})  # nothing of divdec in its process
    start = [python, "-m", "divdec.cli", "serve", str(bundle), "--engine", "vllm", "--name", "steered"]
    start += ["--dtype", given.dtype, f"--vllm-options={shlex.join(options)}"]
    start += ["--speculative", str(speculative)] if speculative else []
    return Command(start, "steered", environment)


def check_heads(bundle, configs):
    """Refuse models that vLLM's attention on a CPU does not know, before anything is started."""
    if shutil.which("nvidia-smi"):
        return
    for part, config in configs.items():
        if (
            size := getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        ) not in CPU_HEADS:
            raise UsageError(
                f"{bundle}: {part} has attention heads of size {size}; vLLM on a CPU takes "
                f"{', '.join(map(str, CPU_HEADS))}; use runs/bench-models/bundle (make bench-models)"
            )


@contextlib.contextmanager
def running(name, command, given, logs):
    """Run a server and yield it when it answers; its output goes to a file in the folder `logs`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = logs / f"{name.replace(' ', '-')}.log"
    # The user's environment takes precedence over these defaults for a CPU without a network.
    environment = {"HF_HUB_OFFLINE": "1"} | command.environment | os.environ | {"OMP_NUM_THREADS": str(given.threads)}
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command.arguments, "--host", "127.0.0.1", "--port", str(port)], stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        _await(name, process, url, log)
        yield ServerProcess(url, command, time.monotonic() - started)
    finally:
        _stop(process)


def _await(name, process, url, log):
    deadline = time.monotonic() + START
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.3)
    print("\n".join(log.read_text(errors="replace").splitlines()[-TAIL:]), file=sys.stderr)
    what = f"did not answer within {START} s" if process.poll() is None else f"ended with code {process.returncode}"
    raise UsageError(f"the server of {name!r} {what}; above is the end of what it wrote")


def _stop(process):
    """End a server and its child processes."""
    process.terminate()
    try:
        process.wait(STOP)
    except subprocess.TimeoutExpired:
        pass
    finally:  # also where Ctrl-C is pressed once more
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


WAYS = ("target", "steered", "speculative")
DRAFTS = {"drafts": "vllm:spec_decode_num_drafts_total", "accepted": "vllm:spec_decode_num_accepted_tokens_total"}


class Ways:
    """The servers that are compared, started one after another; each knows at how many clients it is measured."""

    def __init__(self, given, bundle, paths, tokenizer, stack, logs):
        self.given = given
        self.found, self.clients = {}, {}
        for name in given.ways:
            self.clients[name] = list(given.clients)
            if given.engine == "embedded" and name == "target":
                model = load_model(paths["target"], dtype=getattr(torch, given.dtype), device_map=given.device)
                self.found[name], self.clients[name] = InProcess(model, tokenizer), [1]
                continue
            if given.engine == "vllm":
                target = paths["target"] if name == "target" else None
                command = vllm(bundle, target, given, given.speculative if name == "speculative" else None)
            else:
                command = embedded(bundle, given, "auto" if name == "speculative" else None)
            if given.engine == "embedded" and name == "speculative":
                self.clients[name] = [1]
            self.found[name] = stack.enter_context(running(name, command, given, logs))
            print(f"{name}: ready after {self.found[name].seconds:.0f} s", flush=True)

    def measure(self, name, clients, prompts, tokens):
        prompts = prompts[: max(self.given.requests, clients)]
        if isinstance(self.found[name], InProcess):
            return self.found[name].asked(prompts, tokens)
        return asked(self.found[name], clients, prompts, tokens)

    def vllm_version(self):
        return next(iter(self.found.values())).get("/version").json()["version"]

    def drafts(self, name):
        """vLLM's counts of passes with drafts and of accepted draft tokens."""
        text = self.found[name].get("/metrics").text
        return {key: sum(map(float, re.findall(rf"^{metric}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))
                for key, metric in DRAFTS.items()}  # fmt: skip


def measured(ways, prompts, given):
    """Run every server with every number of clients in each round: {way: {clients: [Measured]}}, and drafts."""
    alone, drafts = {}, {}
    for name in ways.found:
        for clients in ways.clients[name]:
            warm = ways.measure(name, clients, prompts, given.tokens)
            if clients == 1:
                # Speculation must not change an answer.
                alone[name] = alone.get("steered", warm.texts) if name == "speculative" else warm.texts
        if given.engine == "vllm" and name == "speculative":
            drafts = ways.drafts(name)
    results = {name: {clients: [] for clients in ways.clients[name]} for name in ways.found}
    pairs = [(name, clients) for clients in given.clients for name in ways.found if clients in ways.clients[name]]
    for number in range(given.rounds):
        turn = number % len(pairs)
        for name, clients in [*pairs[turn:], *pairs[:turn]]:
            results[name][clients].append(ways.measure(name, clients, prompts, given.tokens))
        print(f"round {number + 1} of {given.rounds}; load average {os.getloadavg()[0]:.1f}", flush=True)
    rows = {name: {clients: summary(rounds, alone.get(name, [])) for clients, rounds in by_clients.items()}
            for name, by_clients in results.items()}  # fmt: skip
    if drafts:
        after = ways.drafts("speculative")
        drafts = {key: after[key] - drafts[key] for key in drafts}
        drafts["tokens_per_pass"] = 1 + drafts["accepted"] / drafts["drafts"]
    return rows, drafts


def show(rows):
    print(f"\n{'':<13}{'clients':>8} {'tokens/s':>9} {'least – most':>17} {'first ms':>9} {'p99':>8} {'gap ms':>8}"
          f" {'p99':>8} {'a token':>8} {'tok/piece':>9}  as alone")  # fmt: skip
    for name, by_clients in rows.items():
        for clients, row in by_clients.items():
            print(f"{name:<13}{clients:>8} {row['tokens_per_s']:>9.1f} {row['least']:>8.1f} –{row['most']:>7.1f}"
                  f" {row['first_ms']:>9.1f} {row['first_p99_ms']:>8.1f} {row['gap_ms']:>8.2f}"
                  f" {row['gap_p99_ms']:>8.2f} {row['ms_per_token']:>8.2f} {row['tokens_per_piece']:>9.2f}"
                  f"  {row['as_alone']} of {row['compared']}")  # fmt: skip


def ratio(row, other):
    """Median over the rounds of the tokens a second of one over those of another in the same round."""
    return statistics.median(a / b for a, b in zip(row["rates"], other["rates"]))


def compared(rows, size):
    """Print ratios of throughput and time."""
    ratios = {}
    print()
    for name, by_clients in rows.items():
        for clients in by_clients if 1 in by_clients else ():
            if clients > 1:
                value = ratios[f"{name}_{clients}_over_1"] = ratio(by_clients[clients], by_clients[1])
                each = [many / single for many, single in zip(by_clients[clients]["rates"], by_clients[1]["rates"])]
                print(f"{name}: {clients} clients at once / one after another  {value:.2f} x the tokens/s "
                      f"({min(each):.2f} – {max(each):.2f})")  # fmt: skip
    for name in rows:
        for clients in rows[name] if name != "target" else ():
            if clients in (base := rows.get("target", {})):
                times = ratio(base[clients], rows[name][clients])
                gaps = rows[name][clients]["gap_ms"] / base[clients]["gap_ms"]
                tokens = rows[name][clients]["ms_per_token"] / base[clients]["ms_per_token"]
                ratios[f"{name}_over_target_{clients}"] = {"time": times, "gap": gaps, "ms_per_token": tokens}
                print(f"{name} / target, {clients:>2} clients  {times:.3f} of its time, {1 / times:.3f} x its tokens/s;"
                      f" gap {gaps:.3f}, a token {tokens:.3f}; by parameters {size['bound']:.3f}")  # fmt: skip
    for clients in rows.get("speculative", {}):
        if clients in rows.get("steered", {}):
            value = ratio(rows["speculative"][clients], rows["steered"][clients])
            ratios[f"speculative_over_steered_{clients}"] = value
            print(f"speculative / steered, {clients:>2} clients  {value:.3f} x its tokens/s")
    return ratios


def questions(sets, tokenizer, count):
    """Forget and retain questions in turn, as token ids."""
    groups = [spread(sets[name], -(-count // 2)) for name in ("forget", "retain")]
    records = [record for pair in zip(*groups) for record in pair]
    return encode_prompts((records * count)[:count], tokenizer)


def run(given):
    bundle, sets = given.bundle, questions_beside(given.bundle)
    try:
        paths = paths_of(bundle)
    except (OSError, KeyError, TypeError):
        raise UsageError(f"{bundle} is no bundle of a target and two auxiliaries") from None
    parts = ("target", "base" if "base" in paths else "retain_auxiliary")  # adapters have no configuration of their own
    if given.engine == "vllm":
        check_heads(bundle, {part: load_config(paths[part]) for part in parts})
    tokenizer = load_tokenizer(bundle)
    prompts = questions(sets, tokenizer, max(given.requests, *given.clients))
    target, auxiliary = (load_model(paths[part], device_map="meta") for part in parts)
    size = sizes(target, auxiliary, paths)
    steering = str(Steering.from_dict(read_json(bundle / "config.json")["steering"]))
    result = {"machine": machine() | {"threads": given.threads, "divdec": divdec.__version__}}
    settings = {name: getattr(given, name) for name in
                ("engine", "dtype", "tokens", "requests", "rounds", "clients")}  # fmt: skip
    settings |= {"steering": steering, "prompt_tokens": [min(map(len, prompts)), max(map(len, prompts))]}
    if given.engine == "vllm":
        settings |= {name: getattr(given, name) for name in ("eager", "speculative", "max_model_len", "vllm_options")}
    print(", ".join(f"{name} {value}" for name, value in result["machine"].items()))
    print(f"target {size['N']:,} parameters, auxiliaries {size['n']:,} each; "
          + ", ".join(f"{name} {value}" for name, value in settings.items()))  # fmt: skip
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        ways = Ways(given, bundle, paths, tokenizer, stack, Path(logs))
        if given.engine == "vllm":
            result["machine"]["vllm"] = ways.vllm_version()
            print(f"vLLM {result['machine']['vllm']}, {'eager' if given.eager else 'compiled'}")
        rows, drafts = measured(ways, prompts, given)
    show(rows)
    if drafts:
        print(f"\nspeculative: {drafts['tokens_per_pass']:.2f} tokens a pass by vLLM's count")
    result |= {"settings": settings, "sizes": size, "rows": rows, "drafts": drafts,
               "ratios": compared(rows, size)}  # fmt: skip
    result["machine"]["load_after"] = os.getloadavg()[0]
    print(f"load average {result['machine']['load']:.1f} before, {result['machine']['load_after']:.1f} after")
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, default=Path("runs/bench-models/bundle"),
                        help="with forget.jsonl and retain.jsonl beside it")  # fmt: skip
    parser.add_argument("--toy", action="store_true", help="random models and one short round: tries the script")
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=8, help="questions at each number of clients, at least")
    parser.add_argument("--tokens", type=int, default=64, help="of every answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cpu", help="of the embedded engine and of 'target' beside it")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="threads of each server; fewer on a shared machine"
    )
    parser.add_argument("--vllm-python", type=Path, default=Path(".venv-vllm/bin/python"), metavar="PYTHON",
                        help="the interpreter of an environment with vLLM and divdec (make test-vllm)")  # fmt: skip
    parser.add_argument("--eager", action="store_true", help="vLLM without compilation")
    parser.add_argument("--speculative", type=int, default=4, metavar="N", help="tokens that vLLM drafts at a time")
    parser.add_argument("--max-model-len", type=int, default=512, help="of vLLM")
    parser.add_argument("--vllm-options", default="", help="further options of vLLM, for all of its servers")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    given = parser.parse_args()
    if min(*given.clients, given.requests, given.rounds, given.threads, given.tokens - 7) < 1:
        parser.error("--clients, --requests, --rounds and --threads must be at least 1, --tokens at least 8")
    given.clients, given.ways = sorted(set(given.clients)), list(dict.fromkeys(given.ways))
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(given.threads)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are ended then, too
    try:
        with tempfile.TemporaryDirectory() as folder:
            if given.toy:
                given.bundle = toy_bundle(Path(folder))
                given.clients, given.requests, given.tokens, given.rounds = [1, 2], 2, 8, 1
            result = run(given)
    except (UsageError, FileNotFoundError) as error:
        print(f"load: {error}", file=sys.stderr)
        return 2
    except WrongAnswerError as error:
        print(f"load: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if given.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
