"""`divdec eval` and `divdec cost`: measure models, predict what steering costs.

Other packages add suites to `eval` (docs/architecture.md).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from divdec.cli.loading import device_map, quiet, report
from divdec.costs.estimate import CostSettings, estimate_costs
from divdec.costs.model_size import format_quantity, is_quantity
from divdec.evaluation.settings import EvalSettings, LeakSettings
from divdec.options import Printing
from divdec.runs import check_one_process

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

    from divdec.evaluation.results import Results
    from divdec.evaluation.run import Suite

LABELS = {  # of the rows of `divdec cost`
    "target": "target alone, unsteered",
    "steer": "steer",
    "distil": "distil",
    "n-gram": "steer with n-grams",
}

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
        all_figures: Print all metrics, not only the most important ones.
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

    if not (is_quantity(settings.target) and is_quantity(settings.aux)):
        quiet()  # transformers reads configurations
    result = estimate_costs(settings)
    for warning in result["warnings"]:
        report(f"warning: {warning}")
    if printing.json:
        print(json.dumps(result, indent=2))
        return
    console = Console(width=max(Console().width, 80))
    console.print(_cost_table(result))
    for line in _cost_lines(result):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(
        f"\n[bold]{result['choice'] or 'no choice'}[/bold]: {result['reason']}", highlight=False, soft_wrap=True
    )


def _cost_table(estimate: dict[str, Any]) -> Table:
    """One row per option: FLOPs once, per token, and for the volume."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("option", no_wrap=True)
    heads = ["FLOPs once", "per token", "vs target"]
    heads += [] if estimate["volume"] is None else [f"for {format_quantity(estimate['volume'])} tokens"]
    for title in heads:
        table.add_column(title, justify="right", no_wrap=True)
    target = estimate["flops_per_token"]["target"]
    for name, once in estimate["flops_once"].items():
        per_token = estimate["flops_per_token"][name]
        cells = [LABELS[name], f"{once:.3g}", f"{per_token:.3g}", f"{per_token / target - 1:+.1%}"]
        cells += [] if estimate["volume"] is None else [f"{estimate['flops_at_volume'][name]:.3g}"]
        table.add_row(*cells, style="bold" if name == estimate["choice"] else None)
    return table


def _cost_lines(estimate: dict[str, Any]) -> list[str]:
    """The rest of the estimate as lines of text."""
    edges, distilling = estimate["break_even_tokens"], estimate["distillation_flops"]
    return [
        f"target N = {format_quantity(estimate['N'])}, auxiliaries n = {format_quantity(estimate['n'])} each: "
        f"compute increase 2n/N {estimate['compute_increase']:.1%}",
        f"training both auxiliaries: {estimate['training_flops']:.3g} FLOPs",
        f"distillation: {distilling['paper']:.3g} FLOPs more; {distilling['live']:.3g} with the target's own pass, "
        "which the paper leaves out",
        f"break-even volume {format_quantity(edges['paper'])} tokens; {format_quantity(edges['live'])} with that pass",
    ]


def measure(settings: EvalSettings, read: Callable[[], Suite], all_figures: bool, printing: Printing) -> None:
    """Read and check a suite's data, evaluate the models, and print their figures."""
    from divdec.evaluation.run import evaluate

    check_one_process()
    quiet()
    suite = read()
    results = evaluate(settings, suite, device_map(settings.device), report=report)
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
