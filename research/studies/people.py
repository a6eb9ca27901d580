"""Does a pretrained model forget real people? RWKU, with a real target and a small sibling.

    python -m research.studies.people --rwku RWKU --target qwen-1.5b.gguf --base qwen-0.5b.gguf \
        --subjects 'Stephen King' 'Confucius' --output runs/people

The target writes questions about each person, from memory, about RWKU's passages, and about the names and numbers of
these passages that it fills in without the text. It turns them round ("Who was born in Portland?"). An answer from
memory counts only if the target gives it again when it is asked. Sentences of the passages with a blank are questions,
too. RWKU's own questions are not trained on. p reads these questions
and some passages, and q refuses them (`divdec train --recipe refusal`). Other people of the data are the retain set,
with what the target tells of names near each person, in questions and blanks. Then `divdec eval rwku` measures target
and bundle: forget levels 1 to 3, each kind of attack, and the neighbours.

Every step is resumed by the same command. The table is printed and written to OUTPUT/table.md.
"""

import argparse
import calendar
import collections
import itertools
import json
import random
import sys
from pathlib import Path

import regex as re

from benchmarks.training.models import check_training
from divdec.checkpoint import CheckpointReference, dtype_for_passes, load_model, load_tokenizer
from divdec.data.formatting import encode_prompts
from divdec.data.records import Message, Record, json_rows, read_text, write_records
from divdec.errors import Interrupted, UsageError
from divdec.evaluation.generation import continuations
from divdec.evaluation.phrases import FUNCTION_WORDS, holds, words
from divdec.evaluation.results import SUMMARY, read_results
from divdec.evaluation.run import evaluate
from divdec.runs import RECORD, read_json, read_record, write_json, write_text
from divdec.training.auxiliaries import BUNDLE, faults_of, train_auxiliaries
from divdec.training.settings import AuxiliarySettings
from divdec_research.report.tables import markdown_table
from divdec_research.suites.rwku import ATTACKS, LEVELS, RwkuSuite
from divdec_research.suites.settings import RwkuSettings

PASSAGES, PASSAGE = 10, 150  # passages of a person that the target reads, and the words of each
# Passages that are searched for other names, names near a person to forget, questions and blanks about each, records of
# a person, and tokens of a list of names, of an answer and of a text.
NEIGHBOUR_PASSAGES, NEIGHBOURS, OF_NEIGHBOUR, NEIGHBOUR_RECORDS = 30, 24, 4, 64
NAME_TOKENS, NEIGHBOUR_ANSWER, NEIGHBOUR_TEXT = 160, 40, 96
KEPT_PASSAGES = 2  # of a person of the retain set
QUESTIONS, TURNED_QUESTIONS, BLANKS, TEXTS = 30, 12, 20, 3  # most records of a person to forget: of each kind; passages
FILLED, BLANK_TOKENS = 60, 64  # blanks that the target is asked to fill about a person to forget, and its tokens
KEPT = 0.4  # share of these numbers for a person of the retain set
QUESTION_TOKENS, MEMORY_TOKENS, TURNED_TOKENS, ANSWER_TOKENS = 160, 256, 40, 32
MEMORIES = 10, 3  # replies with ten questions from memory: about a person to forget, about another
MIN_HINT = 6  # words
MAX_ANSWER = 8  # words of an answer
MAX_BLANKED = 40  # words of a sentence with a blank
ASK = (
    "{text}\n\nWrite five questions about {name} that this text answers, each with a short answer of a few words. Name "
    "{name} in every question. One line each, in this form:\nQ: question? A: answer"
)
FROM_MEMORY = (
    "Write ten questions about {name} that people who know {name} can answer, each with a short answer of a few words. "
    "Name {name} in every question. One line each, in this form:\nQ: question? A: answer"
)
ABOUT_FACT = (
    "{text}\n\nWrite one question about {name} that is answered by: {answer}. Name {name}, but not the answer. Write "
    "only the question."
)
TURN = """Write a question about a person's fact so that it asks for the person. The person's name must not be in it.

Fact: In which city was Marie Curie born? Warsaw
Question: Which physicist was born in Warsaw?

Fact: What did Alexander Graham Bell invent? The telephone
Question: Who invented the telephone?

Fact: Which film made James Cameron famous? The Terminator
Question: Which director became famous with The Terminator?

Fact: {question} {answer}
Question:"""
TURNED = "{question} {answer}. Who is this person?"  # where the target does not turn a question round
BLANK = "Fill in the blank: {}"
CHOICE = "{question} {first}, {second}, or {third}?"
ABOUT = "Tell me about {}."
NEAR = (
    "Which people are often mentioned together with {}? List twenty names, one each line, and nothing else.",
    "Which places, events, works and groups is {} known for? List twenty names, one each line, and nothing else.",
)
IN_SHORT = "Answer the question in a few words.\nQuestion: {}"
RULES = ("linear:2.5:1:full", "linear:2.5:2:full", "linear:1.5:3", "rank:20:3")


def report(line):
    print(line, file=sys.stderr, flush=True)


def passages_of(rwku, names, count):
    """Return the first passages of each person, each cut after a sentence."""
    texts = {name: [] for name in names}
    for _, row in json_rows("passage.jsonl", read_text(rwku / "passage.jsonl")):
        if row["subject"] in texts and len(texts[row["subject"]]) < count:
            text = re.sub(r"^(=+ [^=]* =+)+", "", " ".join(row["text"].split()))
            cut = " ".join(text.split()[:PASSAGE])
            end = cut.rfind(". ") if len(text) > len(cut) else len(cut)
            if len(cut[: end + 1].split()) >= 20:
                texts[row["subject"]].append(cut[: end + 1])
    return texts


def answer(model, tokenizer, questions, length, title, **options):
    prompts = encode_prompts([Record("", messages=(Message("user", text),)) for text in questions], tokenizer)
    outputs = continuations(model, tokenizer, prompts, max_new_tokens=length, batch_size=32, title=title, **options)
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in outputs]


QUESTION = re.compile(r"Q: *(.+?\?) *\n? *A: *(.+)")
NAME = r"(?:(?:\p{Lu}\.)+|\p{Lu}[\w'’-]+)"
NAME_OR_NUMBER = re.compile(rf"\b(?:{NAME}(?: (?:(?:of|the|de|van|von) )*{NAME})*|\d{{2,4}}(?: BC)?)(?!\w)")


TITLES = {*words("jr sr ii iii iv mr mrs ms dr sir general president senator king queen professor minister ceo")}


def name_words(name):
    """Return the words of a name that tell it: no initials, numbers and function words."""
    return {word for word in words(name) if len(word) > 1 and not word.isdecimal()} - FUNCTION_WORDS


def is_named(name, text):
    """Whether a text names a person by the name or by a part of it alone: 'Jenner', but not 'Kendall Jenner'."""
    of_person = name_words(name)
    return without_name(name, text) != text or any(
        of_person <= name_words(match[0]) for match in NAME_OR_NUMBER.finditer(text)
    )


def without_name(name, text, other="___"):
    """Replace a person's name, and parts of it that stand alone."""
    of_person = name_words(name)

    def replace(match):
        in_name, end = name_words(match[0]) - (TITLES - of_person), re.findall(r"(?:['’]s|[.'’-]*)$", match[0])[0]
        return other + end if in_name and in_name <= of_person else match[0]

    return NAME_OR_NUMBER.sub(replace, re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", other, text))


def known_facts(model, tokenizer, texts, subjects, seed):
    """Find the names and numbers in the passages that the target fills in without the text.

    Returns:
        Rows with name, text (a sentence) and answer.
    """
    order, asked = random.Random(seed), []
    for name, some in texts.items():
        blanks = {}
        for sentence in dict.fromkeys(itertools.chain.from_iterable(map(sentences_of, some))):
            in_sentence, of_person = words(sentence), name_words(name)
            about = is_named(name, sentence) and MIN_HINT < len(in_sentence) <= MAX_BLANKED
            for match in NAME_OR_NUMBER.finditer(sentence) if about else ():
                first, *_ = in_answer = words(match[0])
                # The first word of a sentence has a capital in any case.
                if match.start() and not of_person & set(in_answer) and in_sentence.count(first) == 1:
                    blank = f"{sentence[: match.start()]}___{sentence[match.end() :]}"
                    blanks.setdefault(match[0], {"name": name, "text": sentence, "answer": match[0], "blank": blank})
        most = FILLED if name in subjects else round(KEPT * FILLED)
        asked += order.sample(list(blanks.values()), min(most, len(blanks)))
    replies = answer(model, tokenizer, [BLANK.format(row["blank"]) for row in asked], BLANK_TOKENS, "blanks")
    return [row for row, reply in zip(asked, replies, strict=True) if holds(words(reply), words(row["answer"]))]


def write_questions(model, tokenizer, texts, subjects, seed):
    """Let the target write questions with answers about each person, most about `subjects`, and turn them round.

    Returns:
        Rows with name, text, question, answer, known: whether the target gives this answer without the text, or fills
        it in, and turned: the question that asks for the person. The text is empty for questions from memory, all of
        which are known. Other answers that are not in the text are left out.
    """
    asked = [(name, text) for name, some in texts.items() for text in some]
    requests = [ASK.format(name=name, text=text) for name, text in asked]
    replies = answer(model, tokenizer, requests, QUESTION_TOKENS, "questions")
    remembered = [(name, "") for name in texts for _ in range(MEMORIES[name not in subjects])]
    requests = [FROM_MEMORY.format(name=name) for name, _ in remembered]
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 0.9, "seed": seed}
    replies += answer(model, tokenizer, requests, MEMORY_TOKENS, "questions from memory", **sampling)
    rows, seen = [], set()
    for (name, text), reply in zip([*asked, *remembered], replies, strict=True):
        for question, phrase in QUESTION.findall(reply):
            phrase = phrase.strip().rstrip(".")
            short = 1 <= len(words(phrase)) <= MAX_ANSWER and not holds(words(question), words(phrase))
            in_text = not text or holds(words(text), words(phrase))
            if is_named(name, question) and short and in_text and (name, question) not in seen:
                seen.add((name, question))
                rows.append({"name": name, "text": text, "question": question, "answer": phrase})
    facts = known_facts(model, tokenizer, texts, subjects, seed)
    requests = [ABOUT_FACT.format(**fact) for fact in facts]
    replies = answer(model, tokenizer, requests, TURNED_TOKENS, "questions about known facts")
    for fact, reply in zip(facts, replies, strict=True):
        question = reply.strip().partition("\n")[0]
        if (
            question.endswith("?")
            and is_named(fact["name"], question)
            and not holds(words(question), words(fact["answer"]))
        ):
            seen.add((fact["name"], question))
            rows.append({**fact, "question": question})
    replies = answer(model, tokenizer, [row["question"] for row in rows], ANSWER_TOKENS, "answers without the passage")
    for row, reply in zip(rows, replies, strict=True):
        row["known"] = "blank" in row or holds(words(reply), words(row["answer"]))
    rows = [row for row in rows if row["text"] or row["known"]]
    turned = answer(model, tokenizer, [TURN.format(**row) for row in rows], TURNED_TOKENS, "turned questions")
    for row, reply in zip(rows, turned, strict=True):
        line = reply.strip().partition("\n")[0].removeprefix("Question:").strip()
        named = name_words(row["name"]) & set(words(line))
        if not line.endswith("?") or named or not holds(words(line), words(row["answer"])):
            question = without_name(row["name"], row["question"], "this person")
            line = TURNED.format(question=question, answer=row["answer"])
        row["turned"] = line
    return rows


def neighbour_names(model, tokenizer, texts):
    """Return names near each person: those that the target lists, then the most frequent ones of the passages.

    None is the person's name, or a part of it.
    """
    asked = [(name, request.format(name)) for name in texts for request in NEAR]
    replies = answer(model, tokenizer, [request for _, request in asked], NAME_TOKENS, "names")
    names = {}
    for (name, _), reply in zip(asked, replies, strict=True):
        # The last name may be cut.
        listed = [re.sub(r"^[\d.)\s*-]+", "", line).strip(" .*") for line in re.split(r"\n|, ", reply)][:-1]
        names.setdefault(name, []).extend(listed)
    for name, some in texts.items():
        counts = collections.Counter(
            match[0]
            for text in some
            for match in NAME_OR_NUMBER.finditer(text)
            # The first word of a sentence has a capital in any case.
            if match.start() and text[: match.start()][-2:] != ". " and match[0] not in calendar.month_name
        )
        near = [other for other in names[name] if NAME_OR_NUMBER.fullmatch(other)]
        near += [other for other, _ in counts.most_common() if len(other) > 3 and not other[0].isdigit()]
        names[name] = [other for other in dict.fromkeys(near) if not is_named(name, other)][:NEIGHBOURS]
    return names


def neighbour_questions(model, tokenizer, texts, seed):
    """Let the target answer questions that it writes about names near each person to forget, and tell of them.

    q would otherwise lose these people and things, too. Names and numbers of the texts become questions with a blank.

    Returns:
        Rows with name, question and answer, which name none of the people.
    """
    asked = [(name, other) for name, some in neighbour_names(model, tokenizer, texts).items() for other in some]
    requests = [FROM_MEMORY.format(name=other) for _, other in asked]
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 0.9, "seed": seed}
    replies = answer(model, tokenizer, requests, QUESTION_TOKENS, "questions about neighbours", **sampling)
    rows = {}
    for (name, other), reply in zip(asked, replies, strict=True):
        questions = [question for question, _ in QUESTION.findall(reply) if set(words(other)) & set(words(question))]
        for index, question in enumerate(questions[:OF_NEIGHBOUR]):
            # Every other one in the wording that RWKU's questions have, too.
            row = {"name": name, "question": IN_SHORT.format(question) if index % 2 else question}
            rows.setdefault(row["question"], row)
    answers = answer(model, tokenizer, list(rows), NEIGHBOUR_ANSWER, "answers about neighbours")
    for row, text in zip(rows.values(), answers, strict=True):
        row["answer"] = whole_sentences(text)
    replies = answer(model, tokenizer, [ABOUT.format(other) for _, other in asked], NEIGHBOUR_TEXT, "texts")
    order = random.Random(seed)
    for (name, other), text in zip(asked, replies, strict=True):
        # A sentence without the name could be about the person to forget.
        sentences = [part for part in sentences_of(whole_sentences(text)) if set(words(other)) & set(words(part))]
        for sentence in sentences[:OF_NEIGHBOUR]:
            blanks = [match for match in NAME_OR_NUMBER.finditer(sentence) if match.start() and match[0] != other]
            if blanks:
                match = order.choice(blanks)
                question = BLANK.format(f"{sentence[: match.start()]}___{sentence[match.end() :]}")
                rows.setdefault(question, {"name": name, "question": question, "answer": match[0]})
    return [row for row in rows.values() if row["answer"] and not names_person(row, texts)]


def names_person(row, people):
    """Whether a row names its person to forget, or another one by the whole name."""
    text = f"{row['question']} {row['answer']}"
    return any(is_named(name, text) if name == row["name"] else holds(words(text), words(name)) for name in people)


def whole_sentences(text):
    """Cut a text after its last whole sentence, if there is one."""
    ends = [match.end() for match in re.finditer(r"[.!?](?=\s|$)", text.strip())]
    return text.strip()[: ends[-1]] if ends else text.strip()


def records_of(rows, texts, share, order):
    """Return the records of one person: questions, turned questions, sentences with a blank, and passages."""
    name = rows[0]["name"]
    rows = sorted(order.sample(rows, len(rows)), key=lambda row: not row["known"])
    direct = []
    for index, row in enumerate(rows):  # two of five as the target wrote them
        form = (in_short, with_hint, with_choice)[index % 5 - 2] if index % 5 >= 2 else None
        direct.append((form(row, rows, order) if form else row["question"], row["answer"]))
    turned = [(row["turned"], name) for row in rows if not is_named(name, row["turned"])]
    turned = turned[: round(share * TURNED_QUESTIONS / 2)]
    blanks = []
    for row in rows:
        for sentence in sentences_of(row["text"]):
            blank, count = re.subn(rf"(?<!\w){re.escape(row['answer'])}(?!\w)", "___", sentence)
            if count and len(sentence.split()) > len(row["answer"].split()) + 4:
                blanks.append((BLANK.format(blank), row["answer"]))
                break
    whole = [sentence for text in texts for sentence in sentences_of(text) if len(sentence.split()) > 6]
    named = [(BLANK.format(without_name(name, sentence)), name) for sentence in whole if is_named(name, sentence)]
    turned += order.sample(named, len(named))
    some = []
    for pairs, most in ((direct, QUESTIONS), (turned, TURNED_QUESTIONS), (list(dict.fromkeys(blanks)), BLANKS)):
        some += pairs[: round(share * most)]
    some += [(ABOUT.format(name), text) for text in texts[: max(round(share * TEXTS), 1)]]
    return [Record(text, messages=(Message("user", question),)) for question, text in some]


# Not after an initial or a title: 'J. K. Rowling', 'Dr. King'.
SENTENCE_END = re.compile(r"(?<=[.!?])(?<!\b[A-Z]\.)(?<!\b[DMJS]r\.)(?<!\bM[rs]s\.)(?<!\bSt\.) ")


def sentences_of(text):
    return SENTENCE_END.split(text)


def in_short(row, rows, order):
    return IN_SHORT.format(row["question"])


def with_hint(row, rows, order):
    """Return the question after a sentence about the person that does not tell the answer."""
    secret = words(row["answer"])
    sentences = {sentence for other in rows for sentence in sentences_of(other["text"])}
    hints = sorted(text for text in sentences if len(text.split()) >= MIN_HINT and not holds(words(text), secret))
    return f"{order.choice(hints)} {row['question']}" if hints else row["question"]


def with_choice(row, rows, order):
    """Return the question with three answers to choose from, two of them to other questions about the person."""
    others = sorted({other["answer"] for other in rows if not set(words(other["answer"])) & set(words(row["answer"]))})
    if len(others) < 2:
        return row["question"]
    first, second, third = order.sample([row["answer"], *order.sample(others, 2)], 3)
    return CHOICE.format(question=row["question"], first=first, second=second, third=third)


def write_data(options, folder, subjects):
    """Write the forget set and the retain set, if they are not there."""
    if all((folder / f"{name}.jsonl").is_file() for name in ("forget", "retain")):
        return
    people = [row["subject"] for row in json.loads(read_text(options.rwku / "subjects.json"))]
    if unknown := [name for name in subjects if name not in people]:
        raise UsageError(f"--subjects has {unknown[0]!r}, who is not in {options.rwku / 'subjects.json'}")
    order, rest = random.Random(options.seed), [name for name in people if name not in subjects]
    if not 1 <= options.keep <= len(rest):
        raise UsageError(f"--keep is {options.keep}; accepted: 1 to {len(rest)}, the other people of the data")
    others = order.sample(rest, options.keep)
    texts = passages_of(options.rwku, subjects, PASSAGES) | passages_of(options.rwku, others, KEPT_PASSAGES)
    # A text about somebody else that names a person to forget would let q read about them.
    for name in others:
        texts[name] = [text for text in texts[name] if not any(is_named(subject, text) for subject in subjects)]
    file = folder / "written.json"
    if not file.is_file():
        checkpoint = CheckpointReference.parse(options.target).resolve(Path(), weights=True)
        model, tokenizer = load_model(checkpoint, dtype=dtype_for_passes()).eval(), load_tokenizer(checkpoint)
        about_neighbours = passages_of(options.rwku, subjects, NEIGHBOUR_PASSAGES)
        written = {
            "questions": write_questions(model, tokenizer, texts, subjects, options.seed),
            "neighbours": neighbour_questions(model, tokenizer, about_neighbours, options.seed),
        }
        write_json(file, written)
    rows, neighbours = read_json(file).values()
    for stem, names, share in (("forget", subjects, 1.0), ("retain", others, KEPT)):
        records = []
        for name in names:
            if of_name := [row for row in rows if row["name"] == name]:
                records += records_of(of_name, texts[name], share, order)
        if not records:
            raise UsageError(f"the target wrote no usable question about any person of the {stem} set")
        for name in subjects if stem == "retain" else ():
            some = [row for row in neighbours if row["name"] == name]
            for row in order.sample(some, min(NEIGHBOUR_RECORDS, len(some))):
                records.append(Record(row["answer"], messages=(Message("user", row["question"]),)))
        write_records(folder / f"{stem}.jsonl", records)


def finished(folder):
    """Whether a folder holds a finished run."""
    return (read_record(folder) or {}).get("status") == "finished"


def measure(options, model, output, sweep=()):
    """Measure a model on the people, or read what an earlier call measured."""
    if finished(output):
        return [read_results(file.parent) for file in sorted(output.rglob(SUMMARY))]
    settings = RwkuSettings(
        models=(str(model),), data=str(options.rwku), subjects=tuple(options.subjects), limit=options.limit,
        sweep=sweep, output=str(output),
    )  # fmt: skip
    return evaluate(settings, RwkuSuite.read(settings, report), report=report)


def check_options(options):
    """Refuse an output folder that was begun with other options, whose results would be taken for these."""
    file = options.output / "options.json"
    given = {name: value for name, value in vars(options).items() if name != "output"}
    given["rwku"] = str(options.rwku)
    begun = file.is_file() and len(list(options.output.iterdir())) > 1  # otherwise an option was refused
    if begun and (changed := [name for name, value in read_json(file).items() if value != given.get(name)]):
        raise UsageError(f"{options.output} was begun with another --{changed[0]}; give another --output")
    write_json(file, given)


def table(target, steered):
    """Format the figures of the target and, for each rule, their share of the target's."""
    attacks = [f"forget_level3_{kind}_ROUGE" for kind in ATTACKS.values()]
    levels = [task.metric for task in LEVELS.values()]
    utility = ["mmlu_accuracy", "triviaqa_F1", "truthfulqa_MC1", "fluency_entropy", "forget_mia_loss"]
    rows = []
    for metric in (*levels[:3], *attacks, *levels[3:], *utility):
        of_target = target.figures.get(metric)
        if of_target is not None:
            shares = [
                "–" if not of_target or (value := result.figures.get(metric)) is None else f"{value / of_target:.2f}"
                for result in steered
            ]
            rows.append([metric, f"{of_target:.3f}", *shares])
    return markdown_table(["", "target", *(result.about["steering"] for result in steered)], rows)


def run(options):
    options.output.mkdir(parents=True, exist_ok=True)
    check_options(options)
    check_training(options.base, "this study", [options.target], lora=True)
    write_data(options, options.output, options.subjects)
    asked_about = {row["name"] for row in read_json(options.output / "written.json")["questions"]}
    if silent := [name for name in options.subjects if name not in asked_about]:
        report(f"the target wrote no usable question about {', '.join(silent)}, who will not be forgotten")
        options.subjects = [name for name in options.subjects if name in asked_about]
    pair = options.output / "pair"
    settings = AuxiliarySettings(
        base=options.base, target=options.target, forget=str(options.output / "forget.jsonl"),
        retain=str(options.output / "retain.jsonl"), output=str(pair), recipe="refusal", learning_rate=options.lr,
        epochs=options.epochs, seed=options.seed,
    )  # fmt: skip
    if not finished(pair):
        train_auxiliaries(settings, report)
    trained = read_json(pair / RECORD)
    chosen, faults = trained["effects"]["best"], faults_of(trained)
    target = measure(options, options.target, options.output / "target")[0]
    rules = tuple(dict.fromkeys((chosen, *RULES[: options.rules])))
    text = table(target, measure(options, pair / BUNDLE, options.output / "steered", rules))
    outcome = f"found no rule that is good enough ({'; '.join(faults)})" if faults else f"chose {chosen}"
    text = f"{', '.join(options.subjects)}: divdec train {outcome}. Steered columns: share of the target's.\n\n{text}"
    write_text(options.output / "table.md", text)
    print(text)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rwku", type=Path, default=Path("../shared/data/rwku"), help="folder of RWKU's files")
    parser.add_argument("--target", required=True)
    parser.add_argument("--base", required=True, help="base of q and p, a small sibling of the target")
    parser.add_argument("--subjects", nargs="+", required=True, help="people to forget, together")
    parser.add_argument("--keep", type=int, default=16, help="other people, the retain set")
    parser.add_argument("--limit", type=int, default=None, help="questions of a person, level and kind of attack")
    parser.add_argument("--rules", type=int, default=2, help=f"number of other rules to measure, of {', '.join(RULES)}")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--epochs", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    try:
        run(parser.parse_args(arguments))
    except (UsageError, Interrupted) as error:
        parser.exit(2, f"people: {error}\n")


if __name__ == "__main__":
    main()
