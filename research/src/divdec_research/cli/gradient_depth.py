"""`divdec gradient-depth`: which layers distillation would change."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from divdec.cli.loading import load, report
from divdec.options import Printing, read_template_kwargs
from divdec_research.settings import GradientDepthSettings


def gradient_depth(
    settings: Annotated[GradientDepthSettings, Parameter(name="*")], *, printing: Printing = Printing()
) -> None:
    r"""Measure which layers distillation would change, by the gradient norm of each layer.

    For example:

        divdec gradient-depth bundle --forget forget.jsonl --retain retain.jsonl \
          --output runs/depth
    """
    from rich.console import Console

    from divdec.data.formatting import Format, encode_set
    from divdec.data.records import read_records
    from divdec.runs import RECORD, check_output, output_folder, read_record, record, write_json
    from divdec_research.gradient_depth import check_teacher, decoder_parts, draw_examples
    from divdec_research.gradient_depth import gradient_depth as measure
    from divdec_research.report.gradient_depth import depth_frame, depth_table, peaks, write_depth
    from divdec_research.suites.aggregate import Bootstrap

    def ours(folder: Path) -> bool:
        return (read_record(folder) or {}).get("verb") == "gradient-depth"

    output = Path(settings.output).expanduser()
    check_output(output, settings.overwrite, ours)
    bootstrap = Bootstrap(seed=settings.seed)
    sets = {name: read_records(getattr(settings, name)) for name in ("forget", "retain")}
    model, tokenizer = load(settings.bundle, settings, settings)
    check_teacher(model.steering)
    decoder_parts(model.target)
    positions = model.config.max_position_embeddings
    longest = settings.max_length if positions is None else min(settings.max_length, positions)
    kwargs = read_template_kwargs(settings.chat_template_kwargs)
    form = Format(system_prompt=settings.system_prompt, max_length=longest, chat_template_kwargs=kwargs)
    examples = {
        name: draw_examples(encode_set(records, tokenizer, form), settings.samples, settings.seed)
        for name, records in sets.items()
    }
    for name, drawn in examples.items():
        report(f"{name} set: {sets[name].label}, {len(drawn)} examples")
    norms = measure(
        model,
        tokenizer,
        examples,
        temperature=settings.temperature,
        direction=settings.direction,
        batch_size=settings.batch_size,
        bootstrap=bootstrap,
        title="gradients",
    )
    frame = depth_frame(norms)
    about = {
        "steering": str(model.steering),
        "temperature": settings.temperature,
        "direction": settings.direction,
        "batch_size": settings.batch_size,
        "level": bootstrap.level,
        "draws": bootstrap.draws,
        "sets": {name: records.label for name, records in sets.items()},
        "peak_layers": {" ".join(column): layer for column, layer in peaks(frame).items()},
    }
    with output_folder(output, settings.overwrite, ours) as folder:
        content = write_depth(folder, norms, about, bootstrap.level)
        write_json(folder / RECORD, record("gradient-depth", dataclasses.asdict(settings), **about))
    if printing.json:
        print(json.dumps(content))
        return
    console = Console(width=max(Console().width, 80))
    console.print(depth_table(frame))
    console.print(
        f"L2 norm of the gradient, mean over examples with its {bootstrap.level:.0%} interval; "
        f"the largest of each column is bold\nresult: {output}",
        highlight=False,
        soft_wrap=True,
    )
