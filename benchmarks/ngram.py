"""n-gram experts on real news: counting speed, size on disk, cost per decoded token, and the dense scheme.

The dense scheme is a simple baseline: it keeps one array of the vocabulary's size in memory for every context, and
loops over positions. It is measured on as many documents as fit into `--dense-memory`, and its size is computed for
all.

    python benchmarks/ngram.py --data MUSE_NEWS [--json]
"""

from __future__ import annotations

import argparse
import collections
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from divdec.demo.models import train_tokenizer
from divdec.experts.ngram import NgramPair, StupidBackoff
from divdec.experts.ngram_fit import fit
from divdec.model.modeling import DivergenceForCausalLM

BATCH, LONG, CONTEXT, STEPS, ROUNDS = 32, 400, 64, 40, 3


def texts_in(folder):
    """The text of every row of every .jsonl file, by file; of MUSE-News that of its four sustainability sets."""
    folder = folder / "sust" if (folder / "sust").is_dir() else folder
    return [
        [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
        for path in sorted(folder.glob("*.jsonl"))
    ]


class Dense:
    """For every context of up to n−1 tokens the scores of the whole vocabulary."""

    def __init__(self, documents, vocab_size, order):
        counts = [collections.Counter() for _ in range(order + 1)]
        for ids in documents:
            for length in range(1, order + 1):
                counts[length].update(zip(*(ids[start:] for start in range(length))))
        unigrams = np.zeros(vocab_size)
        unigrams[[token for (token,) in counts[1]]] = list(counts[1].values())
        self.order, self.arrays = order, {(): (unigrams / unigrams.sum()).astype(np.float32)}
        for length in range(2, order + 1):
            followers = collections.defaultdict(list)
            for ngram, number in counts[length].items():
                followers[ngram[:-1]].append((ngram[-1], number))
            for context, found in followers.items():
                scores = 0.4 * self.arrays.get(context[1:], self.arrays[()])
                tokens, numbers = zip(*found)
                scores[list(tokens)] = np.array(numbers) / counts[length - 1][context]
                self.arrays[context] = scores

    def scores(self, contexts):
        rows = []
        for context in contexts:
            context, weight = tuple(context), 1.0
            while context not in self.arrays:
                context, weight = context[1:], weight * 0.4
            rows.append(self.arrays[context] * np.float32(weight))
        return np.stack(rows)


def step_seconds(step, inputs):
    """Median of the time of one step."""
    times = []
    for given in inputs:
        started = time.perf_counter()
        step(given)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def target_of(vocab_size):
    """A Llama-style model of about 100M parameters with random weights: its speed does not depend on them."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=768, intermediate_size=2048, num_hidden_layers=10, num_attention_heads=12,
        num_key_value_heads=12, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def decoding(pair, rows, vocab_size):
    """Milliseconds per token for a batch: the experts alone; the target and the steered model, alternating."""
    cache = pair.new_cache()
    pair.divergence(rows[:, :CONTEXT], cache=cache, logits_to_keep=1)
    steps = [rows[:, [place]] for place in range(CONTEXT, rows.shape[1])]
    alone = step_seconds(lambda ids: pair.divergence(ids, cache=cache, logits_to_keep=1), steps)
    target = target_of(vocab_size)
    steered = DivergenceForCausalLM.from_experts(target, pair, "linear:10")
    found = {"target": [], "steered": []}
    with torch.inference_mode():
        for _ in range(ROUNDS):
            for name, model in (("target", target), ("steered", steered)):
                past = model(rows[:, :CONTEXT], use_cache=True, logits_to_keep=1).past_key_values
                found[name].append(
                    step_seconds(lambda ids: model(ids, past_key_values=past, logits_to_keep=1), steps[:STEPS])  # noqa: B023
                )
    plain, with_experts = (statistics.median(found[name]) for name in ("target", "steered"))
    return {
        "experts_ms": 1e3 * alone, "target_ms": 1e3 * plain, "steered_ms": 1e3 * with_experts,
        "experts_share_of_target": alone / plain, "steered_over_target": with_experts / plain,
        "target_parameters": target.num_parameters(),
    }  # fmt: skip


def dense_beside(documents, order, vocab_size, memory, contexts, folder):
    """Both schemes on as many documents as the dense one can hold in memory."""
    seen, chosen, held = set(), [], 0
    for ids in documents:
        new = {tuple(ids[start : start + length]) for length in range(1, order) for start in range(len(ids) - length)}
        if (len(seen | new) + 1) * vocab_size * 4 > memory:
            break
        seen |= new
        chosen.append(ids)
        held += len(ids)
    started = time.perf_counter()
    dense = Dense([ids.tolist() for ids in chosen], vocab_size, order)
    dense_fit = time.perf_counter() - started
    started = time.perf_counter()
    counts = fit(chosen, vocab_size, folder, order=order)
    own_fit = time.perf_counter() - started
    own = StupidBackoff(counts)
    np.testing.assert_allclose(own.scores(contexts[0]).numpy(), dense.scores(contexts[0].tolist()), rtol=1e-5)
    return {
        "documents": len(chosen), "tokens": held, "contexts": len(dense.arrays),
        "dense_fit_s": dense_fit, "own_fit_s": own_fit,
        "dense_bytes": sum(array.nbytes for array in dense.arrays.values()),
        "own_bytes": sum(path.stat().st_size for path in folder.glob("*.npy")),
        "dense_step_ms": 1e3 * step_seconds(lambda rows: dense.scores(rows.tolist()), contexts),
        "own_step_ms": 1e3 * step_seconds(own.scores, contexts),
    }  # fmt: skip


def _made(folder):
    folder.mkdir()
    return folder


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of .jsonl files with a field text")
    parser.add_argument("--order", type=int, default=3)
    parser.add_argument("--vocab-size", type=int, default=32_000)
    parser.add_argument("--dense-memory", type=float, default=2e9, help="bytes that the dense scheme may take")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    given = parser.parse_args()
    files = texts_in(given.data)
    flat = [text for texts in files for text in texts]
    tokenizer = train_tokenizer(flat, given.vocab_size).backend_tokenizer
    by_file = [[np.array(found.ids) for found in tokenizer.encode_batch(texts)] for texts in files]
    documents = [ids for part in by_file for ids in part]
    tokens = sum(map(len, documents))
    results = {"texts": len(flat), "bytes_of_text": sum(len(text.encode()) for text in flat), "tokens": tokens,
               "vocab_size": given.vocab_size, "order": given.order}  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        place = Path(place)
        seconds = []
        for number in range(ROUNDS):
            folder = _made(place / str(number))
            started = time.perf_counter()
            counts = fit(documents, given.vocab_size, folder, order=given.order)
            seconds.append(time.perf_counter() - started)
        size = sum(path.stat().st_size for path in folder.glob("*.npy"))
        contexts_in_all = 1 + sum(int((np.diff(rows) > 0).sum()) for rows in counts.rows)
        results |= {
            "fit_s": statistics.median(seconds), "fit_tokens_per_s": tokens / statistics.median(seconds),
            "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "distinct_ngrams": counts.distinct, "bytes": size, "bytes_per_ngram": size / counts.distinct,
            "contexts": contexts_in_all, "dense_bytes_computed": contexts_in_all * given.vocab_size * 4,
        }  # fmt: skip
        rows = torch.from_numpy(np.stack([ids[:LONG] for ids in documents if len(ids) >= LONG][:BATCH]))
        retain = fit([ids for part in by_file[1:] for ids in part], given.vocab_size, _made(place / "q"),
                     order=given.order)  # fmt: skip
        forget = fit(by_file[0], given.vocab_size, _made(place / "p"), order=given.order)
        results["decoding"] = decoding(NgramPair(retain, forget), rows, given.vocab_size)
        windows = [rows[:, start : start + given.order - 1].numpy() for start in range(60)]
        results["dense"] = dense_beside(
            documents, given.order, given.vocab_size, given.dense_memory, windows, _made(place / "small")
        )
    show(results)
    if given.json:
        print(json.dumps(results))


def show(found):
    decoding, dense = found["decoding"], found["dense"]
    print(f"{found['texts']:,} texts, {found['bytes_of_text'] / 1e6:.1f} MB, {found['tokens']:,} tokens of "
          f"{found['vocab_size']:,}, order {found['order']}")  # fmt: skip
    print(
        f"counting      {found['fit_s']:.2f} s, {found['fit_tokens_per_s'] / 1e6:.2f} million tokens/s "
        f"(median of {ROUNDS})"
    )
    print(f"on disk       {found['distinct_ngrams']:,} n-grams, {found['bytes'] / 1e6:.1f} MB, "
          f"{found['bytes_per_ngram']:.1f} bytes each")  # fmt: skip
    print(
        f"dense scheme  {found['contexts']:,} contexts would take {found['dense_bytes_computed'] / 1e9:.0f} GB "
        "(computed)"
    )
    print(f"decoding      a token for {BATCH} sequences: experts {decoding['experts_ms']:.2f} ms; target of "
          f"{decoding['target_parameters'] / 1e6:.0f}M parameters {decoding['target_ms']:.1f} ms, steered "
          f"{decoding['steered_ms']:.1f} ms; experts {decoding['experts_share_of_target']:.1%} of the target, "
          f"steered / target {decoding['steered_over_target']:.3f}")  # fmt: skip
    print(f"side by side  on {dense['documents']} documents ({dense['tokens']:,} tokens, "
          f"{dense['contexts']:,} contexts): fit {dense['dense_fit_s']:.2f} s dense, {dense['own_fit_s']:.2f} s ours; "
          f"memory {dense['dense_bytes'] / 1e6:,.0f} MB, {dense['own_bytes'] / 1e6:.2f} MB; step "
          f"{dense['dense_step_ms']:.2f} ms, {dense['own_step_ms']:.2f} ms")  # fmt: skip


if __name__ == "__main__":
    main()
