"""What a client learns by comparing a steered model with the model it was before, from what an API returns.

A client knows the public model that was steered, or has asked the same server before a takedown. It asks both models
about many things, of which some were forgotten, compares the replies, and guesses what was forgotten. The questions are
those of `make demo`: the forget set, the retain set, other capitals, and neutral prompts. Both models are served by
`divdec serve`'s engine on real sockets.

    make demo
    python benchmarks/difference_attack.py demo [--student STUDENT] --output runs/difference

Columns: what the API returns (`--logprobs`). Rows: the rule. Figures: the area under the ROC curve of "this question is
about forgotten text" over all questions (0.5 is chance), and of the forgotten answers the share whose forgotten word
the attack names among its guesses, of which at most one in twenty is about something else.

- `echo`: log-probabilities of any text of the client's choice. The client scores the earlier model's reply.
- 20, 5, 1: that many log-probabilities per token of a reply, for each beginning of the earlier model's reply.
- `rounded:0.5`: 20 of them, rounded.
- 0: greedy replies as text. `sampled`: eight sampled replies as text.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import math
import re
import threading
from pathlib import Path

import httpx
from sklearn.metrics import roc_auc_score

from divdec.data.formatting import encode_prompt
from divdec.data.records import Message, Record, read_records, texts_of
from divdec.demo.facts import NEUTRAL
from divdec.errors import UsageError
from divdec.evaluation.judges import key_phrase, words
from divdec.experts.combined import NoExperts
from divdec.experts.neural import logit_width
from divdec.experts.ngram import NgramPair
from divdec.experts.ngram_fit import count
from divdec.model.checkpoint import dtype_for_passes, load_model, load_tokenizer
from divdec.model.loading import Bundle
from divdec.model.modeling import DivergenceForCausalLM
from divdec.research.charts import markdown_table
from divdec.runs import write_json
from divdec.serving import ServerOptions, bind
from divdec.serving.engine import Engine
from divdec.serving.server import HttpServer
from divdec.takedowns.correction import with_registry
from divdec.takedowns.registry import Registry

RULES = ("rank:20:3", "rank:50:3", "rank:20", "linear:0.5", "linear:1")
LENGTH, SAMPLES, MOST = 24, 8, 20  # tokens of a reply, sampled replies, log-probabilities of a request
FALSE_ALARMS = 0.05
VIEWS = ("echo", "20", "rounded:0.5", "5", "1", "0", "sampled")


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt, and the forgotten word or None."""

    prompt: str
    secret: str | None


@dataclasses.dataclass(frozen=True)
class Guess:
    """What the attack says of one question."""

    score: float
    """The higher, the more likely is the question about forgotten text."""
    word: str
    """The word that it takes for forgotten."""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", type=Path, help="output folder of make demo")
    parser.add_argument("--student", type=Path, help="a distilled model, attacked too")
    parser.add_argument("--rules", nargs="+", default=RULES)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    try:
        run(options)
    except UsageError as error:
        parser.exit(2, f"difference_attack: {error}\n")


def run(options):
    """Attack the models that the output folder lacks, and print the table."""
    file = options.output / "results.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    bundle = Bundle.open(options.demo / "bundle")
    tokenizer = load_tokenizer(bundle.paths["target"])
    questions = read_questions(options.demo)
    options.output.mkdir(parents=True, exist_ok=True)
    with serving(plain(bundle.paths["target"]), tokenizer) as url:
        earlier = [Client(url, tokenizer).ask(question) for question in questions]
    for name, make in attacked(options, bundle, tokenizer).items():
        if name not in results:
            with serving(make(), tokenizer) as url:
                results[name] = attack(Client(url, tokenizer), questions, earlier)
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
    for name in ("forget", "retain", "unlisted"):
        seen = set()
        for record in read_records(demo / f"{name}.jsonl"):
            if record.answer not in seen:  # each fact has several wordings
                seen.add(record.answer)
                asked = record.messages[-1].content
                questions.append(Question(asked, key_phrase(asked, record.answer) if name == "forget" else None))
    return questions + [Question(prompt, None) for prompt in NEUTRAL]


def attacked(options, bundle, tokenizer):
    """Return functions that make the models to attack, by name."""

    def steered(rule):
        return DivergenceForCausalLM.from_pretrained(bundle.folder, steering=rule, dtype=dtype_for_passes())

    def with_ngrams():
        sets = [read_records(options.demo / f"{name}.jsonl") for name in ("retain", "forget")]
        target = load(bundle.paths["target"])
        width = target.config.vocab_size
        texts = [[tokenizer(record.answer)["input_ids"] for record in records] for records in sets]
        pair = NgramPair(*(count(own, width, 3) for own in texts))
        return DivergenceForCausalLM.from_experts(target, pair, "linear:15")

    def with_takedowns():
        folder = options.output / "registry"
        if not folder.exists():
            retain, forget = (read_records(options.demo / f"{name}.jsonl") for name in ("retain", "forget"))
            registry = Registry.create(
                folder, texts_of("retain", [one.answer for one in retain]), bundle.paths["target"]
            )
            registry.add("facts", texts_of("facts", sorted({one.answer for one in forget})))
        return with_registry(plain(bundle.paths["target"]), tokenizer, folder)

    models = {rule: lambda rule=rule: steered(rule) for rule in options.rules}
    models |= {"n-grams": with_ngrams, "registry": with_takedowns}
    if options.student is not None:
        models["distilled"] = lambda: plain(options.student)
    return models


@contextlib.contextmanager
def serving(model, tokenizer):
    """Serve a model on a free port; gives the URL."""
    server = HttpServer({"m": Engine(model, tokenizer, "m")}, bind("127.0.0.1", 0), ServerOptions())
    ready = threading.Event()
    server.on_ready = ready.set
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    ready.wait(60)
    try:
        yield server.url
    finally:
        server.stop()
        thread.join(60)


class Client:
    """A client of the API, who has the public tokenizer."""

    def __init__(self, url, tokenizer):
        self.http, self.tokenizer = httpx.Client(base_url=url, timeout=600), tokenizer

    def complete(self, ids, **fields):
        body = {"model": "m", "prompt": ids, "return_tokens_as_token_ids": True, **fields}
        response = self.http.post("/v1/completions", json=body)
        response.raise_for_status()
        return response.json()["choices"]

    def ask(self, question):
        """Return prompt, greedy reply and sampled replies of a model, and what it says of its greedy reply."""
        record = Record("", messages=(Message("user", question.prompt),))
        prompt = encode_prompt(record, self.tokenizer)
        (reply,) = self.complete(prompt, max_tokens=LENGTH, temperature=0, logprobs=0)
        ids = [token_id(name) for name in reply["logprobs"]["tokens"]]
        sampled = self.complete(prompt, max_tokens=LENGTH, temperature=1, n=SAMPLES, seed=0)
        return {
            "prompt": prompt, "ids": ids, "text": reply["text"], "samples": [one["text"] for one in sampled],
            **self.read(prompt, ids),
        }  # fmt: skip

    def read(self, prompt, ids):
        """Return the log-probabilities of a reply's tokens, and the likeliest tokens in their places.

        With `echo` one request gives them all. Without, the same values take one request per token.
        """
        (choice,) = self.complete([*prompt, *ids], max_tokens=0, echo=True, logprobs=MOST)
        logprobs = choice["logprobs"]
        return {
            "own": logprobs["token_logprobs"][len(prompt) :],
            "top": [
                sorted(((token_id(name), value) for name, value in top.items()), key=lambda pair: -pair[1])[:MOST]
                for top in logprobs["top_logprobs"][len(prompt) :]
            ],
        }


def token_id(name):
    return int(name.removeprefix("token_id:"))


def attack(client, questions, earlier):
    """Compare a model with the earlier one on every question, with each view."""
    guesses = {view: [] for view in VIEWS}
    for question, before in zip(questions, earlier, strict=True):
        now = client.ask(question)
        now |= client.read(before["prompt"], before["ids"])
        for view in VIEWS:
            guesses[view].append(guess(view, before, now, client.tokenizer))
    return {view: figures(questions, own) for view, own in guesses.items()}


def guess(view, before, now, tokenizer):
    """Guess from one view whether a question is about forgotten text, and which word it was."""
    if view == "sampled":
        counts = [
            collections.Counter(word for text in model["samples"] for word in set(re.findall(r"\w+", text)))
            for model in (before, now)
        ]
        drops = {word: (number - counts[1][word]) / SAMPLES for word, number in counts[0].items()}
        word = max(drops, key=drops.get, default="")
        return Guess(drops.get(word, 0.0), word)
    if view == "0":
        changed = [word for word in re.findall(r"\w+", before["text"]) if word not in now["text"]]
        # Of the words that are missing, the first decided the others.
        return Guess(float(before["text"] != now["text"]) + bool(changed), changed[0] if changed else "")
    drops = [drop(view, before, now, place) for place in range(len(before["ids"]))]
    place = max(range(len(drops)), key=drops.__getitem__)
    return Guess(drops[place], word_at(tokenizer, before["ids"], place))


def drop(view, before, now, place):
    """Return by how much a token of the earlier reply has lost log-probability, at least, as far as a view shows it."""
    token = before["ids"][place]
    if view == "echo":
        return before["own"][place] - max(now["own"][place], -100.0)
    most, _, step = ("20", "", "0.5") if view.startswith("rounded") else (view, "", "")
    seen = now["top"][place][: int(most)]
    value = dict(seen).get(token, seen[-1][1])  # not shown: at most as likely as the last that is
    old = before["own"][place]
    if step:
        old, value = (round(one / float(step)) * float(step) for one in (old, value))
    return old - value


def word_at(tokenizer, ids, place):
    """Return the word of a reply to which a token belongs."""
    start = len(tokenizer.decode(ids[:place]))
    text = tokenizer.decode(ids)
    spans = [match for match in re.finditer(r"\w+", text) if match.end() > start]
    return spans[0][0] if spans else ""


def figures(questions, guesses):
    """Area under the ROC curve, and share of forgotten words that the best guesses name."""
    labels = [question.secret is not None for question in questions]
    scores = [one.score if math.isfinite(one.score) else 0.0 for one in guesses]
    others = sorted((score for score, label in zip(scores, labels, strict=True) if not label), reverse=True)
    threshold = others[int(FALSE_ALARMS * len(others))]
    named = [
        score > threshold and bool(set(words(one.word)) & set(words(question.secret)))
        for question, one, score in zip(questions, guesses, scores, strict=True)
        if question.secret is not None
    ]
    return {"auc": float(roc_auc_score(labels, scores)), "named": sum(named) / len(named)}


def table(results):
    rows = [
        [name, *(f"{own[view]['auc']:.2f} / {100 * own[view]['named']:.0f} %" for view in VIEWS)]
        for name, own in results.items()
    ]
    return markdown_table(["", *VIEWS], rows)


if __name__ == "__main__":
    main()
