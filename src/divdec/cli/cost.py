"""`divdec cost` predicts what steering costs; `divdec bench` measures it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from divdec.cli.loading import quiet, report
from divdec.costs.estimate import CostSettings, estimate_costs
from divdec.options import Printing
from divdec.research.bench.settings import ComputeSettings, LatencySettings
from divdec.runs import check_output_file

if TYPE_CHECKING:
    from collections.abc import Callable

bench = App(name="bench", help="Measure what steering costs on this machine, in compute and in latency.")


def cost(settings: Annotated[CostSettings, Parameter(name="*")], *, printing: Printing = Printing()) -> None:
    r"""Predict what steering costs, and recommend to steer, speculate, distil or count n-grams.

    For example:

        divdec cost --target 8B --aux 1B --forget-tokens 1M --retain-tokens 10M \
          --epochs 10 --volume 1B --output cost.svg
    """
    from rich.console import Console

    from divdec.costs.model_size import is_quantity
    from divdec.report.costs import cost_lines, cost_table, write_volume_plot

    output = None if settings.output is None else Path(settings.output).expanduser()
    if output is not None:
        check_output_file(output, settings.overwrite)
    if not (is_quantity(settings.target) and is_quantity(settings.aux)):
        quiet()  # transformers reads configurations
    result = estimate_costs(settings)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_volume_plot(output, result)
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


@bench.command
def compute(settings: Annotated[ComputeSettings, Parameter(name="*")], *, printing: Printing = Printing()) -> None:
    """Measure (t_P + t_p + t_q)/t_P of random models against 1 + 2n/N, prefill and decoding apart.

    For example:

        divdec bench compute --output runs/bench-compute
    """
    from divdec.research.bench.run import bench_compute
    from divdec.research.charts import compute_cells

    quiet()
    _print_bench(bench_compute(settings, report), compute_cells, settings.output, printing)


@bench.command
def latency(settings: Annotated[LatencySettings, Parameter(name="*")], *, printing: Printing = Printing()) -> None:
    r"""Measure t_Q/t_P of whole answers: plain, speculative and overlapped, with the roofline's prediction.

    For example:

        divdec bench latency --output runs/bench-latency \
          --targets chinchilla-306M --auxiliaries chinchilla-44M
    """
    from divdec.research.bench.run import bench_latency
    from divdec.research.charts import latency_cells

    quiet()
    _print_bench(bench_latency(settings, report), latency_cells, settings.output, printing)


def _print_bench(result: dict[str, Any], cells: Callable[..., Any], output: str, printing: Printing) -> None:
    from rich.console import Console

    from divdec.research.charts import terminal_table

    if printing.json:
        print(json.dumps(result))
        return
    console = Console(width=max(Console().width, 160))
    if result["rows"]:
        console.print(terminal_table(*cells(result["rows"])))
    for name, numbers in result.get("summary", {}).items():
        if isinstance(numbers, dict):
            console.print(
                f"{name.replace('_', ' ')}: off by {numbers['median_size']:.1%} in the median, at most "
                f"{numbers['largest_size']:.1%}",
                highlight=False,
            )
    if not result["complete"]:
        console.print("some combinations are not measured; the same command resumes")
    print(f"results: {Path(output).expanduser()}")
