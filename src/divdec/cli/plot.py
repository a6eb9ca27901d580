"""Draw one of the paper's figures from runs, or from the paper's published result files."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from divdec.errors import UsageError
from divdec.runs import check_output_file

if TYPE_CHECKING:
    from divdec.cli.parsing import Options

POSITIONAL = ("runs",)
EXAMPLE = "divdec plot runs/compare --figure tofu-bars --output bars.svg"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of `divdec plot`."""

    runs: tuple[str, ...] = ()
    """One or more folders that divdec or the paper's code wrote, or that hold such folders."""
    figure: str | None = None
    """Which figure; --list shows the known ones with what each is drawn from."""
    output: str | None = None
    """The picture, .svg or .png; FIGURE.svg by default."""
    list: bool = False
    """List the figures instead."""
    target: str | None = None
    """Results of the target, where no folder of the runs is called so; held fixed in the intervals."""
    retrain: str | None = None
    """Results of the model retrained without the forget set, likewise."""
    variant: Literal["paper", "dd-repo", "relative"] = "paper"
    """How TOFU's aggregates are computed; published summaries allow dd-repo alone (see `divdec score --help`)."""
    level: float = 0.99
    """Level of the percentile bootstrap intervals, where results hold items."""
    draws: int = 1000
    """How often the items are resampled."""
    seed: int = 0
    """Seed of the resampling."""
    overwrite: bool = False
    """Replace an earlier picture."""
    json: bool = False
    """Print a JSON object with the picture's place, title and sources."""


def choose(arguments: Sequence[str]) -> tuple[Options, str, list[str]]:
    """Runs are asked for, first, unless the figures are only listed."""
    from divdec.cli.parsing import Options

    listing = arguments[:1] and arguments[0].startswith("-") and {"--list", "--list=true"} & set(arguments)
    summary = "Draw one of the paper's figures from runs, or from the paper's published result files."
    return Options(Settings, summary, EXAMPLE, () if listing else POSITIONAL), "plot", list(arguments)


def run(settings: Settings) -> None:
    """List the figures, or draw one and say where it lies."""
    from divdec.report.plots.canvas import check_format
    from divdec.research.figures import KNOWN, known

    if settings.list:
        _list(settings)
        return
    if settings.figure is None:
        raise UsageError(f"--figure is required; there are: {', '.join(KNOWN)}")
    figure = known(settings.figure)
    output = Path(settings.output or f"{settings.figure}.svg").expanduser()
    check_format(output)
    check_output_file(output, settings.overwrite)

    from divdec.report.plots import style, write_figure
    from divdec.research.figures.drawn import Asked

    asked = Asked(
        settings.runs, settings.target, settings.retrain, settings.variant, settings.level, settings.draws,
        settings.seed,
    )  # fmt: skip
    with style(f"divdec-{settings.figure}"):
        drawn = figure.draw(asked)
        output.parent.mkdir(parents=True, exist_ok=True)
        write_figure(output, drawn.figure, title=drawn.title, description=drawn.description, sources=drawn.sources)
    if settings.json:
        content = {"figure": settings.figure, "output": str(output), "title": drawn.title}
        print(json.dumps({**content, "description": drawn.description, "sources": drawn.sources}, ensure_ascii=False))
        return
    print(drawn.description, file=sys.stderr)
    print(f"{output} (from {len(drawn.sources)} file{'s' if len(drawn.sources) > 1 else ''})")


def _list(settings: Settings) -> None:
    from divdec.research.figures import KNOWN

    if settings.json:
        print(json.dumps({name: dataclasses.asdict(one) for name, one in KNOWN.items()}, ensure_ascii=False))
        return
    width = max(map(len, KNOWN))
    for name, one in KNOWN.items():
        print(f"{name:<{width}}  {one.shows}\n{'':<{width}}  from {one.needs}")
