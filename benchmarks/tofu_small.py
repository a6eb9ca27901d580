"""TOFU cut to size, on small models trained from scratch: prints the table that docs/benchmarks.md shows.

Two authors are forgotten and eighteen kept; target, retrain reference and steered settings are measured.

    make tofu-small                      # TOFU in ../shared/data/tofu
    make tofu-small TOFU=path/to/tofu
"""

import argparse
import json
import sys
import time
from pathlib import Path

from divdec.demo.models import Material, Questions, measure_models, train_all
from divdec.demo.run import MAIN_SETS
from divdec.errors import UsageError
from divdec.model.bundle import write_bundle
from divdec.research.compare.benchmark import ASKED, HOLDOUT, RETAIN, TOFU_SMALL, other_authors, spread
from divdec.research.compare.benchmark import tofu_material as assemble
from divdec.runs import cache_folder, write_json
from divdec.steering import Steering

RECIPE = TOFU_SMALL
SETTINGS = tuple(
    [Steering(alpha=alpha) for alpha in (0.5, 1.0, 1.5, 2.0, 3.0)] + [Steering("rank", k=k) for k in (1, 5, 20, 100)]
)


def tofu_material(data: Path) -> tuple[Material, list[Questions]]:
    """Forget, retain, holdout and base questions; no question is in two of them.

    The authors to keep are the last eighteen of retain99, right before those of forget01; the holdout authors are its
    first two, and the bases learn all between.
    """
    others = other_authors(data)
    holdout, between, retain = others[:HOLDOUT], others[HOLDOUT:-RETAIN], others[-RETAIN:]
    material = assemble(data, between, retain)
    sets = [
        Questions("forget", material.forget.records),
        Questions("retain", spread(retain, ASKED)),
        Questions("holdout", tuple(holdout)),
    ]
    return material, sets


def run_tofu_small(data: Path, seed: int = 0, output: Path | None = None) -> dict:
    """Train the models that the cache lacks, measure, and write bundle and result.json."""
    started = time.perf_counter()
    material, sets = tofu_material(data)
    cache = cache_folder() / "tofu-small"
    models = train_all(material, RECIPE, seed, cache / "models", lambda line: print(line, file=sys.stderr))
    results = measure_models(models, sets, SETTINGS, material.form, max_new_tokens=128)
    output = output or cache / f"seed-{seed}"
    output.mkdir(parents=True, exist_ok=True)
    bundle = write_bundle(
        output / "bundle", target=str(models.target), retain_auxiliary=str(models.retain_auxiliary),
        forget_auxiliary=str(models.forget_auxiliary), steering=results.recommended.setting, overwrite=True,
        forget_set=material.forget.label, single_turn=True,
    )  # fmt: skip
    result = {
        "rows": [{"model": row.model, **row.to_dict()} for row in (results.target, results.retrain, *results.steered)],
        "recommended": {
            "gap_closed": round(results.gap, 4), "retain_kept": round(results.kept, 4), "reached": results.reached,
            **results.recommended.to_dict(),
        },
        "verdict": results.verdict,
        "seconds": round(time.perf_counter() - started, 1),
        "training_seconds": models.seconds,
        "bundle": str(bundle),
    }  # fmt: skip
    write_json(output / "result.json", result)
    return result


def show(result: dict) -> None:
    print(f"{'':<12}" + "".join(f"{f'{name}: accuracy, probability, ROUGE-L':>46}" for name in MAIN_SETS))
    for row in result["rows"]:
        cells = [f"{100 * row[f'{name}_{figure}']:.1f}" for name in MAIN_SETS
                 for figure in ("accuracy", "probability", "rouge")]  # fmt: skip
        print(f"{row['setting'] or row['model']:<12}" + "".join(f"{cell:>15}" for cell in cells))
    print("Accuracy: share of the true answer's tokens that are the model's most likely token (teacher-forced).")
    print(f"{result['verdict']}\n{result['seconds']:.0f} s. Bundle: {result['bundle']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/tofu"), help="folder with TOFU's JSON files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="folder for bundle and result.json")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    args = parser.parse_args()
    try:
        result = run_tofu_small(args.data, args.seed, args.output)
    except UsageError as error:
        print(f"tofu_small: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(result))
    else:
        show(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
