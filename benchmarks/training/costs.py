"""A training step of `divdec train` in bfloat16 against a bare loop's forward and backward pass, in the same run.

    python benchmarks/training.py --model smollm2

The records are questions with short answers. Times are processor seconds per step of 16 records, median of the rounds.
"""

import argparse
import copy
import statistics
import tempfile
import time
from pathlib import Path

import torch
import transformers

from divdec.data.formatting import encode_records
from divdec.data.records import Message, Record
from divdec.model.checkpoint import CheckpointReference, load_model, load_tokenizer
from divdec.training.fine_tuning import fine_tune
from divdec.training.inputs import Collator, model_inputs
from divdec.training.settings import TrainingSettings

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


def trained(model, tokenizer, examples):
    """The whole of `fine_tune`: batches, forward and backward pass, clipping, AdamW."""
    settings = TrainingSettings(epochs=1.0, learning_rate=1e-5, batch_size=BATCH, precision="bfloat16")
    with tempfile.TemporaryDirectory() as folder:
        started = time.process_time()
        _, result = fine_tune(
            model, tokenizer, examples, settings, Path(folder), title="step", measure=False, resumable=False
        )
    return (time.process_time() - started) / result.steps


def main() -> None:
    """Print both times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    folder = CheckpointReference.parse(options.model).resolve(Path(), weights=True)
    model, tokenizer = load_model(folder, dtype=torch.float32), load_tokenizer(folder)
    records = [
        Record(
            f"The capital of that country is City {n}.",
            messages=(Message("user", f"Name the capital of country {n}."),),
        )
        for n in range(BATCH * STEPS)
    ]
    examples = encode_records(records, tokenizer)
    bare(copy.deepcopy(model), tokenizer, examples)
    times = {"bare": [], "divdec": []}
    for _ in range(options.rounds):
        times["bare"].append(bare(copy.deepcopy(model), tokenizer, examples))
        times["divdec"].append(trained(copy.deepcopy(model), tokenizer, examples))
    medians = {name: statistics.median(some) for name, some in times.items()}
    tokens = statistics.fmean(len(example.input_ids) for example in examples)
    print(f"{model.num_parameters():,} parameters, {BATCH} records of {tokens:.0f} tokens")
    print(f"bare loop {medians['bare']:.2f} s, divdec {medians['divdec']:.2f} s a step")
    print(f"tokens per second, relative to the bare loop: {medians['bare'] / medians['divdec']:.2f}")


if __name__ == "__main__":
    main()
