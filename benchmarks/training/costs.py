"""What do a training step, a distillation step and an evaluation cost?

    python -m benchmarks.training.costs step [--model smollm2] [--lora-rank 16] [--toy]
    python -m benchmarks.training.costs distillation [--rows 4] [--prompt 64] [--answer 64] [--toy]
    python -m benchmarks.training.costs evaluation --model MODEL --retain MODEL --data TOFU --holdout FILE \\
        --split forget10 [--openunlearning CHECKOUT]

- step: `divdec train` in bfloat16 against a bare loop's forward and backward pass in the same run; processor seconds a
  step of 16 records with short answers, median of the rounds.
- distillation: memory that a step adds, with the loss in pieces and from whole logits. The models are very narrow and
  have a vocabulary of real size, so that logits decide the memory. Each variant runs in its own process.
- evaluation: the TOFU suite, and a sweep of ten settings against one setting. With --openunlearning the same model is
  also measured by OpenUnlearning itself and by `divdec eval`, as whole processes, and the figures are compared. This
  needs a checkout and an environment with its requirements; nothing of it is imported.

Prints a few lines, and with --json one JSON object last.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import resource
import shutil
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
from divdec.evaluation.run import parse_sweep
from divdec.evaluation.scoring import EvaluatedModel
from divdec.training.fine_tuning import fine_tune
from divdec.training.inputs import Collator, model_inputs
from divdec.training.settings import TrainingSettings
from divdec_research.suites.questions import BenchmarkFormat
from divdec_research.suites.tofu import evaluate_tofu, read_tofu

# The default list leaves these out.
MORE = "exact_memorization,mia_loss,mia_zlib,mia_min_k,mia_min_k_plus_plus,mia_gradnorm,mia_reference"


def summary(checkout: Path, python: Path, model: Path, retain: Path, data: Path, holdout: Path, split: str) -> dict:
    """Run OpenUnlearning and return the content of TOFU_SUMMARY.json."""
    with tempfile.TemporaryDirectory() as folder:
        work, held_out = Path(folder), split.replace("forget", "holdout")
        # It asks for the data set "locuslab/TOFU", which a folder of that name answers.
        questions = work / "locuslab" / "TOFU"
        questions.mkdir(parents=True)
        for file in data.glob("*.json"):
            shutil.copyfile(file, questions / file.name)
        shutil.copyfile(holdout, questions / f"{held_out}.json")
        names = sorted(file.stem for file in questions.glob("*.json"))
        configs = "".join(f"- config_name: {name}\n  data_files: {name}.json\n" for name in names)
        (questions / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
        settings = {
            "experiment": "eval/tofu/default",
            "task_name": "benchmark",
            "forget_split": split,
            "holdout_split": held_out,
            "model.model_args.device_map": "cpu",
            "model.model_args.attn_implementation": "sdpa",
            "model.model_args.torch_dtype": "float32",
            "model.model_args.pretrained_model_name_or_path": model,
            "model.tokenizer_args.pretrained_model_name_or_path": model,
            "+eval/tofu_metrics": f"[{MORE}]",
            "eval.tofu.metrics.mia_reference.reference_model_path": retain,
            "paths.output_dir": work / "out",
        }
        command = [python, checkout / "src" / "eval.py", *(f"{name}={value}" for name, value in settings.items())]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"OpenUnlearning did not run:\n{done.stderr[-3000:]}")
        return json.loads((work / "out" / "TOFU_SUMMARY.json").read_text())


def python_of(checkout: Path, given: Path | None) -> Path:
    """The Python interpreter of its environment: the given one, or that of a virtual environment in the checkout."""
    for candidate in [given] if given else [checkout / name / "bin" / "python" for name in (".venv", "venv")]:
        if candidate.is_file():
            return candidate.absolute()
    raise SystemExit(f"{checkout} has no .venv with OpenUnlearning's requirements; give --openunlearning-python")


WAYS = ("plain", "in pieces")


def measure_step(way, given):
    """Run one step in this process."""
    import torch
    from torch.nn.functional import kl_div
    from transformers import LlamaConfig, LlamaForCausalLM

    from divdec import DivergenceForCausalLM
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
    teacher.requires_grad_(False)
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
    found = []
    for way in WAYS:
        command = [sys.executable, "-m", "benchmarks.training.costs", *sys.argv[1:], "--way", way]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{way} failed:\n{done.stderr[-2000:]}")
        found.append(json.loads(done.stdout.splitlines()[-1]))
    one = given.rows * (given.prompt + given.answer) * given.vocabulary * 4
    print(f"vocabulary {given.vocabulary}, {given.rows} × ({given.prompt} prompt + {given.answer} answer) tokens; "
          f"one set of float32 logits: {one / 1e6:.0f} MB")  # fmt: skip
    print(f"{'':<18} {'added memory':>12} {'seconds':>8} {'loss':>10} {'gradient norm':>14}")
    for row in found:
        print(f"{row['way']:<18} {row['added'] / 1e6:>9.0f} MB {row['seconds']:>8.2f} {row['loss']:>10.6f} "
              f"{row['gradient_norm']:>14.6f}")  # fmt: skip
    return found


EVALUATION_BATCH = 32


def _with(record, answer):
    return type(record)(answer, record.messages, record.prompt, record.location)


def _answers(data):
    """The records that the suite scores: those that are attacked, which need moments, and all others."""
    attacked = [question.record for name in ("forget", "holdout") for question in data.sets[name]]
    others = [question.record for name in ("retain", "ra", "wf") for question in data.sets[name]]
    for questions in data.sets.values():
        for question in questions:
            texts = [*question.wrong, *([question.paraphrased] if question.paraphrased else [])]
            others += [_with(question.record, text) for text in texts]
    return attacked, others


def _teacher_forced(subject, layout, attacked, others):
    layout = dataclasses.replace(layout)
    for records, moments in ((attacked, True), (others, False)):
        subject.scores(layout.encode(records), moments=moments, batch_size=EVALUATION_BATCH, title=None)


def _timed(work):
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def _against_openunlearning(given):
    """Run both as separate processes, once; imports and loading count for both."""
    places = [path.absolute() for path in (Path(given.model), Path(given.retain), given.data, given.holdout)]
    python = python_of(given.openunlearning, given.openunlearning_python)
    theirs, expected = _timed(lambda: summary(given.openunlearning.absolute(), python, *places, given.split))
    model, retain, data, holdout = map(str, places)
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "divdec.cli", "eval", "tofu", model, "--data", data, "--holdout", holdout,
            "--split", given.split, "--reference", retain, "--fluency", "none", "--dtype", "float32",
            "--device", "cpu", "--output", f"{folder}/ours",
        ]  # fmt: skip
        ours, _ = _timed(lambda: subprocess.run(command, check=True, capture_output=True))
        figures = json.loads(Path(folder, "ours", "summary.json").read_text())["figures"]
    for metric, value in expected.items():
        assert abs(figures[metric] - value) < 1e-4, (metric, figures[metric], value)
    print(f"whole processes: divdec eval {ours:.1f} s, OpenUnlearning {theirs:.1f} s: {theirs / ours:.2f}×, "
          f"{len(expected)} figures equal to 1e-4")  # fmt: skip
    return {"divdec": ours, "OpenUnlearning": theirs}


def evaluation(given):
    """Time of the TOFU suite, of a sweep of ten settings, and of OpenUnlearning's own evaluation."""
    if given.openunlearning:
        python_of(given.openunlearning, given.openunlearning_python)  # before an hour is spent
    tokenizer = load_tokenizer(Path(given.model))
    data = read_tofu(given.data, given.split, given.holdout, given.limit)
    layout = BenchmarkFormat(tokenizer)
    items = sum(len(questions) for questions in data.sets.values())

    def load(name):
        return load_model(Path(name), dtype=torch.float32).eval()

    model, reference = load(given.model), load(given.retain)
    whole = statistics.median(
        _timed(lambda: evaluate_tofu(EvaluatedModel(model, tokenizer), data, reference=reference))[0]
        for _ in range(given.rounds)
    )
    print(f"TOFU {given.split}, {items} questions, {torch.get_num_threads()} threads, median of {given.rounds}: "
          f"{whole:.1f} s, {items / whole:.1f} questions/s")  # fmt: skip
    steered = DivergenceForCausalLM.from_parts(load(given.model), load(given.retain), load(given.model))
    texts = ["linear:0.25,0.5,0.75,1,1.5,2", "rank:1,5,20,100"]
    attacked, others = _answers(data)
    times = {}
    for count, settings in ((1, parse_sweep(["linear:1"])), (10, parse_sweep(texts))):
        subject = EvaluatedModel(steered, tokenizer, settings)
        times[count] = statistics.median(
            _timed(lambda subject=subject: _teacher_forced(subject, layout, attacked, others))[0]
            for _ in range(given.rounds)
        )
    print(f"sweep: 1 setting {times[1]:.1f} s, 10 settings {times[10]:.1f} s: {times[10] / times[1]:.2f}×")
    found = {"questions": items, "seconds": whole, "sweep": times}
    return found | ({"processes": _against_openunlearning(given)} if given.openunlearning else {})


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
    parser.add_argument("measure", choices=("step", "distillation", "evaluation"))
    parser.add_argument("--toy", action="store_true", help="step, distillation: small models that try the script")
    parser.add_argument("--model", help="step, evaluation: a checkpoint")
    parser.add_argument("--lora-rank", type=int, default=0, help="step: train adapters; 0 trains all weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    memory = parser.add_argument_group("distillation")
    for name, value in (("vocabulary", 128256), ("rows", 4), ("prompt", 64), ("answer", 64), ("width", 32)):
        memory.add_argument(f"--{name}", type=int, default=value)
    memory.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    suite = parser.add_argument_group("evaluation")
    suite.add_argument("--retain", help="q of the sweep, and the reference model")
    suite.add_argument("--data", type=Path, help="folder with TOFU's files")
    suite.add_argument("--holdout", type=Path)
    suite.add_argument("--split", default="forget01")
    suite.add_argument("--limit", type=int)
    suite.add_argument("--openunlearning", type=Path, metavar="PATH", help="a checkout of OpenUnlearning")
    suite.add_argument("--openunlearning-python", type=Path, metavar="PATH", help="of its environment")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if given.measure == "evaluation" and None in (given.model, given.retain, given.data, given.holdout):
        parser.error("evaluation needs --model, --retain, --data and --holdout")
    if given.toy:
        given.rounds, given.vocabulary, given.prompt, given.answer = 1, 4096, 16, 16
    if given.way:
        print(json.dumps(measure_step(given.way, given)))
        return
    found = {"step": step, "distillation": distillation, "evaluation": evaluation}[given.measure](given)
    if given.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
