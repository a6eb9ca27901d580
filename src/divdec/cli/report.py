"""Put results of TOFU or MUSE on one HTML page: scores with intervals, plots, and answers side by side."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Literal

from divdec.errors import UsageError
from divdec.runs import check_output_file

POSITIONAL = ("results",)
EXAMPLE = "divdec report runs/sweep --target runs/target --retrain runs/retrain --output report.html"
# Stands in the head of every page, so that --overwrite replaces no other file.
OURS = '<meta name="generator" content="divdec report">'


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of `divdec report`."""

    results: tuple[str, ...]
    """One or more folders that `divdec eval` or OpenUnlearning wrote, or that hold such folders; of OpenUnlearning the
    *_SUMMARY.json will do, but intervals, ROC and answers need items."""
    target: str | None = None
    """Results of the target, before anything was forgotten; held fixed in the intervals."""
    retrain: str | None = None
    """Results of the model retrained without the forget set; held fixed in the intervals."""
    variant: Literal["paper", "dd-repo", "relative"] = "paper"
    """How TOFU's aggregates are computed; see `divdec score --help`."""
    output: str = "report.html"
    """The page."""
    level: float = 0.99
    """Level of the percentile bootstrap intervals."""
    draws: int = 1000
    """How often the items are resampled."""
    seed: int = 0
    """Seed of the resampling."""
    examples: int = 8
    """How many questions are shown with their answers."""
    overwrite: bool = False
    """Replace an earlier report."""
    json: bool = False
    """Print a JSON object with the page's place and the tables' rows."""

    def __post_init__(self) -> None:
        if self.examples < 0:
            raise UsageError(f"examples is {self.examples}; accepted: 0 or more")


def run(settings: Settings) -> None:
    """Read, score, write the page, and say where it lies."""
    from divdec.evaluation.aggregate import Bootstrap
    from divdec.report.collect import collect
    from divdec.report.evaluation import content_of, write_report

    output = Path(settings.output).expanduser()
    check_output_file(
        output, settings.overwrite, lambda file: OURS in file.read_text(encoding="utf-8", errors="replace")
    )
    bootstrap = Bootstrap(settings.level, settings.draws, settings.seed)
    entries = collect(settings.results, settings.target, settings.retrain)
    content = content_of(entries, settings.variant, bootstrap, settings.examples)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_report(output, content)
    if settings.json:
        variant = {"variant": settings.variant} if content.suite == "tofu" else {}
        rows = [row.as_json() for row in content.rows]
        printed = {"report": str(output), "suite": content.suite, **variant, "level": settings.level, "rows": rows}
        print(json.dumps(printed, indent=2, ensure_ascii=False))
        return
    for line in content.left_out:
        print(f"not on the page: {line}")
    print(f"report: {output}")
