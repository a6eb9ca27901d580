"""Memory of one distillation step: the loss computed in pieces, and computed from whole logits.

The models are very narrow and have a vocabulary of real size, so that logits decide the memory.
Each variant runs in its own process; the figure is the peak resident set minus the resident set before the step.

    python benchmarks/distillation_memory.py [--vocabulary 128256] [--rows 4] [--prompt 64] [--answer 64] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path

WAYS = ("plain", "in pieces", "in pieces, cached")


def measure_step(way, given):
    """Run one step in this process."""
    import torch
    from torch.nn.functional import kl_div
    from transformers import LlamaConfig, LlamaForCausalLM

    from divdec import DivergenceForCausalLM
    from divdec.training.distillation_loss import Distillation, plain_head
    from divdec.training.teachers import CachedTeacher, Fingerprint, LiveTeacher

    torch.set_num_threads(1)

    def model(seed):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=given.vocabulary, hidden_size=given.width, intermediate_size=2 * given.width,
            num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, initializer_range=0.1,
            tie_word_embeddings=True,
        )  # fmt: skip
        return LlamaForCausalLM(config)

    teacher = DivergenceForCausalLM.from_parts(*(model(seed).eval() for seed in range(3)), steering="linear:1.5")
    teacher.requires_grad_(False)
    student = model(3)
    length = given.prompt + given.answer
    ids = torch.randint(0, given.vocabulary, (given.rows, length))
    labels = ids.clone()
    labels[:, : given.prompt] = -100
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    batch["index"] = torch.arange(given.rows)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")} | {"use_cache": False}
    temperature, k, count = 1.5, 64, given.rows * given.answer
    if way == "in pieces, cached":
        # Arbitrary values; they do not change the memory.
        cached = CachedTeacher(
            Fingerprint("", "", "", "", temperature, k), given.vocabulary,
            torch.arange(k, dtype=torch.int32).expand(count, k).contiguous(), torch.full((count, k), -8.0),
            torch.full((count,), math.log1p(-k * math.exp(-8))), torch.arange(0, count + 1, given.answer),
        )  # fmt: skip
        objective = Distillation(cached, plain_head(student))
    else:
        objective = Distillation(LiveTeacher(teacher, temperature, "teacher-student"), plain_head(student))
    before, started = resident(), time.perf_counter()
    if way == "plain":
        with torch.no_grad():
            theirs = teacher(**inputs).logits[:, :-1]
        ours = student(**inputs).logits[:, :-1]
        each = kl_div(
            (ours / temperature).log_softmax(-1), (theirs / temperature).log_softmax(-1), log_target=True,
            reduction="none",
        )  # fmt: skip
        chosen = labels[:, 1:] != -100
        loss = temperature**2 * each.sum(-1)[chosen].sum() / chosen.sum()
    else:
        loss = objective.loss(student, batch, None)
    loss.backward()
    seconds = time.perf_counter() - started
    norm = torch.stack([weight.grad.norm() for weight in student.parameters() if weight.grad is not None]).norm()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "way": way, "resident_before": before, "added": peak - before, "seconds": seconds,
        "loss": float(loss.detach()), "gradient_norm": float(norm),
    }  # fmt: skip


def resident():
    """Bytes of this process that are in memory (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main():
    """Run every implementation in a separate process, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("vocabulary", 128256), ("rows", 4), ("prompt", 64), ("answer", 64), ("width", 32)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        print(json.dumps(measure_step(given.way, given)))
        return
    found = []
    for way in WAYS:
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            sys.exit(f"{way} failed:\n{run.stderr[-2000:]}")
        found.append(json.loads(run.stdout.splitlines()[-1]))
    if given.json:
        print(json.dumps(found))
        return
    one = given.rows * (given.prompt + given.answer) * given.vocabulary * 4
    print(
        f"vocabulary {given.vocabulary}, {given.rows} × ({given.prompt} prompt + {given.answer} answer) tokens; "
        f"one set of float32 logits: {one / 1e6:.0f} MB"
    )
    print(f"{'':<18} {'added memory':>12} {'seconds':>8} {'loss':>10} {'gradient norm':>14}")
    for row in found:
        print(
            f"{row['way']:<18} {row['added'] / 1e6:>9.0f} MB {row['seconds']:>8.2f} {row['loss']:>10.6f} "
            f"{row['gradient_norm']:>14.6f}"
        )


if __name__ == "__main__":
    main()
