"""TOFU forget01 on small models trained from nothing: prints the table that docs/benchmarks.md shows.

make tofu-small                      # TOFU in ../shared/data/tofu
make tofu-small TOFU=path/to/tofu
"""

import argparse
import json
import sys
from pathlib import Path

from divdec.errors import UsageError
from divdec.research.tofu_small import run_tofu_small


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/tofu"), help="folder with TOFU's JSON files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="folder for report and bundle")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    given = parser.parse_args()
    try:
        result = run_tofu_small(given.data, given.seed, given.output, quiet=given.json)
    except UsageError as error:
        print(f"tofu_small: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
