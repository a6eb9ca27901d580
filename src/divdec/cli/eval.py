"""`divdec eval`: measure models on TOFU, MUSE or for leaks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from divdec.cli.loading import device_map, quiet, report
from divdec.evaluation.settings import EvalSettings
from divdec.options import Printing

if TYPE_CHECKING:
    from divdec.evaluation.results import Results


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
        all_figures: Print all metrics, not only the most important ones.
        printing: format of the figures.
    """
    import divdec.research.baselines.auto  # noqa: F401  # registers the composite baselines with transformers
    from divdec.evaluation.run import evaluate as run
    from divdec.evaluation.sharding import is_main, sharded

    quiet()
    with sharded():
        results = run(settings, device_map(settings.device), report=report)
        if not is_main():
            return
    if printing.json:
        for result in results:
            print(json.dumps({"name": result.name, **result.about, "figures": result.figures}))
        return
    _print(results, settings, all_figures)


def _print(results: list[Results], settings: EvalSettings, all_figures: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from divdec.evaluation.results import headlines

    console = Console(width=max(Console().width, 80))
    names = sorted({name for result in results for name in result.figures if "." not in name})
    arrows = headlines(results[0])
    shown = [name for name in arrows if name in names]
    if all_figures or not shown:
        shown = names
    labels = {name: f"{name} {arrows.get(name, '')}".strip() for name in shown}
    # As many results beside one another as fit the width, the others below.
    widest = max(6, *(len(result.name) for result in results)) + 2
    columns = max(1, (console.width - max(map(len, labels.values())) - 2) // widest)
    for start in range(0, len(results), columns):
        block = results[start : start + columns]
        table = Table("metric", *(result.name for result in block), box=None, padding=(0, 2, 0, 0))
        for name in shown:
            values = [result.figures.get(name) for result in block]
            table.add_row(labels[name], *("–" if value is None else f"{value:.4f}" for value in values))
        console.print(table)
    for reason in sorted({reason for r in results for name, reason in r.reasons.items() if name in shown}):
        console.print(f"– {reason}", highlight=False)
    if len(shown) < len(names):
        console.print(f"{len(names) - len(shown)} further figures: --all", highlight=False)
    console.print(f"results: {settings.output}", highlight=False)
