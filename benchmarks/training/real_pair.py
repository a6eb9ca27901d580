"""Forget facts with a real target and its small sibling: noise of the pair, and every form of the rules on it.

For each kind of facts, seed and recipe `divdec train` makes a bundle; then the logits of target, q and p along the
target's own greedy answers are steered by every form (teacher-forced), and the bundle answers all questions with a few
rules (generated). Each result is a JSON file, and a second call goes on where the first was stopped.

    python -m benchmarks.training.real_pair --models FOLDER --output runs/real-pair [--seeds 0 1 2] [--recipes lora]

--relations DATA adds the kinds of relations.json: 100 drawn facts each of the LRE dataset (Hernandez et al. 2024).

Columns: the share of answers whose key phrase is still the first choice, or of generated answers that contain it
(forget, in the trained wordings and in others that p and q have not read; retain; facts in neither set: "similar" if p
and q read a question about them that the target wrote, else unlisted), and the share of answers to neutral
prompts without a changed token. Teacher-forced, also KL(steered ‖ target) a token of them, which a hard mask leaves
finite. Generated answers are the stricter test: a model that may not say "Rome" may say "**Rome**".
Noise: |log q − log p| at the tokens of the neutral answers, in nats.
"""

import argparse
import dataclasses
import json
import math
import random
import sys
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from tqdm.auto import tqdm

from benchmarks.training.models import check_memory
from divdec.checkpoint import CheckpointReference, dtype_for_passes, load_model, load_tokenizer
from divdec.data.formatting import encode_prompts, padded, padding_id
from divdec.data.records import Message, Record, write_records
from divdec.demo.facts import KINDS, NEUTRAL, Fact, known_facts, not_asked, split
from divdec.errors import UsageError
from divdec.evaluation.choice import NOISE_LEVELS
from divdec.evaluation.generation import continuations, without_padding
from divdec.evaluation.scoring import unchanged_answers
from divdec.model.modeling import DivergenceForCausalLM
from divdec.runs import file_sha256, read_record, settings_hash, write_json
from divdec.steering import Steering
from divdec.training.auxiliaries import BUNDLE, train_auxiliaries
from divdec.training.settings import AuxiliarySettings

ANSWER, NEUTRAL_ANSWER = 20, 32  # tokens
THREE_MODELS, ALL_WEIGHTS = 6.0, 14.0  # GiB: three models in bfloat16; all weights of the sibling in training
RECIPES = {
    "lora": {"lora_rank": 16, "learning_rate": 2e-4, "epochs": 4.0},
    "lora-6": {"lora_rank": 16, "learning_rate": 3e-4, "epochs": 6.0},
    "all": {"lora_rank": 0, "learning_rate": 2e-5, "epochs": 4.0},
    "refusal": {"recipe": "refusal", "lora_rank": 16, "learning_rate": 2e-4, "epochs": 2.0},
}
GENERATED = ("linear:1.5", "linear:1.5:3", "rank:20", "rank:20:3")
FACTS = 100  # of a relation
MARGINS = (1.0, 2.0, 3.0, 5.0)
ALPHAS, MARGIN_ALPHAS = (0.5, 1.0, 1.5), (1.0, 1.5)


def linear_forms():
    """Return the forms of the linear rule by name, each a function of log P, log q and log p to an addition."""

    def both(alpha, margin, soft):
        def shift(target, q, p):
            d = q - p
            kept = torch.where(d.abs() >= margin, d - soft * margin * d.sign(), 0.0)
            return alpha * kept

        return shift

    def lower(alpha, margin):
        return lambda target, q, p: alpha * (q - p + margin).clamp(max=0.0)

    forms = {f"linear:{alpha:g}": both(alpha, 0.0, False) for alpha in ALPHAS}
    for alpha in MARGIN_ALPHAS:
        for margin in MARGINS:
            forms[f"linear:{alpha:g}, both sides, hard {margin:g}"] = both(alpha, margin, False)
        forms[f"linear:{alpha:g}, both sides, soft 3"] = both(alpha, 3.0, True)
        forms[f"linear:{alpha:g}, lowering, soft 3"] = lower(alpha, 3.0)
        forms[f"linear:{alpha:g}, lowering"] = lower(alpha, 0.0)
    return forms


def all_forms():
    """Return every form by name, each a function of log P, log q and log p to steered logits."""
    forms = {"unsteered": lambda target, q, p: target}
    for name, shift in linear_forms().items():
        forms[name] = lambda target, q, p, shift=shift: target + shift(target, q, p)
    rules = {text: text for text in ("rank:20", "rank:20:3", "rank:5:3")}
    lowering = [(alpha, margin) for alpha in MARGIN_ALPHAS for margin in MARGINS]
    rules |= {
        f"linear:{alpha:g}, lowering, hard {margin:g}": f"linear:{alpha:g}:{margin:g}" for alpha, margin in lowering
    }
    rules |= {text: text for alpha, margin in lowering for text in [f"linear:{alpha:g}:{margin:g}:full"]}
    for name, text in rules.items():
        rule = Steering.parse(text)
        forms[name] = lambda target, q, p, rule=rule: rule.apply(target, q - p)
    return forms


def find_phrase(ids, tokenizer, fact):
    """Return the positions of the tokens of an answer that write a fact's; none if it does not occur."""
    text, spans = "", []
    for index in range(len(ids)):
        longer = tokenizer.decode(ids[: index + 1])
        spans.append((len(text), len(longer)))
        text = longer
    match = fact.find(text)
    return [i for i, (a, b) in enumerate(spans) if match and a < match.end() and b > match.start()]


def read_relations(folder):
    """Add the kinds of relations.json to those of the demo, with facts of the relations dataset."""
    for kind, fields in json.loads(Path(__file__).with_name("relations.json").read_text()).items():
        samples = json.loads((folder / fields["file"]).read_text())["samples"]
        chosen = random.Random(0).sample(samples, min(FACTS, len(samples)))
        KINDS[kind] = fields | {"answers": {sample["subject"]: sample["object"] for sample in chosen}}


def write_answers(path, target, tokenizer, kind, seed):
    """Ask the target for its facts, split them, and write its greedy answers to all questions with their tokens."""
    facts = known_facts(target, tokenizer, [kind], title=f"asking for {kind}")
    sets = split(facts, seed)
    asked = [
        *((fact, question, "forget") for fact in sets["forget"] for question in fact.questions),
        *((fact, question, "reworded") for fact in sets["forget"] for question in fact.other_questions),
        *((fact, fact.questions[0], name) for name in ("retain", "unlisted") for fact in sets[name]),
        *((None, question, "neutral") for question in NEUTRAL),
    ]
    prompts = encode_prompts([Record("", messages=(Message("user", question),)) for _, question, _ in asked], tokenizer)
    rows = []
    for name in ("forget", "reworded", "retain", "unlisted", "neutral"):
        chosen = [index for index, entry in enumerate(asked) if entry[2] == name]
        options = {"max_new_tokens": NEUTRAL_ANSWER if name == "neutral" else ANSWER, "batch_size": 32, "title": name}
        outputs = continuations(target, tokenizer, [prompts[index] for index in chosen], **options)
        for index, answer in zip(chosen, outputs, strict=True):
            fact = asked[index][0]
            positions = [] if fact is None else find_phrase(answer, tokenizer, fact)
            if fact is None or positions:
                row = {"set": name, "question": asked[index][1], "prompt": prompts[index], "answer": list(answer)}
                fields = None if fact is None else dataclasses.asdict(fact)
                rows.append(row | {"positions": positions, "text": tokenizer.decode(answer), "fact": fields})
    for name, some in sets.items():
        write_records(path.parent / f"{path.stem}-{name}.jsonl", [record for fact in some for record in fact.records])
    write_json(path, {"kind": kind, "seed": seed, "facts": {n: len(some) for n, some in sets.items()}, "rows": rows})


def mark_similar(rows, kind, questions):
    """Count the unlisted facts about which p and q read similar questions as a set of their own."""
    facts = [Fact(kind, *pair) for pair in KINDS[kind]["answers"].items()]
    unlisted = {fact.questions[0] for fact in not_asked(facts, questions)}
    for row in rows:
        if row["set"] == "unlisted" and row["question"] not in unlisted:
            row["set"] = "similar"


@torch.inference_mode()
def answer_logits(model, rows, padding):
    """Return the log-probabilities of the next token at every token of the answers: [batch, answer, vocab]."""
    sequences = [row["prompt"] + row["answer"] for row in rows]
    ids = padded(sequences, padding, left=True).to(model.device)
    mask = padded([[1] * len(sequence) for sequence in sequences], 0, left=True).to(model.device)
    longest = max(len(row["answer"]) for row in rows)
    logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=longest + 1).logits[:, :-1]
    return logits.float().log_softmax(-1)


def measure(rows, models, tokenizer, batch_size=8):
    """Steer by every form along the answers; return the columns of each form, and the noise."""
    forms = all_forms()
    divergences, kl, noise = {"forget": [], "retain": []}, {name: [] for name in forms}, []
    order = sorted(range(len(rows)), key=lambda index: (rows[index]["set"] == "neutral", len(rows[index]["prompt"])))
    kept = {name: [None] * len(rows) for name in forms}
    for start in tqdm(range(0, len(order), batch_size), desc="measuring", disable=None, file=sys.stderr):
        batch = [rows[index] for index in order[start : start + batch_size]]
        target, q, p = (answer_logits(model, batch, padding_id(tokenizer)) for model in models)
        width = min(logits.shape[-1] for logits in (target, q, p))
        for offset, row in enumerate(batch):
            index, length = order[start + offset], len(row["answer"])
            P, of_q, of_p = (logits[offset, -length:, :width] for logits in (target, q, p))
            tokens = torch.tensor(row["answer"], device=P.device)
            at_tokens = (of_q - of_p).gather(-1, tokens[:, None])[:, 0]
            if row["set"] == "neutral":
                noise += at_tokens.abs().tolist()
            elif row["set"] in divergences:
                divergences[row["set"]] += at_tokens[row["positions"]].tolist()
            positions = row["positions"] or list(range(length))
            for name, form in forms.items():
                steered = form(P, of_q, of_p)
                kept[name][index] = bool((steered.argmax(-1) == tokens)[positions].all())
                if row["set"] == "neutral":
                    after = steered.log_softmax(-1)
                    terms = torch.where(after > -math.inf, after.exp() * (after - P), 0.0)
                    kl[name].append(float(terms.sum() / length))
    sets = list(dict.fromkeys(row["set"] for row in rows))
    table = {}
    for name in forms:
        of_set = {group: [k for k, row in zip(kept[name], rows, strict=True) if row["set"] == group] for group in sets}
        same = {group: sum(values) / len(values) for group, values in of_set.items()}
        table[name] = same | {"kl": sum(kl[name]) / len(kl[name])}

    def quantile(values):
        return np.quantile(values, NOISE_LEVELS).tolist()

    return {
        "forms": table,
        "noise": quantile(noise),
        "divergence": {name: quantile([-value for value in values]) for name, values in divergences.items() if values},
    }


def generate(rows, model, tokenizer, rules):
    """Let the steered model answer all questions, and return the columns of each rule, and the answers."""
    names, rules = dict.fromkeys(row["set"] for row in rows), list(dict.fromkeys([str(model.steering), *rules]))
    sets = {name: [row for row in rows if row["set"] == name] for name in names}
    known, answers, table = {}, {}, {}
    for name, asked in sets.items():  # one pass finds the answers that no rule has to generate again
        known["target", name] = expected = [without_padding(model, row["answer"]) for row in asked]
        flags = unchanged_answers(model, [row["prompt"] for row in asked], expected, [*map(Steering.parse, rules)])
        for rule, row in zip(rules, flags, strict=True):
            known[rule, name] = [ids if stays else None for ids, stays in zip(expected, row, strict=True)]
    for rule in ("target", *rules):
        model.steering = rules[0] if rule == "target" else rule  # the target's answers are known
        answers[rule], table[rule] = {}, {}
        for name, asked in sets.items():
            outputs = continuations(
                model, tokenizer, [row["prompt"] for row in asked], known=known[rule, name], batch_size=32,
                max_new_tokens=NEUTRAL_ANSWER if name == "neutral" else ANSWER, title=f"{rule}, {name}",
            )  # fmt: skip
            texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in outputs]
            if name == "neutral":
                same = [text == other for text, other in zip(texts, answers["target"].get(name, texts), strict=True)]
            else:
                same = [Fact(**row["fact"]).is_in(text) for text, row in zip(texts, asked, strict=True)]
            answers[rule][name], table[rule][name] = texts, sum(same) / len(same)
    return {"generated": table, "answers": answers}


def print_table(result):
    print(f"{result['kind']}, seed {result['seed']}, {result['recipe']}: noise (50, 90, 99 %)", result.get("noise"))
    for name, title in (("forms", "teacher-forced"), ("generated", "generated")):
        for index, (rule, row) in enumerate(result.get(name, {}).items()):
            if not index:
                print(f"{title:40}", *(f"{column:>9}" for column in row))
            print(f"{rule:40}", *(f"{value:9.3f}" for value in row.values()))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("real-models"), help="folder of the GGUF files")
    parser.add_argument("--target", default=None, help="target, by default MODELS/qwen-1.5b.gguf")
    parser.add_argument(
        "--base",
        default=None,
        help="base of q and p, by default MODELS/qwen-0.5b.gguf; a bridge leads to one with another tokenizer",
    )
    parser.add_argument("--output", type=Path, default=Path("runs/real-pair"))
    parser.add_argument("--results", type=Path, default=None, help="folder of the results, by default OUTPUT")
    parser.add_argument("--kinds", nargs="*", default=["capitals"])
    parser.add_argument("--relations", type=Path, default=None, help="folder of the relations dataset, for more kinds")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--recipes", nargs="*", default=["lora"], choices=list(RECIPES))
    parser.add_argument(
        "--rules",
        nargs="*",
        default=list(GENERATED),
        help="asked beside the rule that `train` chose; ignored where a result exists",
    )
    options = parser.parse_args(arguments)
    if options.relations is not None:
        read_relations(options.relations)
    if unknown := sorted(set(options.kinds) - set(KINDS)):
        parser.error(f"--kinds {' '.join(unknown)}; accepted: {', '.join(KINDS)}")
    try:
        run(options)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run(options):
    names = [options.target or str(options.models / "qwen-1.5b.gguf")]
    names.append(options.base or str(options.models / "qwen-0.5b.gguf"))
    suffix = "" if options.base is None else f"-{Path(options.base).stem.casefold()}"
    results = options.results or options.output
    check_memory(ALL_WEIGHTS if "all" in options.recipes else THREE_MODELS, "this comparison")
    folders = [CheckpointReference.parse(name).resolve(Path(), weights=True) for name in names]
    options.output.mkdir(parents=True, exist_ok=True)
    results.mkdir(parents=True, exist_ok=True)
    for kind in options.kinds:
        for seed in options.seeds:
            answers = options.output / f"{kind}-{seed}.json"
            if not answers.is_file():
                target = load_model(folders[0], dtype=dtype_for_passes()).to(PartialState().device).eval()
                write_answers(answers, target, load_tokenizer(folders[0]), kind, seed)
                del target
            for recipe in options.recipes:
                pair = options.output / f"{kind}-{seed}-{recipe}{suffix}"
                result = results / f"{pair.name}.json"
                if not result.is_file():
                    measure_recipe(folders, answers, kind, seed, recipe, pair, result, names, options.rules)
                print_table(json.loads(result.read_text()))


def measure_recipe(folders, answers, kind, seed, recipe, pair, result, names, rules):
    stem = answers.with_suffix("")
    vocabularies = [load_tokenizer(folder).get_vocab() for folder in folders]
    bridge = vocabularies[0] != vocabularies[1]
    settings = AuxiliarySettings(
        base=str(folders[1]), target=str(folders[0]), forget=f"{stem}-forget.jsonl", retain=f"{stem}-retain.jsonl",
        output=str(pair), seed=seed, overwrite=True, bridge=bridge, **RECIPES[recipe],
    )  # fmt: skip
    trained = read_record(pair) or {}
    if trained.get("status") != "finished" or settings_hash(trained["settings"]) != settings_hash(settings):
        trained = train_auxiliaries(settings, lambda line: print(line, file=sys.stderr, flush=True))
    content = json.loads(answers.read_text())
    content["rows"] = [row for row in content["rows"] if row["question"] not in trained["rewordings"]]
    mark_similar(content["rows"], kind, trained["similar_questions"])
    tokenizer = load_tokenizer(folders[0])
    model = DivergenceForCausalLM.from_pretrained(pair / BUNDLE, dtype=dtype_for_passes()).to(PartialState().device)
    measured = {}
    if not bridge:
        measured |= measure(content["rows"], [model.target, model.experts.retain, model.experts.forget], tokenizer)
    measured |= generate(content["rows"], model, tokenizer, rules)
    content = {
        "kind": kind, "seed": seed, "recipe": recipe, "settings": RECIPES[recipe], "facts": content["facts"],
        "models": [Path(name).name for name in names], "answers_sha256": file_sha256(answers),
        "training_seconds": {name: values["seconds"] for name, values in trained["auxiliaries"].items()},
        "rewordings": trained["rewordings"], "effects": trained["effects"], **measured,
    }  # fmt: skip
    write_json(result, content)


if __name__ == "__main__":
    sys.exit(main())
