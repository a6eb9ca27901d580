"""`divdec results`: aggregate and plot results of `divdec eval`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal

from cyclopts import App

from divdec.errors import UsageError
from divdec.options import Overwriting, Printing
from divdec.runs import check_output_file
from divdec_research.suites.settings import Scoring

app = App(name="results", help="Aggregate, tabulate and plot results of `divdec eval` or OpenUnlearning.")


@app.command(sort_key=1)
def score(
    suite: Literal["tofu", "muse"],
    results: tuple[str, ...],
    *,
    target: str,
    retrain: str,
    scoring: Scoring = Scoring(),
    printing: Printing = Printing(),
) -> None:
    r"""Aggregate results: TOFU's Mem, Priv, Utility and Agg, or MUSE's distances, with bootstrap intervals.

    For example:

        divdec results score tofu runs/linear runs/rank \
          --target runs/target --retrain runs/retrain

    Args:
        suite: Benchmark of the results: tofu or muse.
        results: Result folders of `divdec eval` or OpenUnlearning. A *_SUMMARY.json is enough; intervals need per-item
            results.
        target: Result folder of the target. The bootstrap does not resample it.
        retrain: Result folder of the model retrained without the forget set. The bootstrap does not resample it.
        scoring: how aggregates are computed.
        printing: format of the table.
    """
    from divdec_research.report.scores import Entry, Scorer
    from divdec_research.report.tables import print_scores, score_json
    from divdec_research.suites.aggregate import UTILITY
    from divdec_research.suites.results import read_results

    folders = (target, retrain, *results)
    names = [Path(folder).expanduser().absolute().name for folder in folders]
    if len(set(names[2:])) < len(results):
        names = list(folders)
    entries = [Entry(name, Path(folder), read_results(folder)) for name, folder in zip(names, folders, strict=True)]
    for entry in entries:
        if entry.results.suite != suite:
            raise UsageError(f"{entry.folder} holds results of {entry.results.suite}, but {suite} was asked for")
    if suite == "tofu" and entries[0].results.figures.get(UTILITY) is None:
        raise UsageError(f"target {target} has no {UTILITY}, and Utility is relative to the target's")
    scorer = Scorer(entries[0].results, entries[1].results, scoring.variant, scoring.bootstrap())
    rows = [scorer.score(entry) for entry in entries[2:]]
    for row in rows:
        if all(value is None for value in row.aggregates.values.values()):
            reasons = "; ".join(dict.fromkeys(row.aggregates.reasons.values()))
            raise UsageError(f"{row.entry.folder} has no figures that can be scored: {reasons}")
    if printing.json:
        print(json.dumps([score_json(row, scoring) for row in rows], indent=2, ensure_ascii=False))
    else:
        print_scores(rows, suite, scoring)


@app.command(sort_key=2)
def plot(
    results: tuple[str, ...] = (),
    *,
    figure: str | None = None,
    output: str | None = None,
    list_figures: bool = False,
    target: str | None = None,
    retrain: str | None = None,
    scoring: Scoring = Scoring(),
    overwriting: Overwriting = Overwriting(),
    printing: Printing = Printing(),
) -> None:
    """Draw one of the paper's figures, from results or from the paper's published result files.

    For example:

        divdec results plot runs/compare --figure tofu-bars --output bars.svg

    Args:
        results: Result folders of divdec or of the paper's code, or folders that contain them.
        figure: Name of the figure; --list-figures shows them.
        output: File to write, .svg or .png. By default FIGURE.svg.
        list_figures: List the figures and the results that each figure needs.
        target: Result folder of the target; by default the folder named 'target'.
        retrain: Result folder of the model retrained without the forget set; by default the folder named 'retrain'.
        scoring: how aggregates are computed.
        overwriting: whether an earlier picture is replaced.
        printing: format of the summary.
    """
    from divdec_research.figures import benchmarks, runs  # noqa: F401  # they register their figures
    from divdec_research.figures.registry import FIGURES, FigureRequest
    from divdec_research.report.style import check_format

    if list_figures:
        if printing.json:
            raise UsageError("--list-figures prints text; leave out --json")
        for name, spec in FIGURES.items():
            print(f"{name}\n  {spec.shows}\n  from {spec.needs}")
        return
    if not results:
        raise UsageError("results is required: folders to draw from (--list-figures shows which)")
    if figure is None or figure not in FIGURES:
        raise UsageError(f"--figure is {figure!r}; accepted: {', '.join(FIGURES)}")
    file = Path(output or f"{figure}.svg").expanduser()
    check_format(file)
    check_output_file(file, overwriting.overwrite)

    from divdec_research.report.style import style, write_figure

    with style(f"divdec-{figure}"):
        drawn = FIGURES[figure].draw(FigureRequest(results, target, retrain, scoring))
        file.parent.mkdir(parents=True, exist_ok=True)
        write_figure(file, drawn.figure, title=drawn.title, description=drawn.description, sources=drawn.sources)
    if printing.json:
        content = {"figure": figure, "output": str(file), "title": drawn.title}
        print(json.dumps({**content, "description": drawn.description, "sources": drawn.sources}, ensure_ascii=False))
        return
    print(drawn.description, file=sys.stderr)
    print(f"{file} (from {len(drawn.sources)} file{'s' if len(drawn.sources) > 1 else ''})")
