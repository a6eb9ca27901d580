"""Time per token of a pretrained target, steered and with speculation, on three groups of prompts.

    python benchmarks/decoding_pretrained.py --bundle PAIR/bundle --forget FILE --retain FILE [--steering rank:20]

The questions of both files are the first two groups; the third are neutral prompts. All methods
answer greedily and take turns at each prompt, and the groups take turns, too, as in a server's traffic. The first round
is not counted. Times are processor seconds of one thread, prompts included, as ratios to the target alone in the same
round (median of the rounds). "mix" weighs the groups' ratios: a tenth forget, the rest retain and free in equal parts.
"""

import argparse
import time
from pathlib import Path

import torch
import transformers

from decoding_costs import spread
from decoding_methods import PLAIN, TARGET, Parts, ratio, speculative
from divdec import Speculation, SpeculationStatistics
from divdec.data.records import Message, Record, read_records
from divdec.demo.facts import NEUTRAL

WEIGHTS = {"forget": 0.1, "retain": 0.45, "free": 0.45}
DRAFTERS = "auto", "lookup"


def timed(ways, groups, parts, rounds, new_tokens):
    """Seconds and tokens of every method and group in every round, and the number of answers that differ from plain."""
    found = {name: {group: [[0.0, 0] for _ in range(rounds)] for group in groups} for name in ways}
    other = dict.fromkeys(ways, 0)
    for number in range(-1, rounds):  # the first is not counted: it warms up, and finds the pace of speculation
        for index, batches in enumerate(zip(*groups.values(), strict=True)):
            for group, given in zip(groups, batches, strict=True):
                order, answers = list(ways), {}
                for name in order[index % len(order) :] + order[: index % len(order)]:
                    started = time.process_time()
                    sequences = ways[name](given, group, max_new_tokens=new_tokens)
                    seconds = time.process_time() - started
                    answers[name] = parts.answers(given, sequences)
                    if number >= 0:
                        found[name][group][number][0] += seconds
                        found[name][group][number][1] += sum(map(len, answers[name]))
                for name in ways if number >= 0 else ():
                    other[name] += sum(a != b for a, b in zip(answers[name], answers[PLAIN], strict=True))
    return found, other


def main() -> None:
    """Print one line for each method, and what was accepted of its drafts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--forget", type=Path, required=True)
    parser.add_argument("--retain", type=Path, required=True)
    parser.add_argument("--steering", help="another rule than the bundle's")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=12, help="prompts of each group")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)

    parts = Parts(options.bundle, options.steering, dtype=getattr(torch, options.dtype))
    groups = {
        "forget": read_records(options.forget).records,
        "retain": read_records(options.retain).records,
        "free": [Record("", messages=(Message("user", prompt),)) for prompt in NEUTRAL],
    }
    groups = {name: parts.batches(spread(records, options.prompts), options.batch) for name, records in groups.items()}
    counted = {name: {group: SpeculationStatistics() for group in groups} for name in DRAFTERS}
    ways = {
        TARGET: lambda given, group, **limits: parts.target.generate(**given, do_sample=False, **limits),
        PLAIN: lambda given, group, **limits: parts.model.generate(**given, do_sample=False, **limits),
    } | {
        f"speculative, {drafter}": lambda given, group, drafter=drafter, **limits: speculative(
            parts, Speculation(drafter=drafter, statistics=counted[drafter][group])
        )(given, **limits)
        for drafter in DRAFTERS
    }
    size, auxiliary = parts.target.num_parameters(), parts.retain.num_parameters()
    print(f"target {size:,} parameters, auxiliaries {auxiliary:,} each, 1 + 2n/N = {1 + 2 * auxiliary / size:.2f}; "
          f"{parts.model.steering}, {options.dtype}, batch {options.batch}, {options.prompts} prompts a group, at most "
          f"{options.new_tokens} tokens, median of {options.rounds} rounds")  # fmt: skip
    found, other = timed(ways, groups, parts, options.rounds, options.new_tokens)
    print(
        f"{'time / target':<20}" + "".join(f"{group:>9}" for group in groups) + f"{'mix':>9}  other answers than plain"
    )
    for name in ways:
        row = {group: ratio(found[name][group], found[TARGET][group]) for group in groups}
        row["mix"] = sum(WEIGHTS[group] * row[group] for group in groups)
        print(f"{name:<20}" + "".join(f"{value:>9.3f}" for value in row.values()) + f"  {other[name]}")
    for name, by_group in counted.items():
        print(f"{name}, tokens a pass and acceptance of drafts: " + ", ".join(
            f"{group} {statistics.tokens_per_pass:.2f} {statistics.acceptance_rate:.0%}"
            for group, statistics in by_group.items()))  # fmt: skip


if __name__ == "__main__":
    main()
