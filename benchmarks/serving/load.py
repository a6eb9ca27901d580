"""Server performance for 1, 8 and 32 clients: tokens per second, time to first token, time between tokens.

    python benchmarks/serving.py --bundle demo --clients 1 8 --ways steered [--json]
    python benchmarks/serving.py [--bundle runs/bench-models/bundle] [--json]
    python benchmarks/serving.py --engine vllm --vllm-python .venv-vllm/bin/python --eager
    python benchmarks/serving.py --engine vllm --vllm-python .venv-vllm/bin/python

Every request is a question of the bundle's forget or retain set, answered greedily with exactly --tokens tokens (ends
are ignored); an answer of another length stops the benchmark. At each number of clients --requests questions are shared
out, at least one a client; one client asks them one after another. All servers run from the beginning to the end and
take turns within a round, and ratios are taken within a round, so that noise of the machine hits all alike. A first
round is not counted. Clients are a process of their own, but not a machine of their own.

"embedded" is `divdec serve` with its own engine. Its ways: "target" is the target's `generate` in a process, one
question after another (there is no server to compare with that runs three models); "steered"; "speculative" is
`--speculative auto`, which speculates for one client alone; "transformers" is `transformers serve
--continuous-batching` on the target alone. "vllm" is vLLM's server: "target" is the plain checkpoint without divdec,
"steered" the bundle, "speculative" the bundle with --speculative drafts of q; all with the same options, and prefixes
are not cached, since the same questions come again.

Columns: "first" is from the request to the first piece of the answer, "gap" from a piece to the next, as a client sees
them. A piece is a token, or the tokens that came together ("tok/piece"): drafts that vLLM accepts, or tokens without
text, which the embedded server does not send. "a token" is the time of an answer after its first piece over its tokens.
"as alone" counts answers that are those that one client got in the uncounted round, from "steered" in the case of
"speculative".
"""

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import types
from pathlib import Path

import torch
import transformers

import divdec
from decoding import machine, sizes
from decoding_costs import bundle_named, spread
from decoding_methods import PARTS, places_of
from divdec.data.formatting import encode_prompts
from divdec.errors import UsageError
from divdec.model.checkpoint import load_config, load_model, load_tokenizer
from divdec.runs import read_json
from divdec.steering import Steering
from serving_clients import InProcess, WrongAnswerError, asked, summary
from serving_servers import check_heads, embedded, running, transformers_own, vllm

AIM, AIM_CLIENTS = 3.0, 8  # embedded engine, demo bundle: goal for the throughput ratio of N clients to one
EMBEDDED, VLLM = ("target", "steered", "speculative", "transformers"), ("target", "steered", "speculative")
DRAFTS = {"drafts": "vllm:spec_decode_num_drafts_total", "accepted": "vllm:spec_decode_num_accepted_tokens_total"}


class Ways:
    """The servers that are compared, started one after another; each knows at how many clients it is measured."""

    def __init__(self, given, bundle, places, tokenizer, stack, logs):
        self.given, self.tokenizer = given, tokenizer
        self.found, self.clients = {}, {}
        for name in given.ways:
            self.clients[name] = list(given.clients)
            if given.engine == "embedded" and name == "target":
                model = load_model(places["target"], dtype=getattr(torch, given.dtype), device_map=given.device)
                self.found[name], self.clients[name] = InProcess(model, tokenizer), [1]
                continue
            if given.engine == "vllm":
                target = places["target"] if name == "target" else None
                command = vllm(bundle, target, given, given.speculative if name == "speculative" else None)
            elif name == "transformers":
                command = transformers_own(places["target"], given)
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
        return asked(self.found[name], clients, prompts, tokens, self.tokenizer)

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
    found = {name: {clients: [] for clients in ways.clients[name]} for name in ways.found}
    pairs = [(name, clients) for clients in given.clients for name in ways.found if clients in ways.clients[name]]
    for number in range(given.rounds):
        turn = number % len(pairs)
        for name, clients in [*pairs[turn:], *pairs[:turn]]:
            found[name][clients].append(ways.measure(name, clients, prompts, given.tokens))
        print(f"round {number + 1} of {given.rounds}; load average {os.getloadavg()[0]:.1f}", flush=True)
    rows = {name: {clients: summary(rounds, alone.get(name, [])) for clients, rounds in by_clients.items()}
            for name, by_clients in found.items()}  # fmt: skip
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


def ratio(one, other):
    """Median over the rounds of the tokens a second of one over those of another in the same round."""
    return statistics.median(a / b for a, b in zip(one["rates"], other["rates"]))


def compared(rows, size, engine):
    """Print the measured ratios beside their goals."""
    found = {}
    print()
    for name, by_clients in rows.items():
        for clients in by_clients if 1 in by_clients else ():
            if clients > 1:
                value = found[f"{name}_{clients}_over_1"] = ratio(by_clients[clients], by_clients[1])
                each = [many / one for many, one in zip(by_clients[clients]["rates"], by_clients[1]["rates"])]
                aim = f"; aim on the demo bundle: at least {AIM:.0f} x" if clients == AIM_CLIENTS else ""
                aim = aim if (engine, name) == ("embedded", "steered") else ""
                print(
                    f"{name}: {clients} clients at once / one after another  {value:.2f} x the tokens/s "
                    f"({min(each):.2f} – {max(each):.2f}){aim}"
                )
    for name in rows:
        for clients in rows[name] if name != "target" else ():
            if clients in (base := rows.get("target", {})):
                times = ratio(base[clients], rows[name][clients])
                gaps = rows[name][clients]["gap_ms"] / base[clients]["gap_ms"]
                tokens = rows[name][clients]["ms_per_token"] / base[clients]["ms_per_token"]
                found[f"{name}_over_target_{clients}"] = {"time": times, "gap": gaps, "ms_per_token": tokens}
                print(f"{name} / target, {clients:>2} clients  {times:.3f} of its time, {1 / times:.3f} x its tokens/s;"
                      f" gap {gaps:.3f}, a token {tokens:.3f}; 1 + 2n/N = {size['bound']:.3f}")  # fmt: skip
    for clients in rows.get("speculative", {}):
        if clients in rows.get("steered", {}):
            value = ratio(rows["speculative"][clients], rows["steered"][clients])
            found[f"speculative_over_steered_{clients}"] = value
            print(f"speculative / steered, {clients:>2} clients  {value:.3f} x its tokens/s")
    return found


def questions(sets, tokenizer, count):
    """Forget and retain questions in turn, as token ids."""
    groups = [spread(sets[name], -(-count // 2)) for name in ("forget", "retain")]
    records = [record for pair in zip(*groups) for record in pair]
    return encode_prompts((records * count)[:count], tokenizer)


def run(given):
    bundle, sets = bundle_named(given.bundle, given.data, Path)
    try:
        places = places_of(bundle)
    except (OSError, KeyError, TypeError):
        raise UsageError(f"{bundle} is no bundle of a target and two auxiliaries") from None
    configs = {part: load_config(place) for part, place in places.items()}
    if given.engine == "vllm":
        check_heads(bundle, configs)
    tokenizer = load_tokenizer(bundle)
    prompts = questions(sets, tokenizer, max(given.requests, *given.clients))
    parts = types.SimpleNamespace(
        **{name: load_model(places[part], device_map="meta") for name, part in zip(("target", "retain"), PARTS)}
    )
    size, steering = sizes(parts), str(Steering.from_dict(read_json(bundle / "config.json")["steering"]))
    result = {"machine": machine() | {"threads": given.threads, "divdec": divdec.__version__}}
    settings = {name: getattr(given, name) for name in
                ("engine", "bundle", "dtype", "tokens", "requests", "rounds", "clients")}  # fmt: skip
    settings |= {"steering": steering, "prompt_tokens": [min(map(len, prompts)), max(map(len, prompts))]}
    if given.engine == "vllm":
        settings |= {name: getattr(given, name) for name in ("eager", "speculative", "max_model_len", "vllm_options")}
    print(", ".join(f"{name} {value}" for name, value in result["machine"].items()))
    print(f"target {size['N']:,} parameters, auxiliaries {size['n']:,} each; "
          + ", ".join(f"{name} {value}" for name, value in settings.items()))  # fmt: skip
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        ways = Ways(given, bundle, places, tokenizer, stack, Path(logs))
        if given.engine == "vllm":
            result["machine"]["vllm"] = ways.vllm_version()
            print(f"vLLM {result['machine']['vllm']}, {'eager' if given.eager else 'compiled'}")
        rows, drafts = measured(ways, prompts, given)
    show(rows)
    if drafts:
        print(f"\nspeculative: {drafts['tokens_per_pass']:.2f} tokens a pass by vLLM's count")
    result |= {"settings": settings, "sizes": size, "rows": rows, "drafts": drafts,
               "ratios": compared(rows, size, given.engine)}  # fmt: skip
    result["machine"]["load_after"] = os.getloadavg()[0]
    print(f"load average {result['machine']['load']:.1f} before, {result['machine']['load_after']:.1f} after")
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", default="runs/bench-models/bundle", help="a folder, or 'demo' or 'tofu-small'")
    parser.add_argument("--data", type=Path, default=Path("../shared/data/tofu"), help="TOFU's files, for tofu-small")
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    parser.add_argument("--ways", nargs="+", choices=EMBEDDED, default=list(VLLM))
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
    if given.engine == "vllm" and not set(given.ways) <= set(VLLM):
        parser.error(f"--ways of vllm: {', '.join(VLLM)}")
    given.clients, given.ways = sorted(set(given.clients)), list(dict.fromkeys(given.ways))
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(given.threads)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are ended then, too
    try:
        result = run(given)
    except (UsageError, FileNotFoundError) as error:
        print(f"serving: {error}", file=sys.stderr)
        return 2
    except WrongAnswerError as error:
        print(f"serving: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if given.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
