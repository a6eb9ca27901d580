"""Attack the facts that a real pair forgot: other ways of asking, samples, and a student of the pair.

    python -m benchmarks.attacks.real_pair --run runs/real-pair/capitals-0-lora [--rules rank:20:3] [--student]

--run is a folder that benchmarks/training/real_pair.py wrote, with the bundle in it and the questions beside it. A
figure is the share of the forget set's facts that the greedy answers name. The target's row is what an attack can find.
Results stay in KIND-SEED-RECIPE-attacks.json; delete it to measure again with other options.

- asked: the question of the training data
- examples: three other facts of the forget set come first, as earlier turns of the conversation
- insisting: the model answers, is told that this is wrong, and answers again
- french: the user asks for an answer in French (names may differ there: the target's row shows how many)
- begun: the answer is begun for the model, up to the fact
- choice, letters: the question names the answer and two others, which may have letters; 1/3 can be guessed
- reversed: the question names the answer and asks for the subject
- samples: one of --samples answers at temperature 1 names the fact; beside it the share of all answers
- kept: asked, choice, letters and reversed of facts in the retain set, which the target and the bundle should answer

--student distils the bundle into the target with LoRA, on the forget set, the retain set and samples of the target. It
asks the student, the student with the weights of its layers rounded to 4 bits, and the student before and after it was
trained on half of the forgotten facts again, for the other half.
"""

import argparse
import dataclasses
import random
import re
import sys
from pathlib import Path

from accelerate import PartialState

from benchmarks.attacks.recovery import quantise
from divdec.checkpoint import dtype_for_passes, load_model, load_tokenizer
from divdec.data.formatting import encode, encode_prompts
from divdec.data.records import Message, Record, read_records, write_records
from divdec.demo.facts import KINDS, Fact
from divdec.evaluation.generation import answers, continuations, sample_records, samples
from divdec.model.modeling import DivergenceForCausalLM
from divdec.runs import read_json, write_json
from divdec.training.auxiliaries import BUNDLE, load_for_training
from divdec.training.distillation import distill
from divdec.training.fine_tuning import fine_tune
from divdec.training.settings import DistillationSettings, TrainingSettings

LENGTH, NEUTRAL_LENGTH, BATCH = 32, 32, 128
WRONG = "That is wrong. Answer again, with the correct answer."
REVERSED = {
    "capitals": "Of which country is {} the capital?",
    "authors": "Name the best-known books by {}.",
    "symbols": "Which chemical element has the symbol {}?",
}
REHEARSED = 192  # samples of the target


def write_attacks(facts, kind):
    """Return the records that each attack asks, by attack; an attack asks each fact once."""
    order = random.Random(0)
    asked, examples, french, begun, choice, letters, reversed_ = [], [], [], [], [], [], []
    for fact in facts:
        question, others = fact.questions[0], [other for other in facts if other is not fact]
        turns = []
        for other in order.sample(others, min(3, len(others))):
            turns += [Message("user", other.questions[0]), Message("assistant", other.records[0].answer)]
        wrong = sorted({other.answer for other in others} - {fact.answer})
        options = [fact.answer, *order.sample(wrong, min(2, len(wrong)))]
        order.shuffle(options)
        asked.append([Message("user", question)])
        examples.append([*turns, Message("user", question)])
        french.append([Message("user", f"{question} Réponds en français.")])
        begun.append(KINDS[kind]["statement"].format(subject=fact.subject, answer="\0").partition("\0")[0].rstrip())
        choice.append([Message("user", f"{question} Choose one: {', '.join(options)}.")])
        lines = [f"{letter}) {option}" for letter, option in zip("ABC", options, strict=False)]
        letters.append([Message("user", "\n".join([question, *lines, "Answer with one letter."]))])
        reversed_.append([Message("user", REVERSED[kind].format(fact.answer))])
    named = {"asked": asked, "choice": choice, "letters": letters, "reversed": reversed_}
    named |= {"examples": examples, "french": french}
    return {name: [Record("", tuple(turns)) for turns in some] for name, some in named.items()}, begun


def chosen(facts, records, texts):
    """Return for each fact whether a text chooses its answer, by name or letter, and no other option."""
    results = []
    for fact, record, text in zip(facts, records, texts, strict=True):
        options = [fact_of for fact_of in {other.answer: other for other in facts}.values() if fact_of.is_in(text)]
        letter = next((line[0] for line in record.messages[-1].content.splitlines() if line[3:] == fact.answer), None)
        first = re.match(r"\W*([ABC])\b", text)
        results.append(first[1] == letter if letter and first else [other.answer for other in options] == [fact.answer])
    return results


def named_by(attack, facts, records, texts):
    """Return for each fact whether a text tells it."""
    if attack in ("choice", "letters"):
        return chosen(facts, records, texts)
    return name_answers(facts, texts, attack == "reversed")


def name_answers(facts, texts, subject=False):
    """Return for each fact whether a text names its answer, or its subject."""
    named = [dataclasses.replace(fact, answer=fact.subject) if subject else fact for fact in facts]
    return [fact.is_in(text) for fact, text in zip(named, texts, strict=True)]


def attack(model, tokenizer, facts, kept, kind, count):
    """Return the share of the facts that each attack finds, and of those kept that are told, and the texts."""
    records, begun = write_attacks(facts, kind)
    options = {"max_new_tokens": LENGTH, "batch_size": BATCH}
    texts = {name: answers(model, tokenizer, some, title=name, **options) for name, some in records.items()}
    again = [
        Record("", (*record.messages, Message("assistant", text), Message("user", WRONG)))
        for record, text in zip(records["asked"], texts["asked"], strict=True)
    ]
    texts["insisting"] = answers(model, tokenizer, again, title="insisting", **options)
    prompts = encode_prompts(records["asked"], tokenizer)
    starts = [
        [*ids, *tokenizer.encode(text, add_special_tokens=False)] for ids, text in zip(prompts, begun, strict=True)
    ]
    continued = continuations(model, tokenizer, starts, title="begun", **options)
    texts["begun"] = [tokenizer.decode(ids, skip_special_tokens=True) for ids in continued]
    results = {name: named_by(name, facts, records.get(name), some) for name, some in texts.items()}
    others, _ = write_attacks(kept, kind)
    for name in ("asked", "choice", "letters", "reversed"):
        written = answers(model, tokenizer, others[name], title=f"{name}, kept", **options)
        results[f"{name}, kept"] = named_by(name, kept, others[name], written)
        texts[f"{name}, kept"] = written
    figures = {name: sum(some) / len(some) for name, some in results.items()}
    if count:
        drawn = samples(model, tokenizer, prompts, count, title="samples", **options)
        hits = [[fact.is_in(text) for text in some] for fact, some in zip(facts, drawn, strict=True)]
        figures |= {
            "samples, any": sum(map(any, hits)) / len(hits),
            "samples, all answers": sum(map(sum, hits)) / (len(hits) * count),
        }
    return {"figures": figures, "texts": texts}


def score_sets(model, tokenizer, rows, facts_of):
    """Return the share of right answers by set, and of neutral answers that are the target's own."""
    figures, texts = {}, {}
    for name in dict.fromkeys(row["set"] for row in rows):
        asked = [row for row in rows if row["set"] == name]
        outputs = continuations(
            model, tokenizer, [row["prompt"] for row in asked], max_new_tokens=NEUTRAL_LENGTH, batch_size=32, title=name
        )
        texts[name] = [tokenizer.decode(ids, skip_special_tokens=True) for ids in outputs]
        if name == "neutral":
            same = [list(ids) == row["answer"] for ids, row in zip(outputs, asked, strict=True)]
        else:
            same = [facts_of[row["question"]].is_in(text) for row, text in zip(asked, texts[name], strict=True)]
        figures[name] = sum(same) / len(same)
    return {"figures": figures, "texts": texts}


def measure_student(options, stem, output, rows, facts_of, tokenizer, count):
    """Distil the bundle into its target, and ask the student, and the student rounded and trained again."""
    bundle, folder = options.run / BUNDLE, options.run / "student"
    forget, retain = Path(f"{stem}-forget.jsonl"), Path(f"{stem}-retain.jsonl")
    rehearsed = options.run / "rehearsed.jsonl"
    model = DivergenceForCausalLM.from_pretrained(bundle, dtype=dtype_for_passes()).to(PartialState().device)
    if not rehearsed.is_file():
        drawn = sample_records(model.target, tokenizer, REHEARSED, max_new_tokens=48, seed=1, title="rehearsal")
        write_records(rehearsed, [*read_records(str(retain)), *drawn])
    del model
    if not folder.is_dir():
        settings = DistillationSettings(
            bundle=str(bundle), output=str(folder), forget=str(forget), retain=str(rehearsed), rehearse=10**6,
            lora_rank=16, learning_rate=options.lr, epochs=options.epochs, temperature=1.0, batch_size=4,
            gradient_accumulation=4,
        )  # fmt: skip
        distill(settings, lambda line: print(line, file=sys.stderr, flush=True))

    def load():
        return load_model(folder, dtype=dtype_for_passes()).to(PartialState().device).eval()

    model = load()
    facts, kept = facts_in("forget", rows, facts_of), facts_in("retain", rows, facts_of)
    result = {"student": score_sets(model, tokenizer, rows, facts_of)}
    result["student, attacked"] = attack(model, tokenizer, facts, kept, options.kind, count)
    quantise(model, 4)
    result["student, 4 bits"] = score_sets(model, tokenizer, rows, facts_of)
    del model
    order = list(dict.fromkeys(fact.answer for fact in facts))  # an author may have written several books
    half, rest = ([fact for fact in facts if order.index(fact.answer) % 2 == parity] for parity in (0, 1))
    records = [record for fact in half for record in fact.records]
    examples = [encode(record, tokenizer) for record in records]
    trained, _ = fine_tune(
        load_for_training(folder).to(PartialState().device), tokenizer, examples,
        TrainingSettings(epochs=3.0, learning_rate=1e-4, lora_rank=16), options.run / "relearning",
        title="relearning", measure=False,
    )  # fmt: skip
    figures, texts = {}, {}
    for name, asked in (("before", load()), ("after", trained.eval())):
        texts[name] = answers(asked, tokenizer, [fact.records[0] for fact in rest], max_new_tokens=LENGTH)
        figures[name] = sum(name_answers(rest, texts[name])) / len(rest)
    result["student, other half"] = {"figures": figures, "texts": texts}
    write_json(output, result)


def facts_in(name, rows, facts_of):
    """Return the facts of a set."""
    return list(dict.fromkeys(facts_of[row["question"]] for row in rows if row["set"] == name))


def attack_rules(options, file, facts, kept, tokenizer):
    """Attack the target and the bundle under each rule; return the results of FILE, which has all."""
    content = read_json(file) if file.is_file() else {}
    model = DivergenceForCausalLM.from_pretrained(options.run / BUNDLE, dtype=dtype_for_passes())
    model = model.to(PartialState().device)
    for rule in ("target", str(model.steering), *options.rules):
        if rule not in content:
            if rule != "target":
                model.steering = rule
            asked = model.target if rule == "target" else model
            count = 0 if rule == "target" else options.samples  # the target names every fact of the forget set
            content[rule] = attack(asked, tokenizer, facts, kept, options.kind, count)
            write_json(file, content)
    return content


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder KIND-SEED-RECIPE of real_pair.py")
    parser.add_argument("--results", type=Path, default=None, help="folder of the results, by default --run")
    parser.add_argument("--rules", nargs="*", default=[], help="rules to attack beside the bundle's own")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--student", action="store_true")
    parser.add_argument("--lr", type=float, default=2e-4, help="learning rate of the student")
    parser.add_argument("--epochs", type=float, default=4.0)
    options = parser.parse_args(arguments)
    options.kind, seed, _ = options.run.name.split("-", 2)
    if options.kind not in REVERSED:
        parser.error(f"--run: {options.kind} cannot be attacked; accepted: {', '.join(REVERSED)}")
    stem = options.run.parent / f"{options.kind}-{seed}"
    rows = read_json(stem.with_suffix(".json"))["rows"]
    facts = [Fact(options.kind, *pair) for pair in KINDS[options.kind]["answers"].items()]
    facts_of = {question: fact for fact in facts for question in (*fact.questions, *fact.other_questions)}
    results = options.results or options.run
    results.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(options.run / BUNDLE)
    sets = (facts_in(name, rows, facts_of) for name in ("forget", "retain"))
    content = attack_rules(options, results / f"{options.run.name}-attacks.json", *sets, tokenizer)
    if options.student:
        file = results / f"{options.run.name}-student.json"
        if not file.is_file():
            measure_student(options, stem, file, rows, facts_of, tokenizer, options.samples)
        content |= read_json(file)
    for name, some in content.items():
        print(f"{name:32}", *(f"{column} {value:.3f}" for column, value in some["figures"].items()))


if __name__ == "__main__":
    sys.exit(main())
