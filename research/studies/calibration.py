"""Compare the choice of `divdec calibrate` with the scores of all settings, which need the retrained model.

The TOFU suite measures the models of `divdec compare --data demo` or `--data tofu-small` under all settings of
calibrate. Models that the cache lacks are trained. Agg is that of the variant
`openunlearning` without fluency.

    python -m research.studies.calibration demo [--seed 1]
    python -m research.studies.calibration tofu-small --data TOFU
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path

from divdec import DivergenceForCausalLM, write_bundle
from divdec.checkpoint import load_tokenizer
from divdec.data.records import read_records
from divdec.evaluation.calibration import SWEEP
from divdec.evaluation.choice import choose_rule
from divdec.evaluation.run import evaluate, parse_sweep
from divdec.runs import cache_folder
from divdec_research.compare.benchmark import ASKED, HOLDOUT, RETAIN, TOFU_SMALL, spread, suite_material
from divdec_research.suites.aggregate import aggregate, tofu_figures
from divdec_research.suites.settings import TofuSettings
from divdec_research.suites.tofu import TofuSuite
from divdec_research.world import demo as demo
from divdec_research.world.facts import build_world, write_tofu
from divdec_research.world.models import train_all

FILES = {"forget": "forget01_perturbed.json", "retain": "retain_perturbed.json", "holdout": "holdout01.json"}


def demo_world(seed, folder, _):
    world = build_world(dataclasses.replace(demo.WORLD, seed=seed))
    write_tofu(world, folder)
    return demo.material_of(world), demo.RECIPE, cache_folder() / "demo" / "models"


def tofu_world(seed, folder, data):
    """The models of `divdec compare --data tofu-small`, and its questions as TOFU's files."""
    material, _ = suite_material(data)
    folder.mkdir()
    for name in ("forget01_perturbed", "real_authors_perturbed", "world_facts_perturbed"):
        (folder / f"{name}.json").write_text((data / f"{name}.json").read_text())
    rows = (data / "retain_perturbed.json").read_text().splitlines()
    (folder / FILES["retain"]).write_text("\n".join(spread(rows[:RETAIN], ASKED)))
    (folder / FILES["holdout"]).write_text("\n".join(rows[RETAIN : RETAIN + HOLDOUT]))
    return material, TOFU_SMALL, cache_folder() / "tofu-small" / "models"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", choices=("demo", "tofu-small"))
    parser.add_argument("--data", type=Path, help="TOFU's files, for tofu-small")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="keep data and results here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        _compare(given, given.output or Path(temporary))


def _compare(given, folder):
    folder.mkdir(parents=True, exist_ok=True)
    build = demo_world if given.world == "demo" else tofu_world
    material, recipe, cache = build(given.seed, folder / "data", given.data)
    trained = train_all(material, recipe, given.seed, cache, print)
    bundle = write_bundle(
        folder / "bundle", target=str(trained.target), retain_auxiliary=str(trained.retain_auxiliary),
        forget_auxiliary=str(trained.forget_auxiliary), steering="linear:1",
    )  # fmt: skip
    shared = {
        "data": str(folder / "data"), "split": "forget01", "fluency": "none",
        "system_prompt": None, "date": None,
    }  # fmt: skip
    plain = TofuSettings(models=(str(trained.target), str(trained.retrain)), output=str(folder / "plain"), **shared)
    target, retrain = evaluate(plain, TofuSuite.read(plain))
    settings = TofuSettings(models=(str(bundle),), sweep=SWEEP, output=str(folder / "sweep"), **shared)
    swept = evaluate(settings, TofuSuite.read(settings))
    scores = {
        results.about["steering"]: aggregate(
            tofu_figures(results), target.figures, retrain.figures, "openunlearning", fluency=False
        )
        for results in swept
    }
    sets = {name: read_records(folder / "data" / file) for name, file in FILES.items()}
    result = choose_rule(
        DivergenceForCausalLM.from_pretrained(bundle), load_tokenizer(trained.target), sets, parse_sweep(SWEEP),
        min_retain=0.98, max_records=None, form=material.form,
    )  # fmt: skip
    print(f"\n{'':<16} {'Agg':>6} {'Mem':>6} {'Priv':>6} {'Util':>6} {'distance':>9} {'retain drop':>12}")
    for point in result.settings:
        values = scores[str(point.steering)].values
        numbers = " ".join(f"{values[name]:6.3f}" for name in ("agg", "mem", "priv", "utility"))
        mark = "→" if point is result.best else " "
        print(f"{mark} {point.steering!s:<14} {numbers} {point.distance:9.3f} {1 - point.retain:12.1%}")
    agg = {setting: float(score.values["agg"] or 0.0) for setting, score in scores.items()}
    chosen, best = str(result.best.steering), max(agg, key=lambda setting: agg[setting])
    print(f"chosen without the retrained model: {chosen}, Agg {agg[chosen]:.3f}; best with it: {best}, "
          f"Agg {agg[best]:.3f}; difference {agg[best] - agg[chosen]:.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
