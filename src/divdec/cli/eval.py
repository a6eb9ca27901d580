"""`divdec eval`: measure models on TOFU, MUSE or for leaks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from divdec.cli.loading import device_map, quiet, report
from divdec.errors import UsageError
from divdec.evaluation.settings import EvalSettings
from divdec.options import Printing

if TYPE_CHECKING:
    from divdec.evaluation.results import Results

# The figures of each suite that a reader looks at first, and where they are best.
HEADLINES = {
    "tofu": {
        "forget_quality": "↑", "forget_truth_ratio": "↑", "forget_Q_A_Prob": "↓", "forget_Q_A_ROUGE": "↓",
        "extraction_strength": "↓", "privleak": "→ 0", "model_utility": "↑",
    },
    "muse": {
        "forget_verbmem_ROUGE": "↓", "forget_knowmem_ROUGE": "↓", "retain_knowmem_ROUGE": "↑", "privleak": "→ 0",
        "extraction_strength": "↓",
    },
}  # fmt: skip


def evaluate(
    settings: Annotated[EvalSettings, Parameter(name="*")],
    *,
    all_figures: Annotated[bool, Parameter(name="--all")] = False,
    printing: Printing = Printing(),
) -> None:
    r"""Measure models on TOFU, MUSE or for leaks, item by item as OpenUnlearning does.

    For example:

        divdec eval tofu bundle --data TOFU --split forget10 \
          --retain-results runs/retrain --holdout holdout10.json --output runs/eval

    Args:
        settings: what is measured.
        all_figures: Print all figures, not only the most important.
        printing: format of the figures.
    """
    import divdec.research.baselines.auto  # noqa: F401  # registers the composite baselines with transformers
    from divdec.evaluation.run import evaluate as run
    from divdec.evaluation.sharding import is_main, sharded

    quiet()
    if settings.suite == "tofu":
        _check_split(Path(settings.data).expanduser(), settings.split)
    with sharded():
        results = run(settings, device_map(settings.device), report=report)
        if not is_main():
            return
    if printing.json:
        for result in results:
            print(json.dumps({"name": result.name, **result.about, "figures": result.figures}))
        return
    _print(results, settings, all_figures)


def _check_split(data: Path, split: str) -> None:
    """Refuse a split without a file, and name those that have one."""
    ending = "_perturbed.json"
    splits = sorted(path.name.removesuffix(ending) for path in data.glob(f"forget*{ending}"))
    if splits and split not in splits:
        raise UsageError(f"--split is {split!r}; in {data} there are: {', '.join(splits)}")


def _print(results: list[Results], settings: EvalSettings, all_figures: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=max(Console().width, 80))
    names = sorted({name for result in results for name in result.figures if "." not in name})
    headlines = HEADLINES.get(settings.suite, {})
    shown = [name for name in headlines if name in names]
    if all_figures or not shown:
        shown = names
    table = Table("metric", *(result.name for result in results), box=None, padding=(0, 2, 0, 0))
    for name in shown:
        values = [result.figures.get(name) for result in results]
        cells = ("–" if value is None else f"{value:.4f}" for value in values)
        table.add_row(f"{name} {headlines.get(name, '')}".strip(), *cells)
    console.print(table)
    for reason in sorted({reason for r in results for name, reason in r.reasons.items() if name in shown}):
        console.print(f"– {reason}", highlight=False)
    if len(shown) < len(names):
        console.print(f"{len(names) - len(shown)} further figures: --all", highlight=False)
    console.print(f"results: {settings.output}", highlight=False)
