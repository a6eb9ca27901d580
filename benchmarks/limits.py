"""What unlearning by steering does not do, in figures: docs/limits.md's tables, on the demo's world.

Target, retrained reference, steered models, students distilled from one, and three gradient baselines are asked for the
forget set in many ways, their candidates are ranked, and those that are ordinary checkpoints are fine-tuned on a little
to see what else comes back. The demo's models are trained where the cache lacks them. The same command goes on after it
was stopped.

    python benchmarks/limits.py [--seeds 3] [--parts prompts candidates relearning] [--output runs/limits] [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time

from divdec.research.limits.run import run_limits, tables
from divdec.research.limits.settings import PARTS, LimitsSettings


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = LimitsSettings(output="runs/limits")
    parser.add_argument("--output", default=usual.output, help="folder for models and figures")
    parser.add_argument("--seeds", type=int, default=usual.seeds)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rate", type=float, default=usual.rate, help="peak learning rate of the relearning attack")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    given = parser.parse_args()
    settings = dataclasses.replace(
        usual, output=given.output, seeds=given.seeds, parts=tuple(given.parts), rate=given.rate
    )
    started = time.perf_counter()
    found = run_limits(settings, lambda line: print(line, file=sys.stderr, flush=True))
    print("\n\n".join(table.markdown() for table in tables(found, settings)))
    print(f"\n{settings.seeds} seeds, {time.perf_counter() - started:.0f} s beside what was there already")
    if given.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
