"""`divdec baseline`, `compare` and `bench`: other unlearning methods, and measured costs of steering."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from divdec.cli.loading import check_not_bundle, quiet, report
from divdec.options import Printing
from divdec_research.baselines.method import Method
from divdec_research.baselines.table import METHODS
from divdec_research.bench.settings import BenchSettings
from divdec_research.compare.settings import CompareSettings

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

    def apply(settings: Any, *, options: Any, printing: Printing = Printing()) -> None:
        from accelerate import PartialState

        from divdec_research.baselines.run import run_baseline

        quiet()
        check_not_bundle(settings.target, "--target")
        content = run_baseline(method, settings, options, report=report)
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
        "options": Annotated[method.settings, Parameter(name="*")],
        "printing": Printing,
    }
    apply.__kwdefaults__ = {"options": method.settings(), "printing": Printing()}
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
    from divdec_research.compare.run import compare_methods
    from divdec_research.compare.table import JSON, TABLE, summary

    quiet()
    result = compare_methods(settings, report=report)
    output = Path(settings.output).expanduser()
    if printing.json:
        print((output / JSON).read_text(encoding="utf-8"))
        return
    print(summary(result, settings))
    print(f"{result.seconds:.0f} s. The whole grid: {output / TABLE}\nFigures: divdec results plot {output} --figure …")


bench = App(name="bench", help="Measure the compute of steering on this machine.")


@bench.command
def compute(settings: Annotated[BenchSettings, Parameter(name="*")], *, printing: Printing = Printing()) -> None:
    """Compare the measured (t_P + t_p + t_q)/t_P of random models with 1 + 2n/N, separately for prefill and decoding.

    For example:

        divdec bench compute --output runs/bench-compute
    """
    from divdec_research.bench.results import compute_table
    from divdec_research.bench.run import bench_compute

    quiet()
    result = bench_compute(settings, report)
    if printing.json:
        print(json.dumps(result))
        return
    if result["rows"]:
        print(compute_table(result["rows"]))
    for name, numbers in result["summary"].items():
        print(f"{name}: off by {numbers['median_size']:.1%} in the median, at most {numbers['largest_size']:.1%}")
    print(f"results: {Path(settings.output).expanduser()}")
