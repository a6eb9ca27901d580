"""Cost of a pair with another tokenizer: times of a token.

    python -m benchmarks.decoding.bridge [--data FILES] [--json]
    python -m benchmarks.decoding.bridge --toy               # a part of the demo world's corpus, short contexts

FILES are files or folders with real text (.txt, .json, .jsonl: any strings in them); without them the demo world's
corpus is used. Two byte-level BPEs are trained on it, and each is the target's tokenizer once. The auxiliaries are
random Llama-style models of 4 layers; times are of one process. With --json one JSON object comes last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from divdec.bridge.alignment import AlignedSequence
from divdec.bridge.pair import BridgedPair

CONTEXTS = [64, 256, 1024]
END = "</s>"


def strings(value):
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for element in inner for text in strings(element)]


def texts_of(data):
    if data is None:
        from divdec_research.world.facts import WorldSettings, build_world

        return list(build_world(WorldSettings()).corpus)
    results = []
    for path in sorted([data] if data.is_file() else data.rglob("*")):
        if path.suffix == ".txt":
            results += path.read_text(encoding="utf-8").splitlines()
        elif path.suffix in (".json", ".jsonl"):
            whole = path.read_text(encoding="utf-8")
            try:
                results += strings(json.loads(whole))
            except ValueError:
                results += [text for line in whole.splitlines() if line for text in strings(json.loads(line))]
    return [text for text in results if text.strip()]


def train(texts, size):
    """Train a byte-level BPE."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False, special_tokens=[END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False)


def model(width, seed):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=width, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=8192, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def seconds(call, times):
    results = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        results.append(time.perf_counter() - start)
    return statistics.median(results)


@torch.no_grad()
def token_times(texts, target, auxiliary):
    pair = BridgedPair(
        model(len(auxiliary), 1), model(len(auxiliary), 2), target_tokenizer=target, auxiliary_tokenizer=auxiliary,
        target_width=len(target),
    )  # fmt: skip
    stream = target("\n".join(texts[:3000]))["input_ids"]
    result = {}
    for length in CONTEXTS:
        ids, steps = stream[:length], stream[length : length + 33]
        cache = pair.new_cache()
        start = time.perf_counter()
        pair.divergence(torch.tensor([ids]), cache=cache, logits_to_keep=1)
        prefill = time.perf_counter() - start
        sequence = AlignedSequence(pair.retokenizer)
        sequence.auxiliary_inputs(ids, [length])
        cached, reading = [], []
        for index, token in enumerate(steps):
            start = time.perf_counter()
            pair.divergence(torch.tensor([[token]]), cache=cache, logits_to_keep=1)
            cached.append(time.perf_counter() - start)
            start = time.perf_counter()
            sequence.auxiliary_inputs(ids + steps[: index + 1], [length + index + 1])
            reading.append(time.perf_counter() - start)
        whole = torch.tensor([ids])
        result[length] = {
            "prefill, ms": 1e3 * prefill,
            "token with the cache, ms": 1e3 * statistics.median(cached[1:]),
            "of which reading the text, ms": 1e3 * statistics.median(reading[1:]),
            "token recomputed, ms": 1e3 * seconds(lambda whole=whole: pair.divergence(whole, logits_to_keep=1), 5),
            "every position scored, ms": 1e3 * seconds(lambda whole=whole: pair.divergence(whole), 1),
        }
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="*", help="files or folders with real text")
    parser.add_argument("--toy", action="store_true", help="little text and one context: tries the script")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    arguments = parser.parse_args()
    texts = [text for data in arguments.data or [None] for text in texts_of(data)]
    torch.set_num_threads(1)
    if arguments.toy:
        texts, CONTEXTS[1:] = texts[:3000], []
    small, large = (train(texts, size) for size in (8_000, 32_000))
    print(f"{len(texts):,} texts, {sum(map(len, texts)):,} characters")
    pairs = {"BPE 32k <- BPE 8k": (large, small), "BPE 8k <- BPE 32k": (small, large)}
    result = {name: token_times(texts, *pair) for name, pair in pairs.items()}
    for pair, lengths in result.items():
        print(f"a token, {pair}")
        for name in lengths[CONTEXTS[0]]:
            print(f"  {name:32}" + "".join(f"{length:>7,}: {lengths[length][name]:9.2f}" for length in CONTEXTS))
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
