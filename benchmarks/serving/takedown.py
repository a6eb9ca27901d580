"""Measure takedown requests and n-gram counts on news: what a model still recites, and times and sizes.

    python -m benchmarks.serving.takedown --data MUSE_NEWS --output runs/takedown
    python -m benchmarks.serving.takedown --data MUSE_NEWS --output runs/takedown --measure registry counts
    python -m benchmarks.serving.takedown --toy --output runs/takedown-toy     # counts of the demo's world

- effect: SmolLM2, or another target, is tuned on the first 256 tokens of 40 articles (MUSE-News: `sust/forget_1`) until
  it continues them word for word. Ten are taken down, one request each, as `divdec takedown add` does it. Registries
  differ in the texts that they may keep: other news (`privleak/retain`), or these and the other thirty articles.
  Unseen news are `privleak/holdout`. Prints recitation, perplexity, neutral answers and processor time.
- registry: seconds to add and remove an article or 1 MB, to open the registry, and to look up a token, by requests.
- counts: speed of counting, size on disk and cost per decoded token of n-gram experts, and the size of a dense scheme,
  which keeps an array of the vocabulary's size for every context (computed).

Results are kept in OUTPUT, and the same command continues.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from divdec.checkpoint import CheckpointReference, load_config, load_model, load_tokenizer
from divdec.data.formatting import IGNORED, Example
from divdec.data.records import texts_of
from divdec.demo.facts import NEUTRAL, ask
from divdec.evaluation.generation import continuations
from divdec.evaluation.recitation import RUN, longest_run
from divdec.evaluation.scoring import score
from divdec.evaluation.takedown import measure, measured_text
from divdec.experts.ngram import NgramPair
from divdec.experts.ngram_fit import fit
from divdec.model.modeling import DivergenceForCausalLM
from divdec.runs import output_folder, write_json
from divdec.takedowns.correction import TakedownCorrection
from divdec.takedowns.registry import Registry
from divdec.training.fine_tuning import fine_tune
from divdec.training.settings import TrainingSettings
from divdec_research.suites.metrics import rouge
from divdec_research.world.facts import WorldSettings, build_world
from divdec_research.world.models import train_tokenizer

LONG, CONTEXT, STEPS, ROUNDS = 400, 64, 40, 3  # tokens of a row, of its prompt, timed steps, rounds


def texts_in(folder):
    """The text of every row of every .jsonl file, by file; of MUSE-News that of its four sustainability sets."""
    folder = folder / "sust" if (folder / "sust").is_dir() else folder
    return [
        [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
        for path in sorted(folder.glob("*.jsonl"))
    ]


def step_seconds(step, inputs):
    """Median of the time of one step."""
    return statistics.median(time_call(lambda g=given: step(g)) for given in inputs)


def target_of(vocab_size, layers):
    """A Llama-style model of about 100M parameters with random weights: its speed does not depend on them."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=768, intermediate_size=2048, num_hidden_layers=layers,
        num_attention_heads=12, num_key_value_heads=12, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def decoding(pair, rows, vocab_size, layers):
    """Milliseconds per token for a batch: the experts alone; the target and the steered model, alternating."""
    cache = pair.new_cache()
    pair.divergence(rows[:, :CONTEXT], cache=cache, logits_to_keep=1)
    steps = [rows[:, [place]] for place in range(CONTEXT, rows.shape[1])]
    alone = step_seconds(lambda ids: pair.divergence(ids, cache=cache, logits_to_keep=1), steps)
    target = target_of(vocab_size, layers)
    steered = DivergenceForCausalLM.from_experts(target, pair, "linear:10")
    seconds = {"target": [], "steered": []}
    with torch.inference_mode():
        for _ in range(ROUNDS):
            for name, model in (("target", target), ("steered", steered)):
                past = model(rows[:, :CONTEXT], use_cache=True, logits_to_keep=1).past_key_values
                seconds[name].append(
                    step_seconds(lambda ids: model(ids, past_key_values=past, logits_to_keep=1), steps[:STEPS])  # noqa: B023
                )
    plain, with_experts = (statistics.median(seconds[name]) for name in ("target", "steered"))
    return {
        "experts_ms": 1e3 * alone, "target_ms": 1e3 * plain, "steered_ms": 1e3 * with_experts,
        "experts_share_of_target": alone / plain, "steered_over_target": with_experts / plain,
        "target_parameters": target.num_parameters(),
    }  # fmt: skip


def measure_counts(data, order, vocab_size, layers=10):
    """Counting speed, size on disk and cost per decoded token of n-gram experts on real news."""
    files = texts_in(data)
    flat = [text for texts in files for text in texts]
    tokenizer = train_tokenizer(flat, vocab_size).backend_tokenizer
    by_file = [[np.array(encoding.ids) for encoding in tokenizer.encode_batch(texts)] for texts in files]
    documents = [ids for part in by_file for ids in part]
    tokens = sum(map(len, documents))
    results = {"texts": len(flat), "bytes_of_text": sum(len(text.encode()) for text in flat), "tokens": tokens,
               "vocab_size": vocab_size, "order": order}  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        place = Path(place)
        seconds = []
        for number in range(ROUNDS):
            (folder := place / str(number)).mkdir()
            started = time.perf_counter()
            counts = fit(documents, vocab_size, folder, order=order)
            seconds.append(time.perf_counter() - started)
        size = sum(path.stat().st_size for path in folder.glob("*.npy"))
        contexts_in_all = 1 + sum(int((np.diff(rows) > 0).sum()) for rows in counts.rows)
        results |= {
            "fit_s": statistics.median(seconds), "fit_tokens_per_s": tokens / statistics.median(seconds),
            "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "distinct_ngrams": counts.distinct, "bytes": size, "bytes_per_ngram": size / counts.distinct,
            "contexts": contexts_in_all, "dense_bytes_computed": contexts_in_all * vocab_size * 4,
        }  # fmt: skip
        rows = torch.from_numpy(np.stack([ids[:LONG] for ids in documents if len(ids) >= LONG][:BATCH]))
        retain = fit([ids for part in by_file[1:] for ids in part], vocab_size, make(place / "q"),
                     order=order)  # fmt: skip
        forget = fit(by_file[0], vocab_size, make(place / "p"), order=order)
        results["decoding"] = decoding(NgramPair(retain, forget), rows, vocab_size, layers)
    show_counts(results)
    return results


def make(folder):
    folder.mkdir()
    return folder


def show_counts(counts):
    decoding = counts["decoding"]
    print(f"{counts['texts']:,} texts, {counts['bytes_of_text'] / 1e6:.1f} MB, {counts['tokens']:,} tokens of "
          f"{counts['vocab_size']:,}, order {counts['order']}")  # fmt: skip
    print(
        f"counting      {counts['fit_s']:.2f} s, {counts['fit_tokens_per_s'] / 1e6:.2f} million tokens/s "
        f"(median of {ROUNDS})"
    )
    print(f"on disk       {counts['distinct_ngrams']:,} n-grams, {counts['bytes'] / 1e6:.1f} MB, "
          f"{counts['bytes_per_ngram']:.1f} bytes each")  # fmt: skip
    print(
        f"dense scheme  {counts['contexts']:,} contexts would take {counts['dense_bytes_computed'] / 1e9:.0f} GB "
        "(computed)"
    )
    print(f"decoding      a token for {BATCH} sequences: experts {decoding['experts_ms']:.2f} ms; target of "
          f"{decoding['target_parameters'] / 1e6:.0f}M parameters {decoding['target_ms']:.1f} ms, steered "
          f"{decoding['steered_ms']:.1f} ms; experts {decoding['experts_share_of_target']:.1%} of the target, "
          f"steered / target {decoding['steered_over_target']:.3f}")  # fmt: skip


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
    parser.add_argument("--data", type=Path, help="folder of MUSE-News")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--output", type=Path, required=True, help="keeps the tuned target, so that it is tuned once")
    parser.add_argument("--measure", nargs="+", choices=("effect", "registry", "counts"), default=["effect"])
    parser.add_argument("--order", type=int, default=3, help="of the n-grams of counts")
    parser.add_argument("--vocab-size", type=int, default=32_000, help="of counts")
    parser.add_argument("--toy", action="store_true", help="counts of the demo's world: tries the script")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.toy:
        options.data, options.measure, options.vocab_size = write_world(options.output / "news"), ["counts"], 1000
    elif options.data is None:
        parser.error("give --data or --toy")
    if "counts" in options.measure:
        counts = measure_counts(options.data, options.order, options.vocab_size, 1 if options.toy else 10)
        write_json(options.output / "counts.json", counts)
    original = CheckpointReference.parse(options.target).resolve(Path(), weights=True) if not options.toy else None
    if "registry" in options.measure:
        with tempfile.TemporaryDirectory() as folder:
            write_json(options.output / "speed.json", measure_speed(Path(folder), original, options.data))
    if "effect" in options.measure:
        measure_effect(options, original)


def write_world(folder):
    """Write two files of the demo's corpus, each row several of its texts."""
    texts = list(build_world(WorldSettings()).corpus)
    folder.mkdir(exist_ok=True)
    for number in range(2):
        rows = [" ".join(texts[start : start + 60]) for start in range(number * 60, min(len(texts), 6000), 120)]
        text = "".join(json.dumps({"text": row}) + "\n" for row in rows)
        (folder / f"{number}.jsonl").write_text(text, encoding="utf-8")
    return folder


def measure_effect(options, original):
    """Recitation of a tuned model, and what else changes."""
    tokenizer = load_tokenizer(original)
    windows = [ids for text in read_texts(options.data / "sust" / "forget_1.jsonl") if len(ids := cut(tokenizer, text))
               == PROMPT + CONTINUED][:ARTICLES]  # fmt: skip
    tuned = options.output / "target"
    if not tuned.exists():
        tune(original, tokenizer, windows, tuned)
    target = load_model(tuned).eval()
    benchmark = TakedownBenchmark(
        tokenizer, target, windows, read_texts(options.data / "privleak" / "holdout.jsonl")[:UNSEEN]
    )
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


class TakedownBenchmark:
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
