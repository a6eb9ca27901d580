"""What does a pair with another tokenizer cost? The vocabulary map, time per token, coverage, and steps of the cache.

    python -m benchmarks.decoding.bridge [--data FILES] [--json]
    python -m benchmarks.decoding.bridge --toy               # a part of the demo world's corpus, short contexts

FILES are files or folders with real text (.txt, .json, .jsonl: any strings in them); without them the demo world's
corpus is used, from which smaller vocabularies come. The auxiliaries are random Llama-style models of 4 layers; times
are of one process. Prints a table for each, and with --json one JSON object last.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from pathlib import Path

import torch

from divdec.bridge.alignment import AlignedSequence, DivergenceMapper, Retokenizer
from divdec.bridge.auxiliary_tokenizer import AuxiliaryTokenizer
from divdec.bridge.pair import BridgedPair
from divdec.bridge.token_bytes import VocabularyMap, token_bytes
from divdec.data.formatting import common_prefix_length

CONTEXTS = [64, 256, 1024]
STEPS = 3000
SHARES = ("one token, nothing dropped", "tokens dropped", "several tokens read")
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


def train(kind, texts, size):
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    options = {"vocab_size": size, "show_progress": False}
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(special_tokens=[END], initial_alphabet=alphabet, **options)
    elif kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(special_tokens=["<unk>", END], unk_token="<unk>", **options)
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(special_tokens=["<unk>", END], **options)
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


def map_times(texts):
    both = train("bpe", texts[::2], 50_000), train("bpe", texts[1::2], 50_000)
    target, auxiliary = map(token_bytes, both)
    return {
        "target tokens": len(target),
        "auxiliary tokens": len(auxiliary),
        "bytes of both, s": seconds(lambda: list(map(token_bytes, both)), 3),
        "map, s": seconds(lambda: VocabularyMap.build(target, auxiliary, len(target)), 3),
    }


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


def coverages(texts, pairs):
    result = {}
    for name, (target, auxiliary) in pairs.items():
        own = AuxiliaryTokenizer(auxiliary)
        built = DivergenceMapper(token_bytes(target), own, len(target)).map()
        ids = [token for text in texts[:: max(len(texts) // 2000, 1)] for token in target(text)["input_ids"]]
        result[name] = {"vocabulary": built.coverage(), "text": built.coverage(ids)}
    return result


def steps(texts, pairs):
    """What a step of the target means for the auxiliaries' cache: shares of steps by tokens to drop and to read."""
    result = {}
    stream = "\n".join(texts[:: max(len(texts) // 200, 1)])
    for name, (target, auxiliary) in pairs.items():
        sequence = AlignedSequence(Retokenizer(target, auxiliary))
        ids, before, counted = target(stream)["input_ids"], [], []
        for count in range(1, min(len(ids), STEPS) + 1):
            (given,) = sequence.auxiliary_inputs(ids[:count], [count])
            # The logits of the last token are needed, so that it is read again even where nothing changed.
            same = min(common_prefix_length(before, given.ids), len(given.ids) - 1)
            counted.append((len(before) - same, len(given.ids) - same))
            before = given.ids
        dropped, read = zip(*counted[1:], strict=True)
        result[name] = {
            "one token, nothing dropped": statistics.fmean(pair == (0, 1) for pair in counted[1:]),
            "tokens dropped": statistics.fmean(map(bool, dropped)),
            "several tokens read": statistics.fmean(number > 1 for number in read),
            "most dropped": max(dropped), "most read": max(read), "read on average": statistics.fmean(read),
        }  # fmt: skip
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
    kinds = {
        "BPE 8k": train("bpe", texts, 8_000),
        "BPE 32k": train("bpe", texts, 32_000),
        "Unigram": train("unigram", texts, 8_000),
        "WordPiece": train("wordpiece", texts, 8_000),
    }
    names = [("BPE 32k", "BPE 8k"), ("BPE 8k", "BPE 32k"), ("BPE 32k", "Unigram"), ("BPE 32k", "WordPiece"),
             ("Unigram", "BPE 8k")]  # fmt: skip
    pairs = {f"{target} <- {auxiliary}": (kinds[target], kinds[auxiliary]) for target, auxiliary in names}
    result = {
        "texts": len(texts),
        "characters": sum(map(len, texts)),
        "map": map_times(texts),
        "tokens": {
            f"{target} <- {auxiliary}": token_times(texts, kinds[target], kinds[auxiliary])
            for target, auxiliary in names[:2]
        },
        "coverage": coverages(texts, pairs),
        "steps": steps(texts, pairs),
    }
    print(f"{result['texts']:,} texts, {result['characters']:,} characters")
    for name, value in result["map"].items():
        print(f"  {name:28} {value:10,.3f}" if isinstance(value, float) else f"  {name:28} {value:10,}")
    for pair, lengths in result["tokens"].items():
        print(f"a token, {pair}")
        for name in lengths[CONTEXTS[0]]:
            print(f"  {name:32}" + "".join(f"{length:>7,}: {lengths[length][name]:9.2f}" for length in CONTEXTS))
    print(f"{'coverage':28}{'':8}" + "".join(f"{kind:>12}" for kind in ("exact", "prefix", "extension", "none")))
    for name, shares in result["coverage"].items():
        for what, kinds_of in shares.items():
            print(f"  {name:26}{what:12}" + "".join(f"{share:12.1%}" for share in copy.copy(kinds_of).values()))
    print("a step of the target, for the auxiliaries' cache")
    for name, own in result["steps"].items():
        print(f"  {name:26}" + ", ".join(
            f"{what} {value:.1%}" if what in SHARES else f"{what} {value:.3g}" for what, value in own.items()
        ))  # fmt: skip
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
