"""Server processes for serving.py: started, awaited until they answer, and ended with their children."""

import contextlib
import dataclasses
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

from divdec.errors import UsageError

START, STOP = 420, 60  # seconds
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM 0.32's attention on a CPU
TAIL = 12  # lines of the log of a server that did not start


@dataclasses.dataclass(frozen=True)
class Command:
    """Command line of a server, and the format of its requests."""

    arguments: list[str]
    model: str
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    peer: bool = False  # transformers' own server, whose requests look different


@dataclasses.dataclass(frozen=True)
class Server:
    """One that answers."""

    url: str
    command: Command
    seconds: float

    def get(self, path):
        return httpx.get(f"{self.url}{path}", timeout=30)


def embedded(bundle, given, speculative=None):
    options = ["--name", "steered", "--dtype", given.dtype, "--device", given.device, "--shutdown-timeout", "1"]
    options += ["--speculative", speculative] if speculative else []
    return Command([sys.executable, "-m", "divdec.cli", "serve", str(bundle), *options], "steered")


def transformers_own(target, given):
    """`transformers serve` on the target alone, with its continuous batching."""
    options = ["--device", given.device, "--dtype", given.dtype, "--continuous-batching", "--log-level", "error"]
    # The model's name is its path.
    return Command([str(Path(sys.executable).with_name("transformers")), "serve", *options], str(target), peer=True)


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
        yield Server(url, command, time.monotonic() - started)
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
