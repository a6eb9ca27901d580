"""Measure what running the experts while the target runs gains on this machine, in milliseconds per token.

    python benchmarks/overlap.py --bundle BUNDLE

Rounds with and without overlap alternate, and the best of each is reported: the machine may be shared.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from divdec import DivergenceForCausalLM
from divdec.model.checkpoint import load_tokenizer

TEXT = "Question: What is the full name of the author born in Taipei, Taiwan on 05/11/1991?\nAnswer:"


def seconds_per_token(model, ids, tokens):
    options = {"do_sample": False, "min_new_tokens": tokens, "pad_token_id": 0}
    started = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **options)
    return (time.perf_counter() - started) / tokens


def measure_passes(model, ids, tokens):
    """Milliseconds of each model's pass over one token, measured alone."""
    milliseconds = {}
    with torch.no_grad():
        for name, part in (("target", model.target), ("q", model.experts.retain), ("p", model.experts.forget)):
            cache = part(ids, use_cache=True).past_key_values
            started = time.perf_counter()
            for _ in range(tokens):
                part(ids[:, :1], past_key_values=cache, use_cache=True)
            milliseconds[name] = (time.perf_counter() - started) / tokens * 1000
    return milliseconds


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = DivergenceForCausalLM.from_pretrained(options.bundle, verify=False)
    ids = torch.tensor([load_tokenizer(Path(options.bundle))(TEXT)["input_ids"]])
    seconds = {False: [], True: []}
    for _ in range(options.rounds):
        for overlap, measured in seconds.items():
            model.overlap = overlap
            measured.append(seconds_per_token(model, ids, options.tokens))
    result = {"sequential": min(seconds[False]) * 1000, "overlap": min(seconds[True]) * 1000}
    print(json.dumps(result | {"passes": measure_passes(model, ids, options.tokens)}))


if __name__ == "__main__":
    main()
