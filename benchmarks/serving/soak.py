"""Does the embedded server hold under load? 64 clients of mixed behaviour, then SIGTERM and SIGKILL in the middle.

No answer may be lost, mixed up or other than the library's, errors must be those that docs/serving.md names, and the
server's memory must stay flat. What clients do is in tests/support/soak.py, the faults are in soak_faults.py.

    python -m benchmarks.serving.soak --toy             # half a minute, without faults
    make soak                                           # --seconds 600

Prints counts, latencies and memory, with --json as one object. If there are problems, the exit code is 1 and standard
error lists them, one per line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.soak import KINDS, Tally
from support.soak_answers import check_sampled, references
from support.soak_faults import Served, asked, faults, load, make_bundle

CLIENTS = 64
WARM = 0.25  # share of the time, 20 s at least, in which memory may still grow: allocators and caches fill
GROWTH = 0.05  # by which the median of the last third of memory may exceed that of the first third
SHORT, SHORT_GROWTH = 300.0, 0.2  # in fewer seconds the widest batch, which memory is kept for, may come late
SHOWN = 50  # problems


def figures_of(page):
    """Sums of the server's figures over their labels."""
    sums = {}
    for line in page.splitlines():
        if not line.startswith("#"):
            name, _, value = line.partition("{")
            sums[name] = sums.get(name, 0.0) + float(value.rpartition(" ")[2] or 0)
    return sums


async def watched(server, tally, load, seconds):
    """Memory each second, and a line each ten."""
    memory, process, started = [], psutil.Process(server.process.pid), time.monotonic()
    last, at = tally.tokens, started
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        while (now := time.monotonic()) < started + seconds and server.process.poll() is None:
            memory.append((now - started, process.memory_info().rss / 2**20))
            if now - at >= 10:
                figures = figures_of((await http.get("/metrics")).text)
                shown = {
                    "requests": sum(tally.statuses.values()),
                    "compared": tally.compared,
                    "refused": tally.refused,
                    "tokens/s": round((tally.tokens - last) / (now - at)),
                    "running": int(figures["divdec_sequences_running"]),
                    "waiting": int(figures["divdec_sequences_waiting"]),
                    "MiB": round(memory[-1][1]),
                    "problems": len(tally.problems),
                }
                line = "  ".join(f"{value:6d} {name}" for name, value in shown.items())
                print(f"{now - started:5.0f} s  {line}", file=sys.stderr, flush=True)
                last, at = tally.tokens, now
            await asyncio.sleep(1)
        load.over = True
    return memory, time.monotonic() - started


async def idle(url):
    """Running and waiting requests after the load has ended, and the server's token count."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        for _ in range(50):
            figures = figures_of((await http.get("/metrics")).text)
            left = {name: int(figures[f"divdec_sequences_{name}"]) for name in ("running", "waiting")}
            if not any(left.values()):
                break
            await asyncio.sleep(0.2)
    return left, figures["divdec_generated_tokens_total"]


async def soak(server, made, tally, seconds):
    """Run the load and collect the results."""
    async with asked(server.url, made, tally, CLIENTS) as load:
        memory, took = await watched(server, tally, load, seconds)
    if server.process.poll() is not None:
        tally.problem(f"the server ended with exit code {server.process.returncode}")
        return {"memory_mib": flatness(memory)}
    left, generated = await idle(server.url)
    if any(left.values()):
        tally.problem(f"after the load there is {left}")
    return {
        "seconds": round(took, 1),
        "requests": sum(tally.statuses.values()),
        "whole_answers": len(tally.seconds),
        "compared": tally.compared,
        "refused_429": tally.refused,
        "statuses": {str(status): count for status, count in sorted(tally.statuses.items())},
        "kinds": dict(tally.kinds),
        "latency_s": quantiles(tally.seconds),
        "first_token_s": quantiles(tally.first),
        "answered_tokens_per_s": round(tally.tokens / took, 1),
        "generated_tokens_per_s": round(generated / took, 1),
        "memory_mib": flatness(memory),
        "left": left,
    }


def quantiles(values):
    if len(values) < 2:
        return None
    return {"p50": round(float(np.quantile(values, 0.5)), 3), "p99": round(float(np.quantile(values, 0.99)), 3)}


def flatness(memory):
    """Medians of the first and last third after the warm-up, and the slope in between."""
    warm = max(20.0, WARM * memory[-1][0])
    kept = [(at, value) for at, value in memory if at > warm]
    if len(kept) < 9:
        return None
    third, values = len(kept) // 3, [value for _, value in kept]
    slope = np.polyfit([at / 60 for at, _ in kept], values, 1)[0]
    return {
        "first_third": round(statistics.median(values[:third]), 1),
        "last_third": round(statistics.median(values[-third:]), 1),
        "slope_per_minute": round(float(slope), 2),
        "most": round(max(value for _, value in memory), 1),
    }


def judge(report, tally, seconds):
    """Check that the run contained every kind of event, so that it cannot pass without load."""
    memory = report["memory_mib"]
    most = GROWTH if seconds >= SHORT else SHORT_GROWTH
    if memory is not None and memory["last_third"] > memory["first_third"] * (1 + most):
        tally.problem(f"memory grows: {memory}")
    if memory is None and seconds >= 40:
        tally.problem("memory was not measured")
    if absent := [kind for kind in KINDS if not tally.kinds[kind]]:
        tally.problem(f"no client did {absent}: give it more --seconds")
    if not tally.refused:
        tally.problem("the queue was never full")
    if not tally.compared:
        tally.problem("no answer was compared")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long clients ask")
    parser.add_argument("--toy", action="store_true", help="30 seconds without faults")
    parser.add_argument("--no-faults", action="store_true", help="leave out SIGTERM and SIGKILL")
    parser.add_argument("--json", action="store_true", help="print one JSON report")
    options = parser.parse_args()
    if options.toy:
        options.seconds, options.no_faults = 30.0, True
    with tempfile.TemporaryDirectory() as name:
        folder, tally = Path(name), Tally()
        bundle, texts = make_bundle(folder)
        model, tokenizer = load(bundle)
        made = references(model, tokenizer, texts)
        with Served(bundle, folder / "server.log", "--shutdown-timeout", 5, "--max-seconds", 60) as server:
            report = asyncio.run(soak(server, made, tally, options.seconds))
            for failure in server.failures():
                tally.problem(f"the server's log: {failure}")
        check_sampled(model, tally)
        judge(report, tally, options.seconds)
        problems = tally.problems
        if not options.no_faults:
            report["faults"], more = faults(bundle, folder, texts, made)
            problems = problems + more
    report["problems"] = problems[:SHOWN]
    for problem in report["problems"]:
        print(f"wrong: {problem}", file=sys.stderr)
    print(json.dumps(report, indent=2) if options.json else summary(report))
    return 1 if problems else 0


def summary(report):
    return "\n".join(f"{name:24} {value}" for name, value in report.items() if name != "problems")


if __name__ == "__main__":
    sys.exit(main())
