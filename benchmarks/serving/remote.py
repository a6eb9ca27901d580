"""Measure the cost of steering through an API: requests and tokens per answer token, share of proved tokens.

The target of `make world` answers behind the embedded server, unsteered; the same models steered in this process say
what the answers must be. The models are trained if they are not in the cache.

    python -m benchmarks.serving.remote [--prompts 20] [--seed 0]
    python -m benchmarks.serving.remote --toy            # random models, and two of the cases

Prints a line for each case: rule, temperature, whether log-probabilities are returned, tokens a request, and tries.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.attacks.difference import serving
from benchmarks.decoding.steering import PARTS, paths_of, questions_beside, toy_bundle
from divdec import DivergenceForCausalLM, write_bundle
from divdec.checkpoint import load_tokenizer
from divdec.data.formatting import Format, encode_prompts
from divdec.endpoint import Endpoint
from divdec.model.loading import Bundle
from divdec.remote.completions import ProviderCapabilities
from divdec.remote.experts import LoadedExperts
from divdec.remote.settings import RemoteSettings
from divdec.remote.target import RemoteTarget
from divdec.runs import cache_folder
from divdec.steering import Steering
from divdec_research.world.demo import RECIPE, WORLD, material_of, question_sets
from divdec_research.world.facts import build_world
from divdec_research.world.models import train_all

TOKENS = 32
CASES = (  # rule, temperature, tells log-probabilities, block, tries
    ("rank:10", 0.0, True, 1, 4),
    ("rank:10", 0.0, True, 8, 4),
    ("rank:10", 0.0, False, 1, 4),
    ("linear:1.5", 0.0, True, 1, 4),
    ("linear:1.5", 0.0, True, 8, 4),
    ("linear:1.5", 0.0, True, 1, 1),
    ("linear:1.5", 0.0, False, 1, 1),
    ("linear:1.5", 0.0, False, 1, 4),
    ("linear:1.5", 0.0, False, 1, 30),
    ("linear:1.5", 1.0, False, 1, 30),
)

HEAD = (
    f"{'rule':<11} {'T':>3} {'logprobs':>8} {'block':>5} {'tries':>5} {'requests/token':>14} "
    f"{'tokens sent/token':>17} {'proved':>6} {'same answers':>12} {'worst bound':>11} {'ms/token':>8}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--toy", action="store_true", help="random models and two cases: tries the script")
    given = parser.parse_args()
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        parts, records, form = toy_models(Path(folder)) if given.toy else world_models(given.seed, given.prompts // 2)
        bundle = write_bundle(Path(folder) / "steered", **parts, steering="linear:1.5")
        plain = write_bundle(Path(folder) / "plain", **parts, steering="linear:0")
        prompts = encode_prompts(records, load_tokenizer(bundle), form)
        local = DivergenceForCausalLM.from_pretrained(bundle)
        print(f"{len(prompts)} prompts, up to {TOKENS} tokens each, vocabulary {local.vocab_size}")
        print(HEAD)
        with serving(lambda: DivergenceForCausalLM.from_pretrained(plain), load_tokenizer(plain)) as url:
            for case in CASES[:2] if given.toy else CASES:
                print(measured(case, prompts, local, bundle, url), flush=True)


def world_models(seed, count):
    """Checkpoints of the fictitious world by part, questions, and their layout."""
    world = build_world(dataclasses.replace(WORLD, seed=seed))
    material = material_of(world)
    trained = train_all(material, RECIPE, seed, cache_folder() / "demo" / "models", print)
    records = [record for asked in question_sets(world)[:2] for record in asked.records[:count]]
    return {part: str(getattr(trained, part)) for part in PARTS}, records, material.form


def toy_models(folder):
    """The same of random models."""
    bundle = toy_bundle(folder / "toy")
    records = [some[0] for some in questions_beside(bundle).values()]
    return {part: str(path) for part, path in paths_of(bundle).items()}, records, Format()


def measured(case, prompts, local, bundle, url) -> str:
    rule, temperature, logprobs, block, tries = case
    opened = Bundle.open(bundle, target=False)
    settings = RemoteSettings(block=block, tries=tries)
    same, started = 0, time.perf_counter()
    endpoint = Endpoint(f"{url}/v1", "m")
    with RemoteTarget(endpoint, LoadedExperts.load(opened), Steering.parse(rule), settings) as target:
        if not logprobs:
            target.capabilities = ProviderCapabilities(top_logprobs=0)
        answers = [
            target.generate(prompt, TOKENS, temperature=temperature, seed=place) for place, prompt in enumerate(prompts)
        ]
        seconds = time.perf_counter() - started
        counts, choices = target.completions.usage, target.choices
    local.steering = rule
    if not temperature:
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = torch.tensor([prompt])
            expected = local.generate(ids, max_new_tokens=TOKENS, do_sample=False)[0, len(prompt) :].tolist()
            same += [choice.token for choice in answer.choices] == expected
    tokens, exact = len(choices), sum(choice.exact for choice in choices)
    gap, distance = (max(getattr(choice, name) for choice in choices) for name in ("gap", "total_variation"))
    bound = f"{distance:.2f} TV" if temperature else f"{gap:.2f} nat"
    agreed = "" if temperature else f"{same}/{len(prompts)}"
    return (
        f"{rule:<11} {temperature:>3g} {'20' if logprobs else 'none':>8} {block:>5} {tries:>5} "
        f"{counts.requests / tokens:>14.2f} {counts.prompt_tokens / tokens:>17.1f} "
        f"{exact / tokens:>6.1%} {agreed:>12} {bound:>11} {1000 * seconds / tokens:>8.0f}"
    )


if __name__ == "__main__":
    main()
