"""Measure steering's cost on a GPU and compare answers with a CPU's: equality, decoding, passes and serving.

    make gpu                                        # needs CUDA, no network; five pieces of at most ten minutes
    python -m benchmarks.decoding.gpu --output runs/gpu [--only decoding-8b serving]
    python -m benchmarks.decoding.gpu --output runs/gpu-toy --shape tiny --device cpu --dtype float32   # a try
    python -m benchmarks.decoding.gpu --piece decoding --shape 70b --batch 1 8       # one piece, in this process

OUTPUT/results.json holds the figures of all pieces, results.md the tables, PIECE.log what a piece printed. A piece that
has figures is not run again, so that the same command continues a run that was stopped. The exit code is 1 if a piece
failed. All models have random weights, created on the device: the figures are times, not texts.

- equality: `tests/gpu`: answers and scores are those of the CPU, a broken auxiliary raises.
- decoding-8b, decoding-70b: steering, a pair of adapters and speculation with the shapes of Llama 3.1 and two
  Llama 3.2 1B; the 70B target has as many of its layers as fit into the memory. Random models do not agree, so
  acceptance is SIMULATED: each draft is accepted with the probability --acceptance. The time is real: drafts, passes,
  verification and cropping of caches. Batches of several decode without drafts. Methods take turns, ratios are computed
  within a round, and the first round is not counted.
- passes: one step's passes of P, q and p with a cache of fixed size, eager and compiled with CUDA graphs, and the rule.
  divdec decodes eagerly: the ratios (P + q + p + rule) / P tell what compiling would gain.
- serving: `benchmarks.serving.load`, 1, 8 and 32 clients, beside the target's own `generate`.
"""

import argparse
import dataclasses
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from unittest import mock

import torch
import transformers
from transformers import LlamaForCausalLM, StaticCache, StoppingCriteria, StoppingCriteriaList

from benchmarks.decoding.steering import PLAIN, TARGET, per_token, random_bundle, ratio, sizes
from divdec.costs.model_size import measure_size
from divdec.decoding import speculative
from divdec.errors import UsageError
from divdec.experts.adapters import AdapterPair
from divdec.model.modeling import DivergenceForCausalLM
from divdec.runs import output_folder, read_json, write_json, write_text
from divdec.sampling import Verdict, verify_greedy
from divdec_research.bench.settings import DecoderShape, find_shape
from divdec_research.report.tables import markdown_table

END_OF_PROMPT = 100  # random tokens are drawn from here on; which ones they are changes no time
ADAPTERS, RANK = "steered, adapters", 16  # q and p as LoRA adapters of one base
LLAMA_1B = find_shape("llama-1B")
SHAPES = {
    "8b": (find_shape("llama-8B"), LLAMA_1B),
    "70b": (find_shape("llama-70B"), LLAMA_1B),
    "tiny": (DecoderShape("llama-tiny", 128, 256, 32, 4, 2, 2), DecoderShape("llama-tiny", 64, 128, 16, 4, 2, 1)),
}
VOCABULARY, POSITIONS = 128256, 8192
LENGTHS = {"8b": (128, 3), "70b": (64, 3), "tiny": (8, 1)}  # default new tokens and rounds
ROOM = 0.85  # share of the free memory for weights; the rest is for keys, values and activations


def random_model(shape, device, dtype):
    """A Llama with random weights, created on the device."""
    config = shape.config(VOCABULARY, POSITIONS)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=dtype)
    model.generation_config.pad_token_id = 0
    return model.eval()


def steered_model(shape, device, dtype):
    torch.manual_seed(0)
    target, auxiliary = SHAPES[shape]
    if device.type == "cuda":
        target = fitted(target, auxiliary, device, dtype)
    models = [random_model(part, device, dtype) for part in (target, auxiliary, auxiliary)]
    return DivergenceForCausalLM.from_parts(*models, steering="linear:1")


def adapted(model):
    """The same target with random adapters of one auxiliary as q and p, whose weights are read once."""
    base = model.experts.retain
    linear = {name: layer for name, layer in base.named_modules() if isinstance(layer, torch.nn.Linear)}
    linear.pop("lm_head")

    def factors():
        sizes = {name: (layer.in_features, layer.out_features) for name, layer in linear.items()}
        return {
            name: tuple(0.01 * torch.randn(shape).to(base.device, base.dtype) for shape in ((RANK, n), (m, RANK)))
            for name, (n, m) in sizes.items()
        }

    return DivergenceForCausalLM(model.config, model.target, AdapterPair(base, factors(), factors())).eval()


def fitted(target, auxiliary, device, dtype):
    """The target's shape with as many layers as fit into the device's free memory beside both auxiliaries."""
    free, _ = torch.cuda.mem_get_info(device)
    shapes = (auxiliary, *(dataclasses.replace(target, layers=layers) for layers in (1, 2)))
    small, first, second = (measure_size(shape.config(VOCABULARY), shape.name).parameters for shape in shapes)
    room = ROOM * free / dtype.itemsize - 2 * small - first
    if room < 0:
        print(f"gpu: {free / 2**30:.0f} GiB of free memory hold not even one layer of this target", file=sys.stderr)
        raise SystemExit(2)
    return dataclasses.replace(target, layers=min(target.layers, 1 + int(room // (second - first))))


class Simulated:
    """`verify_greedy` with simulated acceptance: each draft is accepted with a given probability."""

    def __init__(self, acceptance, device):
        self.acceptance, self.device = acceptance, device
        self.begin(0)

    def begin(self, seed):
        """Before an answer, whose first token comes from the prompt."""
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.tokens, self.judged = 1, 0

    def __call__(self, scores, drafts):
        tokens = verify_greedy(scores, drafts).tokens  # its time belongs to a pass
        drawn = torch.rand(drafts.shape, generator=self.generator, device=self.device)
        accepted = drawn < self.acceptance
        kept = accepted[:, :-1].long().cumprod(dim=1).sum(dim=1) + 1
        self.tokens += int(kept.sum())  # waits for the device, as the decoder does right after
        self.judged += len(drafts)
        return Verdict(torch.where(accepted, drafts, tokens), accepted, kept)


class Enough(StoppingCriteria):
    """Ends all rows when they have N tokens, accepted ones included."""

    def __init__(self, prompt, new_tokens, simulated=None):
        self.prompt, self.new_tokens, self.simulated = prompt, new_tokens, simulated

    def __call__(self, input_ids, scores, **kwargs):
        rows, length = input_ids.shape
        made = length - self.prompt if self.simulated is None else self.simulated.tokens
        return torch.full((rows,), made >= self.new_tokens, device=input_ids.device)


def answer(model, ids, new_tokens, simulated=None, gamma=None, seed=0):
    """Generate once; returns the seconds, and the tokens of all rows."""
    options = {} if simulated is None else {"speculative": gamma}
    if simulated is not None:
        simulated.begin(seed)
    enough = StoppingCriteriaList([Enough(ids.shape[1], new_tokens, simulated)])
    wait(ids.device)
    started = time.perf_counter()
    with mock.patch.object(speculative, "verify_greedy", simulated or verify_greedy):
        # No block is cut short by the end of the room.
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=2 * new_tokens + 16,
            stopping_criteria=enough, **options,
        )  # fmt: skip
    wait(ids.device)
    seconds = time.perf_counter() - started
    return seconds, simulated.tokens if simulated is not None else new_tokens * len(ids)


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compared(model, batch, given):
    """Rows by method at one batch size, with the ratio of time per token to the target's."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(END_OF_PROMPT, model.vocab_size, (batch, given.prompt_tokens), generator=generator)
    ids = ids.to(model.target.device)
    ways = {TARGET: (model.target, None, None), PLAIN: (model, None, None), ADAPTERS: (adapted(model), None, None)}
    for gamma in given.gammas if batch == 1 else ():
        for share in given.acceptance:
            ways[f"speculative, γ {gamma}, {share:.0%}"] = (model, gamma, Simulated(share, ids.device))
    rounds, judged = {name: [] for name in ways}, {name: [] for name in ways}
    for number in range(-1, given.rounds):  # the first is not counted
        order = list(ways)
        start = number % len(order)
        for name in order[start:] + order[:start]:
            decoder, gamma, simulated = ways[name]
            timing = answer(decoder, ids, given.new_tokens, simulated, gamma, seed=number + 1)
            if number >= 0:
                rounds[name].append(timing)
                judged[name].append(simulated.judged if simulated is not None else 0)
    rows = {}
    for name, (_, gamma, simulated) in ways.items():
        over = ratio(rounds[name], rounds[TARGET])
        rows[name] = per_token(rounds[name]) | {"over_target": over}
        if simulated is not None:
            made = sum(tokens - 1 for _, tokens in rounds[name]) / sum(judged[name])
            expected = sum(simulated.acceptance**place for place in range(gamma + 1))
            rows[name] |= {"gamma": gamma, "acceptance": simulated.acceptance, "tokens_per_pass": made,
                           "expected": expected}  # fmt: skip
    return rows


def machine(device):
    """Versions and device of the machine."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"device": name, "threads": torch.get_num_threads(), "torch": torch.__version__,
            "transformers": transformers.__version__}  # fmt: skip


def decoding(given):
    """Piece: target, steering and speculation."""
    new_tokens, rounds = LENGTHS[given.shape]
    given.new_tokens, given.rounds = given.new_tokens or new_tokens, given.rounds or rounds
    device = torch.device(given.device)
    model = steered_model(given.shape, device, getattr(torch, given.dtype))
    size = sizes(model.target, model.experts.retain)
    layers, whole = model.target.config.num_hidden_layers, SHAPES[given.shape][0].layers
    print(f"target {size['N']:,} parameters ({layers} of {whole} layers), auxiliaries {size['n']:,} each; "
          f"{given.dtype}; {given.prompt_tokens} tokens in a prompt, {given.new_tokens} new; {given.rounds} rounds; "
          "acceptance is simulated (only time is measured)")  # fmt: skip
    measured = []
    for batch in given.batch:
        rows = compared(model, batch, given)
        measured.append({"batch": batch, "rows": rows})
        print(f"\nbatch {batch}: tokens/s, ms a token, time / target, tokens a target pass (expected)")
        for name, row in rows.items():
            passes = f" {row['tokens_per_pass']:.2f} ({row['expected']:.2f})" if "tokens_per_pass" in row else ""
            print(
                f"{name:<22} {row['tokens_per_s']:>9.1f} {row['ms_per_token']:>9.3f} {row['over_target']:>7.3f}{passes}"
            )
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {"machine": machine(device), "shape": given.shape, "dtype": given.dtype, "acceptance": "simulated",
            "prompt_tokens": given.prompt_tokens, "new_tokens": given.new_tokens, "rounds": given.rounds, "sizes": size,
            "layers": layers, "peak_bytes": peak, "measured": measured}  # fmt: skip


REPEATS, WARM_UP = {"cuda": 50, "cpu": 3}, 3


def step_of(model, batch, context, compiled, repeats):
    """A function that computes the logits of the next token in each row; it may be called a limited number of times."""
    device = model.device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(END_OF_PROMPT, model.config.vocab_size, (batch, context + 1), generator=generator).to(device)
    cache = StaticCache(config=model.config, max_cache_len=context + WARM_UP + repeats + 1)
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
    forward = model.forward
    if compiled:
        options = {"mode": "reduce-overhead"} if device.type == "cuda" else {"backend": "aot_eager"}
        forward = torch.compile(forward, fullgraph=True, **options)
    last, position = ids[:, -1:].contiguous(), torch.full((batch, 1), context, device=device)

    @torch.no_grad()
    def step():
        logits = forward(last, position_ids=position, past_key_values=cache, use_cache=True).logits[:, -1].clone()
        position.add_(1)
        return logits

    return step


def milliseconds(function, device, repeats):
    """Median time of a call; the first calls, which compile and record graphs, are not counted."""
    times = []
    for number in range(-WARM_UP, repeats):
        wait(device)
        started = time.perf_counter()
        function()
        wait(device)
        if number >= 0:
            times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def parts_of_step(model, batch, context, repeats):
    """Times of all parts at one batch size."""
    parts = {"P": model.target, "q": model.experts.retain, "p": model.experts.forget}
    device, row, logits = model.target.device, {"batch": batch}, {}
    for kind in ("eager", "compiled"):
        for name, part in parts.items():
            step = step_of(part, batch, context, kind == "compiled", repeats)
            row[f"{name}_{kind}_ms"] = milliseconds(step, device, repeats)
            logits[name, kind] = step().float()
    row["difference"] = max(float((logits[name, "eager"] - logits[name, "compiled"]).abs().max()) for name in parts)
    target, retain, forget = (logits[name, "eager"] for name in parts)
    row["rule_ms"] = milliseconds(
        lambda: model.steering.apply(target, retain.log_softmax(-1) - forget.log_softmax(-1)), device, repeats
    )
    for kind in ("eager", "compiled"):
        together = sum(row[f"{name}_{kind}_ms"] for name in parts) + row["rule_ms"]
        row[f"{kind}_over_target"] = together / row[f"P_{kind}_ms"]
    return row


def passes(given):
    """Piece: the parts of one step."""
    model = steered_model(given.shape, torch.device(given.device), getattr(torch, given.dtype))
    rows = []
    for batch in given.batch:
        rows.append(parts_of_step(model, batch, given.context, REPEATS[torch.device(given.device).type]))
        print(", ".join(f"{name} {value:.3f}" for name, value in rows[-1].items()))
    return {"machine": machine(torch.device(given.device)), "shape": given.shape, "dtype": given.dtype,
            "context": given.context, "bound": sizes(model.target, model.experts.retain)["bound"],
            "rows": rows}  # fmt: skip


ROOT = Path(__file__).resolve().parents[2]
LIMIT, STOP = 600, 90  # seconds of a piece, and until it has ended its servers
TOKENIZER = 512  # tokens; the models have more, as many models do
PIECES = ("equality", "decoding-8b", "decoding-70b", "passes", "serving")


def command(piece, given):
    """The command line of a piece, which prints its figures as one JSON object at the end."""
    shared = ["--device", given.device, "--dtype", given.dtype]
    if piece == "equality":
        return [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu",
                f"--junitxml={given.output.resolve() / 'equality.xml'}"]  # fmt: skip
    if piece != "serving":
        name, _, shape = piece.partition("-")
        gammas = ["--gammas", "4"] if name == "decoding" else []
        return module("decoding.gpu", "--piece", name, "--shape", given.shape or shape or "8b", *gammas, *shared)
    toy = ["--clients", "1", "2", "--requests", "2", "--tokens", "8", "--rounds", "1"]
    size = toy if given.shape == "tiny" else ["--tokens", "32"]
    bundle = write_models(given.output / "serving", given.shape or "8b", given)
    return module("serving.load", "--bundle", str(bundle), *size, *shared, "--json")


def module(name, *options):
    return [sys.executable, "-m", f"benchmarks.{name}", *options]


def write_models(folder, shape, given):
    """Write a bundle of random models, with the questions that the clients ask."""
    if not folder.exists():
        model = steered_model(shape, torch.device(given.device), getattr(torch, given.dtype))
        with output_folder(folder) as temporary:
            random_bundle(temporary, lambda _: (model.target, model.experts.retain, model.experts.forget), TOKENIZER)
        del model  # the pieces need the device's memory
        if given.device == "cuda":
            torch.cuda.empty_cache()
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
            arguments, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output,
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
    for piece, result in results["pieces"].items():
        text += f"\n## {piece}\n\n"
        if "failed" in result:
            text += f"**Failed**: {result['failed']}\n"
        else:
            text += f"{SECTIONS[piece](result['figures'])}\n({result['seconds']:.0f} s)\n"
    return text


def equality_table(figures):
    return f"{figures['passed']} tests passed, {figures['skipped']} were skipped.\n"


def decoding_table(figures):
    heads = ["batch", "method", "tokens/s", "ms a token", "time / target", "tokens a target pass"]
    rows = [
        [str(entry["batch"]), name, f"{row['tokens_per_s']:.1f}", f"{row['ms_per_token']:.2f}",
         f"{row['over_target']:.3f}",
         f"{row['tokens_per_pass']:.2f}" if "tokens_per_pass" in row else ""]
        for entry in figures["measured"] for name, row in entry["rows"].items()
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
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--only", nargs="+", choices=PIECES, default=PIECES, metavar="PIECE", help=", ".join(PIECES))
    parser.add_argument("--shape", choices=SHAPES, help="one shape for all pieces instead of those that they name")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    piece = parser.add_argument_group("one piece")
    piece.add_argument("--piece", choices=("decoding", "passes"), help="run it here, and print its figures as JSON")
    piece.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    piece.add_argument("--gammas", type=int, nargs="+", default=[2, 4, 6])
    # Of the trained real pair: 0.79 to 0.88 (docs/benchmarks.md), and the least of a single answer, on neutral text.
    piece.add_argument("--acceptance", type=float, nargs="+", default=[0.56, 0.79, 0.88], metavar="SHARE",
                       help="probability with which a draft is kept, given that those before it were")  # fmt: skip
    piece.add_argument("--prompt-tokens", type=int, default=64)
    piece.add_argument("--new-tokens", type=int, help="by default 128; 64 of --shape 70b, 8 of tiny")
    piece.add_argument("--rounds", type=int, help="by default 3; 1 of --shape tiny")
    piece.add_argument("--context", type=int, default=256, help="tokens before the measured one, in passes")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        print("gpu: no CUDA here; accepted: --device cpu --shape tiny, which tries the pieces", file=sys.stderr)
        return 2
    if given.piece is None:
        return run_all(given)
    transformers.utils.logging.set_verbosity_error()
    given.shape = given.shape or "8b"
    print(json.dumps({"decoding": decoding, "passes": passes}[given.piece](given)))
    return 0


def run_all(given):
    """Run the pieces that have no figures, and write and print the tables; return the exit code."""
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
    return int(any("failed" in result for result in done.values()))


if __name__ == "__main__":
    sys.exit(main())
