"""Speed of a target in bfloat16 and in float32 on this CPU: what `--dtype auto` chooses between.

    python benchmarks/dtypes.py [--target smollm2] [--threads 1]

Time per decoded token and time to read a prompt of 64 tokens at batch 1 and 8, each in turns; medians. Without
bfloat16 instructions (AVX-512 BF16, AMX) a CPU emulates it.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch

from divdec.model.checkpoint import CheckpointReference, has_bfloat16_instructions, load_model

PROMPT, NEW, ROUNDS = 64, 32, 3


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = CheckpointReference.parse(options.target).resolve(Path(), weights=True)
    models = {dtype: load_model(folder, dtype=dtype).eval() for dtype in (torch.bfloat16, torch.float32)}
    print(f"bfloat16 instructions: {'yes' if has_bfloat16_instructions() else 'no'}; {options.threads} threads")
    for batch in (1, 8):
        ids = torch.randint(5, models[torch.float32].config.vocab_size, (batch, PROMPT))
        times = {dtype: ([], []) for dtype in models}
        for number in range(ROUNDS + 1):
            for dtype, model in models.items():
                measured = timed(model, ids)
                if number:  # the first round warms up
                    for values, value in zip(times[dtype], measured, strict=True):
                        values.append(value)
        for index, what in enumerate(("prompt", "token")):
            low, high = (1000 * statistics.median(times[dtype][index]) for dtype in models)
            print(f"batch {batch}, {what}: bfloat16 {low:.0f} ms, float32 {high:.0f} ms, ratio {low / high:.2f}")


@torch.inference_mode()
def timed(model, ids):
    """Seconds to read the prompts, and for each token after them."""
    mask, started = torch.ones_like(ids), time.perf_counter()
    model(input_ids=ids, attention_mask=mask)
    read = time.perf_counter()
    model.generate(input_ids=ids, attention_mask=mask, do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW)
    read, generated = read - started, time.perf_counter() - read
    return read, (generated - read) / NEW


if __name__ == "__main__":
    main()
