"""The decoding methods that decoding.py compares, as functions from prompts to sequences, and their timing.

Target alone, plain steered and speculative are `generate`; "three models" is the loop that is written by hand today;
the paper's own code is imported from a checkout of it when there is one.
"""

import importlib.util
import json
import statistics
import time
from pathlib import Path

import torch

import divdec  # noqa: F401  registers the model type
from divdec.data.formatting import encode_prompts, left_padded
from divdec.model.checkpoint import load_model, load_tokenizer
from divdec.model.modeling import DivergenceForCausalLM

TARGET, PLAIN, SPECULATIVE, SEPARATE, REFERENCE = "target", "plain", "speculative", "three models", "paper's code"
PARTS = ("target", "retain_auxiliary", "forget_auxiliary")
REFERENCE_FILE = Path("Benchmarks/src/model/dd.py")


def places_of(bundle):
    """The folders that a bundle refers to, by part."""
    references = json.loads((bundle / "config.json").read_text(encoding="utf-8"))
    return {part: (bundle / references[part]["folder"]).resolve() for part in PARTS}


class Parts:
    """A bundle's steered model, its target, and separate copies of both auxiliaries for methods without divdec."""

    def __init__(self, bundle, steering=None, dtype="auto"):
        self.tokenizer = load_tokenizer(bundle)
        self.model = DivergenceForCausalLM.from_pretrained(bundle, steering=steering, dtype=dtype)
        self.target = self.model.target
        self.places = places_of(bundle)
        self.retain, self.forget = (load_model(self.places[part]) for part in PARTS[1:])
        self.end, self.padding = self.target.generation_config.eos_token_id, self.tokenizer.pad_token_id

    def batch(self, prompts):
        """Left-padded ids and mask."""
        return dict(zip(("input_ids", "attention_mask"), left_padded(prompts, self.padding)))

    def batches(self, records, size):
        prompts = encode_prompts(records, self.tokenizer)
        return [self.batch(prompts[start : start + size]) for start in range(0, len(prompts), size)]

    def answers(self, given, sequences):
        """The generated tokens of each row, up to and with the one that ends it."""
        found = []
        for row in sequences[:, given["input_ids"].shape[1] :].tolist():
            found.append(row[: row.index(self.end) + 1] if self.end in row else row)
        return found


def methods(parts, reference=None):
    """The available methods by name: target, plain, speculative, three models and the paper's code."""
    found = {
        TARGET: lambda given, **options: parts.target.generate(**given, do_sample=False, **options),
        PLAIN: lambda given, **options: parts.model.generate(**given, do_sample=False, **options),
        SPECULATIVE: speculative(parts, True),
    }
    if parts.model.steering.rule != "linear":
        print(f"{SEPARATE} and {REFERENCE} are left out: they are run with the linear rule only")
        return found
    found[SEPARATE] = separate(parts)
    if reference is not None:
        found[REFERENCE] = papers_own(parts, reference)
    return found


def speculative(parts, setting):
    return lambda given, **options: parts.model.generate(**given, do_sample=False, speculative=setting, **options)


def separate(parts):
    """Three models called one after another, each with its cache, the linear rule and a greedy choice by hand."""
    alpha = parts.model.steering.alpha

    @torch.no_grad()
    def run(given, max_new_tokens):
        ids, mask = given["input_ids"], given["attention_mask"]
        caches, tokens = [None, None, None], ids
        finished = torch.zeros(len(ids), dtype=torch.bool)
        for _ in range(max_new_tokens):
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            logits = []
            for place, model in enumerate((parts.target, parts.retain, parts.forget)):
                output = model(
                    tokens, attention_mask=mask, position_ids=positions, past_key_values=caches[place], use_cache=True
                )
                caches[place] = output.past_key_values
                logits.append(output.logits[:, -1])
            tokens = (logits[0] + alpha * (logits[1] - logits[2])).argmax(-1, keepdim=True)
            tokens[finished] = parts.padding
            ids = torch.cat([ids, tokens], dim=1)
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            finished |= tokens[:, 0] == parts.end
            if finished.all():
                break
        return ids

    return run


class _Settings(dict):
    """A mapping whose keys are attributes too, as the paper's code reads its settings."""

    __getattr__ = dict.__getitem__


def papers_own(parts, checkout):
    """The decoding class of the paper's published code, on the very weights that the other methods run."""
    file = checkout / REFERENCE_FILE
    if not file.is_file():
        raise SystemExit(
            f"--reference {checkout}: {REFERENCE_FILE} is not there; expected is a checkout of the paper's code, "
            "https://github.com/fin-ai-lab/divergence-decoding-inference-time-unlearning"
        )
    specification = importlib.util.spec_from_file_location("papers_own", file)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    names = {"target": "big", "retain_auxiliary": "retain", "forget_auxiliary": "forget"}
    settings = _Settings({f"model_dd_{name}": str(parts.places[part]) for part, name in names.items()})
    settings |= {"device": "cpu", "model_dd_use_ngram": "No", "model_dd_alpha": parts.model.steering.alpha}
    theirs = module.DD(settings)
    # It loads half precision, for a GPU. On a CPU this would be several times slower than the other methods.
    theirs.main_model, theirs.verifier_retain, theirs.verifier_forget = parts.target, parts.retain, parts.forget
    theirs.special_token_ids = [parts.end]

    def run(given, max_new_tokens):
        return theirs.generate(**given, pad_token_id=parts.padding, max_new_tokens=max_new_tokens)

    return run


def timed(ways, batches, parts, rounds, max_new_tokens):
    """Seconds and tokens of every method in every round; the methods take turns at each prompt.

    Returns:
        By way: a list of (seconds, tokens) a round, and the answers, which must not change from round to round.
    """
    found = {name: {"rounds": [[0.0, 0] for _ in range(rounds)], "answers": []} for name in ways}
    for number in range(-1, rounds):  # the first is not counted: it warms up, and finds the pace of speculation
        for place, given in enumerate(batches):
            order = list(ways)
            for name in order[place % len(order) :] + order[: place % len(order)]:
                started = time.perf_counter()
                sequences = ways[name](given, max_new_tokens=max_new_tokens)
                seconds = time.perf_counter() - started
                answers = parts.answers(given, sequences)
                if number < 0:
                    found[name]["answers"] += answers
                    continue
                found[name]["rounds"][number][0] += seconds
                found[name]["rounds"][number][1] += sum(map(len, answers))
    return found


def per_token(rounds):
    """Milliseconds per token (median, minimum and maximum over the rounds), and tokens per second."""
    times = [1e3 * seconds / tokens for seconds, tokens in rounds]
    middle = statistics.median(times)
    return {"ms_per_token": middle, "least": min(times), "most": max(times), "tokens_per_s": 1e3 / middle}


def ratio(one, other):
    """Ratio of two methods' time per token within a round, as the median over the rounds."""
    pairs = zip(one, other)
    return statistics.median((a[0] / a[1]) / (b[0] / b[1]) for a, b in pairs)
