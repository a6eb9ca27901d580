"""Does a student that was distilled from a pretrained model's bundle forget facts, also under attack?

    make demo
    python -m research.studies.pretrained --student demo --news NEWS --output runs/student

A student learns the steered answers of the bundle of `make demo` to the forget set, and the target's to the retain set.
Columns as in the demo's table; the perplexity is that of 32 news texts, relative to the target's. Attacks on it: int8,
int4 (rounded weights, of the target too), relearning (training on all wordings of a third of the forgotten facts; the
other facts are asked) and unrelated (training on as many facts of the retain set), both at several learning rates.
Results are kept in OUTPUT/results.json after each row; the same command continues.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import tempfile
from pathlib import Path

import torch

from benchmarks.attacks.recovery import quantise
from divdec import DivergenceForCausalLM
from divdec.checkpoint import CheckpointReference, dtype_for_passes, load_model, load_tokenizer
from divdec.data.formatting import Format, encode_set
from divdec.data.records import RecordSet, read_records
from divdec.demo.facts import NEUTRAL, ask, known_facts, split
from divdec.demo.pretrained import COLUMNS, KIND, NEUTRAL_LENGTH, TARGET, measure, questions_of
from divdec.errors import Interrupted, UsageError
from divdec.evaluation.scoring import mean_loss, score
from divdec.runs import RECORD, read_json, write_json
from divdec.training.auxiliaries import load_for_training
from divdec.training.distillation import distill
from divdec.training.fine_tuning import fine_tune
from divdec.training.settings import DistillationSettings, TrainingSettings
from divdec_research.report.tables import markdown_table

RATE, EPOCHS, DIRECTION = 1e-4, 10.0, "student-teacher"
RATES = 5e-5, 1e-4, 2e-4
AFTER = 2, 4  # epochs of relearning, after which questions are asked
BATCH = 4
ATTACKS = "relearning", "unrelated"
SHOWN = 3  # every third fact is shown again
NEWS, NEWS_LENGTH = 32, 128  # texts, and their tokens


class StudentRun:
    """Models and questions of a run, and the rows that it has so far."""

    def __init__(self, options):
        self.demo, self.output = options.demo, options.output
        self.target = CheckpointReference.parse(TARGET).resolve(Path(), weights=True)
        self.tokenizer = load_tokenizer(self.target)
        target = load(self.target)
        self.sets = split(known_facts(target, self.tokenizer, [KIND]), options.seed)
        self.questions = questions_of(self.sets, read_json(self.demo / "pair" / RECORD)["rewordings"])
        asked = [record.answer for fact in self.sets["forget"] for record in fact.records]
        if [record.answer for record in read_records(self.demo / "forget.jsonl")] != asked:
            raise UsageError(f"{self.demo} is not a demo of this seed on this machine; run make demo again")
        self.expected = ask(target, self.tokenizer, NEUTRAL, NEUTRAL_LENGTH)
        self.news = None
        if options.news:
            self.news = encode_set(read_records(options.news), self.tokenizer, Format(max_length=NEWS_LENGTH))[:NEWS]
            self.perplexity = perplexity(target, self.news)
        self.output.mkdir(parents=True, exist_ok=True)
        self.file = self.output / "results.json"
        self.results = read_json(self.file) if self.file.exists() else {}

    def run(self):
        """Add the rows that are missing, and print the tables."""
        student = self.distil()
        self.row("target", lambda: load(self.target))
        self.row("steered", lambda: DivergenceForCausalLM.from_pretrained(
            self.demo / "bundle", dtype=dtype_for_passes()))  # fmt: skip
        self.row("student", lambda: load(student))
        for name, path in (("target", self.target), ("student", student)):
            for bits in (8, 4):
                self.row(f"{name}, int{bits}", lambda path=path, bits=bits: quantised(path, bits))
        for attack in ATTACKS:
            for rate in RATES:
                self.add(f"{attack}, {rate:g}", lambda attack=attack, rate=rate: self.train(student, attack, rate))
        print(self.table())

    def distil(self):
        """Train the student, if it is not there."""
        folder = self.output / "student"
        if not folder.exists():
            distill(
                DistillationSettings(
                    bundle=str(self.demo / "bundle"), forget=str(self.demo / "forget.jsonl"),
                    retain=str(self.demo / "retain.jsonl"), output=str(folder), learning_rate=RATE, epochs=EPOCHS,
                    direction=DIRECTION, rehearse=len(read_records(self.demo / "retain.jsonl")),
                )
            )  # fmt: skip
        return folder

    def add(self, name, make):
        """Compute a row that is missing."""
        if name not in self.results:
            self.results[name] = make()
            write_json(self.file, self.results)
            print(f"{name}: {self.results[name]}", flush=True)

    def row(self, name, load_it):
        """Measure a model that a function loads."""

        def figures():
            model = load_it()
            row = measure(model, self.tokenizer, self.questions, self.expected).figures
            if self.news is not None:
                if isinstance(model, DivergenceForCausalLM) and model.steering.rule == "rank":
                    model.steering = dataclasses.replace(model.steering, fill="soft")  # as all likelihoods
                row["perplexity"] = perplexity(model, self.news) / self.perplexity
            return row

        if self.news is not None and "perplexity" not in self.results.get(name, {}):
            self.results.pop(name, None)  # of a run without --news
        self.add(name, figures)

    def train(self, folder, attack, rate):
        """Share of the facts that are not shown that a model states, by steps of training."""
        model = load_for_training(folder)
        forget = self.sets["forget"]
        facts = forget[::SHOWN] if attack == "relearning" else self.sets["retain"][: len(forget[::SHOWN])]
        others = [fact for fact in forget if fact not in forget[::SHOWN]]
        examples = encode_set(
            RecordSet("shown", "question/answer", tuple(record for fact in facts for record in fact.records)),
            self.tokenizer,
        )
        asked = [(fact, question) for fact in others for question in (*fact.questions, *fact.other_questions)]
        per_epoch = -(-len(examples) // BATCH)
        curve = {}

        def after_epoch(trained, epoch):
            if epoch in AFTER:
                curve[str(epoch * per_epoch)] = self.stated(trained, asked)

        curve["0"] = self.stated(model.eval(), asked)
        settings = TrainingSettings(epochs=float(AFTER[-1]), learning_rate=rate, batch_size=BATCH)
        with tempfile.TemporaryDirectory() as work:
            fine_tune(
                model, self.tokenizer, examples, settings, Path(work), title=f"{attack}, {rate:g}", measure=False,
                resumable=False, on_epoch=after_epoch,
            )  # fmt: skip
        return curve

    def stated(self, model, asked):
        texts = ask(model, self.tokenizer, [question for _, question in asked])
        return sum(fact.is_in(text) for (fact, _), text in zip(asked, texts)) / len(asked)

    def table(self):
        """Format the rows."""
        columns = [*COLUMNS, *(["perplexity"] if self.news is not None else [])]
        rows = [
            [name, *(f"{row[column]:.2f}" for column in columns)]
            for name, row in self.results.items()
            if "forget" in row
        ]
        text = markdown_table(["", *columns], rows)
        curves = [[name, *(f"{share:.2f}" for share in row.values())] for name, row in self.results.items()
                  if name.startswith(ATTACKS)]  # fmt: skip
        steps = next(row for name, row in self.results.items() if name.startswith(ATTACKS))
        return f"{text}\n{markdown_table(['', *(f'{number} steps' for number in steps)], curves)}"


def load(path):
    return load_model(path, dtype=dtype_for_passes()).eval()


def quantised(path, bits):
    model = load(path)
    quantise(model, bits)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--news", help="plain text for perplexity, such as MUSE-News privleak/retain.jsonl")
    parser.add_argument("--student", required=True, type=Path, metavar="DEMO", dest="demo", help="folder of make demo")
    parser.add_argument("--seed", type=int, default=0, help="the demo's")
    options = parser.parse_args()
    try:
        StudentRun(options).run()
    except (UsageError, Interrupted) as error:
        parser.exit(2, f"pretrained: {error}\n")


@torch.no_grad()
def perplexity(model, examples):
    """Perplexity of plain texts."""
    return math.exp(mean_loss(score(model, examples, batch_size=8)))


if __name__ == "__main__":
    main()
