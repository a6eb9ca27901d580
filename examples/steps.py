"""Steps that the examples share: run a command, serve a bundle, create the output folder."""

from __future__ import annotations

import contextlib
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from openai import OpenAI

from divdec.cli import main as divdec
from divdec.errors import UsageError


def command(*words: str | Path, codes: Collection[int] = (0,)) -> None:
    """Print and run a command of divdec as a user would type it; other exit codes end the script."""
    texts = [str(word) for word in words]
    print(f"$ divdec {shlex.join(texts)}", flush=True)
    if (code := divdec(texts)) not in codes:
        raise SystemExit(code)


@contextlib.contextmanager
def server(bundle: Path, *options: str, name: str) -> Iterator[OpenAI]:
    """Serve a bundle on a free port, and yield a client."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "divdec.cli", "serve", str(bundle), *options, "--name", name, "--port", str(port)]
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                break
            if process.poll() is not None:
                raise SystemExit(f"the server ended with exit code {process.returncode}")
            time.sleep(1)
        yield OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600)
    finally:
        process.terminate()
        process.wait()


def create_output(folder: Path) -> None:
    """Create the output folder; a `UsageError` if it is in use."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"output {folder} is in use; give the name of an empty or absent folder")
    folder.mkdir(parents=True, exist_ok=True)


def run_main(main: Callable[[], object]) -> None:
    """Run a script; a `UsageError` becomes one line and the exit code 2."""
    try:
        main()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
