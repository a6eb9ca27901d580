"""Cost of the TOFU suite: divdec against one pass per metric in the same run, and a sweep against one setting.

The peer computes each metric the straightforward way, as OpenUnlearning's metrics do: its own pass over its own
questions, batches of 32 in the order of the file. Both measure the same figures, which are compared.

With --openunlearning the same model is also measured by OpenUnlearning itself, and by `divdec eval`, whole processes.

    python benchmarks/evaluation.py --model MODEL --retain MODEL --data TOFU --holdout FILE --split forget10
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from rouge_score.rouge_scorer import RougeScorer
from torch.nn import functional

from divdec import DivergenceForCausalLM
from divdec.data.formatting import IGNORED, left_padded
from divdec.evaluation.questions import QuestionFormat, decoded
from divdec.evaluation.run import parse_sweep
from divdec.evaluation.scoring import EvaluatedModel, gradient_norm
from divdec.evaluation.tofu import NEW_TOKENS, evaluate_tofu, read_tofu
from divdec.model.checkpoint import load_model, load_tokenizer
from openunlearning import python_of, summary

BATCH = 32


class Counter:
    """Forward passes of a model and the sequences in them."""

    def __init__(self, model):
        self.passes, self.sequences = 0, 0
        self.handle = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module, arguments, options):
        ids = options.get("input_ids", arguments[0] if arguments else None)
        self.passes += 1
        self.sequences += ids.shape[0]


class OnePassAMetric:
    """The straightforward implementation: every metric runs the model over its own data."""

    def __init__(self, model, reference, layout):
        self.model, self.reference, self.layout = model, reference, layout
        self.figures = {}

    def run(self, data):
        sets = data.sets
        for name in ("forget", "retain", "ra", "wf"):
            questions = sets[name]
            own = [question.record for question in questions]
            self.figures[f"{name}_Q_A_Prob"] = statistics.fmean(self.probabilities(own))
            kinds = [("PERT", [question.wrong for question in questions])]
            if questions[0].paraphrased is not None:
                kinds.append(("PARA", [(question.paraphrased,) for question in questions]))
            for kind, texts in kinds:
                columns = []
                for column in range(len(texts[0])):
                    records = [_with(question.record, row[column]) for question, row in zip(questions, texts)]
                    columns.append(self.probabilities(records))
                self.figures[f"{name}_Q_A_{kind}_Prob"] = statistics.fmean(map(statistics.fmean, zip(*columns)))
            self.figures[f"{name}_Q_A_ROUGE"] = self.rouge(own)
        forget, holdout = ([q.record for q in sets[name]] for name in ("forget", "holdout"))
        paraphrased = [_with(q.record, q.paraphrased) for q in sets["forget"]]
        self.figures["forget_Q_A_PARA_ROUGE"] = self.rouge(paraphrased)
        self.figures["exact_memorization"] = statistics.fmean(
            (logits.argmax(-1) == labels)[:-1].float().mean().item() for logits, labels in self.labelled(forget)
        )
        self.figures["extraction_strength"] = statistics.fmean(
            _strength((logits.argmax(-1) == labels)[:-1].tolist()) for logits, labels in self.labelled(forget)
        )
        for records in (forget, holdout):
            self.probabilities(records)  # loss
            self.probabilities(records)  # zlib
            self.probabilities(records)  # reference: the model's own
            self.probabilities(records, self.reference)
            for logits, labels in self.labelled(records):  # min-k
                logits.float().log_softmax(-1).gather(1, labels[:, None])
            for logits, _ in self.labelled(records):  # min-k++
                log_p = logits.float().log_softmax(-1)
                (log_p.exp() * log_p.square()).sum(-1)
            layout = dataclasses.replace(self.layout)
            for record in records:
                gradient_norm(self.model, layout.encode([record])[0])

    def labelled(self, records, model=None):
        """Logits and labels of each answer's tokens, a batch of 32 at a time in the order given."""
        model = model or self.model
        layout = dataclasses.replace(self.layout)  # which remembers nothing: each metric lays its data out
        for start in range(0, len(records), BATCH):
            examples = [layout.encode([record])[0] for record in records[start : start + BATCH]]
            width = max(len(example.input_ids) for example in examples)
            ids = torch.tensor([e.input_ids + [0] * (width - len(e.input_ids)) for e in examples])
            mask = torch.tensor([[1] * len(e.input_ids) + [0] * (width - len(e.input_ids)) for e in examples])
            labels = torch.tensor([e.labels + [IGNORED] * (width - len(e.labels)) for e in examples])
            with torch.inference_mode():
                logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
            for row in range(len(examples)):
                chosen = labels[row, 1:] != IGNORED
                yield logits[row][chosen], labels[row, 1:][chosen]

    def probabilities(self, records, model=None):
        return [
            functional.cross_entropy(logits.float(), labels).neg().exp().item()
            for logits, labels in self.labelled(records, model)
        ]

    def rouge(self, records):
        found = []
        scorer = RougeScorer(["rouge1", "rougeL"], use_stemmer=True)
        layout, tokenizer = dataclasses.replace(self.layout), self.layout.tokenizer
        for start in range(0, len(records), BATCH):
            batch = records[start : start + BATCH]
            ids, mask = left_padded([layout.prompt(record) for record in batch], tokenizer.pad_token_id)
            with torch.inference_mode():
                output = self.model.generate(
                    input_ids=ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False,
                    pad_token_id=tokenizer.pad_token_id,
                )  # fmt: skip
            for row, record in zip(output[:, ids.shape[1] :].tolist(), batch, strict=True):
                found.append(scorer.score(layout.truth(record), decoded(tokenizer, row).strip())["rougeL"].recall)
        return statistics.fmean(found)


def _with(record, answer):
    return type(record)(answer, record.messages, record.prompt, record.location)


def _strength(hits):
    trailing = next((count for count, hit in enumerate(reversed(hits)) if not hit), len(hits))
    return max(trailing, 1) / len(hits)


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
        subject.scores(layout.encode(records), moments=moments, batch_size=BATCH, title=None)


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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--retain", required=True, help="q of the sweep, and the reference model")
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--holdout", required=True, type=Path)
    parser.add_argument("--split", default="forget01")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--openunlearning", type=Path, metavar="PATH", help="a checkout of OpenUnlearning")
    parser.add_argument("--openunlearning-python", type=Path, metavar="PATH", help="of its environment")
    given = parser.parse_args()
    if given.openunlearning:
        python_of(given.openunlearning, given.openunlearning_python)  # before an hour is spent

    tokenizer = load_tokenizer(Path(given.model))
    data = read_tofu(given.data, given.split, given.holdout, given.limit)
    layout = QuestionFormat(tokenizer)
    items = sum(len(questions) for questions in data.sets.values())

    def load(name):
        return load_model(Path(name), dtype=torch.float32).eval()

    model, reference = load(given.model), load(given.retain)
    rows: dict[str, list[tuple[float, int, int]]] = {"ours": [], "one pass a metric": []}
    figures = {}
    for _ in range(given.repeats):
        for name in rows:
            counter = Counter(model)
            if name == "ours":
                seconds, (found,) = _timed(
                    lambda: evaluate_tofu(EvaluatedModel(model, tokenizer), data, reference=reference)
                )
                figures[name] = found.figures
            else:
                peer = OnePassAMetric(model, reference, layout)
                seconds, _ = _timed(lambda peer=peer: peer.run(data))
                figures[name] = peer.figures
            counter.handle.remove()
            rows[name].append((seconds, counter.passes, counter.sequences))
    for metric, value in figures["one pass a metric"].items():
        assert abs(figures["ours"][metric] - value) < 1e-4, (metric, figures["ours"][metric], value)

    print(f"TOFU {given.split}, {items} questions, {torch.get_num_threads()} threads, median of {given.repeats}")
    medians = {}
    for name, runs in rows.items():
        medians[name] = statistics.median(run[0] for run in runs)
        print(
            f"{name:<20} {medians[name]:7.1f} s  {items / medians[name]:6.1f} questions/s  "
            f"{runs[0][1]:6d} forward passes of {runs[0][2]} sequences"
        )
    print(f"ratio                {medians['one pass a metric'] / medians['ours']:7.2f}")

    steered = DivergenceForCausalLM.from_parts(load(given.model), load(given.retain), load(given.model))
    texts = ["linear:0.25,0.5,0.75,1,1.5,2", "rank:1,5,20,100"]
    attacked, others = _answers(data)
    times = {}
    for count, settings in ((1, parse_sweep(["linear:1"])), (10, parse_sweep(texts))):
        subject = EvaluatedModel(steered, tokenizer, settings)
        times[count] = statistics.median(
            _timed(lambda subject=subject: _teacher_forced(subject, layout, attacked, others))[0]
            for _ in range(given.repeats)
        )
    print(
        f"teacher-forced sweep: 1 setting {times[1]:.1f} s, 10 settings {times[10]:.1f} s: {times[10] / times[1]:.2f}×"
    )
    if given.openunlearning:
        _against_openunlearning(given)


if __name__ == "__main__":
    main()
