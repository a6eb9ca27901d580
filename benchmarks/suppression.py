"""How much probability steering takes from replies about the forget set and from others (`serve --on-suppressed`).

    make demo
    python benchmarks/suppression.py demo [--rules rank:50:3 linear:1]

The questions are those of `make demo`, one wording each: the forget set, the retain set, other capitals, and neutral
prompts. For each set the table has the shares of greedy replies of up to 32 tokens, and how many are at least the
default of --suppressed-share. Below it is the threshold that divdec chooses for these replies. `divdec train` and
`divdec calibrate` choose it by up to 16 records of each set.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from difference_attack import SETS, one_for_each_fact
from divdec.cli.serving import ServeSettings
from divdec.data.formatting import encode_prompts
from divdec.data.records import Message, Record
from divdec.demo.facts import NEUTRAL
from divdec.errors import UsageError
from divdec.evaluation.suppression import SuppressionThreshold, shares_of_replies
from divdec.model.checkpoint import dtype_for_passes, load_tokenizer
from divdec.model.loading import Bundle
from divdec.model.modeling import DivergenceForCausalLM
from divdec.research.charts import markdown_table


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", type=Path, help="output folder of make demo")
    parser.add_argument("--rules", nargs="+", default=[None], help="steering rules (default: the bundle's)")
    options = parser.parse_args()
    try:
        for rule in options.rules:
            print(measure(options.demo, rule))
    except UsageError as error:
        parser.exit(2, f"suppression: {error}\n")


def measure(demo, rule=None):
    """Return the table of one rule, and its threshold."""
    bundle = Bundle.open(demo / "bundle")
    model = DivergenceForCausalLM.from_pretrained(bundle.folder, steering=rule, dtype=dtype_for_passes())
    tokenizer = load_tokenizer(bundle.paths["target"])
    sets = {name: one_for_each_fact(demo, name) for name in SETS}
    sets["neutral"] = [Record("", messages=(Message("user", prompt),)) for prompt in NEUTRAL]
    default = ServeSettings().suppressed_share
    shares, rows = {}, []
    for name, records in sets.items():
        own = shares[name] = shares_of_replies(model, tokenizer, encode_prompts(records, tokenizer))
        cells = len(own), f"{statistics.median(own):.2f}", f"{min(own):.2f}–{max(own):.2f}"
        rows.append([name, *map(str, cells), str(sum(share >= default for share in own))])
    table = markdown_table([str(model.steering), "number", "median", "range", f"at least {default:g}"], rows)
    return f"{table}\n{SuppressionThreshold.between(shares)}\n"


if __name__ == "__main__":
    main()
