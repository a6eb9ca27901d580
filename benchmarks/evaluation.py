"""The TOFU suite's cost: ours against one pass a metric, in the same run, and a sweep against one setting.

The peer computes each metric the straightforward way, as OpenUnlearning's metrics do: its own pass over its own
questions, batches of 32 in the order of the file. Both measure the same figures, which are compared.

    python benchmarks/evaluation.py --model MODEL --retain MODEL --data TOFU --holdout FILE [--limit 100]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from torch.nn import functional

from divdec import DivergenceForCausalLM
from divdec.data.formatting import IGNORED
from divdec.evaluation import attacks
from divdec.evaluation.generation import left_padded
from divdec.evaluation.layout import Layout, decoded
from divdec.evaluation.run import parse_sweep
from divdec.evaluation.subject import Subject
from divdec.evaluation.text import rouge
from divdec.evaluation.tofu import NEW_TOKENS, TofuOptions, evaluate_tofu, read_tofu
from divdec.model.checkpoint import load_model, load_tokenizer

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
            for record in records:
                attacks.gradient_norm(self.model, self.layout.encode(record))

    def labelled(self, records, model=None):
        """Logits and labels of each answer's tokens, a batch of 32 at a time in the order given."""
        model = model or self.model
        for start in range(0, len(records), BATCH):
            examples = [self.layout.encode(record) for record in records[start : start + BATCH]]
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
        tokenizer = self.layout.tokenizer
        for start in range(0, len(records), BATCH):
            batch = records[start : start + BATCH]
            ids, mask = left_padded([self.layout.prompt(record) for record in batch], tokenizer.pad_token_id)
            with torch.inference_mode():
                output = self.model.generate(
                    input_ids=ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False,
                    pad_token_id=tokenizer.pad_token_id,
                )  # fmt: skip
            for row, record in zip(output[:, ids.shape[1] :].tolist(), batch, strict=True):
                found.append(rouge(decoded(tokenizer, row).strip(), self.layout.truth(record))["rougeL_recall"])
        return statistics.fmean(found)


def _with(record, answer):
    return type(record)(answer, record.messages, record.prompt, record.place)


def _strength(hits):
    trailing = next((count for count, hit in enumerate(reversed(hits)) if not hit), len(hits))
    return max(trailing, 1) / len(hits)


def _timed(work):
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--retain", required=True, help="q of the sweep, and the reference model")
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--holdout", required=True, type=Path)
    parser.add_argument("--split", default="forget01")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()

    tokenizer = load_tokenizer(Path(given.model))
    data = read_tofu(given.data, given.split, given.holdout, given.limit)
    options = TofuOptions()
    layout = Layout(tokenizer, "chat", options.system_prompt, options.date)
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
                    lambda: evaluate_tofu(Subject(model, tokenizer), data, options, reference=reference)
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
    examples = [layout.encode(question.record) for questions in data.sets.values() for question in questions]
    times = {}
    for count, settings in ((1, parse_sweep(["linear:1"])), (10, parse_sweep(texts))):
        subject = Subject(steered, tokenizer, settings)
        times[count] = statistics.median(
            _timed(lambda subject=subject: subject.scores(examples, moments=True, batch_size=BATCH, title=None))[0]
            for _ in range(given.repeats)
        )
    print(
        f"teacher-forced sweep: 1 setting {times[1]:.1f} s, 10 settings {times[10]:.1f} s: {times[10] / times[1]:.2f}×"
    )


if __name__ == "__main__":
    main()
