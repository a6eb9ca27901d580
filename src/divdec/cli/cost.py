"""Estimate what steering costs in operations, memory and time, and whether to steer, distil or count n-grams."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from divdec.costs.settings import CostSettings
from divdec.runs import check_output_file

POSITIONAL = ()
EXAMPLE = (
    "divdec cost --target 8B --aux 1B --forget-tokens 1M --retain-tokens 10M --epochs 10 --volume 1B --output cost.svg"
)


@dataclasses.dataclass(frozen=True)
class Settings(CostSettings):
    """Options of `divdec cost`."""

    json: bool = False
    """Print one JSON object."""


def run(settings: Settings) -> None:
    """Compute, draw, print."""
    from divdec.costs.estimate import estimate_costs
    from divdec.costs.model_size import is_quantity
    from divdec.report.costs import cost_lines, cost_table, write_volume_plot

    output = None if settings.output is None else Path(settings.output).expanduser()
    if output is not None:
        check_output_file(output, settings.overwrite)
    if not (is_quantity(settings.target) and is_quantity(settings.aux)):
        from divdec.cli.loading import quiet

        quiet()  # transformers is needed for configurations alone
    estimate = estimate_costs(settings)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_volume_plot(output, estimate)
    for warning in estimate.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if settings.json:
        print(json.dumps(estimate.to_dict() | {"plot": None if output is None else str(output)}, indent=2))
        return
    from rich.console import Console

    console = Console(width=max(Console().width, 100))
    console.print(cost_table(estimate))
    for line in cost_lines(estimate):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(
        f"\n[bold]{estimate.choice or 'no choice'}[/bold]: {estimate.reason}", highlight=False, soft_wrap=True
    )
    if output is not None:
        print(f"plot: {output}")
