"""`divdec eval` and `divdec cost`: measure models, predict what steering costs.

Other packages add suites to `eval` (docs/architecture.md).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from divdec.cli.loading import device_map, quiet, report
from divdec.costs.estimate import CostSettings, estimate_costs
from divdec.evaluation.settings import EvalSettings, LeakSettings
from divdec.options import Printing

if TYPE_CHECKING:
    from collections.abc import Callable

    from divdec.evaluation.results import Results
    from divdec.evaluation.run import Suite

app = App(name="eval", help="Measure models: how often their answers leak, and benchmarks.")


@app.command(sort_key=1)
def leak(
    settings: Annotated[LeakSettings, Parameter(name="*")],
    *,
    all_figures: Annotated[bool, Parameter(name="--all")] = False,
    printing: Printing = Printing(),
) -> None:
    r"""Measure how often models answer questions that they should have forgotten.

    For example:

        divdec eval leak bundle --data forget.jsonl --samples 8 --output runs/leaks

    Args:
        settings: what is measured.
        all_figures: Print all metrics, not only the most important ones.
        printing: format of the figures.
    """
    from divdec.evaluation.leak import LeakSuite

    measure(settings, lambda: LeakSuite.read(settings), all_figures, printing)


def cost(settings: Annotated[CostSettings, Parameter(name="*")], *, printing: Printing = Printing()) -> None:
    r"""Predict the cost of steering, and recommend steering, distillation or n-grams.

    For example:

        divdec cost --target 8B --aux 1B --forget-tokens 1M --retain-tokens 10M \
          --epochs 10 --volume 1B
    """
    from rich.console import Console

    from divdec.costs.model_size import is_quantity
    from divdec.report.costs import cost_lines, cost_table

    if not (is_quantity(settings.target) and is_quantity(settings.aux)):
        quiet()  # transformers reads configurations
    result = estimate_costs(settings)
    for warning in result.warnings:
        report(f"warning: {warning}")
    if printing.json:
        print(json.dumps(result.to_dict(), indent=2))
        return
    console = Console(width=max(Console().width, 80))
    console.print(cost_table(result))
    for line in cost_lines(result):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"\n[bold]{result.choice or 'no choice'}[/bold]: {result.reason}", highlight=False, soft_wrap=True)


def measure(settings: EvalSettings, read: Callable[[], Suite], all_figures: bool, printing: Printing) -> None:
    """Read a suite, evaluate the models, and print their figures.

    Args:
        settings: what is measured.
        read: reads and checks the suite's data.
        all_figures: print all metrics.
        printing: format of the figures.
    """
    from divdec.evaluation.generation import is_main, sharded
    from divdec.evaluation.run import evaluate

    quiet()
    with sharded():
        suite = read()
        results = evaluate(settings, suite, device_map(settings.device), report=report)
        if not is_main():
            return
    if printing.json:
        for result in results:
            print(json.dumps({"name": result.name, **result.about, "figures": result.figures}))
        return
    _print_figures(results, suite.headlines(results[0]), settings, all_figures)


def _print_figures(results: list[Results], arrows: dict[str, str], settings: EvalSettings, all_figures: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=max(Console().width, 80))
    names = sorted({name for result in results for name in result.figures if "." not in name})
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
