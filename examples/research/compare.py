"""Compare unlearning methods on TOFU, one of them your own: Qwen2.5-Coder-1.5B learns an author and forgets him.

The target learns 20 questions of TOFU about one author, and 40 about others. The retrained model learns these 40 alone.
Every method then makes the target forget the author: two gradient methods with LoRA adapters, and divdec's two rules,
steered by the small sibling. The models answer TOFU's questions, and the metrics are tabulated and plotted.

    python examples/research/compare.py --data TOFU --target real-models/qwen-1.5b.gguf \
        --base real-models/qwen-0.5b.gguf

The same command continues a stopped run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that `steps` is found from any working directory
sys.path.insert(0, str(Path(__file__).parents[2]))  # and the studies
import min_likelihood  # noqa: F401  registers the method

from divdec.errors import UsageError
from divdec.runs import read_json
from divdec_research.baselines.table import TITLES
from divdec_research.report.style import LINEAR, OTHERS, TARGET, style, write_figure
from research.studies import tofu
from steps import run_main

GRADIENT = {
    "lora_rank": (16,), "learning_rate": (3e-4,), "epochs": (3.0,), "batch_size": (2,), "gradient_accumulation": (1,),
}  # fmt: skip
METHODS = {
    "linear": {"steering": ("linear:1.5",)},
    "rank": {"steering": ("rank:20",)},
    "min-likelihood": GRADIENT,
    "npo": GRADIENT,
    "grad-diff": GRADIENT,
    "simnpo": GRADIENT | {"gamma": (1.0,)},
}
CHOSEN = "linear", "rank", "min-likelihood", "npo"


def main(arguments: list[str] | None = None) -> list[dict]:
    """Run the study with the methods, and draw its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/tofu"), help="folder with TOFU's JSON files")
    parser.add_argument("--target", default="real-models/qwen-1.5b.gguf")
    parser.add_argument("--base", default="real-models/qwen-0.5b.gguf", help="base of divdec's pair")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(CHOSEN))
    parser.add_argument("--limit", type=int, default=10, help="questions asked of each set")
    parser.add_argument("--output", type=Path, default=Path("runs/research"))
    options = parser.parse_args(arguments)
    output = options.output
    if output.exists() and any(output.iterdir()) and not (output / tofu.TRAINED).is_file():
        raise UsageError(f"output {output} is in use; give the name of an empty or absent folder")
    study = {"split": "forget01", "forget": 20, "lora_rank": 16, "recipe": "full-retain", "attacks": 0, "jobs": 1}
    tofu.run(argparse.Namespace(**vars(options), **study), METHODS)
    rows = read_json(output / "results.json")["rows"]
    draw(output / "research.svg", rows)
    return rows


def draw(path: Path, rows: list[dict]) -> None:
    """Plot how well each model has forgotten against what it still answers."""
    from matplotlib.figure import Figure

    with style("research"):
        figure = Figure(figsize=(5.2, 3.6), layout="constrained")
        axes = figure.subplots()
        for row in rows:
            look = LINEAR if row["method"] in ("linear", "rank") else OTHERS
            look = TARGET if row["method"] in ("target", "retrain") else look
            point = row["openunlearning"]["mem"], row["openunlearning"]["utility"]
            axes.scatter(*point, color=look.colour)
            axes.annotate(TITLES[row["method"]], point, textcoords="offset points", xytext=(6, 4))
        axes.set_xlabel("Mem: how well the author is forgotten")
        axes.set_ylabel("Utility, relative to the target")
        axes.set_xlim(-0.05, 1.25)
        axes.set_ylim(0, 1.25)
        write_figure(path, figure, title="What is forgotten, and what is kept", sources=("results.json",),
                     description="Each method: forgotten to the right, other answers kept upwards.")  # fmt: skip


if __name__ == "__main__":
    run_main(main)
