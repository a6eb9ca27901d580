"""`divdec cost`: predict what steering costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from divdec.cli.loading import quiet, report
from divdec.costs.estimate import CostSettings, estimate_costs
from divdec.options import Printing
from divdec.runs import check_output_file


def cost(settings: Annotated[CostSettings, Parameter(name="*")], *, printing: Printing = Printing()) -> None:
    r"""Predict the cost of steering, and recommend steering, distillation or n-grams.

    For example:

        divdec cost --target 8B --aux 1B --forget-tokens 1M --retain-tokens 10M \
          --epochs 10 --volume 1B --output cost.svg
    """
    from rich.console import Console

    from divdec.costs.model_size import format_quantity, is_quantity
    from divdec.report.costs import cost_lines, cost_table, volume_figure
    from divdec.report.style import style, write_figure

    output = None if settings.output is None else Path(settings.output).expanduser()
    if output is not None:
        check_output_file(output, settings.overwrite)
    if not (is_quantity(settings.target) and is_quantity(settings.aux)):
        quiet()  # transformers reads configurations
    result = estimate_costs(settings)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        with style("divdec-cost"):
            write_figure(
                output,
                volume_figure(result),
                title="Cost of a deployment by volume",
                description=f"target N = {format_quantity(result.N)}, auxiliaries n = {format_quantity(result.n)} each",
                sources=[result.target.name, result.auxiliary.name],
            )
    for warning in result.warnings:
        report(f"warning: {warning}")
    if printing.json:
        print(json.dumps(result.to_dict() | {"plot": None if output is None else str(output)}, indent=2))
        return
    console = Console(width=max(Console().width, 80))
    console.print(cost_table(result))
    for line in cost_lines(result):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"\n[bold]{result.choice or 'no choice'}[/bold]: {result.reason}", highlight=False, soft_wrap=True)
    if output is not None:
        print(f"plot: {output}")
