"""Effect of a takedown request on a target that has memorised articles: verbatim recall before and after.

A small model is over-trained on real news articles (MUSE-News: `verbmem/forget.jsonl` and `privleak/retain.jsonl`), so
that it continues them word for word. `divdec takedown add` then takes the articles of the first file down. Measured as
MUSE's verbmem is, ROUGE-L of the greedy continuation with the article's, beside the perplexity of the articles to keep.

    python benchmarks/takedown.py --data MUSE_NEWS [--speed] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path

import torch

from divdec.data.formatting import IGNORED, Example
from divdec.data.records import read_records, texts_of
from divdec.demo.models import Shape, new_model, train_tokenizer
from divdec.evaluation.generation import continuations
from divdec.evaluation.metrics import rouge
from divdec.evaluation.scoring import score
from divdec.model.checkpoint import load_model, load_tokenizer
from divdec.model.modeling import DivergenceForCausalLM
from divdec.runs import cache_folder, output_folder, settings_hash
from divdec.takedowns.correction import TakedownCorrection
from divdec.takedowns.registry import Registry
from divdec.training.fine_tuning import fine_tune
from divdec.training.settings import TrainingSettings

PROMPT, CONTINUED = 128, 128  # tokens
BATCH, CONTINUED_TOKENS = 32, 20  # sequences and decoded tokens whose corrections are timed
ARTICLES, KNOWN = 60, 30  # to forget, and as many to keep; those of the latter that the registry is told
SHAPE = Shape(width=192, layers=3, heads=6, mlp_width=512)
TRAINING = TrainingSettings(epochs=40.0, learning_rate=3e-3, batch_size=8, warmup=0.05)


def articles(data):
    """Texts to forget and texts to keep."""
    rows = [json.loads(line) for line in (data / "verbmem" / "forget.jsonl").read_text().splitlines()[:ARTICLES]]
    forget = [row["prompt"] + row["gt"] for row in rows]
    retain = [record.answer for record in read_records(data / "privleak" / "retain.jsonl").records[:ARTICLES]]
    return forget, retain


def over_trained(data):
    """Tokenizer, model, and the memorised windows of each set."""
    forget, retain = articles(data)
    tokenizer = train_tokenizer([*forget, *retain], 4096)
    windows = {}
    for name, texts in (("forget", forget), ("retain", retain)):
        ids = [tokenizer(text)["input_ids"] for text in texts]
        # The end of an article that is forgotten is what MUSE asks for.
        cut = slice(-PROMPT - CONTINUED, None) if name == "forget" else slice(None, PROMPT + CONTINUED)
        windows[name] = [document[cut] for document in ids]
    both = [*windows["forget"], *windows["retain"]]
    folder = cache_folder() / "takedown" / settings_hash([both, str(TRAINING), str(SHAPE)])
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        model, _ = fine_tune(
            new_model(SHAPE, tokenizer, seed=0), tokenizer, [Example(ids, list(ids)) for ids in both], TRAINING,
            folder.parent / "work", title="over-training", measure=False, resumable=False,
        )  # fmt: skip
        with output_folder(folder) as temporary:
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
    return folder, windows


def measured(model, tokenizer, windows):
    """ROUGE-L of the continuation of each set, and perplexity of each set's second halves."""
    found = {}
    for name, rows in windows.items():
        prompts, truths = [row[:PROMPT] for row in rows], [row[PROMPT:] for row in rows]
        answered = continuations(model, tokenizer, prompts, max_new_tokens=CONTINUED, batch_size=20)
        found[f"{name}_rouge_l"] = statistics.fmean(
            rouge(tokenizer.decode(ids, skip_special_tokens=True), tokenizer.decode(truth))["rougeL_f1"]
            for truth, ids in zip(truths, answered, strict=True)
        )
        examples = [Example(row, [IGNORED] * PROMPT + row[PROMPT:]) for row in rows]
        found[f"{name}_perplexity"] = math.exp(
            statistics.fmean(item.loss for item in score(model, examples, batch_size=16))
        )
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of MUSE-News")
    parser.add_argument("--orders", type=int, nargs="+", default=[3, 5])
    parser.add_argument("--strengths", type=float, nargs="+", default=[2, 5, 10])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--speed", action="store_true", help="measure only the speed of a registry")
    given = parser.parse_args()
    if given.speed:
        with tempfile.TemporaryDirectory() as place:
            tokenizer = train_tokenizer([text for texts in articles(given.data) for text in texts], 4096)
            new_model(SHAPE, tokenizer, seed=0).save_pretrained(Path(place) / "target")
            tokenizer.save_pretrained(Path(place) / "target")
            results = measure_speed(Path(place), Path(place) / "target", given.data, given.requests)
        print(json.dumps(results) if given.json else "")
        return
    folder, windows = over_trained(given.data)
    tokenizer, target = load_tokenizer(folder), load_model(folder)
    forget, retain = articles(given.data)
    # Half of the articles to keep are in the registry's retain set; the others are not.
    windows = {"forget": windows["forget"], "retain": windows["retain"][:KNOWN], "other": windows["retain"][KNOWN:]}
    results = {"before": measured(target, tokenizer, windows)}
    print(f"{'':<18}" + "".join(f"{name + ' ' + kind:>18}" for name in windows for kind in ("ROUGE-L", "perplexity")))
    show("before", results["before"])
    with tempfile.TemporaryDirectory() as place:
        for order in given.orders:
            registry = Registry.create(
                Path(place) / str(order), texts_of("retain", retain[:KNOWN]), folder, order=order
            )
            registry.add("articles", texts_of("articles", forget))
            for strength in given.strengths:
                takedowns = TakedownCorrection(registry.folder, strength=strength)
                model = DivergenceForCausalLM.from_experts(target, None, takedowns=takedowns)
                results[f"order {order}, strength {strength:g}"] = found = measured(model, tokenizer, windows)
                show(f"order {order}, strength {strength:g}", found)
        results["registry"] = measure_speed(Path(place), folder, given.data, given.requests)
    if given.json:
        print(json.dumps(results))


def show(name, found):
    print(f"{name:<18}" + "".join(f"{value:>18.3f}" for value in found.values()), flush=True)


def measure_speed(place, checkpoint, data, sizes):
    """Seconds by number of requests: add an article or 1 MB, apply the change, open the registry, look up a token."""
    lines = (line for part in (1, 2) for line in (data / "sust" / f"forget_{part}.jsonl").read_text().splitlines())
    texts = [text for text in (json.loads(line)["text"] for line in lines) if text.strip()]
    registry = Registry.create(place / "growing", texts_of("retain", texts[-100:]), checkpoint)
    takedowns = TakedownCorrection(registry.folder)
    article, megabyte = texts[0], "\n".join(texts)[:1_000_000]
    tokenizer = registry.tokenizer()
    ids = torch.tensor([tokenizer(text)["input_ids"][:64] for text in texts[: 4 * BATCH] if len(text) > 1000][:BATCH])
    results, held = {}, 0
    columns = ("add", "taken up", "add 1 MB", "taken up", "open", "remove", "first token", "next tokens", "lookups")
    print(f"\n{'requests':>9}" + "".join(f"{name:>12}" for name in columns) + "   (seconds)")
    for size in sizes:
        while held < size:
            registry.add(f"request {held}", texts_of("t", [texts[held % len(texts)]]))
            held += 1
        takedowns.snapshot()
        small = [timed(lambda n=n: registry.add(f"probe {n}", texts_of("t", [article]))) for n in range(5)]
        row = {"add": statistics.median(small), "taken_up": timed(takedowns.snapshot)}
        row["add_megabyte"] = timed(lambda: registry.add("large", texts_of("t", [megabyte])))
        row["taken_up_megabyte"] = timed(takedowns.snapshot)
        row["open"] = timed(lambda: TakedownCorrection(registry.folder))
        row["remove"] = timed(lambda: registry.remove("large"))
        for number in range(5):
            registry.remove(f"probe {number}")
        cache = takedowns.new_cache()
        started = time.perf_counter()
        takedowns.correction(ids[:, :-CONTINUED_TOKENS], None, cache, 1)
        row["first_token"] = time.perf_counter() - started
        steps = [ids[:, place : place + 1] for place in range(ids.shape[1] - CONTINUED_TOKENS, ids.shape[1])]
        seconds = []
        for step in steps:
            started = time.perf_counter()
            takedowns.correction(step, None, cache, 1)
            seconds.append(time.perf_counter() - started)
        row["next_token"] = statistics.median(seconds)
        row["lookups"] = statistics.median(timed(lambda: look_up(takedowns, ids[:, -4:].numpy())) for _ in range(20))
        results[size] = {name: round(value, 4) for name, value in row.items()}
        print(f"{size:>9}" + "".join(f"{value:>12.4f}" for value in row.values()), flush=True)
    return results


def look_up(takedowns, contexts):
    """Look up all contexts of one token per sequence in the counts of the requests."""
    counts = takedowns.snapshot().taken
    for length in range(1, counts.order):
        counts.followers(contexts[:, -length:])


def timed(act):
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
