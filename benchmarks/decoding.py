"""Cost of steering and speculation: tokens per second of the target, steered, speculative, and other methods.

    make bench-models
    python benchmarks/decoding.py [--bundle runs/bench-models/bundle] [--reference CHECKOUT] [--json]
    python benchmarks/decoding.py --gammas --drafters lookup
    python benchmarks/decoding.py --no-table --growth --acceptance demo tofu-small runs/bench-models/bundle

Each method answers the same retain and forget questions greedily, and stops at the end of its answer or after
--new-tokens. Its time, including the prompt, is divided by the number of generated tokens. The methods take turns at
each question, and ratios are computed within a round, so that noise affects all methods equally. The first round is not
counted. "three models" is a simple loop that calls target, q and p one after another, each with a separate cache.
--reference imports the decoding class of the paper's published code from a checkout and runs it in the same precision
on the same weights.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch
import transformers

from bench_models import flops_per_token
from decoding_costs import acceptance, bundle_named, growth, material_of, show_acceptance, show_growth, spread
from decoding_methods import (
    PLAIN,
    REFERENCE,
    SEPARATE,
    SPECULATIVE,
    TARGET,
    Parts,
    methods,
    per_token,
    ratio,
    speculative,
    timed,
)
from divdec import Speculation, SpeculationStatistics
from divdec.errors import UsageError

GROUPS = ("retain", "forget")
SPEEDUP, OVERHEAD = 1.3, 1.10  # the aims: speculative over target alone, plain over target times 1 + 2n/N
GAMMAS = range(1, 9)


def machine():
    """Versions and load of the machine."""
    model = next((line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line[:10] == "model name"), "")
    return {"cpu": model, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "torch": torch.__version__,
            "transformers": transformers.__version__, "load": os.getloadavg()[0]}  # fmt: skip


def _lines(path):
    return Path(path).read_text().splitlines() if Path(path).is_file() else []


def sizes(parts):
    """N, n and their ratio in parameters and in compute, the output head included."""
    target, auxiliary = parts.target, parts.retain
    N, n = target.num_parameters(), auxiliary.num_parameters()
    return {
        "N": N, "n": n, "bound": 1 + 2 * n / N, "target_flops": flops_per_token(target),
        "auxiliary_flops": flops_per_token(auxiliary),
        "compute_ratio": flops_per_token(target) / flops_per_token(auxiliary),
    }  # fmt: skip


def compared(ways, groups, parts, given):
    """Rows by method: milliseconds per token for each group and for both, and the ratios to the target."""
    found = {group: timed(ways, batches, parts, given.rounds, given.new_tokens) for group, batches in groups.items()}
    rounds = {
        name: {group: found[group][name]["rounds"] for group in groups}
        | {"all": [[sum(column) for column in zip(*parts_of)]
                   for parts_of in zip(*(found[group][name]["rounds"] for group in groups))]}
        for name in ways
    }  # fmt: skip
    rows = {
        name: {
            group: per_token(rounds[name][group]) | {"over_target": ratio(rounds[name][group], rounds[TARGET][group])}
            for group in rounds[name]
        }
        for name in ways
    }
    for name in ways:
        for group in groups:
            ours, theirs = found[group][PLAIN]["answers"], found[group][name]["answers"]
            rows[name][group]["as_plain"] = sum(a == b for a, b in zip(ours, theirs))
            rows[name][group]["answers"] = len(theirs)
            rows[name][group]["tokens"] = sum(map(len, theirs))
    against = {
        name: {group: ratio(rounds[PLAIN][group], rounds[name][group]) for group in rounds[name]}
        for name in (SEPARATE, REFERENCE)
        if name in ways
    }
    return rows, against


def show_rows(rows):
    print(f"\n{'':<24} {'ms a token':>10} {'least – most':>15} {'tokens/s':>9} {'time/target':>11}"
          f" {'retain':>7} {'forget':>7} {'tokens':>7}  answers as plain")  # fmt: skip
    for name, row in rows.items():
        both, by_group = row["all"], [row[group] for group in GROUPS]
        same = sum(found["as_plain"] for found in by_group)
        print(f"{name:<24} {both['ms_per_token']:>10.2f} {both['least']:>7.2f} –{both['most']:>6.2f}"
              f" {both['tokens_per_s']:>9.1f} {both['over_target']:>11.3f}"
              + "".join(f" {found['over_target']:>7.3f}" for found in by_group)
              + f" {sum(found['tokens'] for found in by_group):>7}"
              f"  {same} of {sum(found['answers'] for found in by_group)}")  # fmt: skip


def gates(rows, against, size):
    """Print the goals and the measured values."""
    found = {"plain_over_target": rows[PLAIN]["all"]["over_target"], "plain_limit": OVERHEAD * size["bound"]}
    print(f"\nplain / target          {found['plain_over_target']:.3f}; aim: at most {OVERHEAD:.2f} x (1 + 2n/N) = "
          f"{OVERHEAD:.2f} x {size['bound']:.3f} = {found['plain_limit']:.3f}, with n = {size['n']:,} and "
          f"N = {size['N']:,} parameters")  # fmt: skip
    found["speculative_speedup"] = 1 / rows[SPECULATIVE]["all"]["over_target"]
    by_group = {group: 1 / rows[SPECULATIVE][group]["over_target"] for group in GROUPS}
    found["speculative_speedup_by_group"] = by_group
    print(f"speculative / target    {found['speculative_speedup']:.2f} x as fast (retain {by_group['retain']:.2f}, "
          f"forget {by_group['forget']:.2f}); aim: at least {SPEEDUP} x")  # fmt: skip
    for name, ratios in against.items():
        found[f"plain_over_{name}"] = ratios
        print(f"plain / {name:<15} {ratios['all']:.3f} of its time (retain {ratios['retain']:.3f}, "
              f"forget {ratios['forget']:.3f})")  # fmt: skip
    return found


def speculated(parts, groups, given):
    """Statistics of speculation with an adaptive γ, from a separate pass, because counting takes time."""
    found = {}
    for group, batches in groups.items():
        counted = SpeculationStatistics()
        for batch in batches:
            speculative(parts, Speculation(statistics=counted))(batch, max_new_tokens=given.new_tokens)
        found[group] = counted.to_dict()
        accepted = " ".join(f"{share:.0%}" for share in counted.acceptance)
        print(f"speculative, {group:<7} drafter {counted.drafter}; {counted.tokens_per_pass:.2f} tokens a target pass; "
              f"accepted by position {accepted}")  # fmt: skip
    return found


def table(given):
    """The comparison at one batch size."""
    parts = Parts(given.bundle, given.steering)
    sets = material_of(given.bundle)
    groups = {group: parts.batches(spread(sets[group], given.prompts * given.batch), given.batch) for group in GROUPS}
    size = sizes(parts)
    print(f"target {size['N']:,} parameters, auxiliaries {size['n']:,} each; {size['compute_ratio']:.1f} x in compute "
          f"({size['target_flops'] / 1e6:.1f} and {size['auxiliary_flops'] / 1e6:.1f} MFLOP a token); "
          f"{parts.model.steering}, batch {given.batch}, {given.prompts} batches of prompts "
          f"a group, at most {given.new_tokens} tokens, median of {given.rounds} rounds")  # fmt: skip
    ways = methods(parts, given.reference)
    ways |= {f"speculative, {name}": speculative(parts, Speculation(drafter=name)) for name in given.drafters}
    ways |= {f"speculative, γ {gamma}": speculative(parts, gamma) for gamma in (GAMMAS if given.gammas else ())}
    rows, against = compared(ways, groups, parts, given)
    show_rows(rows)
    found = {"bundle": given.bundle.resolve().parent.name, "steering": str(parts.model.steering), "sizes": size,
             "batch": given.batch, "new_tokens": given.new_tokens, "rounds": given.rounds, "prompts": given.prompts,
             "rows": rows, "gates": gates(rows, against, size),
             "speculation": speculated(parts, groups, given)}  # fmt: skip
    return found


def grown(given):
    """Cost by context and by batch."""
    parts, sets = Parts(given.bundle, given.steering), material_of(given.bundle)
    found = growth(parts, [*sets["retain"], *sets["forget"]], min(given.rounds, 3), given.growth_tokens)
    show_growth(found)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, default=Path("runs/bench-models/bundle"),
                        help="with forget.jsonl and retain.jsonl beside it")  # fmt: skip
    parser.add_argument("--steering", help="another rule than the bundle's")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=5, help="batches of prompts from each of the two sets")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gammas", action="store_true", help="γ fixed at 1 to 8, too")
    parser.add_argument("--drafters", nargs="+", default=[], choices=("retain", "lookup"))
    parser.add_argument("--reference", type=Path, metavar="PATH", help="a checkout of the paper's published code")
    parser.add_argument("--growth", action="store_true", help="cost by context length and by batch")
    parser.add_argument("--growth-tokens", type=int, default=24)
    parser.add_argument("--acceptance", nargs="+", default=[], metavar="BUNDLE",
                        help="'demo', 'tofu-small' (of the user's cache), or a bundle's folder")  # fmt: skip
    parser.add_argument("--no-table", action="store_true", help="only --growth and --acceptance")
    parser.add_argument("--data", type=Path, default=Path("../shared/data/tofu"), help="TOFU's files, for tofu-small")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    given = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    result = {"machine": machine()}
    print(", ".join(f"{name} {value}" for name, value in result["machine"].items()))
    try:
        if not given.no_table:
            result |= table(given)
        if given.growth:
            result["growth"] = grown(given)
        result["acceptance"] = {}
        for name in given.acceptance:
            bundle, sets = bundle_named(name, given.data, Path)
            label = name if not Path(name).is_dir() else bundle.resolve().parent.name
            result["acceptance"][label] = acceptance(bundle, sets, 2 * given.prompts, given.new_tokens)
            show_acceptance(label, result["acceptance"][label])
    except UsageError as error:
        print(f"decoding: {error}", file=sys.stderr)
        return 2
    result["machine"]["load_after"] = os.getloadavg()[0]
    if given.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
