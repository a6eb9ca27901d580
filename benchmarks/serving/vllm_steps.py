"""Time what steering adds to a decoding step of vLLM and where: processor time of target and bundle.

    .venv-vllm/bin/python -m benchmarks.serving.vllm_steps [--toy] [--batch 1 8 32] [--rounds 7] [--json]

Two processes, each with an engine, take turns: one runs the plain checkpoint without divdec, the other the bundle. Each
answers --batch prompts at once with 4 and with 36 tokens; the difference, over 32, is a step. Processor time of one
thread is counted, so that other work on the machine changes little. The models have the shapes of `make bench-models`
and random weights, because only shapes matter here. Nothing is compiled: compiled passes are one graph, whose parts
cannot be told apart.

"step" is the whole step with vLLM's scheduler and sampler; "target", "auxiliaries": their passes and logits;
"steering": the rule, its checks, and joining hidden states. The parts are measured in rounds of their own, because the
clock's calls take time too.
"""

import argparse
import collections
import functools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path

import transformers

SHORT, LONG, PROMPT = 4, 36, 12
VLLM = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def engine(connection, model):
    """Process of one engine: receives a number of prompts and whether to time parts, and sends milliseconds a step."""
    os.environ |= VLLM
    from vllm import LLM, SamplingParams

    times = collections.defaultdict(float)
    steered = [] if "VLLM_PLUGINS" in os.environ else remembered()
    llm = LLM(
        model=str(model), dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=64,
        enable_prefix_caching=False, disable_log_stats=True,
    )  # fmt: skip

    def answer(batch, tokens):
        prompts = [{"prompt_token_ids": list(range(10 + row, 10 + row + PROMPT))} for row in range(batch)]
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        times.clear()
        started = time.process_time()
        llm.generate(prompts, sampling, use_tqdm=False)
        return dict(times) | {"step": time.process_time() - started}

    answer(8, SHORT)
    connection.send(None)
    watched = False
    while (request := connection.recv()) is not None:
        batch, parts = request
        if parts and not watched:
            watch(steered[0], times)
            watched = True
        short, long = answer(batch, SHORT), answer(batch, LONG)
        connection.send({name: 1e3 * (long[name] - short[name]) / (LONG - SHORT) for name in long})


def remembered():
    """A list that will hold the steered model when vLLM has created it."""
    from divdec.serving.vllm.model import DivergenceForCausalLM

    models, create = [], DivergenceForCausalLM.__init__

    @functools.wraps(create)
    def init(self, **options):
        create(self, **options)
        models.append(self)

    DivergenceForCausalLM.__init__ = init
    return models


def watch(model, times):
    """Add up the processor time of the steered model's parts from now on."""

    def timed(module, name, part):
        function = getattr(module, name)

        def call(*args, **kwargs):
            started = time.process_time()
            result = function(*args, **kwargs)
            times[part] += time.process_time() - started
            return result

        object.__setattr__(module, name, call)  # nn.Module would look for parameters

    for part, module in model.models.items():
        for name in ("forward", "compute_logits"):
            timed(module, name, "target" if part == "target" else "auxiliaries")
    for name in ("forward", "compute_logits"):
        timed(model, name, "model")


def measured(bundle, target, given):
    """Milliseconds a step, as {batch: {"target": [...], "steered": [...], "parts": [...]}}."""
    context = multiprocessing.get_context("spawn")
    connections = {}
    for name, model in (("target", target), ("steered", bundle)):
        connections[name], other = context.Pipe()
        if name == "target":
            os.environ["VLLM_PLUGINS"] = ""  # nothing of divdec in its process
        context.Process(target=engine, args=(other, model), daemon=False).start()
        os.environ.pop("VLLM_PLUGINS", None)
        other.close()
    for connection in connections.values():
        connection.recv()

    def asked(name, *request):
        connections[name].send(request)
        return connections[name].recv()

    steps = {batch: {name: [] for name in (*connections, "parts")} for batch in given.batch}
    for _ in range(given.rounds):
        for batch in given.batch:
            for name in connections:
                steps[batch][name].append(asked(name, batch, False)["step"])
    for batch in given.batch:
        steps[batch]["parts"] = [asked("steered", batch, True) for _ in range(given.rounds)]
    for connection in connections.values():
        connection.send(None)
    return steps


def row(batch, steps, bound):
    """Print the figures of one number of prompts and return them."""
    middle = {name: statistics.median(steps[name]) for name in ("target", "steered")}
    each = [steered / target for steered, target in zip(steps["steered"], steps["target"], strict=True)]
    result = middle | {"ratio": statistics.median(each), "least": min(each), "most": max(each)}
    spread = f"{result['ratio']:.3f} ({min(each):.3f} – {max(each):.3f})"
    times = f"target {middle['target']:.2f} ms, steered {middle['steered']:.2f} ms"
    print(f"{batch:>3} at once: {times}, ratio {spread}; 1.10 × (1 + 2n/N) = {1.1 * bound:.3f}")
    parts = {name: statistics.median(step[name] for step in steps["parts"]) for name in steps["parts"][0]}
    parts["steering"] = parts["model"] - parts["target"] - parts["auxiliaries"]
    parts["vLLM"] = parts["step"] - parts.pop("model")
    print("            " + ", ".join(f"{name} {value:.2f} ms" for name, value in parts.items()))
    return result | {"parts": parts}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="two prompts and one round: tries the script")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    given = parser.parse_args()
    if given.toy:
        given.batch, given.rounds = [2], 1
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        # vLLM's environment lacks packages that divdec's has: imported in the process that needs them.
        from benchmarks.decoding.steering import VOCABULARY, random_bundle, random_models
        from divdec.checkpoint import load_model
        from divdec.model.loading import Bundle

        paths = Bundle.open(random_bundle(Path(folder), random_models, VOCABULARY, "linear:1.5"))
        sizes = {part: load_model(path, device_map="meta").num_parameters() for part, path in paths.paths.items()}
        n, N = sizes["retain_auxiliary"], sizes["target"]
        print(f"{N / 1e6:.1f}M and {n / 1e6:.1f}M, {paths.steering}, eager")
        steps = measured(paths.folder, paths.paths["target"], given)
        rows = {batch: row(batch, steps[batch], 1 + 2 * n / N) for batch in given.batch}
    if given.json:
        print(json.dumps({"N": N, "n": n, "rows": rows}))


if __name__ == "__main__":
    main()
