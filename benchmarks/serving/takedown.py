"""Effect of takedown requests on a model that recites news articles: what it still recites, what else changes, speed.

SmolLM2, or another target, is tuned on the first 256 tokens of 40 articles (MUSE-News: `sust/forget_1`) until it
continues them word for word. Ten of them are taken down, one request each, as `divdec takedown add` does it. Registries
differ in the texts that they may keep: other news (`privleak/retain`), or these and the other thirty articles. Unseen
news are `privleak/holdout`.

    python benchmarks/takedown.py --data MUSE_NEWS --output runs/takedown [--speed]
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from divdec.data.formatting import IGNORED, Example
from divdec.data.records import texts_of
from divdec.demo.facts import NEUTRAL, ask
from divdec.evaluation.generation import continuations
from divdec.evaluation.metrics import rouge
from divdec.evaluation.recitation import RUN, longest_run, measure, measured_text
from divdec.evaluation.scoring import score
from divdec.model.checkpoint import CheckpointReference, load_config, load_model, load_tokenizer
from divdec.model.modeling import DivergenceForCausalLM
from divdec.runs import output_folder, write_json
from divdec.takedowns.correction import TakedownCorrection
from divdec.takedowns.registry import Registry
from divdec.training.fine_tuning import fine_tune
from divdec.training.settings import TrainingSettings

ARTICLES, TAKEN_DOWN, UNSEEN = 40, 10, 30
PROMPT, SHORT, CONTINUED = 128, 64, 128  # tokens of a prompt, of a prompt in another form, of a continuation
TUNING = TrainingSettings(epochs=10.0, learning_rate=2e-4, batch_size=4, warmup=0.05)
STRENGTHS = 10.0, 5.0  # beside the one that the registry finds
NEUTRAL_LENGTH = 32  # tokens of an answer
TIMED, REPEATS = 32, 5  # decoded tokens of a timed answer, and timed answers of each model
REQUESTS = 1, 10, 100, 1000  # sizes of a registry whose speed is measured
BATCH, CONTINUED_TOKENS = 32, 20  # sequences and decoded tokens whose corrections are timed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of MUSE-News")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--output", type=Path, required=True, help="keeps the tuned target, so that it is tuned once")
    parser.add_argument("--speed", action="store_true", help="measure only the speed of a registry")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    original = CheckpointReference.parse(options.target).resolve(Path(), weights=True)
    if options.speed:
        with tempfile.TemporaryDirectory() as folder:
            write_json(options.output / "speed.json", measure_speed(Path(folder), original, options.data))
        return
    tokenizer = load_tokenizer(original)
    windows = [ids for text in read_texts(options.data / "sust" / "forget_1.jsonl") if len(ids := cut(tokenizer, text))
               == PROMPT + CONTINUED][:ARTICLES]  # fmt: skip
    tuned = options.output / "target"
    if not tuned.exists():
        tune(original, tokenizer, windows, tuned)
    target = load_model(tuned).eval()
    benchmark = Benchmark(tokenizer, target, windows, read_texts(options.data / "privleak" / "holdout.jsonl")[:UNSEEN])
    results = {"sets": {}, "forms": {}, "time": {}}
    if (file := options.output / "results.json").exists():
        results = json.loads(file.read_text())

    def record(table, label, measure, model):
        if label not in results[table]:
            results[table][label] = measure(model)
            write_json(file, results)
        print(
            f"{label}: " + ", ".join(f"{name} {value:.3f}" for name, value in results[table][label].items()), flush=True
        )

    record("sets", "not tuned", benchmark.measure, load_model(original).eval())
    record("sets", "target", benchmark.measure, target)
    record("forms", "target", benchmark.measure_forms, target)
    other_news = read_texts(options.data / "privleak" / "retain.jsonl")
    kept = [tokenizer.decode(ids) for ids in benchmark.kept]

    def measure_all(name, registry, strength):
        takedowns = TakedownCorrection(registry.folder, strength=strength)
        model = DivergenceForCausalLM.from_experts(target, None, takedowns=takedowns)
        record("sets", f"{name}, strength {strength:g}", benchmark.measure, model)
        return model

    first = take_down(options.output / "order-5", other_news, 5, tuned, benchmark)
    strength = first.strength  # which it found; the other registries are compared at the same one
    model = measure_all("order 5", first, strength)
    record("forms", f"order 5, strength {strength:g}", benchmark.measure_forms, model)
    record("time", f"order 5, strength {strength:g}", benchmark.measure_time, model)
    second = take_down(options.output / "retained", [*other_news, *kept], 5, tuned, benchmark, strength)
    measure_all("order 5, thirty retained", second, strength)
    measure_all("order 3", take_down(options.output / "order-3", other_news, 3, tuned, benchmark, strength), strength)
    for each in STRENGTHS:
        measure_all("order 5", first, each)


def take_down(folder, retain, order, checkpoint, benchmark, strength=None):
    """Return a registry with one request for each article, measured unless a strength is given."""
    if folder.exists():
        registry = Registry(folder)
        if len(registry.entries()) == TAKEN_DOWN:
            return registry
        shutil.rmtree(folder)
    registry = Registry.create(folder, texts_of("retain", retain), checkpoint, order=order)
    for number, ids in enumerate(benchmark.forget, start=1):
        texts = texts_of("article", [benchmark.decode(ids)])
        entry = registry.add(f"article {number}", texts)
        if strength is None:
            measured = measure(registry, entry, texts, benchmark.target, benchmark.tokenizer)
            print(f"article {number}: {measured_text(measured, entry)}", flush=True)
    if strength is not None:
        registry.raise_strength(strength)
    return registry


def read_texts(path):
    return [text for line in path.read_text().splitlines() if (text := json.loads(line)["text"]).strip()]


def cut(tokenizer, text):
    return tokenizer(text)["input_ids"][: PROMPT + CONTINUED]


def tune(original, tokenizer, windows, folder):
    """Train all weights on the windows, and write the model."""
    model, _ = fine_tune(
        load_model(original, dtype=torch.float32), tokenizer, [Example(ids, list(ids)) for ids in windows], TUNING,
        folder.parent / "work", title="tuning", measure=False, resumable=False,
    )  # fmt: skip
    with output_folder(folder) as temporary:
        model.to(load_config(original).dtype or torch.float32).save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


class Benchmark:
    """The articles that are taken down, those that are not, unseen news, and neutral prompts."""

    def __init__(self, tokenizer, target, windows, unseen):
        self.tokenizer, self.target = tokenizer, target
        self.forget, self.kept = windows[:TAKEN_DOWN], windows[TAKEN_DOWN:]
        self.unseen = [cut(tokenizer, text) for text in unseen]
        self.neutral_answers = ask(target, tokenizer, NEUTRAL, NEUTRAL_LENGTH)

    def measure(self, model):
        """Recitation and perplexity of each set, and the share of neutral answers that are the target's."""
        windows = [*self.forget, *self.kept]
        outputs = continuations(model, self.tokenizer, [ids[:PROMPT] for ids in windows], max_new_tokens=CONTINUED)
        texts, truths, row = [self.decode(ids) for ids in outputs], [ids[PROMPT:] for ids in windows], {}
        for name, part in (("forget", slice(TAKEN_DOWN)), ("kept", slice(TAKEN_DOWN, None))):
            row |= {f"{name} {kind}": value for kind, value in self.compare(texts[part], truths[part]).items()}
        row |= {
            "forget perplexity": perplexity(model, self.forget),
            "unseen perplexity": perplexity(model, self.unseen),
        }
        same = map(str.__eq__, ask(model, self.tokenizer, NEUTRAL, NEUTRAL_LENGTH), self.neutral_answers)
        return row | {"neutral": statistics.fmean(same)}

    def measure_forms(self, model):
        """Recitation of the taken-down articles where their beginnings are given in other forms."""
        starts, truths = (
            [self.decode(ids[:SHORT]) for ids in self.forget],
            [ids[SHORT:][:CONTINUED] for ids in self.forget],
        )
        row = {}
        for name, texts in (("as it is", starts), ("lower case", map(str.lower, starts))):
            prompts = [self.tokenizer(text)["input_ids"] for text in texts]
            outputs = continuations(model, self.tokenizer, prompts, max_new_tokens=CONTINUED)
            row |= {f"{name} {k}": value for k, value in self.compare(map(self.decode, outputs), truths).items()}
        outputs = ask(model, self.tokenizer, [f"Continue this article: {text}" for text in starts], CONTINUED)
        return row | {f"chat {k}": value for k, value in self.compare(outputs, truths).items()}

    def compare(self, outputs, truths):
        """Share of texts of which `RUN` tokens in a row are repeated, whatever their case, and mean ROUGE-L."""
        pairs = [(output, self.decode(truth)) for output, truth in zip(outputs, truths, strict=True)]
        tokens = [[self.tokenizer(text.lower())["input_ids"] for text in pair] for pair in pairs]
        return {
            "recited": statistics.fmean(longest_run(*pair) >= RUN for pair in tokens),
            "ROUGE-L": statistics.fmean(rouge(*pair)["rougeL_f1"] for pair in pairs),
        }

    def measure_time(self, model):
        """Processor time of an answer by batch size, as a multiple of the target's; medians of alternating answers."""
        ratios = {}
        for size in (1, 8):
            ids = torch.tensor([window[:PROMPT] for window in self.unseen[:size]])
            seconds = {each: [] for each in (self.target, model)}
            for _ in range(REPEATS):
                for each, values in seconds.items():
                    started = time.process_time()
                    each.generate(ids, max_new_tokens=TIMED, min_new_tokens=TIMED, do_sample=False)
                    values.append(time.process_time() - started)
            ratios[f"batch {size}"] = statistics.median(seconds[model]) / statistics.median(seconds[self.target])
        return ratios

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def perplexity(model, windows):
    """Perplexity of the texts after their prompts."""
    examples = [Example(ids, [IGNORED] * PROMPT + ids[PROMPT:]) for ids in windows]
    return math.exp(statistics.fmean(item.loss for item in score(model, examples, batch_size=8)))


def measure_speed(folder, checkpoint, data):
    """Seconds by number of requests: add an article or 1 MB, apply the change, open the registry, look up a token."""
    texts = [text for part in (1, 2) for text in read_texts(data / "sust" / f"forget_{part}.jsonl")]
    registry = Registry.create(folder / "growing", texts_of("retain", texts[-100:]), checkpoint)
    takedowns = TakedownCorrection(registry.folder)
    article, megabyte = texts[0], "\n".join(texts)[:1_000_000]
    tokenizer = registry.tokenizer()
    ids = torch.tensor([tokenizer(text)["input_ids"][:64] for text in texts[: 4 * BATCH] if len(text) > 1000][:BATCH])
    results, size = {}, 0
    columns = ("add", "taken up", "add 1 MB", "taken up", "open", "remove", "first token", "next tokens", "lookups")
    print(f"\n{'requests':>9}" + "".join(f"{name:>12}" for name in columns) + "   (seconds)")
    for requests in REQUESTS:
        while size < requests:
            registry.add(f"request {size}", texts_of("t", [texts[size % len(texts)]]))
            size += 1
        takedowns.snapshot()
        small = [time_call(lambda n=n: registry.add(f"probe {n}", texts_of("t", [article]))) for n in range(5)]
        row = {"add": statistics.median(small), "taken_up": time_call(takedowns.snapshot)}
        row["add_megabyte"] = time_call(lambda: registry.add("large", texts_of("t", [megabyte])))
        row["taken_up_megabyte"] = time_call(takedowns.snapshot)
        row["open"] = time_call(lambda: TakedownCorrection(registry.folder))
        row["remove"] = time_call(lambda: registry.remove("large"))
        for number in range(5):
            registry.remove(f"probe {number}")
        cache = takedowns.new_cache()
        row["first_token"] = time_call(lambda c=cache: takedowns.correction(ids[:, :-CONTINUED_TOKENS], None, c, 1))
        steps = ids[:, -CONTINUED_TOKENS:].split(1, dim=1)
        row["next_token"] = statistics.median(
            [time_call(lambda s=step, c=cache: takedowns.correction(s, None, c, 1)) for step in steps]
        )
        row["lookups"] = statistics.median(
            time_call(lambda: look_up(takedowns, ids[:, -4:].numpy())) for _ in range(20)
        )
        results[requests] = {name: round(value, 4) for name, value in row.items()}
        print(f"{requests:>9}" + "".join(f"{value:>12.4f}" for value in row.values()), flush=True)
    return results


def look_up(takedowns, contexts):
    """Look up all contexts of one token per sequence in the counts of the requests."""
    counts = takedowns.snapshot().taken
    for length in range(1, counts.order):
        counts.followers(contexts[:, -length:])


def time_call(act):
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
