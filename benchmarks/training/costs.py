"""Cost of a training step and of a distillation step.

    python -m benchmarks.training.costs step [--model smollm2] [--lora-rank 16] [--toy]
    python -m benchmarks.training.costs distillation [--rows 4] [--prompt 64] [--answer 64] [--toy]

- step: `divdec train` in bfloat16 against a bare loop's forward and backward pass in the same run; processor seconds a
  step of 16 records with short answers, median of the rounds.
- distillation: memory that a step adds, with the loss in pieces and from whole logits. The models are very narrow and
  have a vocabulary of real size, so that logits decide the memory. Each variant runs in its own process.

Prints a few lines, and with --json one JSON object last.
"""

from __future__ import annotations

import argparse
import copy
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, get_peft_model

from benchmarks.decoding.steering import paths_of, toy_bundle
from divdec import DivergenceForCausalLM
from divdec.checkpoint import CheckpointReference, load_model, load_tokenizer
from divdec.data.formatting import encode_records
from divdec.data.records import Message, Record
from divdec.training.fine_tuning import fine_tune
from divdec.training.inputs import Collator, model_inputs
from divdec.training.settings import TrainingSettings

WAYS = ("plain", "in pieces")


def measure_step(way, given):
    """Run one step in this process."""
    import torch
    from torch.nn.functional import kl_div
    from transformers import LlamaConfig, LlamaForCausalLM

    from divdec.training.distillation_loss import Distillation, SteeredTeacher, plain_head

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
    student = model(3)
    length = given.prompt + given.answer
    ids = torch.randint(0, given.vocabulary, (given.rows, length))
    labels = ids.clone()
    labels[:, : given.prompt] = -100
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    batch["index"] = torch.arange(given.rows)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")} | {"use_cache": False}
    temperature = 1.5
    objective = Distillation(SteeredTeacher(teacher, temperature, "teacher-student"), plain_head(student))
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


def distillation(given):
    """Memory of one distillation step; every implementation runs in a separate process."""
    rows = []
    for way in WAYS:
        command = [sys.executable, "-m", "benchmarks.training.costs", *sys.argv[1:], "--way", way]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{way} failed:\n{done.stderr[-2000:]}")
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    size = given.rows * (given.prompt + given.answer) * given.vocabulary * 4
    print(f"vocabulary {given.vocabulary}, {given.rows} × ({given.prompt} prompt + {given.answer} answer) tokens; "
          f"one set of float32 logits: {size / 1e6:.0f} MB")  # fmt: skip
    print(f"{'':<18} {'added memory':>12} {'seconds':>8} {'loss':>10} {'gradient norm':>14}")
    for row in rows:
        print(f"{row['way']:<18} {row['added'] / 1e6:>9.0f} MB {row['seconds']:>8.2f} {row['loss']:>10.6f} "
              f"{row['gradient_norm']:>14.6f}")  # fmt: skip
    return rows


BATCH, STEPS = 16, 4


def bare(model, tokenizer, examples):
    """Forward and backward pass alone, with the model's own loss."""
    model.train()
    batches = list(Collator(tokenizer).batches(examples, range(len(examples)), BATCH, torch.device("cpu")))
    started = time.process_time()
    for batch in batches:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**model_inputs(batch)).loss
        loss.backward()
        model.zero_grad()
    return (time.process_time() - started) / len(batches)


def trained(model, tokenizer, examples, rank):
    """The whole of `fine_tune`: batches, forward and backward pass, clipping, AdamW."""
    settings = TrainingSettings(learning_rate=1e-5, batch_size=BATCH, epochs=1.0, precision="bfloat16", lora_rank=rank)
    with tempfile.TemporaryDirectory() as folder:
        started = time.process_time()
        options = {"title": "step", "measure": False, "resumable": False}
        _, result = fine_tune(model, tokenizer, examples, settings, Path(folder), **options)
    return (time.process_time() - started) / result.steps


def step(given):
    """Processor time of a training step of `divdec train` in bfloat16, and of a bare loop's two passes."""
    with tempfile.TemporaryDirectory() as folder:
        if given.toy:
            target = paths_of(toy_bundle(Path(folder)))["target"]
        else:
            target = CheckpointReference.parse(given.model or "smollm2").resolve(Path(), weights=True)
        model, tokenizer = load_model(target, dtype=torch.float32), load_tokenizer(target)
    questions = [(Message("user", f"Name the capital of country {n}."),) for n in range(BATCH * STEPS)]
    records = [Record(f"The capital of that country is City {n}.", messages=q) for n, q in enumerate(questions)]
    examples = encode_records(records, tokenizer)
    adapters = LoraConfig(r=given.lora_rank or 1, lora_alpha=2 * given.lora_rank or 1, target_modules="all-linear")

    def untrained():
        copied = copy.deepcopy(model)
        return get_peft_model(copied, adapters) if given.lora_rank else copied

    bare(untrained(), tokenizer, examples)
    times = {"bare": [], "divdec": []}
    for _ in range(given.rounds):
        times["bare"].append(bare(untrained(), tokenizer, examples))
        times["divdec"].append(trained(copy.deepcopy(model), tokenizer, examples, given.lora_rank))
    medians = {name: statistics.median(some) for name, some in times.items()}
    tokens = statistics.fmean(len(example.input_ids) for example in examples)
    print(f"{model.num_parameters():,} parameters, {BATCH} records of {tokens:.0f} tokens")
    print(f"bare loop {medians['bare']:.2f} s, divdec {medians['divdec']:.2f} s a step")
    print(f"tokens per second, relative to the bare loop: {medians['bare'] / medians['divdec']:.2f}")
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measure", choices=("step", "distillation"))
    parser.add_argument("--toy", action="store_true", help="small models that try the script")
    parser.add_argument("--model", help="step: a checkpoint")
    parser.add_argument("--lora-rank", type=int, default=0, help="step: train adapters; 0 trains all weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    memory = parser.add_argument_group("distillation")
    for name, value in (("vocabulary", 128256), ("rows", 4), ("prompt", 64), ("answer", 64), ("width", 32)):
        memory.add_argument(f"--{name}", type=int, default=value)
    memory.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if given.toy:
        given.rounds, given.vocabulary, given.prompt, given.answer = 1, 4096, 16, 16
    if given.way:
        print(json.dumps(measure_step(given.way, given)))
        return
    result = {"step": step, "distillation": distillation}[given.measure](given)
    if given.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
