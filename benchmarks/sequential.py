"""Sequential requests and growing forget sets on small models: the tables of docs/depth_and_sequential.md.

make sequential                                            # the demo's world, three requests
python benchmarks/sequential.py muse --data path/to/muse_news --steps 4
"""

import argparse
import json
import sys
from pathlib import Path

from divdec.errors import UsageError
from divdec.research.sequential import run_sequential
from divdec.research.sequential_material import demo_course, muse_course
from divdec.research.sequential_models import SequentialSettings
from divdec.runs import cache_folder
from divdec.training.fine_tuning import Interrupted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", choices=("demo", "muse"))
    parser.add_argument("--steps", type=int, default=3, help="how many requests")
    parser.add_argument("--data", type=Path, default=Path("../shared/data/muse_news"), help="folder with MUSE-News")
    parser.add_argument("--steering", default=SequentialSettings.steering)
    parser.add_argument("--auxiliaries", choices=("onwards", "anew"), default=SequentialSettings.auxiliaries)
    parser.add_argument("--temperature", type=float, default=SequentialSettings.temperature)
    parser.add_argument("--lr", type=float, default=SequentialSettings.lr, help="of distillation")
    parser.add_argument("--epochs", type=float, default=SequentialSettings.epochs, help="of distillation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="run folder; runs/sequential-WORLD by default")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier result there")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    given = parser.parse_args()
    output = given.output or Path("runs") / f"sequential-{given.world}"
    try:
        demo = given.world == "demo"
        course = demo_course(given.steps, given.seed) if demo else muse_course(given.data, given.steps)
        settings = SequentialSettings(
            steering=given.steering, auxiliaries=given.auxiliaries, temperature=given.temperature, lr=given.lr,
            epochs=given.epochs, seed=given.seed,
        )  # fmt: skip
        cache = cache_folder() / ("demo" if demo else "sequential-muse") / "models"
        result = run_sequential(
            course, settings, output, cache, overwrite=given.overwrite, report=lambda line: print(line, file=sys.stderr)
        )
    except UsageError as error:
        print(f"sequential: {error}", file=sys.stderr)
        return 2
    except (Interrupted, KeyboardInterrupt) as error:
        print(f"sequential: {error or 'interrupted'}; the same command goes on from there", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps(result))
    else:
        print((output / "table.md").read_text() + f"\n{result['seconds']:.0f} s. {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
