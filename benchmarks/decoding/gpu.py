"""Everything that is measured on a GPU, in one command: equality, decoding, passes, serving.

    make gpu                                     # needs CUDA, no network; five pieces of at most ten minutes
    python benchmarks/gpu.py --output runs/gpu [--only decoding-8b serving]
    python benchmarks/gpu.py --output runs/gpu-toy --shape tiny --device cpu     # tries the pieces, measures nothing

Each piece is a process with a limit of ten minutes. OUTPUT/results.json holds the figures of all pieces, results.md the
tables, PIECE.log what a piece printed. A piece that has figures is not run again, so that the same command continues a
run that was stopped.

- equality: `tests/gpu`: answers and scores are those of the CPU, overlap on CUDA streams changes nothing, a broken
  auxiliary raises;
- decoding-8b, decoding-70b: steering, overlap and speculation at set acceptance rates, relative to the target alone;
- passes: eager and compiled passes of P, q and p, and the rule;
- serving: `divdec serve` under 1, 8 and 32 clients, beside the target's own `generate`.

All models have random weights: the figures are times, not texts. The exit code is 1 if a piece failed.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import torch

from decoding_gpu import SHAPES, machine, steered_model
from divdec.data.records import write_records
from divdec.data.world import build_world
from divdec.demo import run as demo
from divdec.demo.models import train_tokenizer
from divdec.errors import UsageError
from divdec.model.bundle import write_bundle
from divdec.research.charts import markdown_table
from divdec.runs import output_folder, read_json, write_json, write_text

HERE = Path(__file__).parent
LIMIT, STOP = 600, 90  # seconds of a piece, and until it has ended its servers
TOKENIZER = 512  # tokens; the models have more, as many models do
PIECES = ("equality", "decoding-8b", "decoding-70b", "passes", "serving")


def command(piece, given):
    """The command line of a piece, which prints its figures as one JSON object at the end."""
    toy = given.shape == "tiny"
    shared = ["--device", given.device, "--dtype", given.dtype, "--json"]
    if piece == "equality":
        return [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu",
                f"--junitxml={given.output.resolve() / 'equality.xml'}"]  # fmt: skip
    if piece.startswith("decoding"):
        shape = given.shape or piece.removeprefix("decoding-")
        return script("decoding_gpu.py", "--shape", shape, "--gammas", "4", *shared)
    if piece == "passes":
        return script("passes_gpu.py", "--shape", given.shape or "8b", *shared)
    size = ["--clients", "1", "2", "--requests", "2", "--tokens", "8", "--rounds", "1"] if toy else ["--tokens", "32"]
    bundle = random_bundle(given.output / "serving", given.shape or "8b", given)
    return script("serving.py", "--bundle", str(bundle), *size, *shared)


def script(name, *options):
    return [sys.executable, str(HERE / name), *options]


def random_bundle(folder, shape, given):
    """Write a bundle of random models, and the questions that serving.py asks."""
    if not folder.exists():
        world = build_world(demo.WORLD)
        sets = {item.name: item.records for item in demo.question_sets(world)}
        texts = [text for records in sets.values() for one in records for text in (one.messages[0].content, one.answer)]
        tokenizer = train_tokenizer(texts, TOKENIZER)
        model = steered_model(shape, torch.device(given.device), getattr(torch, given.dtype), 1.0)
        parts = {"target": model.target, "retain": model.experts.retain, "forget": model.experts.forget}
        with output_folder(folder) as temporary:
            for name, part in parts.items():
                part.save_pretrained(temporary / name)
                tokenizer.save_pretrained(temporary / name)
            for name in ("forget", "retain"):
                write_records(temporary / f"{name}.jsonl", sets[name])
        del model, parts, part  # the pieces need the device's memory
        if given.device == "cuda":
            torch.cuda.empty_cache()
    if not (folder / "bundle").exists():
        places = {"target": "target", "retain_auxiliary": "retain", "forget_auxiliary": "forget"}
        write_bundle(
            folder / "bundle", **{part: str(folder / name) for part, name in places.items()}, steering="linear:1"
        )
    return folder / "bundle"


def run_piece(piece, given):
    """Run a piece; returns its figures, or the reason why there are none."""
    log = given.output / f"{piece}.log"
    started = time.monotonic()
    try:
        arguments = command(piece, given)
    except (OSError, RuntimeError, UsageError) as error:
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "DIVDEC_TEST_DEVICE": given.device}
    with log.open("wb") as output:
        process = subprocess.Popen(
            arguments, cwd=HERE.parent, env=environment, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            stop(process)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if code != 0:
        reason = f"ended after the limit of {LIMIT} s" if code is None else f"exit code {code}"
        return {"failed": f"{reason}: {lines[-1] if lines else 'no output'}"}
    figures = counted(given.output / "equality.xml") if piece == "equality" else json.loads(lines[-1])
    if piece == "equality" and not figures["passed"]:
        return {"failed": f"no test ran: {figures}"}
    return {"seconds": round(time.monotonic() - started, 1), "figures": figures}


def stop(process):
    """End a piece that still runs; serving.py ends its servers on SIGTERM."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def counted(file):
    """Numbers of tests in a report of pytest."""
    suite = next(ElementTree.parse(file).iter("testsuite"))
    numbers = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    return {"passed": numbers["tests"] - sum(list(numbers.values())[1:]), **numbers}


def table(results):
    """All pieces in Markdown."""
    about = ", ".join(f"{name} {value}" for name, value in results["machine"].items())
    text = f"# divdec on {results['machine']['device']}\n\n{about}; {results['settings']}\n"
    for piece, found in results["pieces"].items():
        text += f"\n## {piece}\n\n"
        if "failed" in found:
            text += f"**Failed**: {found['failed']}\n"
        else:
            text += f"{SECTIONS[piece](found['figures'])}\n({found['seconds']:.0f} s)\n"
    return text


def equality_table(figures):
    return f"{figures['passed']} tests passed, {figures['skipped']} were skipped.\n"


def decoding_table(figures):
    heads = ["batch", "method", "tokens/s", "ms a token", "time / target", "tokens a target pass"]
    rows = [
        [str(one["batch"]), name, f"{row['tokens_per_s']:.1f}", f"{row['ms_per_token']:.2f}",
         f"{row['over_target']:.3f}",
         f"{row['tokens_per_pass']:.2f}" if "tokens_per_pass" in row else ""]
        for one in figures["measured"] for name, row in one["rows"].items()
    ]  # fmt: skip
    sizes = figures["sizes"]
    return (
        f"Target {sizes['N'] / 1e9:.1f}B ({figures['layers']} layers), auxiliaries {sizes['n'] / 1e9:.1f}B, "
        f"1 + 2n/N = {sizes['bound']:.3f}; acceptance of drafts is simulated.\n\n{markdown_table(heads, rows)}"
    )


def passes_table(figures):
    heads = ["batch", *(f"{part}, {kind} (ms)" for kind in ("eager", "compiled") for part in "Pqp"), "rule (ms)",
             "(P + q + p + rule) / P, eager", "compiled", "largest difference of logits"]  # fmt: skip
    rows = [
        [str(row["batch"]), *(f"{row[f'{part}_{kind}_ms']:.3f}" for kind in ("eager", "compiled") for part in "Pqp"),
         f"{row['rule_ms']:.3f}", f"{row['eager_over_target']:.3f}", f"{row['compiled_over_target']:.3f}",
         f"{row['difference']:.2g}"]
        for row in figures["rows"]
    ]  # fmt: skip
    return f"1 + 2n/N = {figures['bound']:.3f}\n\n{markdown_table(heads, rows)}"


def serving_table(figures):
    heads = ["server", "clients", "tokens/s", "first token (ms)", "gap (ms)", "answers as for one client"]
    rows = [
        [name, str(clients), f"{row['tokens_per_s']:.1f}", f"{row['first_ms']:.1f}", f"{row['gap_ms']:.2f}",
         f"{row['as_alone']} of {row['compared']}"]
        for name, by_clients in figures["rows"].items() for clients, row in by_clients.items()
    ]  # fmt: skip
    return f"1 + 2n/N = {figures['sizes']['bound']:.3f}\n\n{markdown_table(heads, rows)}"


SECTIONS = {"equality": equality_table, "decoding-8b": decoding_table, "decoding-70b": decoding_table,
            "passes": passes_table, "serving": serving_table}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=PIECES, default=PIECES, metavar="PIECE", help=", ".join(PIECES))
    parser.add_argument("--shape", choices=SHAPES, help="one shape for all pieces instead of those that they name")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        print("gpu: no CUDA here; accepted: --device cpu --shape tiny, which tries the pieces", file=sys.stderr)
        return 2
    settings = {name: getattr(given, name) for name in ("shape", "device", "dtype")}
    file = given.output / "results.json"
    if file.exists() and (begun := read_json(file)["settings"]) != settings:
        print(f"gpu: {given.output} was begun with {begun}; give another --output", file=sys.stderr)
        return 2
    given.output.mkdir(parents=True, exist_ok=True)
    done = read_json(file)["pieces"] if file.exists() else {}
    for piece in PIECES:
        if piece not in given.only or "figures" in done.get(piece, {}):
            continue
        print(f"{time.strftime('%H:%M:%S')} {piece}", flush=True)
        done[piece] = run_piece(piece, given)
        print(f"{time.strftime('%H:%M:%S')} {piece}: {done[piece].get('failed', 'done')}", flush=True)
        ordered = {name: done[name] for name in PIECES if name in done}
        results = {"machine": machine(torch.device(given.device)), "settings": settings, "pieces": ordered}
        write_json(file, results)
        write_text(given.output / "results.md", table(results))
    shutil.rmtree(given.output / "serving", ignore_errors=True)  # 20 GB of random weights
    print((given.output / "results.md").read_text())
    return int(any("failed" in found for found in done.values()))


if __name__ == "__main__":
    sys.exit(main())
