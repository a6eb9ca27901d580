"""Measure what comparing a steered model with the model it was before tells a client.

A client knows the public model that was steered, or has asked the same server before a takedown. It asks both models
about many things, of which some were forgotten, compares the replies, and guesses what was forgotten. The questions are
those of `make demo`: the forget set, the retain set, other capitals, and neutral prompts. Both models are served by
`divdec serve`'s engine on real sockets. With --before and --after running servers are asked instead, such as vLLM's.

    make demo
    python -m benchmarks.attacks.difference demo [--student STUDENT] --output runs/difference
    python -m benchmarks.attacks.difference demo --before URL --after URL --name vLLM --output runs/difference
    python -m benchmarks.attacks.difference demo --suppressed --rules rank:50:3 linear:1

Columns: what the API returns (`--logprobs`). Rows: the rule. Each cell has three figures. The first is the area under
the ROC curve of "this question is about forgotten text" over all questions (0.5 is chance). The second is the share of
the forgotten answers whose forgotten word the attack names; the third is the share of the forgotten words' tokens that
it marks. The attack names a word in at most one in twenty of the other replies, and marks at most one in twenty of
their tokens.

- `echo`: log-probabilities of any text of the client's choice. The client scores the earlier model's reply.
- 20, 5, 1: that many log-probabilities per token of a reply, for each beginning of the earlier model's reply.
- `rounded:0.5`: 20 of them, rounded.
- 0: greedy replies as text. `sampled`: eight sampled replies as text.

The attack reads log-probabilities by `echo`; where a server refuses it, only the last two columns are measured (–).

With --suppressed another table: how much probability steering takes from replies of up to 32 tokens to each set, and
how many replies `serve --on-suppressed` marks at its default threshold.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import re
import statistics
import threading
from pathlib import Path

import httpx
import torch
from sklearn.metrics import roc_auc_score

from divdec.checkpoint import dtype_for_passes, load_model, load_tokenizer
from divdec.data.formatting import encode_prompt, encode_prompts
from divdec.data.records import Message, Record, read_records, texts_of
from divdec.demo.facts import NEUTRAL
from divdec.errors import UsageError
from divdec.evaluation.generation import continuations, without_padding
from divdec.evaluation.phrases import key_phrase, words
from divdec.experts.combined import NoExperts
from divdec.experts.ngram import NgramPair
from divdec.experts.ngram_fit import count
from divdec.model.loading import Bundle
from divdec.model.modeling import DivergenceForCausalLM
from divdec.passes import logit_width
from divdec.runs import read_json, write_json
from divdec.serving import ServeSettings, bind
from divdec.serving.engine import Engine
from divdec.serving.server import HttpServer
from divdec.takedowns.correction import TakedownCorrection
from divdec.takedowns.registry import Registry
from divdec_research.report.tables import markdown_table


@torch.inference_mode()
def suppressed_share(model, tokens, prompt_length):
    """Largest share of probability that steering took at one token of a reply."""
    ids = torch.tensor([tokens[:-1]], device=model.device)
    target, corrected, divergence = model.components(ids, logits_to_keep=len(tokens) - prompt_length)
    removed_probability = target.float().softmax(-1) - model.steer(corrected, divergence).softmax(-1)
    return float(removed_probability.clamp(min=0).sum(-1).max())


def suppression(demo, rule=None):
    """Table of the probability that a rule takes from replies."""
    bundle = Bundle.open(demo / "bundle")
    model = DivergenceForCausalLM.from_pretrained(bundle.folder, steering=rule, dtype=dtype_for_passes())
    tokenizer = load_tokenizer(bundle.paths["target"])
    sets = {name: one_for_each_fact(demo, name) for name in SETS}
    sets["neutral"] = [Record("", messages=(Message("user", prompt),)) for prompt in NEUTRAL]
    default = ServeSettings().suppressed_share
    rows = []
    for name, records in sets.items():
        prompts = encode_prompts(records, tokenizer)
        replies = continuations(model, tokenizer, prompts, max_new_tokens=32)
        texts = [prompt + without_padding(model, ids) for prompt, ids in zip(prompts, replies, strict=True)]
        lengths = map(len, prompts)
        values = [suppressed_share(model, text, n) for text, n in zip(texts, lengths, strict=True)]
        cells = len(values), f"{statistics.median(values):.2f}", f"{min(values):.2f}–{max(values):.2f}"
        rows.append([name, *map(str, cells), str(sum(share >= default for share in values))])
    return markdown_table([str(model.steering), "number", "median", "range", f"at least {default:g}"], rows) + "\n"


RULES = ("rank:20:3", "rank:50:3", "rank:20", "linear:0.5", "linear:1")
LENGTH, SAMPLES, MAX_LOGPROBS = 24, 8, 20  # tokens of a reply, sampled replies, log-probabilities of a request
FALSE_ALARMS = 0.05
DIGITS = 3  # of a difference of log-probabilities; smaller ones come from rounding
SETS = ("forget", "retain", "unlisted")
TEXTS = ("0", "sampled")
VIEWS = ("echo", "20", "rounded:0.5", "5", "1", *TEXTS)


@dataclasses.dataclass(frozen=True)
class AttackQuestion:
    """A prompt, and the forgotten word or None."""

    prompt: str
    secret: str | None


@dataclasses.dataclass(frozen=True)
class Guess:
    """The attack's guess on one question."""

    scores: list[float]
    """One for each token of the earlier reply. The higher, the more likely the token belongs to forgotten text."""
    score: float
    """The same for the question."""
    word: str
    """The word that the attack takes for forgotten."""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", type=Path, help="output folder of make demo")
    parser.add_argument("--student", type=Path, help="a distilled model, attacked too")
    parser.add_argument("--rules", nargs="+", default=RULES)
    parser.add_argument("--before", help="URL of a running server of the target: attack two servers")
    parser.add_argument("--after", help="URL of a running server of the steered model")
    parser.add_argument("--name", help="row of the table for --before and --after")
    parser.add_argument("--suppressed", action="store_true", help="how much probability the rules take from replies")
    parser.add_argument("--output", type=Path, default=Path("runs/difference"))
    options = parser.parse_args()
    if len({options.before is None, options.after is None, options.name is None}) > 1:
        parser.error("--before, --after and --name go together")
    try:
        if options.suppressed:
            print("\n".join(suppression(options.demo, rule) for rule in options.rules))
        else:
            run(options)
    except (UsageError, httpx.HTTPError) as error:
        parser.exit(2, f"difference: {error}\n")


def run(options):
    """Attack the models that the output folder lacks, and print the table."""
    file = options.output / "results.json"
    results = read_json(file) if file.exists() else {}
    bundle = Bundle.open(options.demo / "bundle")
    tokenizer = load_tokenizer(bundle.paths["target"])
    questions = read_questions(options.demo)
    options.output.mkdir(parents=True, exist_ok=True)
    if options.before is None:
        target = functools.partial(serving, lambda: plain(bundle.paths["target"]), tokenizer)
        servers = {
            name: functools.partial(serving, make, tokenizer)
            for name, make in attacked(options, bundle, tokenizer).items()
        }
    else:
        target = functools.partial(contextlib.nullcontext, options.before)
        servers = {options.name: functools.partial(contextlib.nullcontext, options.after)}
    if missing := [name for name in servers if name not in results]:
        with target() as url, Client(url, tokenizer) as client:
            earlier = client.ask_all(questions)
        for name in missing:
            with servers[name]() as url, Client(url, tokenizer) as client:
                results[name] = attack(client, questions, earlier)
            write_json(file, results)
            print(table(results), flush=True)
    print(table(results))


def load(path):
    return load_model(path, dtype=dtype_for_passes()).eval()


def plain(path):
    """A model without steering, in the form that the server takes."""
    model = load(path)
    return DivergenceForCausalLM.from_experts(model, NoExperts(logit_width(model)))


def read_questions(demo):
    """Return one question for each fact of the demo, and the neutral prompts."""
    questions = []
    for name in SETS:
        for record in one_for_each_fact(demo, name):
            asked = record.messages[-1].content
            questions.append(AttackQuestion(asked, key_phrase(asked, record.answer) if name == "forget" else None))
    return questions + [AttackQuestion(prompt, None) for prompt in NEUTRAL]


def one_for_each_fact(demo, name):
    """Return the first wording of each fact of a set."""
    records = {}
    for record in read_records(demo / f"{name}.jsonl"):
        records.setdefault(record.answer, record)
    return list(records.values())


def attacked(options, bundle, tokenizer):
    """Return functions that make the models to attack, by name."""

    def steered(rule):
        return DivergenceForCausalLM.from_pretrained(bundle.folder, steering=rule, dtype=dtype_for_passes())

    def with_ngrams():
        sets = [read_records(options.demo / f"{name}.jsonl") for name in ("retain", "forget")]
        target = load(bundle.paths["target"])
        width = target.config.vocab_size
        texts = [[tokenizer(record.answer)["input_ids"] for record in records] for records in sets]
        pair = NgramPair(*(count(documents, width, 3) for documents in texts))
        return DivergenceForCausalLM.from_experts(target, pair, "linear:15")

    def with_takedowns():
        folder = options.output / "registry"
        if not folder.exists():
            retain, forget = (read_records(options.demo / f"{name}.jsonl") for name in ("retain", "forget"))
            registry = Registry.create(
                folder, texts_of("retain", [record.answer for record in retain]), bundle.paths["target"]
            )
            registry.add("facts", texts_of("facts", sorted({record.answer for record in forget})))
        return DivergenceForCausalLM.from_experts(
            load(bundle.paths["target"]), None, takedowns=TakedownCorrection(folder)
        )

    models = {rule: lambda rule=rule: steered(rule) for rule in options.rules}
    models |= {"n-grams": with_ngrams, "registry": with_takedowns}
    if options.student is not None:
        models["distilled"] = lambda: plain(options.student)
    return models


@contextlib.contextmanager
def serving(make, tokenizer):
    """Serve the model that a function makes on a free port; gives the URL."""
    port = bind("127.0.0.1", 0)
    server = HttpServer({"m": Engine(make(), tokenizer, "m")}, port, ServeSettings(logprobs="full"))
    ready = threading.Event()
    server.on_ready = ready.set
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        if not ready.wait(60):
            raise UsageError("the server did not start within a minute")
        yield server.url
    finally:
        server.should_exit = True
        thread.join(60)
        port.close()


class Client:
    """A client of the API, who has the public tokenizer."""

    def __init__(self, url, tokenizer):
        self.http, self.tokenizer = httpx.Client(base_url=url, timeout=600), tokenizer
        (model, *_) = self.http.get("/v1/models").raise_for_status().json()["data"]
        self.model = model["id"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.http.close()

    def complete(self, ids, **fields):
        """Return the choices, or None if the server refuses log-probabilities or a seed."""
        response = self.http.post("/v1/completions", json={"model": self.model, "prompt": ids, **fields})
        asks = "logprobs" in fields or "seed" in fields
        if response.status_code in (400, 403) and asks and "logprobs" in response.text:
            return None
        response.raise_for_status()
        return response.json()["choices"]

    def ask_all(self, questions, earlier=None):
        """Return for each question the prompt, the replies, and what the model says of a greedy reply.

        The reply that is scored is the model's own, or the earlier model's. Requests are made one by one, because in
        bfloat16 other requests of a batch change some replies. So a model that answers a question as before draws the
        same samples with the same seed, if the server accepts one.
        """
        answers = []
        for question, before in zip(questions, earlier or [None] * len(questions), strict=True):
            answer = self.ask(question)
            ids = before["ids"] if before else answer["ids"]
            answers.append(answer | {"ids": ids} | self.read(answer["prompt"], ids))
        return answers

    def ask(self, question):
        """Return the prompt of a question, the greedy reply, and sampled replies."""
        record = Record("", messages=(Message("user", question.prompt),))
        prompt = encode_prompt(record, self.tokenizer)
        (reply,) = self.complete(prompt, max_tokens=LENGTH, temperature=0)
        ids = self.tokenizer(reply["text"], add_special_tokens=False)["input_ids"]
        fields = {"max_tokens": LENGTH, "temperature": 1, "n": SAMPLES}
        sampled = self.complete(prompt, seed=0, **fields) or self.complete(prompt, **fields)
        return {"prompt": prompt, "ids": ids, "text": reply["text"], "samples": [sample["text"] for sample in sampled]}

    def read(self, prompt, ids):
        """Return the log-probabilities of a reply's tokens, and the likeliest tokens in their places, if there are any.

        With `echo` one request gives them all. Without, the same values take one request per token.
        """
        fields = {"max_tokens": 1, "echo": True, "logprobs": MAX_LOGPROBS, "return_tokens_as_token_ids": True}
        choices = self.complete([*prompt, *ids], **fields)
        if choices is None:
            return {}
        logprobs, reply = choices[0]["logprobs"], slice(len(prompt), len(prompt) + len(ids))
        return {
            "own": logprobs["token_logprobs"][reply],
            "top": [
                sorted(((token_id(name), value) for name, value in top.items()), key=lambda pair: -pair[1])[
                    :MAX_LOGPROBS
                ]
                for top in logprobs["top_logprobs"][reply]
            ],
        }


def token_id(name):
    return int(name.removeprefix("token_id:"))


def attack(client, questions, earlier):
    """Compare a model with the earlier one on every question, with each view that both servers allow."""
    later = client.ask_all(questions, earlier)
    views = VIEWS if "own" in earlier[0] and "own" in later[0] else TEXTS
    return {
        view: figures(
            questions,
            earlier,
            [guess(view, before, now, client.tokenizer) for before, now in zip(earlier, later, strict=True)],
            client.tokenizer,
        )
        for view in views
    }


def guess(view, before, now, tokenizer):
    """Guess from one view which tokens of the earlier reply are forgotten text, and which word was forgotten."""
    if not before["ids"]:
        return Guess([], 0.0, "")
    word_of = words_of(tokenizer, before["ids"])
    if view == "sampled":
        counts = [
            collections.Counter(word for text in model["samples"] for word in set(re.findall(r"\w+", text)))
            for model in (before, now)
        ]
        drops = {word: (number - counts[1][word]) / SAMPLES for word, number in counts[0].items()}
        word = max(drops, key=drops.get, default="")
        return Guess([drops.get(token_word, 0.0) for token_word in word_of], drops.get(word, 0.0), word)
    if view == "0":
        changed = [word for word in re.findall(r"\w+", before["text"]) if word not in now["text"]]
        # Of the words that are missing, the first decided the others.
        scores = [0.0 if token_word not in changed else 1.0 + (token_word == changed[0]) for token_word in word_of]
        score = float(before["text"] != now["text"]) + bool(changed)
        return Guess(scores, score, changed[0] if changed else "")
    scores = [drop(view, before, now, index) for index in range(len(before["ids"]))]
    index = max(range(len(scores)), key=scores.__getitem__)
    return Guess(scores, scores[index], word_of[index])


def drop(view, before, now, index):
    """Return by how much a token of the earlier reply has lost log-probability, at least, as far as a view shows it."""
    token = before["ids"][index]
    if view == "echo":
        return round(before["own"][index] - max(now["own"][index], -100.0), DIGITS)
    most, _, step = ("20", "", "0.5") if view.startswith("rounded") else (view, "", "")
    seen = now["top"][index][: int(most)]
    value = dict(seen).get(token, seen[-1][1])  # not shown: at most as likely as the last that is
    old = before["own"][index]
    if step:
        old, value = (round(number / float(step)) * float(step) for number in (old, value))
    return round(old - value, DIGITS)


def words_of(tokenizer, ids):
    """Return for each token of a reply the word to which it belongs, or an empty text."""
    text = tokenizer.decode(ids)
    spans = list(re.finditer(r"\w+", text))
    starts = [len(tokenizer.decode(ids[:index])) for index in range(len(ids) + 1)]
    return [
        next((span[0] for span in spans if span.end() > start and span.start() < end), "")
        for start, end in itertools.pairwise(starts)
    ]


def figures(questions, earlier, guesses, tokenizer):
    """Area under the ROC curve, share of forgotten words that are named, and share of their tokens that are marked."""
    labels = [question.secret is not None for question in questions]
    scores = [finite(guessed.score) for guessed in guesses]
    threshold = threshold_of([score for score, label in zip(scores, labels, strict=True) if not label])
    of_token = threshold_of(
        [finite(score) for guessed, label in zip(guesses, labels, strict=True) if not label for score in guessed.scores]
    )
    named, marked = [], []
    for question, before, guessed, score in zip(questions, earlier, guesses, scores, strict=True):
        if question.secret is not None:
            secret = set(words(question.secret))
            named.append(score > threshold and bool(set(words(guessed.word)) & secret))
            marked += [
                finite(value) > of_token
                for value, word in zip(guessed.scores, words_of(tokenizer, before["ids"]), strict=True)
                if set(words(word)) & secret
            ]
    return {
        "auc": float(roc_auc_score(labels, scores)),
        "named": sum(named) / len(named),
        "tokens": sum(marked) / max(len(marked), 1),
    }


def finite(score):
    return score if math.isfinite(score) else 0.0


def threshold_of(others):
    """Score that at most one in twenty of the others exceeds."""
    return sorted(others, reverse=True)[int(FALSE_ALARMS * len(others))]


def table(results):
    rows = [[name, *(cell(row[view]) if view in row else "–" for view in VIEWS)] for name, row in results.items()]
    return markdown_table(["", *VIEWS], rows)


def cell(figures):
    return f"{figures['auc']:.2f} / {100 * figures['named']:.0f} / {100 * figures['tokens']:.0f} %"


if __name__ == "__main__":
    main()
