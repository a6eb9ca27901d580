"""Gradient depth as a table, a plot and JSON: L2 norms of attention and MLP by layer, on forget and retain set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divdec.data.records import read_records
from divdec.options import read_template_kwargs
from divdec.runs import RECORD, check_output, made_by, output_folder, record, write_json
from divdec_research.report.charts import Dot, Series, band_panels
from divdec_research.report.style import OTHERS, SERIES_STYLES, style, write_figure
from divdec_research.report.tables import markdown_table
from divdec_research.suites.aggregate import Bootstrap

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedTokenizerBase

    from divdec.model.modeling import DivergenceForCausalLM
    from divdec_research.settings import GradientDepthSettings

Row = Mapping[str, Any]
"""Row of a depth.json: set, part, layer, mean, low, high, n, norms."""
VERB = "gradient-depth"
RESULT, PLOT = "depth.json", "depth.svg"
SETS = {"forget": SERIES_STYLES[1], "retain": SERIES_STYLES[0]}
TITLES = {"attention": "attention", "mlp": "MLP"}


def run_gradient_depth(
    settings: GradientDepthSettings,
    load: Callable[[], tuple[DivergenceForCausalLM, PreTrainedTokenizerBase]],
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Measure a bundle's gradients, and write them into the output folder.

    Args:
        settings: what is measured, and where the result goes.
        load: loads the bundle, after the output folder and the data are checked.
        report: receives lines of progress.

    Returns:
        The content of depth.json.

    Raises:
        UsageError: a setting, the data or the bundle is not accepted, or the output would replace something else.
    """
    from divdec.data.formatting import Format, encode_set
    from divdec.training.inputs import sample_examples
    from divdec_research.gradient_depth import gradient_depth

    output, bootstrap = Path(settings.output).expanduser(), Bootstrap(seed=settings.seed)
    check_output(output, settings.overwrite, made_by(VERB))
    sets = {name: read_records(getattr(settings, name)) for name in ("forget", "retain")}
    model, tokenizer = load()
    positions = model.config.max_position_embeddings
    longest = settings.max_length if positions is None else min(settings.max_length, positions)
    kwargs = read_template_kwargs(settings.chat_template_kwargs)
    form = Format(system_prompt=settings.system_prompt, max_length=longest, chat_template_kwargs=kwargs)
    examples = {}
    for name, records in sets.items():
        encoded = encode_set(records, tokenizer, form)
        examples[name] = sample_examples(encoded, settings.samples or len(encoded), settings.seed)
        report(f"{name} set: {records.label}, {len(examples[name])} examples")
    rows = gradient_depth(
        model, tokenizer, examples, temperature=settings.temperature, direction=settings.direction,
        bootstrap=bootstrap, title="gradients",
    )  # fmt: skip
    about = {
        "steering": model.rule,
        "temperature": settings.temperature,
        "direction": settings.direction,
        "level": bootstrap.level,
        "draws": bootstrap.draws,
        "sets": {name: records.label for name, records in sets.items()},
        "peak_layers": {" ".join(column): layer for column, layer in peaks(rows).items()},
    }
    with output_folder(output, settings.overwrite, made_by(VERB)) as folder:
        write_json(folder / RESULT, {**about, "rows": rows})
        with style("divdec-depth"):
            largest = ", ".join(f"{column}: layer {layer}" for column, layer in about["peak_layers"].items())
            write_figure(
                folder / PLOT, depth_figure(rows, bootstrap.level), title="Distillation's gradient, layer by layer",
                description=f"L2 norm of the gradient by layer; the largest of {largest}.", sources=[RESULT],
            )  # fmt: skip
        write_json(folder / RECORD, record(VERB, settings, **about))
    return {**about, "rows": rows}


def depth_figure(rows: Sequence[Row], level: float) -> Figure:
    """Plot the norms of a depth.json's rows over the layer: a panel for each part of a layer, a band for each set.

    The scale is logarithmic unless a norm is 0. The legend names the level of the intervals.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    panels: dict[str, list[Series]] = {}
    for (name, component), group in _by_set_and_part(rows).items():
        dots = tuple(Dot(row["layer"], row["mean"], y_interval=(row["low"], row["high"])) for row in group)
        panels.setdefault(TITLES.get(component, component), []).append(Series(name, SETS.get(name, OTHERS), dots))
    figure = Figure(figsize=(9.0, 3.8), layout="constrained")
    grid = band_panels(figure, panels, "layer (0: next to the embeddings)")
    for axes in grid:
        if all(row["low"] > 0 for row in rows):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
        else:
            axes.set_ylim(bottom=0)
    grid[0].set_ylabel("L2 norm of the gradient\n(nats per token, per unit of weight)")
    grid[-1].legend(title=f"mean, {100 * level:g} % interval")
    return figure


def peaks(rows: Sequence[Row]) -> dict[tuple[str, str], int]:
    """Find the layer with the largest mean by set and part."""
    return {key: max(group, key=lambda row: row["mean"])["layer"] for key, group in _by_set_and_part(rows).items()}


def depth_table(rows: Sequence[Row]) -> str:
    """Tabulate means with their intervals in Markdown, one row for each layer; the largest of each column is bold."""
    largest = peaks(rows)
    cells = {layer: {"layer": str(layer)} for layer in sorted({row["layer"] for row in rows})}
    for (name, component), group in _by_set_and_part(rows).items():
        for row in group:
            text = f"{row['mean']:.3g} [{row['low']:.3g}, {row['high']:.3g}]"
            text = f"**{text}**" if largest.get((name, component)) == row["layer"] else text
            cells[row["layer"]][f"{name}, {TITLES.get(component, component)}"] = text
    table = list(cells.values())
    return markdown_table(list(table[0]), [list(row.values()) for row in table])


def _by_set_and_part(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["set"], row["part"]), []).append(row)
    return groups
