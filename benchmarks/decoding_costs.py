"""Cost per token by context length and batch size, and acceptance rates, for decoding.py."""

import dataclasses
import statistics
import time

import torch

from decoding_methods import PARTS, PLAIN, SPECULATIVE, TARGET, Parts
from divdec import Speculation, SpeculationStatistics
from divdec.data.formatting import encode_records
from divdec.data.records import read_records
from divdec.data.world import build_world
from divdec.demo import run as demo
from divdec.errors import UsageError
from divdec.runs import cache_folder
from tofu_small import tofu_material

CONTEXTS, BATCHES = (64, 128, 256, 512, 1024, 2048, 4096), (1, 2, 4, 8, 16, 32)
SETTINGS = ("linear:0.5", "linear:1", "linear:2", "rank:5", "rank:20")
GAMMA = 4


class Clock:
    """A streamer that records the time of each token. It skips the prompt, which some methods send first."""

    def __init__(self, batch):
        self.batch, self.times = batch, []

    def put(self, tokens):
        if tokens.numel() == self.batch:
            self.times.append(time.perf_counter())

    def end(self):
        pass


def growth(parts, records, rounds, new_tokens):
    """Milliseconds of a step and of the prompt, by context length at batch 1 and by batch at the shortest context.

    The contexts are questions and answers strung together: what they cost does not depend on what they say, and how
    many drafts are accepted, which does, stands beside.
    """
    stream = [token for example in encode_records(records, parts.tokenizer) for token in example.input_ids]
    longest = parts.model.config.max_position_embeddings - new_tokens
    contexts = [context if context <= longest else longest for context in CONTEXTS]
    found = {"new_tokens": new_tokens, "context": {}, "batch": {}}
    ends = [(model.generation_config, model.generation_config.eos_token_id) for model in (parts.target, parts.model)]
    for config, _ in ends:
        config.eos_token_id = parts.padding  # which never comes: all make the same number of tokens
    for context in dict.fromkeys(contexts):
        found["context"][context] = _steps(parts, stream, context, 1, rounds, new_tokens)
    for batch in BATCHES:
        found["batch"][batch] = _steps(parts, stream, CONTEXTS[0], batch, rounds, new_tokens)
    for config, end in ends:
        config.eos_token_id = end
    return found


def _steps(parts, stream, context, batch, rounds, new_tokens):
    starts = [(7919 * row) % len(stream) for row in range(batch)]
    ids = torch.tensor([(stream[start:] + stream * (context // len(stream) + 1))[:context] for start in starts])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False}
    counted = SpeculationStatistics()
    ways = {
        TARGET: (parts.target, {}),
        PLAIN: (parts.model, {}),
        SPECULATIVE: (parts.model, {"speculative": Speculation(statistics=counted)}),
    }
    times = {name: ([], []) for name in ways}
    for number in range(-1, rounds):
        for name, (model, options) in ways.items():
            clock = Clock(batch)
            started = time.perf_counter()
            model.generate(**given, max_new_tokens=new_tokens, streamer=clock, **options)
            if number >= 0:
                times[name][0].append(1e3 * (clock.times[0] - started))
                times[name][1].append(1e3 * (clock.times[-1] - clock.times[0]) / (len(clock.times) - 1))
    found = {
        name: {"prompt_ms": statistics.median(prompt), "step_ms": statistics.median(steps),
               "ms_per_token": statistics.median(steps) / batch}
        for name, (prompt, steps) in times.items()
    }  # fmt: skip
    found[SPECULATIVE]["tokens_per_pass"] = counted.tokens_per_pass
    return found


def show_growth(found):
    ways = list(next(iter(found["context"].values())))
    print("\nms a step (a token for every sequence), median; of the prompt in brackets; t/p: tokens a target pass")
    for kind in ("context", "batch"):
        print(f"{kind:>8} " + " ".join(f"{way:>22}" for way in ways) + "   plain/target  target/speculative")
        for size, row in found[kind].items():
            cells = []
            for way in ways:
                accepted = f" {row[way]['tokens_per_pass']:.1f} t/p" if "tokens_per_pass" in row[way] else ""
                cells.append(f"{row[way]['step_ms']:.1f} ({row[way]['prompt_ms']:,.0f}){accepted}")
            steps = {way: row[way]["step_ms"] for way in ways}
            print(f"{size:>8,} " + " ".join(f"{cell:>22}" for cell in cells)
                  + f"   {steps[PLAIN] / steps[TARGET]:>10.3f}"
                  + f" {steps[TARGET] / steps[SPECULATIVE]:>10.2f} x")  # fmt: skip


def material_of(bundle):
    """The forget and retain questions of a bundle: from files beside it, or from the experiment that wrote it."""
    beside = {name: bundle.parent / f"{name}.jsonl" for name in ("forget", "retain")}
    if all(path.is_file() for path in beside.values()):
        return {name: read_records(path).records for name, path in beside.items()}
    raise UsageError(f"{bundle}: forget.jsonl and retain.jsonl are not beside it, as bench_models.py leaves them")


def bundle_named(name, data, path):
    """A bundle and its questions: 'demo' and 'tofu-small' from the user's cache (seed 0), else a folder."""
    if name == "demo":
        sets = {item.name: item.records for item in demo.question_sets(build_world(demo.WORLD))}
    elif name == "tofu-small":
        material, _ = tofu_material(data)
        sets = {"forget": material.forget.records, "retain": material.retain.records}
    else:
        return path(name), material_of(path(name))
    bundle = cache_folder() / name / "seed-0" / "bundle"
    if not bundle.is_dir():
        command = {"demo": "divdec demo", "tofu-small": "make tofu-small"}[name]
        raise UsageError(f"{bundle} does not exist; make it with: {command}")
    return bundle, sets


def spread(records, count):
    """Choose N records at equal distances."""
    return [records[place * len(records) // count] for place in range(min(count, len(records)))]


def acceptance(bundle, sets, prompts, new_tokens, gamma=GAMMA):
    """Acceptance rate by position and tokens per pass, for each rule, on forget and retain prompts."""
    found, parts = {}, Parts(bundle)
    sizes = [sum(weight.numel() for weight in model.parameters()) for model in (parts.target, parts.retain)]
    for setting in SETTINGS:
        parts.model.steering = setting
        found[setting] = {}
        for group in ("retain", "forget"):
            counted = SpeculationStatistics()
            for given in parts.batches(spread(sets[group], prompts), 1):
                parts.model.generate(
                    **given, do_sample=False, max_new_tokens=new_tokens,
                    speculative=Speculation(gamma=gamma, statistics=counted),
                )  # fmt: skip
            found[setting][group] = dataclasses.asdict(counted) | {
                "tokens_per_pass": counted.tokens_per_pass, "acceptance": counted.acceptance,
                "rate": counted.acceptance_rate,
            }  # fmt: skip
    return {"parameters": dict(zip(PARTS, sizes)), "gamma": gamma, "settings": found}


def show_acceptance(name, found):
    target, auxiliary = found["parameters"].values()
    print(f"\n{name}: target {target:,} parameters, auxiliaries {auxiliary:,}; γ {found['gamma']}; share of drafted "
          "tokens that is accepted, by position after others that were, and tokens a target pass")  # fmt: skip
    for setting, groups in found["settings"].items():
        for group, row in groups.items():
            positions = " ".join(f"{share:6.1%}" for share in row["acceptance"])
            print(f"  {setting:<11} {group:<7} {row['rate']:6.1%}   {positions}   {row['tokens_per_pass']:.2f}")
