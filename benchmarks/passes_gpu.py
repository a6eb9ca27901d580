"""Time of one decoding step's parts on a GPU: the passes of P, q and p, eager and compiled, and the steering rule.

    python benchmarks/passes_gpu.py [--batch 1 8] [--json]
    python benchmarks/passes_gpu.py --shape tiny --device cpu

The models are those of decoding_gpu.py, with random weights. A pass computes the logits of one token a row, after
--context tokens, with keys and values in a cache of fixed size. "compiled" is `torch.compile` with CUDA graphs (on a
CPU without code generation, which runs the same path but measures nothing of use). divdec itself decodes eagerly: the
ratio (P + q + p + rule) / P of eager and of compiled passes says what compiling would gain. The compiled logits are
compared with the eager ones.
"""

import argparse
import json
import statistics
import sys
import time

import torch
import transformers
from transformers import StaticCache

from decoding_gpu import END_OF_PROMPT, SHAPES, machine, steered_model, wait

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


def measured(model, batch, context, repeats):
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=256, help="tokens before the measured one")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("passes_gpu: no CUDA here; accepted: --device cpu, best with --shape tiny", file=sys.stderr)
        return 2
    transformers.utils.logging.set_verbosity_error()
    model = steered_model(given.shape, device, getattr(torch, given.dtype), 1.0)
    N, n = model.target.num_parameters(), model.experts.retain.num_parameters()
    rows = []
    for batch in given.batch:
        row = measured(model, batch, given.context, REPEATS[device.type])
        rows.append(row)
        print(f"batch {batch}: " + ", ".join(f"{name} {value:.3f}" for name, value in row.items() if name != "batch"))
    result = {"machine": machine(device), "shape": given.shape, "dtype": given.dtype, "context": given.context,
              "bound": 1 + 2 * n / N, "rows": rows}  # fmt: skip
    print(f"1 + 2n/N = {result['bound']:.3f}")
    if given.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
