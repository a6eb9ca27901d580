"""What placing the experts apart gains on this machine: milliseconds a token, and what crosses for how large an error.

    python benchmarks/placement.py --bundle BUNDLE                                  inside, and in a thread
    torchrun --nproc-per-node 2 benchmarks/placement.py --bundle BUNDLE --processes  in a process (or two of 3)
    … --entries 64 256 1024                                                         with fewer entries of the divergence

Rounds of the ways alternate, and the best of each is told: the machine is shared.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch

from divdec import DivergenceForCausalLM
from divdec.experts.placed import Placement
from divdec.model.checkpoint import load_tokenizer

TEXT = "Question: What is the full name of the author born in Taipei, Taiwan on 05/11/1991?\nAnswer:"


def seconds_a_token(model, ids, tokens):
    options = {"do_sample": False, "min_new_tokens": tokens, "pad_token_id": 0}
    started = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **options)
    return (time.perf_counter() - started) / tokens


def passes(model, ids, tokens):
    """Milliseconds of the parts' passes over a token, one after the other, measured alone."""
    found = {}
    with torch.no_grad():
        for name, part in (("target", model.target), ("q", model.experts.retain), ("p", model.experts.forget)):
            cache = part(ids, use_cache=True).past_key_values
            started = time.perf_counter()
            for _ in range(tokens):
                part(ids[:, :1], past_key_values=cache, use_cache=True)
            found[name] = (time.perf_counter() - started) / tokens * 1000
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--processes", action="store_true")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--entries", type=int, nargs="*", default=[])
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    place = Placement("processes") if given.processes else None
    model = DivergenceForCausalLM.from_pretrained(given.bundle, verify=False, experts_placement=place)
    ids = torch.tensor([load_tokenizer(Path(given.bundle))(TEXT)["input_ids"]])
    told = {"processes": int(os.environ.get("WORLD_SIZE", "1")), "vocabulary": model.vocab_size}
    if given.processes:
        best = min(seconds_a_token(model, ids, given.tokens) for _ in range(given.rounds))
        statistics = model.experts.statistics
        told |= {"ms": best * 1000, "bytes a pass": statistics.bytes / statistics.passes}
    else:
        times = {"inside": [], "thread": []}
        for _ in range(given.rounds):
            for way, measured in times.items():
                model.overlap = way == "thread"
                measured.append(seconds_a_token(model, ids, given.tokens))
        told |= {way: min(measured) * 1000 for way, measured in times.items()}
        told["passes"] = passes(model, ids, given.tokens)
    print(json.dumps(told))
    for entries in given.entries if given.processes else ():
        experts = model.experts
        for tolerance in (1.0, 0.01):
            experts.entries, experts.tolerance = entries, tolerance
            experts.statistics = type(experts.statistics)()
            seconds_a_token(model, ids, given.tokens)
            print(f"tolerance {tolerance:g}: {experts.statistics.said(entries, model.vocab_size)}")


if __name__ == "__main__":
    main()
