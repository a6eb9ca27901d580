"""Measure models on TOFU, MUSE or for leaks, item by item as OpenUnlearning does."""

from __future__ import annotations

import dataclasses
import json
import sys

from divdec.evaluation.settings import EvalSettings

POSITIONAL = ("suite", "models")
EXAMPLE = (
    "divdec eval tofu bundle --data TOFU --split forget10 --retain-results runs/retrain --holdout holdout10.json "
    "--output runs/steered"
)


@dataclasses.dataclass(frozen=True)
class Settings(EvalSettings):
    """Options of `divdec eval`."""

    json: bool = False
    """Print one JSON object a result, and everything else to standard error."""


def run(settings: Settings) -> None:
    """Measure, write, and print the figures."""
    from rich.console import Console
    from rich.table import Table

    import divdec.research.baselines.composite  # noqa: F401  # registers the composite baselines with transformers
    from divdec.cli.loading import device_map, quiet
    from divdec.evaluation.run import evaluate
    from divdec.evaluation.sharding import is_main, sharded

    quiet()
    given = {field.name: getattr(settings, field.name) for field in dataclasses.fields(EvalSettings)}
    with sharded():
        found = evaluate(
            EvalSettings(**given), device_map(settings.device), report=lambda line: print(line, file=sys.stderr)
        )
        if not is_main():
            return
    if settings.json:
        for results in found:
            print(json.dumps({"name": results.name, **results.about, "figures": results.figures}))
        return
    console = Console(width=max(Console().width, 100))
    table = Table("metric", *(results.name for results in found), box=None, padding=(0, 2, 0, 0))
    for metric in sorted({name for results in found for name in results.figures if "." not in name}):
        cells = [results.figures.get(metric) for results in found]
        table.add_row(metric, *("–" if value is None else f"{value:.4f}" for value in cells))
    console.print(table)
    for reason in sorted({reason for results in found for reason in results.reasons.values()}):
        console.print(f"– {reason}", highlight=False)
    console.print(f"results: {settings.output}", highlight=False)
