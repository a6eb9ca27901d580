"""`divdec baseline`, `compare`, `cost` and `bench`: other unlearning methods, and the costs of steering."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from divdec.cli.loading import check_not_bundle, quiet, report
from divdec.costs.estimate import CostEstimate, CostSettings, estimate_costs
from divdec.options import Printing
from divdec.research.baselines.methods import METHODS, Method
from divdec.research.bench.settings import BenchSettings, LatencySettings
from divdec.research.compare.settings import CompareSettings
from divdec.runs import check_output_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table


baseline = App(name="baseline", help="Apply another unlearning method to the same target and data.")


@baseline.command(name="list", sort_key=-1)
def list_methods(*, printing: Printing = Printing()) -> None:
    """List the methods: name, kind, source and what they do.

    For example:

        divdec baseline list

    Args:
        printing: format of the list.
    """
    if printing.json:
        fields = ("name", "title", "kind", "source", "summary")
        print(json.dumps([{field: getattr(method, field) for field in fields} for method in METHODS.values()]))
        return
    for method in METHODS.values():
        print(f"{method.name} ({method.title}, {method.kind}): {method.summary}\n  {method.source}")


def _command(method: Method) -> Callable[..., None]:
    """Return the command of one method."""

    def apply(settings: Any, *, own: Any, printing: Printing = Printing()) -> None:
        from accelerate import PartialState

        from divdec.research.baselines.run import run_baseline

        quiet()
        check_not_bundle(settings.target, "--target")
        content = run_baseline(method, settings, own, report=report)
        if not PartialState().is_main_process:
            return
        if printing.json:
            print(json.dumps(content))
            return
        print(f"model: {content['model']} ({content['seconds']:.0f} s)")
        for note in content["notes"]:
            print(f"note: {note}")
        print("measure it beside the target: divdec eval tofu … (see divdec eval --help)")

    apply.__annotations__ |= {
        "settings": Annotated[method.run_settings, Parameter(name="*")],
        "own": Annotated[method.settings, Parameter(name="*")],
        "printing": Printing,
    }
    apply.__kwdefaults__ = {"own": method.settings(), "printing": Printing()}
    apply.__doc__ = (
        f"{method.title}: {method.summary}.\n\nSource: {method.source}.\n\nFor example:\n\n"
        f"    divdec baseline {method.name} --target models/target \\\n"
        f"      --forget forget.jsonl --retain retain.jsonl --output runs/{method.name}\n"
    )
    return apply


for number, method in enumerate(METHODS.values()):
    baseline.command(_command(method), name=method.name, sort_key=number)


def compare(settings: Annotated[CompareSettings, Parameter(name="*")], *, printing: Printing = Printing()) -> None:
    r"""Compare every method on the same models and data: the paper's main table, with costs and leaks.

    The same command resumes a stopped run.

    For example:

        divdec compare --data demo --methods all --grid small --seeds 3 --search-seeds 1 \
          --jobs 2 --output runs/compare
    """
    from rich.console import Console

    from divdec.research.compare.run import compare_methods
    from divdec.research.compare.table import JSON, PAGE, show

    quiet()
    result = compare_methods(settings, report=report)
    output = Path(settings.output).expanduser()
    if printing.json:
        print((output / JSON).read_text(encoding="utf-8"))
        return
    show(result, settings, Console())
    print(f"{result.seconds:.0f} s. Report: {output / PAGE}")


OPTIONS = {
    "target": "target alone, unsteered",
    "steer": "steer",
    "speculate": "steer, speculative",
    "distil": "distil",
    "n-gram": "steer with n-grams",
}
bench = App(name="bench", help="Measure the compute and latency of steering on this machine.")


def cost(settings: Annotated[CostSettings, Parameter(name="*")], *, printing: Printing = Printing()) -> None:
    r"""Predict the cost of steering, and recommend steering, distillation or n-grams.

    For example:

        divdec cost --target 8B --aux 1B --forget-tokens 1M --retain-tokens 10M \
          --epochs 10 --volume 1B --output cost.svg
    """
    from rich.console import Console

    from divdec.costs.model_size import format_quantity, is_quantity
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
                _volume_figure(result),
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
    console.print(_cost_table(result))
    for line in _cost_lines(result):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"\n[bold]{result.choice or 'no choice'}[/bold]: {result.reason}", highlight=False, soft_wrap=True)
    if output is not None:
        print(f"plot: {output}")


def _volume_figure(estimate: CostEstimate) -> Figure:
    """Plot all FLOPs, and the FLOPs beyond the target's own, over the volume; call it under `style`."""
    import numpy as np
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    from divdec.costs.model_size import format_quantity
    from divdec.report.style import SERIES_STYLES, TARGET, TEXT

    styles = {
        "target": TARGET,
        "steer": SERIES_STYLES[0],
        "speculate": SERIES_STYLES[4],
        "distil": SERIES_STYLES[1],
        "n-gram": SERIES_STYLES[2],
    }
    # One panel above the other, so that the text stays readable on a phone.
    figure = Figure(figsize=(5.6, 7.2), layout="constrained")
    panels = figure.subplots(2, 1)
    marks = {"break-even": estimate.break_even["paper"]} | ({"volume": estimate.volume} if estimate.volume else {})
    limits = [marks["break-even"] / 100, *marks.values(), marks["break-even"] * 100]
    volumes = np.geomspace(min(limits), max(limits) * 1.2, 200)
    target = estimate.options["target"]
    for name, cost in estimate.options.items():
        line = {"color": styles[name].colour, "linestyle": styles[name].dash, "label": OPTIONS[name]}
        panels[0].plot(volumes, [cost.at(volume) for volume in volumes], **line)
        if name not in ("target", "n-gram"):  # 0 has no position on a logarithmic axis
            panels[1].plot(volumes, [cost.at(volume) - target.at(volume) for volume in volumes], **line)
    for axes, title in zip(panels, ("All FLOPs", "FLOPs beyond the target's own inference"), strict=True):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(title)
        axes.set_ylabel("FLOPs")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_quantity(value)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}".replace("+", "")))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(True)
        for text, volume in marks.items():
            axes.axvline(volume, color=TEXT, linewidth=0.9)
            axes.annotate(
                f"{text} {format_quantity(volume)}", (volume, 1.0), xycoords=("data", "axes fraction"), xytext=(3, -2),
                textcoords="offset points", rotation=90, va="top",
            )  # fmt: skip
    panels[1].set_xlabel("volume (tokens read and written)")
    panels[0].legend(loc="upper left")
    return figure


def _cost_table(estimate: CostEstimate) -> Table:
    """One row per option: FLOPs once, per token, and for the volume."""
    from rich import box
    from rich.table import Table

    from divdec.costs.model_size import format_quantity

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("option", no_wrap=True)
    heads = ["FLOPs once", "per token", "vs target"]
    heads += [] if estimate.volume is None else [f"for {format_quantity(estimate.volume)} tokens"]
    for title in heads:
        table.add_column(title, justify="right", no_wrap=True)
    target = estimate.options["target"].per_token
    for name, cost in estimate.options.items():
        cells = [OPTIONS[name], f"{cost.once:.3g}", f"{cost.per_token:.3g}", f"{cost.per_token / target - 1:+.1%}"]
        cells += [] if estimate.volume is None else [f"{cost.at(estimate.volume):.3g}"]
        table.add_row(*cells, style="bold" if name == estimate.choice else None)
    return table


def _cost_lines(estimate: CostEstimate) -> list[str]:
    """The rest of the estimate as lines of text."""
    from divdec.costs.model_size import format_bytes, format_quantity

    hours = estimate.device.flops * 3600
    latency, edges, memory = estimate.latency, estimate.break_even, estimate.memory

    def milliseconds(seconds: float) -> str:
        return f"{1e3 * seconds:.3g} ms"

    def memory_of(kind: str) -> str:
        return f"{format_bytes(memory[f'target_{kind}'])} + {format_bytes(memory[f'auxiliary_{kind}'])}"

    parallel = ""
    if latency.parallel is not None:
        parallel = f", {milliseconds(latency.parallel)} with each auxiliary on a separate device"
    lines = [
        f"target N = {format_quantity(estimate.N)}, auxiliaries n = {format_quantity(estimate.n)} each: "
        f"compute increase 2n/N {estimate.increase:.1%}",
        f"training both auxiliaries: {estimate.training:.3g} FLOPs, at least {estimate.training / hours:.3g} hours on "
        f"one {estimate.device.name} at its peak",
        f"distillation: {estimate.distillation['paper']:.3g} FLOPs more; {estimate.distillation['live']:.3g} with the "
        "target's own pass, which the paper leaves out",
        f"break-even volume {format_quantity(edges['paper'])} tokens; {format_quantity(edges['live'])} with that pass, "
        f"{format_quantity(edges['cached'])} with a cached teacher",
        f"memory, target + both auxiliaries: weights {memory_of('weights')}, cache per request "
        f"{memory_of('cache_per_request')}, per token {memory_of('cache_per_token')}",
        f"predicted time per token on {estimate.device.name} (limited by {latency.bound}): target "
        f"{milliseconds(latency.target)}, steered {milliseconds(latency.plain)}{parallel}",
    ]
    if estimate.tokens_per_block is not None:
        lines.append(
            f"speculation: {estimate.tokens_per_block:.3g} tokens per target pass at this acceptance rate; its time is "
            "not predicted, measure it with `divdec bench latency`"
        )
    guessed = [size.name for size in (estimate.target, estimate.auxiliary) if size.guessed]
    if guessed:
        lines.append(f"layers and caches of {' and '.join(guessed)} assume the proportions of Llama 3.1 8B")
    return lines


@bench.command
def compute(settings: Annotated[BenchSettings, Parameter(name="*")], *, printing: Printing = Printing()) -> None:
    """Compare the measured (t_P + t_p + t_q)/t_P of random models with 1 + 2n/N, separately for prefill and decoding.

    For example:

        divdec bench compute --output runs/bench-compute
    """
    from divdec.research.bench.results import compute_table
    from divdec.research.bench.run import bench_compute

    quiet()
    _print_bench(bench_compute(settings, report), compute_table, settings.output, printing)


@bench.command
def latency(settings: Annotated[LatencySettings, Parameter(name="*")], *, printing: Printing = Printing()) -> None:
    r"""Compare t_Q/t_P of plain, speculative and overlapped decoding of complete answers with the roofline model.

    For example:

        divdec bench latency --output runs/bench-latency \
          --targets chinchilla-306M --auxiliaries chinchilla-44M
    """
    from divdec.research.bench.results import latency_table
    from divdec.research.bench.run import bench_latency

    quiet()
    _print_bench(bench_latency(settings, report), latency_table, settings.output, printing)


def _print_bench(result: dict[str, Any], tabulate: Callable[..., Any], output: str, printing: Printing) -> None:
    from rich.console import Console

    from divdec.research.charts import terminal_table

    if printing.json:
        print(json.dumps(result))
        return
    console = Console()
    if result["rows"]:
        console.print(terminal_table(tabulate(result["rows"], narrow=True)))
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
