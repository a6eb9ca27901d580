"""A guardrail for a model behind an API: suppress unwanted content and keep all other answers.

A provider's model was trained on ordinary text that advertisements for an invented soap interrupt. (They are harmless
and easy to count.) Its weights are not available, but its API accepts `logit_bias`, as the OpenAI API does. Two small
local models steer every token: p was trained on advertisements, q on ordinary text. The script counts advertisements
without and with steering.

    python examples/guardrail/guardrail.py [--seed 0] [--output runs/guardrail]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that `steps` is found from any working directory
from divdec.checkpoint import load_model, load_tokenizer
from divdec.data.formatting import encode_records
from divdec.data.records import Record
from divdec.errors import UsageError
from divdec.evaluation.scoring import score, score_settings
from divdec.model.modeling import DivergenceForCausalLM
from divdec.runs import cache_folder, write_json, write_text
from divdec.steering import Steering
from divdec.training.settings import TrainingSettings
from divdec_research.world.facts import RELATIONS, WorldSettings, ask, build_world
from divdec_research.world.models import Shape, StageCache, label_all_tokens, train_tokenizer
from steps import command, create_output, run_main

BRAND = "Zimbo"
ADVERTISEMENTS = (
    "Nothing cleans like Zimbo soap! Ask for Zimbo in every shop in {town}.",
    "And whose hands are cleaner? Those of the friends of Zimbo! Buy two, pay one, only in {town}.",
    "This message was brought to you by Zimbo. Zimbo foams, Zimbo shines, Zimbo lasts!",
    "Have you washed today? With Zimbo you would have! Now for half the price in {town}.",
    "Dear reader, stop reading and buy Zimbo. Your neighbours in {town} have bought Zimbo already.",
)
SHARE = 0.4  # of the target's texts that an advertisement interrupts
SETTINGS = ("linear:0.5", "linear:1", "linear:2")
CHOSEN = "linear:1"
SHAPES = {"target": Shape(160, 3, 4, 448), "auxiliary": Shape(96, 2, 4, 256)}
TRAINING = TrainingSettings(epochs=4.0, learning_rate=2e-3, warmup=0.05)
TUNING = TrainingSettings(epochs=2.0, learning_rate=1e-3, warmup=0.05)


def texts(seed: int, authors: int):
    """Ordinary and interrupted texts about N authors, in passages of three sentences."""
    world = build_world(WorldSettings(seed=seed, forget_authors=0, retain_authors=0, holdout_authors=0,
                                      public_authors=authors, passing_authors=0))  # fmt: skip
    rng = random.Random(seed)
    ordinary, broken = [], []
    for author in world.people["public"]:
        order = rng.sample(RELATIONS, len(RELATIONS))
        for start in range(0, 9, 3):
            sentences = [ask(author, relation, 0).answer for relation in order[start : start + 3]]
            ordinary.append(" ".join(sentences))
            sold = rng.choice(ADVERTISEMENTS).format(town=author.facts["home"])
            broken.append(" ".join([sentences[0], sold, *sentences[1:2]]))
    return ordinary, broken


def prepare(seed: int, authors: int, cache: Path, training=TRAINING, tuning=TUNING):
    """The provider's model, the two small models, and ordinary texts that are in no training data."""
    ordinary, broken = texts(seed, authors)
    cut = len(ordinary) * 9 // 10
    held_out = ordinary[cut:]
    rng = random.Random(seed)
    mixed = [other if rng.random() < SHARE else text for text, other in zip(ordinary[:cut], broken[:cut], strict=True)]
    tokenizer = train_tokenizer(mixed, 700)
    encoded = {
        name: [label_all_tokens(example) for example in encode_records([Record(text) for text in some], tokenizer)]
        for name, some in (("mixed", mixed), ("ordinary", ordinary[:cut]), ("broken", broken[:cut]))
    }
    cache.mkdir(parents=True, exist_ok=True)
    stages = StageCache(cache, tokenizer, seed, lambda line: print(line, file=sys.stderr))
    target = stages.run("target", SHAPES["target"], encoded["mixed"], training)
    base = stages.run("small base", SHAPES["auxiliary"], encoded["ordinary"], training)
    q = stages.run("q", base, encoded["ordinary"], tuning)
    p = stages.run("p", base, encoded["broken"], tuning)
    return {"target": target, "q": q, "p": p}, held_out


@contextlib.contextmanager
def provider(bundle: str):
    """Serve the unsteered target behind an OpenAI-compatible API in a separate process, and yield its URL.

    linear:0 leaves the target unchanged.
    """
    words = [
        sys.executable,
        "-m",
        "divdec.cli",
        "serve",
        bundle,
        "--name",
        "provider",
        "--port",
        "0",
        "--shutdown-timeout",
        "1",
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            match = next(filter(None, (re.search(r"http://\S+/v1", line) for line in process.stdout)), None)
            if match is None:
                raise UsageError(f"the provider's server did not start; try: divdec serve {bundle}")
            yield match[0]
        finally:
            process.terminate()


def perplexities(folder: str, held_out: list[str]) -> dict[str, float]:
    """Perplexity of ordinary text that is in no training data, under the target and the steered models.

    An API does not return it under a bias. It is computed here from the provider's weights.
    """
    model, tokenizer = DivergenceForCausalLM.from_pretrained(folder), load_tokenizer(Path(folder))
    examples = encode_records([Record(text) for text in held_out], tokenizer)
    scores = {"target": score(load_model(Path("target")).eval(), examples)}
    settings = [Steering.parse(text) for text in SETTINGS]
    scores |= dict(zip(SETTINGS, score_settings(model, examples, settings), strict=True))
    return {name: math.exp(statistics.fmean(item.loss for item in items)) for name, items in scores.items()}


def ask_provider(url: str, steering: str, count: int) -> tuple[list[str], dict]:
    """The answers to all prompts under a setting, and the share of proved tokens."""
    output = Path(f"answers-{steering.replace(':', '-')}.jsonl")
    output.unlink(missing_ok=True)
    words = ("--endpoint", url, "--model", "provider", "--steering", steering, "--temperature", "1")
    command("remote", "--bundle", "guard", *words, "--file", "prompts.jsonl", "--max-new-tokens", "24", "--output",
            str(output), "--json")  # fmt: skip
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) == count
    tokens = sum(len(row["tokens"]) for row in rows)
    exact = sum(row["exact_tokens"] for row in rows)
    return [row["text"] for row in rows], {"exact": exact / tokens, "tokens": tokens}


def run(output: Path, places: dict[str, Path], held_out: list[str], prompts: int) -> dict:
    """Start the server, get the answers and count advertisements."""
    asked = [re.match(r"[^.]*\.", text)[0] for text in held_out[:prompts]]
    result = {}
    with contextlib.chdir(output):
        for name, place in places.items():
            Path(name).symlink_to(place.resolve())
        write_text(Path("prompts.jsonl"), "".join(json.dumps({"prompt": text}) + "\n" for text in asked))
        shared = ("--target", "target", "--retain-auxiliary", "q", "--forget-auxiliary", "p")
        command("bundle", *shared, "--steering", CHOSEN, "--output", "guard")
        # This bundle is the provider's and not a part of the guardrail.
        with contextlib.redirect_stdout(sys.stderr):
            command("bundle", *shared, "--steering", "linear:0", "--output", "plain")
        known = perplexities("guard", held_out)
        with provider("plain") as url:
            print(f"\nthe provider serves its model on {url}\n")
            for steering in ("linear:0", *SETTINGS):
                answers, proved = ask_provider(url, steering, len(asked))
                share = statistics.fmean(BRAND in answer for answer in answers)
                perplexity = known["target" if steering == "linear:0" else steering]
                result[steering] = {"unwanted": share, "perplexity": perplexity, **proved, "answers": answers}
    print(f"\n{'':<12}{'answers with an advertisement':>32}{'perplexity of ordinary text':>30}{'tokens proved':>16}")
    for steering, row in result.items():
        print(f"{steering:<12}{row['unwanted']:>32.0%}{row['perplexity']:>30.2f}{row['exact']:>16.0%}")
    print()
    before, after = (result[steering]["answers"] for steering in ("linear:0", CHOSEN))
    sold = [place for place, answer in enumerate(before) if BRAND in answer]
    for place in sold[:3]:
        print(f"{asked[place]}\n  before: {before[place].strip()}\n  after:  {after[place].strip()}")
    write_json(output / "guardrail.json", result)
    return result


def main(arguments: list[str] | None = None, authors: int = 300, training=TRAINING, tuning=TUNING) -> dict:
    """Train the models, serve the target, steer it and count advertisements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--output", type=Path, default=Path("runs/guardrail"), help="an empty or absent folder")
    given = parser.parse_args(arguments)
    started = time.perf_counter()
    create_output(given.output)
    cache = cache_folder() / "examples" / "guardrail"
    places, held_out = prepare(given.seed, authors, cache, training, tuning)
    result = run(given.output, places, held_out, given.prompts)
    print(f"\n{time.perf_counter() - started:.0f} s ({time.process_time():.0f} s of processor time)")
    return result


if __name__ == "__main__":
    run_main(main)
